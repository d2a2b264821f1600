"""Repair: pin the fewest ops to float32 for a conversion near enough to its float32 reference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from onnx import ModelProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.reasons import REASONS, Pin
from amp_rewrite.errors import Finding, PolicyError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.errors import local_errors
from amp_rewrite.evidence.guard import carried, is_low_op, read_low
from amp_rewrite.evidence.metric import criterion
from amp_rewrite.evidence.opening import Device, in_tf32, unrolled, written_out
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.verify import EMULATED, Comparison, Side, Verdict, plain_json, verdict_of
from amp_rewrite.files.model import METADATA_KEY, Model, ModelSource
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import exact
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import Op, OpId, View
from amp_rewrite.pipeline.conversion import Converted, Draft, finish
from amp_rewrite.pipeline.findings import cuda_findings
from amp_rewrite.pipeline.measured import calibrated, model_name, shifted_and_guarded
from amp_rewrite.reports.evidence import ALLCLOSE, FAILED, REPAIRED, VERIFIED, Criterion, Evidence, TrialRow
from amp_rewrite.reports.render import count
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.faults import float32_products
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.providers import TF32
from amp_rewrite.settings.choices import HEADROOM, check_headroom
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.option import Data, OptionsAndCriterion, Progress, checked, takes
from amp_rewrite.settings.request import CRITERION, KEYWORDS, Request

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

BUDGET = 100
"""Default bound on the trials of a search. One culprit among n regions takes about 2 log2(n)."""
_MAX_SHOWN = 3
"""Regions in a summary."""


@takes(KEYWORDS, CRITERION)
@checked
def repair(
    model: ModelSource,
    data: Data,
    *,
    headroom: float = HEADROOM,
    budget: int = BUDGET,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionsAndCriterion],
) -> Repaired:
    """Convert a model, with few ops pinned to float32, to outputs near enough to float32 on `data`.

    Ops that the ranges forbid with `headroom` are pinned in any case. Then the search pins as few regions (single ops
    or clusters) as suffice, and tries those with the largest local error (`local_errors`) first. A trial is a
    conversion, and the verdict of `verify` on it.

    The reference is the model in float32, of a half model its widened twin.

    Args:
        model: as `convert` takes it.
        data: a Feed, or an argument of `Feed.of`; with feedback, trials and the verdict run all steps.
        headroom: as `convert` takes it.
        budget: the largest number of trials.
        folder: as `convert` takes it.
        progress: called as `progress(stage, done, total)`.
        **options: those of `convert`, see docs/reference/options.md, and the criterion as `verify` takes it.

    Returns:
        The conversion with its verdict. A failed search is not an error: see `Repaired.solved`.

    Raises:
        AmpRewriteError: as `convert`, `calibrate` and `verify` raise it.
        PolicyError: no criterion is given, or the budget is below 1.

    Example:
        >>> import amp_rewrite
        >>> repaired = amp_rewrite.repair("model.onnx", "batches.npz", tolerance=1e-2)
        >>> repaired.solved
        True
    """
    keywords: Mapping[str, Any] = options
    by = criterion(**{name: value for name, value in keywords.items() if name in CRITERION})
    check_headroom(headroom)
    if budget < 1:
        raise PolicyError(f"a budget of {budget} trials finds nothing; use 1 or more")
    require("a conversion with data")
    request = Request.of(**{name: value for name, value in keywords.items() if name not in CRITERION})
    draft = Draft.of(model, request, folder=folder)
    feed = Feed.of(data, draft.source)

    def search(draft: Draft) -> Repaired:
        ranges = calibrated(draft, feed, progress=_stage(progress, "calibrate"))
        draft = shifted_and_guarded(draft, ranges, headroom)
        return Search(draft, feed, by, ranges, budget, progress).repaired()

    repaired = search(draft)
    if repaired.converted.coloring.opens(repaired.converted.view):
        return repaired
    return search(Draft.of(draft.source, request, grouped=False))


@dataclass(frozen=True, repr=False)
class Repaired(Result):
    """Result of `repair`. Pins of ranges alone are in `converted.report` with the guard's rules.

    Attributes:
        converted: the conversion with the pins; if the search failed, with all candidates pinned.
        verdict: that on the result as it runs.
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
        if self.solved and not self.regions and not verbose:  # the evidence in the report says it all
            return "".join(f"{note}\n" for note in notes)
        shown = self.regions if verbose else self.regions[:_MAX_SHOWN]
        lines = [f"  {region.because}" for region in shown]
        if rest := len(self.regions) - len(shown):
            lines.append(f"  … and {rest} more (-v shows all)")
        if not self.solved:
            lines = [f"  {_SPENT}" if len(self.trail) >= self.budget else f"  {self.ranges.to} {_UNREACHABLE}"]
        heading = f"repair: {search_summary(len(self.regions), self.candidates, len(self.trail), self.minimal)}"
        if verbose:
            return "\n".join([heading, *lines, "", self.verdict.text()])
        failure = [] if self.verdict.ok else [self.verdict.brief, *filter(None, [self.verdict.reached])]
        return "\n".join([heading, *lines, *failure, *notes]) + "\n"


_SPENT = "the trials ran out before the outputs came within tolerance; allow more trials"
_UNREACHABLE = (
    "cannot meet the tolerance: even with all ops in float32 the error is larger, due to low inputs and outputs, or"
    " to float32 itself"
)


def search_summary(pinned: int, candidates: int, trials: int, minimal: bool) -> str:
    """Return the outcome of a search in words: regions pinned of those to choose of, and trials."""
    if not pinned:
        return f"no region pinned to float32; {count(trials, 'trial')}"
    needed = "each is needed" if minimal else "some may not be needed"
    return f"{pinned} of {count(candidates, 'region')} pinned to float32, {needed}; {count(trials, 'trial')}"


# -- regions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Ops to pin together: one op, or a cluster. `error` is the largest local error among them.

    `name` is the op with that error; `kind` its type, or the cluster's kind. `root`: the op is on the allow list, so
    pinning it costs most.
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
        effect = "turns finite numbers into infinity" if math.isinf(self.error) else local
        kind = "" if self.name == self.kind else f" ({self.kind})"
        return f"{self.name}{kind} alone {effect}"

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pins of the region to float32."""
        return tuple(Pin(op, reasons.REPAIR, None, self.because, raises=True) for op in self.ops)


def regions_of(draft: Draft, coloring: Coloring, errors: Mapping[str, float]) -> list[Region]:
    """Return the regions in the order of the model: rounding low ops, each with its cluster. `errors`: by op name.

    Ops that only move values get their color from their neighbours, and ops that the user lowered stay low.
    O(nodes + uses).
    """
    cluster_of = {op: cluster for cluster in clusters(draft.view) for op in cluster.ops}
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


def suspicion(region: Region) -> tuple[float, bool, float, tuple[OpId, ...]]:
    """Key to sort by: larger errors by powers of two, then ops of less gain, then larger errors."""
    power = math.frexp(region.error)[1] if math.isfinite(region.error) and region.error else -math.inf
    power = math.inf if math.isinf(region.error) else power
    return -power, region.root, -region.error, region.ops


def _rounds(view: View, coloring: Coloring, op: Op) -> bool:
    if op.signature is None or op.bodies or op.kind in CASTS or op.kind == "Constant":
        return False
    if not exact(op):
        return is_low_op(view, coloring, op)
    constant = (slot for slot, value in enumerate(op.inputs) if view.constant(value) is not None)
    return any(read_low(view, coloring, op, slot) for slot in constant)


def with_tf32(
    draft: Draft, converted: Converted, error_of: Callable[[Model], float | None], limit: float = math.inf
) -> Converted:
    """Return the conversion, with TF32 permitted in its file if low convolutions need it and the outputs allow it.

    `error_of`: the error of a model, None beyond the criterion; `limit`: the largest to permit it. A product kept in
    float32 by a safety rule, or by `keep` in its place, needs its digits, even if no batch shows it.
    """
    view, products = converted.view, list[OpId]()
    if not converted.plan.empty and any(finding.kind == TF32 for finding in converted.findings):
        products = [op.id for op in float32_products(view, view.dtype)]
    paints = [(converted.coloring.of(op), draft.needs.pins.get(op)) for op in products]
    kept = ((paint, pin) for paint, pin in paints if paint is not None and not paint.dtype.low)
    if not paints or any(paint and REASONS[paint.rule].has_page for pair in kept for paint in pair):
        return converted
    result = replace(converted.result, proto=clone(converted.result.proto))
    next(p for p in result.proto.metadata_props if p.key == METADATA_KEY).value += f" {TF32}=1"
    emulated, after = in_tf32(result), View.of(result)
    error = None if emulated is None else error_of(emulated)
    if error is None or error > limit:
        return converted
    number = count(sum(1 for _ in float32_products(after, after.dtype)), "float32 product")
    permitted = Finding(TF32, "CUDA", f"TF32 in {number} has an error of {error:.2g} on the data, so it is allowed")
    others = (finding for finding in converted.findings if finding.kind != TF32)
    findings = (*others, *cuda_findings(after, after.dtype, converted.request.target, permitted=True), permitted)
    return replace(converted, result=result, findings=findings)


# -- the search --------------------------------------------------------------------------------------------


def reference_of(draft: Draft) -> Model:
    """Return the model in float32 throughout: of a half model the widened twin."""
    half = draft.view.low_types or draft.widened
    return emulate(draft.source, rounding=False, io="float32") if half else written_out(draft.source)


@dataclass
class Search:
    """One search by a criterion, on a guarded draft.

    A trial converts the draft and verifies the result. `outputs`: the compared ones; () for all. `device`: that of the
    trials. `verdicts`: by the numbers of pinned regions, in the order of the trials.
    """

    draft: Draft
    feed: Feed
    by: Criterion
    ranges: Ranges
    budget: int = BUDGET
    progress: Progress | None = None
    outputs: tuple[str, ...] = ()
    device: Device = field(default_factory=Device)
    regions: Sequence[Region] = ()
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)
    trail: list[TrialRow] = field(default_factory=list)

    def repaired(self) -> Repaired:
        """Return the conversion with the fewest regions pinned; with all of them if no tested set passes."""
        plain = self._convert(frozenset())
        if self._try(frozenset(), plain):
            return self._result((), plain)
        self.regions = regions_of(self.draft, plain.coloring, {})
        spent = len(self.trail) >= self.budget
        if not self.regions or spent or not self._passes(frozenset(range(len(self.regions)))):
            return self._result(None)
        reference = self.reference.model if self.draft.view.low_types else self.draft.view.model
        feed = Feed.of(self.feed, reference, allow_nonfinite=True)  # in the types of the reference
        progress = _stage(self.progress, "own errors")
        errors = local_errors(reference, plain.result, unrolled(feed, reference), progress=progress)
        self.regions = sorted(regions_of(self.draft, plain.coloring, errors), key=suspicion)
        return self._result(minimal_set(len(self.regions), self._passes))

    @cached_property
    def reference(self) -> Side:
        return Side.of(reference_of(self.draft), model_name(self.draft), self.device, keeps=True, valid=True)

    def _passes(self, held: frozenset[int]) -> bool:
        if held not in self.verdicts:
            if len(self.trail) >= self.budget:
                raise BudgetSpent
            self._try(held, self._convert(held))
        return self.verdicts[held].ok

    def _try(self, held: frozenset[int], converted: Converted) -> bool:
        verdict = self._verdict(converted.result, "" if held else "verify", to_failure=True)
        self.verdicts[held] = verdict
        floats = converted.coloring.float32_ops
        self.trail.append(TrialRow(len(held), verdict.ok, verdict.because, floats, verdict.score))
        if self.progress and held:
            self.progress("search", len(self.trail), self.budget)
        return verdict.ok

    def _verdict(self, candidate: Model, stage: str, *, to_failure: bool = False) -> Verdict:
        reference = self.reference  # opened first, since the model itself may not open
        side = Side.of(candidate, "the conversion", self.device, valid=True)
        comparison = Comparison(self.by, self.outputs, to_failure=to_failure)
        progress = _stage(self.progress, stage) if stage else None
        return verdict_of(reference, side, Feed.of(self.feed, reference.model), comparison, progress)

    def _error(self, model: Model) -> float | None:
        verdict = self._verdict(model, "")
        return verdict.largest if verdict.ok else None

    def _convert(self, held: Iterable[int], findings: Sequence[Finding] = ()) -> Converted:
        draft, by = self.draft, self.by
        pinned = [self.regions[i] for i in sorted(held)]
        own = tuple(pin for region in pinned for pin in region.pins)
        moved = carried(draft.view, own) if draft.view.low_types else ()  # ops that only move the results
        bound = f"rtol:{by.rtol:g},atol:{by.atol:g}" if by.name == ALLCLOSE else f"{by.name}:{by.limit:g}"
        words = (f"repaired={bound}", f"regions={len(pinned)}", f"trials={max(len(self.trail), 1)}")
        return finish(draft, draft.paint((*own, *moved)), findings, words)

    def _result(self, chosen: Sequence[int] | None, plain: Converted | None = None) -> Repaired:
        """Return the conversion with the chosen regions pinned (None: all of them), and its verdict on all the data."""
        held = frozenset(range(len(self.regions)) if chosen is None else chosen)
        pinned, trials = tuple(self.regions[i] for i in sorted(held)), len(self.trail)
        subsets = [self.verdicts.get(held - {one}) for one in held]
        minimal = all(verdict is not None and not verdict.ok for verdict in subsets)
        summary = search_summary(len(pinned), len(self.regions), trials, minimal)
        findings = [Finding("repaired", str(self.by), summary)] if pinned else []
        converted = plain or self._convert(held, findings)
        verdict = self.verdicts[held] if plain else self._verdict(converted.result, "verify")
        solved = verdict.ok and chosen is not None
        objection = verdict.because if not verdict.ok else "the trials ran out before the search ended"
        error, score = verdict.largest, verdict.score
        evidence = Evidence(
            level=(REPAIRED if pinned else VERIFIED) if solved else FAILED,
            data=verdict.fed.origin,
            batches=verdict.fed.batches,
            random=verdict.fed.random,
            criterion=str(self.by),
            error="" if error is None else f"{error:.2g}",
            emulated=EMULATED in verdict.candidate.as_,
            pinned=len(pinned),
            objection="" if solved else objection,
            largest_error=error if error is not None and math.isfinite(error) else None,
            score="" if score is None or self.by.name == "scaled" else f"{self.by.measured} {score:.4g}",
        )
        converted = replace(converted, evidence=evidence)
        converted = with_tf32(self.draft, converted, self._error) if solved else converted
        minimal, candidates, trail = minimal and verdict.ok, len(self.regions), tuple(self.trail)
        return Repaired(converted, verdict, self.ranges, pinned, minimal, candidates, self.budget, trail, solved)


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None


# -- the smallest set of suspects ----------------------------------------------------------------------------


class BudgetSpent(Exception):
    """Raised by a test once its budget is spent."""


def minimal_set(suspects: int, test: Callable[[frozenset[int]], bool]) -> tuple[int, ...] | None:
    """Return a minimal set of the suspects 0, 1 … (sorted) to pass a test; None if no tested set passes.

    Doubling and bisection find the shortest passing prefix. Then halves, quarters … and single suspects are dropped
    as long as the rest passes (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
    Transactions on Software Engineering 28(2), 2002). It takes about 2 log2(n) tests for one culprit. On BudgetSpent it
    is the smallest set so far, which need not be minimal.
    """
    results: dict[frozenset[int], bool] = {}

    def passes(chosen: tuple[int, ...]) -> bool:
        key = frozenset(chosen)
        if key not in results:
            results[key] = test(key)
        return results[key]

    def search(everyone: tuple[int, ...]) -> None:
        if passes(()) or not passes(everyone):
            return
        low, high = 0, 1  # lengths of a failing and of a passing prefix
        while high < len(everyone) and not passes(everyone[:high]):
            low, high = high, high * 2
        high = min(high, len(everyone))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if passes(everyone[:middle]) else (middle, high)
        chosen, size, before = everyone[:high], high, tuple[int, ...]()
        while size > 1 or chosen != before:
            size, before = max(size // 2, 1), chosen
            end = len(before) - (size > 1)  # without the last one a prefix did not pass
            for at in reversed(range(0, end, size)):
                part = before[at : min(at + size, end)]
                rest = tuple(one for one in chosen if one not in part)
                if rest != chosen and passes(rest):
                    chosen = rest

    with suppress(BudgetSpent):
        search(tuple(range(suspects)))
    smallest = min((chosen for chosen, passed in results.items() if passed), key=len, default=None)
    return None if smallest is None else tuple(sorted(smallest))
