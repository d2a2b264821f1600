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
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.errors import local_errors
from amp_rewrite.evidence.metric import criterion
from amp_rewrite.evidence.opening import Device, unrolled
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.evidence.verdict import Verdict
from amp_rewrite.evidence.verify import EMULATED, Comparison, Side, verdict_of
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.conversion import Converted, finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.measured import calibrated, model_name, shifted_and_guarded
from amp_rewrite.pipeline.repaired import Region, Repaired, painted, regions_of, search_summary, suspicion, with_tf32
from amp_rewrite.reports.evidence import ALLCLOSE, FAILED, REPAIRED, VERIFIED, Criterion, Evidence, Guarded, TrialRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.settings.choices import HEADROOM, check_headroom
from amp_rewrite.settings.option import Data, OptionsAndCriterion, Progress, checked, takes
from amp_rewrite.settings.request import CRITERION, KEYWORDS, Request

BUDGET = 100
"""Default bound on the trials of a search, which needs about 2 log2(n) where one op of n is to blame."""


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
    given: Mapping[str, Any] = options
    by = criterion(**{name: value for name, value in given.items() if name in CRITERION})
    check_headroom(headroom)
    if budget < 1:
        raise PolicyError(f"a budget of {budget} trials finds nothing; use 1 or more")
    require("a conversion with data")
    request = Request.of(**{name: value for name, value in given.items() if name not in CRITERION})
    draft = Draft.of(model, request, folder=folder)
    feed = Feed.of(data, draft.source)

    def found(draft: Draft) -> Repaired:
        known = calibrated(draft, feed, progress=_stage(progress, "calibrate"))
        draft, pinned = shifted_and_guarded(draft, known, headroom)
        return Search(draft, feed, by, known, pinned, budget, progress).repaired()

    repaired = found(draft)
    if repaired.converted.coloring.opens(repaired.converted.view):
        return repaired
    return found(Draft.of(draft.source, request, grouped=False))


def reference_of(draft: Draft) -> Model:
    """Return the model in float32 throughout: of a half model the widened twin."""
    half = draft.view.low_types or draft.widened
    return emulate(draft.source, rounding=False, io="float32") if half else draft.source


def _evidence_of(verdict: Verdict, level: str, why: str, pinned: int) -> Evidence:
    by, score, error = verdict.criterion, verdict.score, verdict.largest
    return Evidence(
        level=level,
        data=verdict.fed.origin,
        batches=verdict.fed.batches,
        random=verdict.fed.random,
        criterion=str(by),
        error="" if error is None else f"{error:.2g}",
        emulated=EMULATED in verdict.candidate.as_,
        pinned=pinned,
        objection=why,
        largest_error=error if error is not None and math.isfinite(error) else None,
        score="" if score is None or by.name == "scaled" else f"{by.measured} {score:.4g}",
    )


@dataclass
class Search:
    """One search by a criterion, on a guarded draft.

    A trial converts the draft and verifies the result. `outputs`: those that count; () for all. `device`: that of the
    trials. `verdicts`: by the numbers of pinned regions, in the order of the trials.
    """

    draft: Draft
    feed: Feed
    by: Criterion
    ranges: Ranges
    guarded: Guarded
    budget: int = BUDGET
    progress: Progress | None = None
    outputs: tuple[str, ...] = ()
    device: Device = field(default_factory=Device)
    regions: Sequence[Region] = ()
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)
    trail: list[TrialRow] = field(default_factory=list)

    def repaired(self) -> Repaired:
        """Return the conversion with the fewest regions pinned; with all of them if no tested set passes."""
        plain = self._converted(frozenset())
        if self._tried(frozenset(), plain):
            return self._result((), plain)
        self.regions = regions_of(self.draft, plain.coloring, {})
        spent = len(self.trail) >= self.budget
        if not self.regions or spent or not self._enough(frozenset(range(len(self.regions)))):
            return self._result(None)
        self.regions = self._by_error(plain)
        return self._result(minimal_set(len(self.regions), self._enough))

    @cached_property
    def reference(self) -> Side:
        return Side.of(reference_of(self.draft), model_name(self.draft), self.device, keeps=True, valid=True)

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
        verdict = self._verdict(converted.result, "" if held else "verify", to_failure=True)
        self.verdicts[held] = verdict
        floats = converted.coloring.float32_ops
        self.trail.append(TrialRow(len(held), verdict.ok, verdict.because, floats, verdict.score))
        if self.progress and held:
            self.progress("search", len(self.trail), self.budget)
        return verdict.ok

    def _verdict(self, candidate: Model, stage: str, *, to_failure: bool = False) -> Verdict:
        reference = self.reference  # first: what does not open may be the model itself
        side = Side.of(candidate, "the conversion", self.device, valid=True)
        comparison = Comparison(self.by, self.outputs, to_failure=to_failure)
        progress = _stage(self.progress, stage) if stage else None
        return verdict_of(reference, side, Feed.of(self.feed, reference.model), comparison, progress)

    def _error(self, model: Model) -> float | None:
        verdict = self._verdict(model, "")
        return verdict.largest if verdict.ok else None

    def _converted(self, held: Iterable[int], findings: Sequence[Finding] = ()) -> Converted:
        pinned = [self.regions[i] for i in sorted(held)]
        coloring = painted(self.draft, self.guarded.pins, pinned)
        words = (f"repaired={_compact(self.by)}", f"regions={len(pinned)}", f"trials={max(len(self.trail), 1)}")
        return finish(self.draft, coloring, self.guarded, findings, words)

    def _result(self, chosen: Sequence[int] | None, plain: Converted | None = None) -> Repaired:
        """Return the conversion with the chosen regions pinned (None: all of them), and its verdict on all the data."""
        held = frozenset(range(len(self.regions)) if chosen is None else chosen)
        pinned, trials = tuple(self.regions[i] for i in sorted(held)), len(self.trail)
        rests = [self.verdicts.get(held - {one}) for one in held]
        minimal = all(verdict is not None and not verdict.ok for verdict in rests)
        summary = search_summary(len(pinned), len(self.regions), trials, minimal)
        findings = [Finding("repaired", str(self.by), summary)] if pinned else []
        converted = plain or self._converted(held, findings)
        verdict = self.verdicts[held] if plain else self._verdict(converted.result, "verify")
        solved = verdict.ok and chosen is not None
        level = (REPAIRED if pinned else VERIFIED) if solved else FAILED
        why = "" if solved else verdict.because if not verdict.ok else "the budget ended before the search did"
        converted = replace(converted, evidence=_evidence_of(verdict, level, why, len(pinned)))
        converted = with_tf32(converted, self._error) if solved else converted
        minimal, candidates, trail = minimal and verdict.ok, len(self.regions), tuple(self.trail)
        return Repaired(converted, verdict, self.ranges, pinned, minimal, candidates, self.budget, trail, solved)


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(stage, done, total)) if progress else None


def _compact(by: Criterion) -> str:
    return f"rtol:{by.rtol:g},atol:{by.atol:g}" if by.name == ALLCLOSE else f"{by.name}:{by.limit:g}"


# -- the smallest set of suspects ----------------------------------------------------------------------------

Ask = Callable[[tuple[int, ...]], bool]


class BudgetSpent(Exception):
    """Raised by a test once its budget is spent."""


def minimal_set(suspects: int, enough: Callable[[frozenset[int]], bool]) -> tuple[int, ...] | None:
    """Return a minimal set of the suspects 0, 1 … (sorted) to hold back, by a test; None if no tested set passes.

    Doubling and bisection find the shortest prefix that passes. Then halves, quarters … and single suspects of it are
    let go as long as the rest passes (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE
    Transactions on Software Engineering 28(2), 2002). It takes about 2 log2(n) tests for one culprit. On BudgetSpent it
    is the smallest set so far, which need not be minimal.
    """
    answers: dict[frozenset[int], bool] = {}

    def ask(held: tuple[int, ...]) -> bool:
        key = frozenset(held)
        if key not in answers:
            answers[key] = enough(key)
        return answers[key]

    with suppress(BudgetSpent):
        everyone = tuple(range(suspects))
        if not ask(()) and ask(everyone):
            _thin_out(ask, everyone[: _shortest(ask, everyone)])
    found = min((held for held, passes in answers.items() if passes), key=len, default=None)
    return None if found is None else tuple(sorted(found))


def _shortest(ask: Ask, everyone: tuple[int, ...]) -> int:
    """Return the length of the shortest prefix that passes."""
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


def _thin_out(ask: Ask, held: tuple[int, ...]) -> None:
    """Ask for ever smaller parts of the shortest prefix that passes, until each of its suspects is needed."""
    size, before = len(held), tuple[int, ...]()
    while size > 1 or held != before:
        size, before = max(size // 2, 1), held
        end = len(before) - (size > 1)  # without the last one a prefix did not pass
        for at in reversed(range(0, end, size)):
            part = before[at : min(at + size, end)]
            rest = tuple(one for one in held if one not in part)
            if rest != held and ask(rest):
                held = rest
