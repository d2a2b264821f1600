"""Regions of a repair, and its result: the conversion with its pins, the trials, and the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx import ModelProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.reasons import REASONS, Paint, Pin
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.guard import carried, made_low, read_low
from amp_rewrite.evidence.opening import in_tf32
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.verdict import Verdict, plain_json
from amp_rewrite.files.model import METADATA_KEY, Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import exact
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.findings import cuda_findings
from amp_rewrite.reports.evidence import TrialRow
from amp_rewrite.reports.render import count
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result
from amp_rewrite.runtime.faults import float32_products
from amp_rewrite.runtime.providers import TF32
from amp_rewrite.settings.list_entry import Color

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure


_SHOWN = 3
"""Pins of a search that a summary lists."""


@dataclass(frozen=True, slots=True)
class Region:
    """Ops to pin together: one op, or a cluster. `error` is the largest local error among them.

    `name` is the name of the op with that error; `kind` its type, or the cluster's kind. `root`: the op is on the allow
    list, so that pinning it costs most.
    """

    name: str
    kind: str
    ops: tuple[OpId, ...]
    error: float
    root: bool

    @property
    def because(self) -> str:
        """Reason for the suspicion, in one line."""
        local = f"adds a relative error of {self.error:.2g}"
        what = "makes infinity of finite numbers" if math.isinf(self.error) else local
        kind = "" if self.name == self.kind else f" ({self.kind})"
        return f"{self.name}{kind} alone {what}"

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the region to float32."""
        return tuple(Pin(op, reasons.REPAIR, None, self.because, raises=True) for op in self.ops)


def regions_of(draft: Draft, coloring: Coloring, errors: Mapping[str, float]) -> list[Region]:
    """Return the regions in the order of the model: rounding low ops, each with its cluster. `errors`: by op name.

    Ops that only move values get their color from their neighbours, and ops that the user lowered stay low.
    O(nodes + uses).
    """
    cluster_of = {op: cluster for cluster in draft.clusters for op in cluster.ops}
    regions: dict[tuple[OpId, ...], Region] = {}
    for op in draft.view.ops:
        if op.id in draft.lower or not _rounds(draft.view, coloring, op):
            continue
        cluster = cluster_of.get(op.id)
        kind, ops = (cluster.kind, cluster.ops) if cluster is not None else (op.kind, (op.id,))
        root = coloring.entries[op.id].color is Color.ALLOW
        region = Region(op.name, kind, ops, errors.get(op.name, 0.0), root)
        if ops not in regions or regions[ops].error < region.error:
            regions[ops] = region
    return list(regions.values())


def painted(draft: Draft, pins: Sequence[Pin], held: Iterable[Region]) -> Coloring:
    """Return the coloring with regions pinned beside other pins; ops merely moving their results follow."""
    own = tuple(pin for region in held for pin in region.pins)
    moved = carried(draft.view, own) if draft.view.low_types else ()
    return draft.paint((*pins, *own, *moved))


def suspicion(region: Region) -> tuple[float, bool, float, tuple[OpId, ...]]:
    """Key to sort by: larger errors by powers of two, then ops of less gain, then larger errors."""
    power = math.frexp(region.error)[1] if math.isfinite(region.error) and region.error else -math.inf
    power = math.inf if math.isinf(region.error) else power
    return -power, region.root, -region.error, region.ops


def _rounds(view: View, coloring: Coloring, op: Op) -> bool:
    if op.signature is None or op.bodies or op.kind in CASTS or op.kind == "Constant":
        return False
    reads = [slot for slot in range(len(op.inputs)) if read_low(view, coloring, op, slot)]
    makes = any(made_low(view, coloring, v) for v in op.outputs if v is not None)
    if not reads and not makes:
        return False
    return not exact(op) or any(view.constant(op.inputs[slot]) is not None for slot in reads)


def with_tf32(converted: Converted, errs: Callable[[Model], float | None], most: float = math.inf) -> Converted:
    """Return the conversion, with TF32 permitted in its file if low convolutions need it and the outputs allow it.

    `errs`: the error of a model, None beyond the criterion; `most`: the largest to permit it. A product that a safety
    rule holds in float32 needs its digits, even if no batch shows it.
    """
    view, paints = converted.view, list[Paint | None]()
    if any(finding.kind == TF32 for finding in converted.findings):
        paints = [converted.coloring.of(op.id) for op in float32_products(view, view.dtype)]
    if not paints or any(paint and not paint.dtype.low and REASONS[paint.rule].has_page for paint in paints):
        return converted
    result = replace(converted.result, proto=clone(converted.result.proto))
    next(p for p in result.proto.metadata_props if p.key == METADATA_KEY).value += f" {TF32}=1"
    shortened, made = in_tf32(result), View.of(result)
    error = None if shortened is None else errs(shortened)
    if error is None or error > most:
        return converted
    number = count(sum(1 for _ in float32_products(made, made.dtype)), "float32 product")
    permitted = Finding(TF32, "CUDA", f"TF32 in {number} errs by {error:.2g} on the data, which permits it")
    others = (finding for finding in converted.findings if finding.kind != TF32)
    findings = (*others, *cuda_findings(made, made.dtype, converted.request.target), permitted)
    return replace(converted, result=result, findings=findings)


@dataclass(frozen=True, repr=False)
class Repaired(Result):
    """Result of `repair`. Pins of ranges alone are in `converted.report` with the guard's rules.

    Attributes:
        converted: the conversion with the pins; if the search failed, with all candidates pinned.
        verdict: how near the result is as it really runs.
        ranges: the ranges of the data.
        regions: the pinned regions, those with the largest errors first.
        minimal: True if a trial shows for each region that the outputs miss the tolerance without it.
        candidates: number of regions to choose of.
        budget: the largest number of trials.
        trail: all trials.
        solved: True if the search ended and the result is near enough.
    """

    converted: Converted
    verdict: Verdict
    ranges: Ranges
    regions: tuple[Region, ...]
    minimal: bool
    candidates: int
    budget: int
    trail: tuple[TrialRow, ...]
    solved: bool

    @property
    def result(self) -> Model:
        """Model of the conversion, its weights still in their files."""
        return self.converted.result

    @property
    def model(self) -> ModelProto:
        """Model of the conversion, whole in memory; see `Converted.model`."""
        return self.converted.model

    @property
    def report(self) -> Report:
        """Report of the conversion."""
        return self.converted.report

    def save(self, path: str | Path, *, overwrite: bool = False, external_data: bool | str | None = None) -> None:
        """Write the model; see `Converted.save`."""
        self.converted.save(path, overwrite=overwrite, external_data=external_data)

    @property
    def brief(self) -> str:
        """Gist of the report, and the outcome of the search."""
        pinned = count(len(self.regions), "region") if self.regions else "no region"
        return f"{self.report.brief}; {pinned} pinned, {'' if self.solved else 'not '}within tolerance"

    def to_json(self) -> str:
        """Return outcome, pinned regions, trials, ranges, verdict and report as JSON. Ends with a newline.

        Scores that are not finite are "inf", "-inf" and "nan".
        """
        parts = {
            "schema": 1,
            **{name: getattr(self, name) for name in ("solved", "minimal", "candidates", "budget")},
            "regions": [region.because for region in self.regions],
            "trail": [plain_json(asdict(step)) for step in self.trail],
            "ranges": self.ranges.to_dict(),
            "verdict": self.verdict.to_dict(),
            "report": self.report.to_dict(),
        }
        return json.dumps(parts, indent=1) + "\n"

    def figures(self, command: str | None = None) -> Sequence[Figure]:
        """Return the summary, the scores of the outputs, the ranges, and the graph; `command` is the next step."""
        figures = self.converted.figures(command)
        return (*figures[:1], *self.verdict.figures(), *self.ranges.figures(), *figures[1:])

    def text(self, *, verbose: bool = False) -> str:
        """Return the outcome of the search as text. Ends with a newline.

        Args:
            verbose: every pin with its reason, and the whole verdict; else the first pins, and a verdict that fails.
        """
        notes = [f"note: {note}" for note in self.verdict.notes]
        if self.solved and not self.regions and not verbose:  # the evidence says all of it
            return "".join(f"{note}\n" for note in notes)
        shown = self.regions if verbose else self.regions[:_SHOWN]
        lines = [f"  {region.because}" for region in shown]
        if rest := len(self.regions) - len(shown):
            lines.append(f"  … and {rest} more (-v shows all)")
        if not self.solved:
            lines = [f"  {_SPENT}" if len(self.trail) >= self.budget else f"  {self.ranges.to} {_UNREACHED}"]
        heading = f"repair: {search_summary(len(self.regions), self.candidates, len(self.trail), self.minimal)}"
        if verbose:
            return "\n".join([heading, *lines, "", self.verdict.text()])
        failure = [] if self.verdict.ok else [self.verdict.brief, *filter(None, [self.verdict.reached])]
        return "\n".join([heading, *lines, *failure, *notes]) + "\n"


_SPENT = "the budget of trials ended before a set met the tolerance; allow more"
_UNREACHED = (
    "cannot hold this: with all ops in float32 the error is still larger, from low inputs and outputs or from float32"
    " itself"
)


def search_summary(pinned: int, candidates: int, trials: int, minimal: bool) -> str:
    """Return the outcome of a search in words: regions pinned of those to choose of, and trials."""
    if not pinned:
        return f"no region pinned to float32; {count(trials, 'trial')}"
    needed = "each is needed" if minimal else "perhaps not all are needed"
    return f"{pinned} of {count(candidates, 'region')} pinned to float32, {needed}; {count(trials, 'trial')}"
