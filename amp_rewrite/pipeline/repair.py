"""Repair: pin the fewest ops to float32 for a conversion near enough to its float32 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from amp_rewrite.errors import Finding, PolicyError
from amp_rewrite.evidence.conditions import Conditions, unrolled
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.errors import local_errors
from amp_rewrite.evidence.metric import MEASURES, Criterion, MetricBound, Tolerance, criterion
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.verdict import Verdict
from amp_rewrite.evidence.verify import EMULATED, Comparison, Side, verdict_of
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.conversion import Converted, calibrated, finish, model_name, ranges_for, shifted_and_guarded
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.repaired import Region, Repaired, painted, regions_of, search_summary, suspicion
from amp_rewrite.reports.evidence import FAILED, REPAIRED, VERIFIED, Evidence, Guarded, TrialRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.settings.choices import HEADROOM, check_headroom
from amp_rewrite.settings.option import Data, OptionsAndCriterion, checked, takes
from amp_rewrite.settings.request import CRITERION, KEYWORDS, Request

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
    """Convert a model, with few ops pinned to float32, to outputs near enough to float32 on `data`.

    Ops that the ranges forbid with `headroom` are pinned in any case. Then the search pins as few regions (single ops
    or clusters) as suffice, and tries those with the largest local error (`local_errors`) first. A trial is a
    conversion, and the verdict of `verify` on it.

    The reference is the model in float32, of a half model its widened twin. Without a criterion the conversion is
    guarded by the ranges of the data, and no search follows.

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

    def found(draft: Draft) -> Repaired:
        if ranges is None:
            stage = _stage(progress, "calibrate")
            known = calibrated(draft, feed, allow_nonfinite=allow_nonfinite, progress=stage)
        else:
            known = ranges_for(draft, ranges)
        draft, pinned = shifted_and_guarded(draft, known, headroom)
        if by is None:
            converted = finish(draft, draft.paint(pinned.pins), pinned.findings, measured=pinned)
            return Repaired(converted, None, known, (), False, 0, budget, (), True)
        return Search(draft, feed, by, known, pinned, budget, progress).repaired()

    repaired = found(draft)
    if repaired.converted.coloring.opens(repaired.converted.view):
        return repaired
    return found(Draft.of(draft.source, request, grouped=False))


def reference_of(draft: Draft) -> Model:
    """Return the model in float32 throughout: of a half model the widened twin."""
    half = draft.view.low_types or draft.widened
    return emulate(draft.source, rounding=False, io="float32") if half else draft.source


def _evidence_of(verdict: Verdict, level: str, why: str = "", pinned: int = 0) -> Evidence:
    by = verdict.criterion
    asked = isinstance(by, Tolerance) or math.isfinite(by.limit)
    score = None if by.measured == MetricBound(MEASURES["scaled"], 0.0).measured else verdict.score
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


@dataclass
class Search:
    """One search by a criterion, on a guarded draft.

    A trial converts the draft and verifies the result. `outputs`: those that count; () for all. `conditions`: those of
    each verdict.
    """

    draft: Draft
    feed: Feed
    by: Criterion
    ranges: Ranges
    guarded: Guarded
    budget: int
    progress: Progress | None
    outputs: tuple[str, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    regions: Sequence[Region] = ()
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)
    trail: list[TrialRow] = field(default_factory=list)

    def repaired(self) -> Repaired:
        """Return the conversion with the fewest regions pinned; with all of them if no tested set passes."""
        plain = self._converted(frozenset())
        if self._tried(frozenset(), plain):
            return self._result((), plain)
        if regions_of(self.draft, plain.coloring, {}):
            self.regions = self._by_error(plain)
        chosen = minimal_set(len(self.regions), self._enough)
        return self._result(chosen)

    @cached_property
    def reference(self) -> Side:
        return Side.of(reference_of(self.draft), model_name(self.draft), self._conditions(), keeps=True, valid=True)

    def _conditions(self, stage: str = "") -> Conditions:
        return replace(self.conditions, progress=_stage(self.progress, stage) if stage else None)

    def _by_error(self, plain: Converted) -> list[Region]:
        whole = self.reference.model if self.draft.view.low_types else self.draft.view.model
        feed = Feed.of(self.feed, whole, allow_nonfinite=True)  # in the types of the reference
        progress = _stage(self.progress, "own errors")
        errors = local_errors(whole, plain.result, unrolled(feed, whole), progress=progress)
        return sorted(regions_of(self.draft, plain.coloring, errors), key=suspicion)

    def _enough(self, held: frozenset[int]) -> bool:
        if held not in self.verdicts:
            if len(self.trail) >= self.budget:
                raise BudgetSpent
            self._tried(held, self._converted(held))
        return self.verdicts[held].ok

    def _tried(self, held: frozenset[int], converted: Converted) -> bool:
        verdict = self._verdict(converted, "" if held else "verify", to_failure=True)
        self.verdicts[held] = verdict
        floats = converted.coloring.float32_ops
        self.trail.append(TrialRow(len(held), verdict.ok, verdict.because, floats, verdict.score))
        if self.progress and held:
            self.progress("search", len(self.trail), self.budget)
        return verdict.ok

    def _verdict(self, converted: Converted, stage: str, *, to_failure: bool = False) -> Verdict:
        conditions = self._conditions(stage)
        reference = self.reference  # first: what does not open may be the model itself
        candidate = Side.of(converted.result, "the conversion", conditions, valid=True)
        comparison = Comparison(self.by, self.outputs, to_failure=to_failure)
        return verdict_of(reference, candidate, self.feed, comparison, conditions)

    def _converted(self, held: Iterable[int], findings: Sequence[Finding] = ()) -> Converted:
        pinned = [self.regions[i] for i in sorted(held)]
        coloring = painted(self.draft, self.guarded.pins, pinned)
        words = (f"repaired={_compact(self.by)}", f"regions={len(pinned)}", f"trials={max(len(self.trail), 1)}")
        return finish(self.draft, coloring, (*self.guarded.findings, *findings), words, self.guarded)

    def _result(self, chosen: Sequence[int] | None, plain: Converted | None = None) -> Repaired:
        """Return the conversion with the chosen regions pinned (None: all of them), and its verdict on all the data."""
        held = frozenset(range(len(self.regions)) if chosen is None else chosen)
        pinned, trials = tuple(self.regions[i] for i in sorted(held)), len(self.trail)
        rests = [self.verdicts.get(held - {one}) for one in held]
        minimal = all(verdict is not None and not verdict.ok for verdict in rests)
        summary = search_summary(len(pinned), len(self.regions), trials, minimal)
        findings = [Finding("repaired", str(self.by), summary)] if pinned else []
        converted = plain or self._converted(held, findings)
        verdict = self.verdicts[held] if plain else self._verdict(converted, "verify")
        solved = verdict.ok and chosen is not None
        level = (REPAIRED if pinned else VERIFIED) if solved else FAILED
        why = "" if solved else verdict.because if not verdict.ok else "the budget ended before the search did"
        converted = with_evidence(converted, _evidence_of(verdict, level, why, len(pinned)))
        return Repaired(
            converted,
            verdict,
            self.ranges,
            pinned,
            minimal and verdict.ok,
            len(self.regions),
            self.budget,
            tuple(self.trail),
            solved,
        )


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None


def _compact(by: Criterion) -> str:
    if isinstance(by, Tolerance):
        return f"rtol:{by.rtol:g},atol:{by.atol:g}"
    return f"{by.measure.name}:{by.limit:g}"


# -- the smallest set of suspects ----------------------------------------------------------------------------

Ask = Callable[[tuple[int, ...]], bool]


class BudgetSpent(Exception):
    """Raised by a test once its budget is spent."""


def minimal_set(suspects: int, enough: Callable[[frozenset[int]], bool]) -> tuple[int, ...] | None:
    """Return a minimal set of the suspects 0, 1 … (sorted) to hold back, by a test; None if no tested set passes.

    Doubling and bisection find the shortest prefix that passes. QuickXplain (Junker, Preferred Explanations and
    Relaxations for Over-Constrained Problems, AAAI 2004) removes unneeded suspects by halves. Finally each remaining
    suspect is tested alone, since holding back more may make the test fail, which both steps rule out. It takes about
    2 log2(n) tests for one culprit, and 3 k + 2 k log2(n / k) for k. On BudgetSpent it is the smallest set so far,
    which need not be minimal.
    """
    answers: dict[frozenset[int], bool] = {}

    def ask(held: tuple[int, ...]) -> bool:
        key = frozenset(held)
        if key not in answers:
            answers[key] = enough(key)
        return answers[key]

    def best() -> frozenset[int] | None:
        return min((held for held, passes in answers.items() if passes), key=len, default=None)

    with suppress(BudgetSpent):
        everyone = tuple(range(suspects))
        if not ask(()) and ask(everyone):
            last = _shortest(ask, everyone) - 1
            _needed(ask, (last,), everyone[:last])
            _each_needed(ask, tuple(sorted(best() or ())))
    return None if (found := best()) is None else tuple(sorted(found))


def _shortest(ask: Ask, everyone: tuple[int, ...]) -> int:
    fails, passes = 0, 1
    while passes < len(everyone) and not ask(everyone[:passes]):
        fails, passes = passes, passes * 2
    passes = min(passes, len(everyone))
    while passes - fails > 1:
        middle = (fails + passes) // 2
        if ask(everyone[:middle]):
            passes = middle
        else:
            fails = middle
    return passes


def _needed(ask: Ask, held: tuple[int, ...], suspects: tuple[int, ...]) -> tuple[int, ...]:
    if ask(held) or not suspects:
        return ()
    if len(suspects) == 1:
        return suspects
    more, less = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    of_less = _needed(ask, held + more, less)
    return _needed(ask, held + of_less, more) + of_less


def _each_needed(ask: Ask, chosen: tuple[int, ...]) -> None:
    spared = True
    while spared:
        spared = False
        for one in reversed(chosen):
            rest = tuple(i for i in chosen if i != one)
            if ask(rest):
                chosen, spared = rest, True
