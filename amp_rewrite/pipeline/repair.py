"""Repair: pin the fewest ops to float32 with which a conversion is near enough to its float32 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, PolicyError
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.data.sources import Data
from amp_rewrite.evidence.guard import Guarded
from amp_rewrite.evidence.instrument.side_by_side import local_errors
from amp_rewrite.evidence.instrument.switchable import Vertex, switchable_model
from amp_rewrite.evidence.metric import MEASURES, Criterion, MetricBound, Tolerance, criterion
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.search import Trial, Trials, minimal_set, worst_score
from amp_rewrite.evidence.states import unrolled
from amp_rewrite.evidence.verdict import Verdict
from amp_rewrite.evidence.verify import EMULATED, Comparison, Side, verdict_of
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.conversion import Converted, calibrated, finish, model_name, ranges_for, shifted_and_guarded
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.repaired import Region, Repaired, painted, regions_of, search_summary, suspicion
from amp_rewrite.reports.evidence import FAILED, REPAIRED, VERIFIED, Evidence
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU
from amp_rewrite.settings.choices import HEADROOM, check_headroom
from amp_rewrite.settings.keywords import checked, takes
from amp_rewrite.settings.request import CRITERION, KEYWORDS, OptionsAndCriterion, Request

_ROUNDS = 9
"""Searches at most, each but the first with a margin. Verdicts of earlier trials stay, so each round costs few more."""

BUDGET = 100
"""Default bound on the trials of a search, which needs about 2 log2(n) where one op of n is to blame."""

Progress = Callable[[str, int, int], None]
"""Called with the stage ("calibrate", "own errors", "search" or "verify"), the work done, and its total."""


@takes(KEYWORDS, CRITERION)
@checked
def repair(
    model: ModelSource,
    data: Data,
    *,
    ranges: Ranges | str | Path | None = None,
    headroom: float = HEADROOM,
    budget: int = BUDGET,
    allow_nonfinite: bool = False,
    folder: str | Path | None = None,
    feedback: Sequence[str] | str = (),
    steps: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionsAndCriterion],
) -> Repaired:
    """Convert a model so that its outputs on `data` are near enough to float32, with few ops pinned to float32.

    Ops that the ranges forbid with `headroom` are pinned in any case. Then the search pins as few regions (single ops
    or clusters) as suffice, and tries those with the largest local error (`local_errors`) first. A trial is one run
    over the data.

    The reference is the model in float32, of a half model its widened twin. Trials run emulated on the CPU; the
    verdict is that of `verify` on the result. Without a criterion the conversion is guarded by the ranges of the data,
    and no search follows.

    Args:
        model: as `convert` takes it.
        data: a Feed, or an argument of `Feed.of`.
        ranges: as `convert` takes them; by default those measured on the data.
        headroom: as `convert` takes it.
        budget: the largest number of trials.
        allow_nonfinite: accept NaN and infinity in the data.
        folder: as `convert` takes it.
        feedback: as `Feed.of` takes it; trials and the verdict run all steps.
        steps: as `Feed.of` takes them.
        progress: called as `progress(stage, done, total)`.
        **options: those of `convert`, see docs/reference/options.md, and the criterion as `verify` takes it.

    Returns:
        The conversion with its verdict. A failed search is not an error: see `Repaired.solved`.

    Raises:
        AmpRewriteError: as `convert`, `calibrate` and `verify` raise it.
        PolicyError: the budget is below 1.

    Example:
        >>> import amp_rewrite
        >>> repaired = amp_rewrite.repair("model.onnx", "batches.npz", tolerance=1e-2)
        >>> repaired.solved
        True
    """
    given: Mapping[str, Any] = options
    near = {name: value for name, value in given.items() if name in CRITERION and value is not None}
    by = criterion(**near) if near else None
    check_headroom(headroom)
    if budget < 1:
        raise PolicyError(f"a budget of {budget} trials finds nothing; use 1 or more")
    require("a conversion with data")
    request = Request.of(**{name: value for name, value in given.items() if name not in CRITERION})
    draft = Draft.of(model, request, folder=folder)
    feed = Feed.of(data, draft.source, allow_nonfinite=allow_nonfinite, feedback=feedback, steps=steps)
    if ranges is None:
        ranges = calibrated(draft, feed, allow_nonfinite=allow_nonfinite, progress=_stage(progress, "calibrate"))
    else:
        ranges = ranges_for(draft, ranges)
    draft, pinned = shifted_and_guarded(draft, ranges, headroom)
    if by is None:
        converted = finish(draft, draft.paint(pinned.pins), pinned.findings, measured=pinned)
        return Repaired(converted, None, ranges, (), False, 0, budget, (), True)
    return Search(draft, feed, by, ranges, pinned, budget, progress).repaired()


def reference_of(draft: Draft) -> Model:
    """Return the model in float32 throughout: of a half model the widened twin."""
    half = draft.view.low_types or draft.widened
    return emulate(draft.source, rounding=False, io="float32") if half else draft.source


def _evidence_of(verdict: Verdict, level: str, why: str = "", pinned: int = 0) -> Evidence:
    by = verdict.criterion
    asked = isinstance(by, Tolerance) or math.isfinite(by.limit)
    score = None if by.measured == MetricBound(MEASURES["scaled"], 0.0).measured else worst_score(verdict, by)
    error, emulated = verdict.largest, EMULATED in verdict.candidate.as_
    return Evidence(
        level=level,
        data=verdict.fed.origin,
        batches=verdict.fed.batches,
        random=verdict.fed.random,
        criterion=str(by) if asked else "",
        error="" if error is None else f"{error:.2g}",
        emulated=emulated,
        pinned=pinned,
        objection=why,
        largest_error=error if error is not None and math.isfinite(error) else None,
        score="" if score is None else by.said(score),
    )


def with_evidence(converted: Converted, evidence: Evidence) -> Converted:
    return replace(converted, report=replace(converted.report, evidence=evidence))


@dataclass(frozen=True)
class Search:
    """One search by a criterion, on a draft that is guarded already. `outputs`: those that count; () for all."""

    draft: Draft
    feed: Feed
    by: Criterion
    ranges: Ranges
    guarded: Guarded
    budget: int
    progress: Progress | None
    outputs: tuple[str, ...] = ()

    def repaired(self) -> Repaired:
        base = self.draft.paint(self.guarded.pins)
        reference = self._side(Conditions())
        trials = Trials(self._trial(base, reference), self.budget, lambda held: base)
        plain = self._finished((), (), trials, reference)
        if plain.solved:
            return plain
        return self._searched(trials, self._regions(base, plain.result, reference.model), reference)

    def _side(self, conditions: Conditions) -> Side:
        return Side.of(reference_of(self.draft), model_name(self.draft), conditions, keeps=True)

    def _searched(self, trials: Trials, regions: Sequence[Region], reference: Side) -> Repaired:
        """Search; again with a margin if the real model is not as near as its trial; in the end pin all."""

        def enough(held: frozenset[int]) -> bool:
            passes = trials.passes(held)
            if self.progress:
                self.progress("search", len(trials.trail), self.budget)
            return passes

        trials.paints = lambda held: painted(self.draft, self.guarded.pins, [regions[i] for i in sorted(held)])
        trials.whole = frozenset(range(len(regions)))
        for _ in range(_ROUNDS):
            chosen = minimal_set(len(regions), enough)
            repaired = self._finished(chosen, regions, trials, reference)
            if repaired.solved or chosen is None:
                return repaired
            if not trials.learn(frozenset(chosen), repaired.verdict):
                break
        return self._finished(None, regions, trials, reference)

    def _trial(self, base: Coloring, reference: Side) -> Trial:
        draft = self.draft
        if reference.runner.provider != CPU:
            reference = self._side(Conditions(provider=CPU))
        vertices = {*base.low, *self._affine()}
        switchable = switchable_model(
            draft.view, vertices, draft.request.to, io=draft.io, saturate=draft.hazards.saturate
        )
        return Trial(reference, self.feed, self.by, lambda c: finish(draft, c).result, switchable, self.outputs)

    def _affine(self) -> Iterator[Vertex]:
        """Yield the scales and biases of norms, which may become low while the norm itself becomes float32."""
        for op in (op for cluster in self.draft.clusters for op in cluster.tail):
            variables = self.draft.view.variables[op]
            yield from ((op, v.name) for v in variables if v.type and v.type.dtype is DType.FLOAT)

    def _regions(self, base: Coloring, low: Model, reference: Model) -> list[Region]:
        """Return the regions, those with the largest errors first; of equals the first in the model."""
        if not regions_of(self.draft, base, {}):
            return []
        whole = reference if self.draft.view.low_types else self.draft.view.model
        feed = Feed.of(self.feed, whole, allow_nonfinite=True)  # in the types of the reference
        errors = local_errors(whole, low, unrolled(feed, whole), progress=_stage(self.progress, "own errors"))
        return sorted(regions_of(self.draft, base, errors), key=suspicion)

    def _finished(
        self, chosen: Sequence[int] | None, regions: Sequence[Region], trials: Trials, reference: Side
    ) -> Repaired:
        """Return the real conversion with the chosen regions pinned (None: all of them), and its verdict.

        The first one, without pins, is a trial itself.
        """
        first = not trials.trail
        tried = len(trials.trail) + first
        decided = chosen is not None or trials.whole in trials.verdicts  # a real model may pass where its trial fails
        chosen = range(len(regions)) if chosen is None else chosen
        pinned = tuple(regions[i] for i in chosen)
        minimal = trials.each_needed(frozenset(chosen))
        findings = self.guarded.findings
        if pinned:
            summary = search_summary(len(pinned), len(regions), tried, minimal)
            findings = (*findings, Finding("repaired", str(self.by), summary))
        words = (f"repaired={_compact(self.by)}", f"regions={len(pinned)}", f"trials={tried}")
        converted = finish(self.draft, painted(self.draft, self.guarded.pins, pinned), findings, words, self.guarded)
        names = (model_name(self.draft), "the conversion")
        conditions = Conditions(names=names, progress=_stage(self.progress, "verify"))
        comparison = Comparison(self.by, self.outputs, to_failure=first)
        verdict = verdict_of(reference, converted.result, self.feed, comparison, conditions)
        if first:
            trials.add(frozenset(), converted.coloring, verdict)
        minimal, solved, trail = minimal and verdict.ok, verdict.ok and decided, tuple(trials.trail)
        level = (REPAIRED if pinned else VERIFIED) if solved else FAILED
        why = verdict.because if not verdict.ok else "the budget ended before the search did"
        evidence = _evidence_of(verdict, level, "" if solved else why, len(pinned))
        converted = with_evidence(converted, evidence)
        plain = trials.verdicts.get(frozenset())
        remark = plain.near_zero if plain is not None else ""
        return Repaired(
            converted, verdict, self.ranges, pinned, minimal, len(regions), self.budget, trail, solved, remark
        )


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None


def _compact(by: Criterion) -> str:
    if isinstance(by, Tolerance):
        return f"rtol:{by.rtol:g},atol:{by.atol:g}"
    return f"{by.measure.name}:{by.limit:g}"
