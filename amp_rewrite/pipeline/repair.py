"""Repair a conversion: pin as few ops to float32 as the tolerance allows."""

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
from amp_rewrite.evidence.opening import Device, decompose, in_tf32, unrolled
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
"""The default maximum number of trials of a search. One culprit among n regions takes about 2 log2(n) trials."""
_MAX_SHOWN = 3
"""Maximum number of regions in a summary."""


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
    """Convert a model, and pin a few ops to float32 so that its outputs on `data` are close enough to float32.

    Ops whose values overflow with `headroom` are pinned in any case. Then a search pins as few regions (individual ops
    or clusters) as possible; it tries those with the largest local error (`local_errors`) first. Each trial converts
    the model and verifies the result.

    The reference is the model in float32; for a half-precision model, it is the model widened to float32.

    Args:
        model: anything that `convert` accepts.
        data: a Feed, or an argument of `Feed.of`; with feedback, trials and the verdict run all steps.
        headroom: see `convert`.
        budget: the maximum number of trials.
        folder: see `convert`.
        progress: called as `progress(stage, done, total)`.
        **options: those of `convert`, see docs/reference/options.md, and the criterion of `verify`.

    Returns:
        The conversion with its verdict. A failed search is not an error: see `Repaired.solved`.

    Raises:
        AmpRewriteError: `convert`, `calibrate` or `verify` raises it.
        PolicyError: no criterion is given, or the budget is below 1.

    Example:
        >>> import amp_rewrite
        >>> repaired = amp_rewrite.repair("model.onnx", "batches.npz", tolerance=1e-2)
        >>> repaired.solved
        True
    """
    keywords: Mapping[str, Any] = options
    bound = criterion(**{name: value for name, value in keywords.items() if name in CRITERION})
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
        return Search(draft, feed, bound, ranges, budget, progress).repaired()

    repaired = search(draft)
    if repaired.converted.coloring.is_loadable(repaired.converted.view):
        return repaired
    return search(Draft.of(draft.source, request, low_only=False))


@dataclass(frozen=True, repr=False)
class Repaired(Result):
    """The result of `repair`. Ops pinned because of their ranges are only in `converted.report`.

    Attributes:
        converted: the conversion with the pins; if the search failed, with all candidates pinned.
        verdict: the verdict on the result.
        ranges: the ranges on the data.
        regions: the pinned regions, in order of decreasing error.
        minimal: True if trials show that the outputs miss the tolerance without any one of the regions.
        candidates: the number of regions that could be pinned.
        budget: the maximum number of trials.
        trail: all trials.
        solved: True if the search ended and the result is within tolerance.
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
        """The converted model, with its weights still in their files."""
        return self.converted.result

    @property
    def model(self) -> ModelProto:
        """The converted model, completely in memory; see `Converted.model`."""
        return self.converted.model

    @property
    def report(self) -> Report:
        """The report of the conversion."""
        return self.converted.report

    def save(self, path: str | Path, *, overwrite: bool = False, external_data: bool | str | None = None) -> None:
        """Write the model; see `Converted.save`."""
        self.converted.save(path, overwrite=overwrite, external_data=external_data)

    @property
    def brief(self) -> str:
        """The gist of the report, and the outcome of the search."""
        pinned = count(len(self.regions), "region") if self.regions else "no region"
        return f"{self.report.brief}; {pinned} pinned, {'' if self.solved else 'not '}within tolerance"

    def to_json(self) -> str:
        """Return outcome, pinned regions, trials, ranges, verdict and report as JSON with a final newline.

        Nonfinite scores are "inf", "-inf" and "nan".
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
        """Return the summary, the scores of the outputs, the ranges, and the graph. `command`: the next step."""
        figures = self.converted.figures(command)
        return (*figures[:1], *self.verdict.figures(), *self.ranges.figures(), *figures[1:])

    def text(self, *, verbose: bool = False) -> str:
        """Return the outcome of the search as text with a final newline.

        Args:
            verbose: True to include every pin and the full verdict, False for the first pins and a failed verdict.
        """
        notes = [f"note: {note}" for note in self.verdict.notes]
        if self.solved and not self.regions and not verbose:  # the evidence in the report is enough
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
    """Return the outcome of a search as text: the numbers of pinned and candidate regions, and of trials."""
    if not pinned:
        return f"no region pinned to float32; {count(trials, 'trial')}"
    needed = "each is needed" if minimal else "some may not be needed"
    return f"{pinned} of {count(candidates, 'region')} pinned to float32, {needed}; {count(trials, 'trial')}"


# -- regions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """Ops to pin together, a single op or a cluster. `error`: the largest local error among them.

    `name`: the op with that error. `kind`: its type, or the kind of the cluster. `root`: the op is on the allow list,
    so pinning it costs the most.
    """

    name: str
    kind: str
    ops: tuple[OpId, ...]
    error: float
    root: bool

    @property
    def because(self) -> str:
        local = f"adds a relative error of {self.error:.2g}"
        effect = "turns finite numbers into infinity" if math.isinf(self.error) else local
        kind = "" if self.name == self.kind else f" ({self.kind})"
        return f"{self.name}{kind} alone {effect}"

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(Pin(op, reasons.REPAIR, None, self.because, raises=True) for op in self.ops)


def regions_of(draft: Draft, coloring: Coloring, errors: Mapping[str, float]) -> list[Region]:
    """Return the regions in the order of the model: the low ops that round, each with its cluster. O(nodes + uses).

    Ops that only move values get their color from their neighbors, and ops that the user lowered stay low. `errors`:
    the local errors, by the name of the op.
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
    """Return the sort key: by the power of two of the error, then ops with less to gain, then by the error."""
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

    `error_of`: returns the error of a model, None if it misses the criterion. `limit`: the largest acceptable error.
    TF32 is not permitted if a safety rule, or `keep` in its place, keeps a product in float32: the product needs its
    digits, even if no batch shows that.
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
    """Return the float32 reference: the model itself, widened if it is a half-precision model."""
    half = draft.view.low_types or draft.widened
    return emulate(draft.source, rounding=False, io="float32") if half else decompose(draft.source)


@dataclass
class Search:
    """A search for regions to pin, on a draft with pins from ranges.

    A trial converts the draft and verifies the result. `outputs`: the outputs to compare; () for all. `device`: where
    trials run. `verdicts`: by the indices of the pinned regions, in the order of the trials.
    """

    draft: Draft
    feed: Feed
    criterion: Criterion
    ranges: Ranges
    budget: int = BUDGET
    progress: Progress | None = None
    outputs: tuple[str, ...] = ()
    device: Device = field(default_factory=Device)
    regions: Sequence[Region] = ()
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)
    trail: list[TrialRow] = field(default_factory=list)

    def repaired(self) -> Repaired:
        """Return the conversion with as few regions pinned as possible, or with all if no tested set passes."""
        plain = self._convert(frozenset())
        if self._try(frozenset(), plain):
            return self._result((), plain)
        self.regions = regions_of(self.draft, plain.coloring, {})
        spent = len(self.trail) >= self.budget
        if not self.regions or spent or not self._passes(frozenset(range(len(self.regions)))):
            return self._result(None)
        reference = self.reference.model if self.draft.view.low_types else self.draft.view.model
        feed = Feed.of(self.feed, reference, allow_nonfinite=True)  # in the types of the reference
        progress = _stage(self.progress, "local errors")
        errors = local_errors(reference, plain.result, unrolled(feed, reference), progress=progress)
        self.regions = sorted(regions_of(self.draft, plain.coloring, errors), key=suspicion)
        return self._result(minimal_set(len(self.regions), self._passes))

    @cached_property
    def reference(self) -> Side:
        return Side.of(reference_of(self.draft), model_name(self.draft), self.device, cached=True, valid=True)

    def _passes(self, pinned: frozenset[int]) -> bool:
        if pinned not in self.verdicts:
            if len(self.trail) >= self.budget:
                raise BudgetSpent
            self._try(pinned, self._convert(pinned))
        return self.verdicts[pinned].ok

    def _try(self, pinned: frozenset[int], converted: Converted) -> bool:
        verdict = self._verdict(converted.result, "" if pinned else "verify", to_failure=True)
        self.verdicts[pinned] = verdict
        floats = converted.coloring.float32_ops
        self.trail.append(TrialRow(len(pinned), verdict.ok, verdict.because, floats, verdict.score))
        if self.progress and pinned:
            self.progress("search", len(self.trail), self.budget)
        return verdict.ok

    def _verdict(self, candidate: Model, stage: str, *, to_failure: bool = False) -> Verdict:
        reference = self.reference  # loaded first, since the model itself may fail to load
        side = Side.of(candidate, "the conversion", self.device, valid=True)
        comparison = Comparison(self.criterion, self.outputs, to_failure=to_failure)
        progress = _stage(self.progress, stage) if stage else None
        return verdict_of(reference, side, Feed.of(self.feed, reference.model), comparison, progress)

    def _error(self, model: Model) -> float | None:
        verdict = self._verdict(model, "")
        return verdict.largest if verdict.ok else None

    def _convert(self, pinned: Iterable[int], findings: Sequence[Finding] = ()) -> Converted:
        draft, by = self.draft, self.criterion
        regions = [self.regions[i] for i in sorted(pinned)]
        own = tuple(pin for region in regions for pin in region.pins)
        moved = carried(draft.view, own) if draft.view.low_types else ()  # ops that only move the results
        bound = f"rtol:{by.rtol:g},atol:{by.atol:g}" if by.name == ALLCLOSE else f"{by.name}:{by.limit:g}"
        words = (f"repaired={bound}", f"regions={len(regions)}", f"trials={max(len(self.trail), 1)}")
        return finish(draft, draft.paint((*own, *moved)), findings, words)

    def _result(self, chosen: Sequence[int] | None, plain: Converted | None = None) -> Repaired:
        """Return the conversion with the chosen regions pinned (None for all), and its verdict on all data."""
        pinned = frozenset(range(len(self.regions)) if chosen is None else chosen)
        regions, trials = tuple(self.regions[i] for i in sorted(pinned)), len(self.trail)
        subsets = [self.verdicts.get(pinned - {one}) for one in pinned]
        minimal = all(verdict is not None and not verdict.ok for verdict in subsets)
        summary = search_summary(len(regions), len(self.regions), trials, minimal)
        findings = [Finding("repaired", str(self.criterion), summary)] if regions else []
        converted = plain or self._convert(pinned, findings)
        verdict = self.verdicts[pinned] if plain else self._verdict(converted.result, "verify")
        solved = verdict.ok and chosen is not None
        objection = verdict.because if not verdict.ok else "the trials ran out before the search ended"
        error, score = verdict.largest, verdict.score
        evidence = Evidence(
            level=(REPAIRED if regions else VERIFIED) if solved else FAILED,
            data=verdict.fed.origin,
            batches=verdict.fed.batches,
            random=verdict.fed.random,
            criterion=str(self.criterion),
            error="" if error is None else f"{error:.2g}",
            emulated=EMULATED in verdict.candidate.as_,
            pinned=len(regions),
            objection="" if solved else objection,
            largest_error=error if error is not None and math.isfinite(error) else None,
            score="" if score is None or self.criterion.name == "scaled" else f"{self.criterion.measured} {score:.4g}",
        )
        converted = replace(converted, evidence=evidence)
        converted = with_tf32(self.draft, converted, self._error) if solved else converted
        minimal, candidates, trail = minimal and verdict.ok, len(self.regions), tuple(self.trail)
        return Repaired(converted, verdict, self.ranges, regions, minimal, candidates, self.budget, trail, solved)


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None


# -- the smallest set of suspects ----------------------------------------------------------------------------


class BudgetSpent(Exception):
    """Raised by a test when its budget is spent."""


def minimal_set(suspects: int, test: Callable[[frozenset[int]], bool]) -> tuple[int, ...] | None:
    """Return a minimal, sorted set of the suspects 0, 1 … for a test to pass; None if no tested set passes.

    Doubling and bisection find the shortest passing prefix. Then halves, quarters … and single suspects are dropped as
    long as the rest passes (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE Transactions
    on Software Engineering 28(2), 2002). One culprit takes about 2 log2(n) tests. After BudgetSpent, the result is the
    smallest passing set so far, which may not be minimal.
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
        low, high = 0, 1  # lengths of a failing and a passing prefix
        while high < len(everyone) and not passes(everyone[:high]):
            low, high = high, high * 2
        high = min(high, len(everyone))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if passes(everyone[:middle]) else (middle, high)
        chosen, size, before = everyone[:high], high, tuple[int, ...]()
        while size > 1 or chosen != before:
            size, before = max(size // 2, 1), chosen
            end = len(before) - (size > 1)  # a prefix without the last suspect did not pass
            for at in reversed(range(0, end, size)):
                part = before[at : min(at + size, end)]
                rest = tuple(one for one in chosen if one not in part)
                if rest != chosen and passes(rest):
                    chosen = rest

    with suppress(BudgetSpent):
        search(tuple(range(suspects)))
    smallest = min((chosen for chosen, passed in results.items() if passed), key=len, default=None)
    return None if smallest is None else tuple(sorted(smallest))
