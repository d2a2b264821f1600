"""Search: the smallest set of regions to hold in float32, by trials of colorings against the float32 reference.

Delta debugging finds the set in a bounded number of tests. Doubling and bisection find the shortest prefix of the
sorted suspects that passes. QuickXplain (Junker, Preferred Explanations and Relaxations for Over-Constrained Problems,
AAAI 2004) removes unneeded suspects by halves. Finally each remaining suspect is tested alone, since the test need not
be monotone as both steps assume. A trial is one run of the switchable twin with another mask; without such a twin, each
trial converts, emulates and opens a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.switchable import SwitchableModel
from amp_rewrite.evidence.metric import Criterion, Tolerance
from amp_rewrite.evidence.states import Run, Stepped
from amp_rewrite.evidence.verdict import FedData, ModelRun, Verdict
from amp_rewrite.evidence.verify import Comparison, Side, rows_of
from amp_rewrite.files.model import Model
from amp_rewrite.reports.measurements import OutputRow, TrialRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner

Enough = Callable[[frozenset[int]], bool]
"""True if the test passes with these suspects held back."""


class BudgetSpent(Exception):
    """Raised by a test once its budget is spent."""


@dataclass
class _Tests:
    """Cache of tests, each run once; `best` is the smallest set that passed."""

    enough: Enough
    answers: dict[frozenset[int], bool] = field(default_factory=dict)
    best: frozenset[int] | None = None

    def __call__(self, held: tuple[int, ...]) -> bool:
        key = frozenset(held)
        if key not in self.answers:
            self.answers[key] = self.enough(key)
            if self.answers[key] and (self.best is None or len(key) < len(self.best)):
                self.best = key
        return self.answers[key]


def minimal_set(suspects: int, enough: Enough) -> tuple[int, ...] | None:
    """Return a minimal set of the suspects 0, 1 … (sorted) that is `enough`; None if no tested set is.

    On BudgetSpent it is the smallest set so far, which need not be minimal. The search assumes that holding back more
    never makes the test fail; where that is wrong, the set still passes, and each of its suspects is needed. It takes
    about 2 log2(n) tests for one culprit, and 3 k + 2 k log2(n / k) for k.
    """
    ask = _Tests(enough)
    with suppress(BudgetSpent):
        everyone = tuple(range(suspects))
        if not ask(()) and ask(everyone):
            last = _shortest(ask, everyone) - 1
            _needed(ask, (last,), everyone[:last])
            _each_needed(ask, tuple(sorted(ask.best or ())))
    return tuple(sorted(ask.best)) if ask.best is not None else None


def _shortest(ask: _Tests, everyone: tuple[int, ...]) -> int:
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


def _needed(ask: _Tests, held: tuple[int, ...], suspects: tuple[int, ...]) -> tuple[int, ...]:
    """Return the suspects that are needed besides the held ones, if all of them together are enough."""
    if ask(held) or not suspects:
        return ()
    if len(suspects) == 1:
        return suspects
    more, less = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    of_less = _needed(ask, held + more, less)
    return _needed(ask, held + of_less, more) + of_less


def _each_needed(ask: _Tests, chosen: tuple[int, ...]) -> None:
    """Remove unneeded suspects one by one, least suspect first, until all are needed."""
    spared = True
    while spared:
        spared = False
        for one in reversed(chosen):
            rest = tuple(i for i in chosen if i != one)
            if ask(rest):
                chosen, spared = rest, True


@dataclass(frozen=True)
class Trial:
    """Reference, data and criterion of a search; `build` converts by a coloring without a twin.

    `outputs`: those that count; () for all.
    """

    reference: Side
    feed: Feed
    by: Criterion
    build: Callable[[Coloring], Model]
    board: SwitchableModel | None = None
    outputs: tuple[str, ...] = ()

    def run(self, coloring: Coloring) -> Verdict:
        """Return the verdict on a coloring over all runs, or up to the first that fails."""
        reference, tried = Stepped(self.feed, self.reference.run), Stepped(self.feed, self._runs(coloring))
        rows: list[OutputRow] = []
        for number, batch in enumerate(self.feed):
            expected = reference(number, batch)
            outputs = tried(number, batch)
            added = list(
                rows_of(self.feed.place(number), expected, outputs, self.outputs or expected, Comparison(self.by))
            )
            rows += added
            if not all(row.difference.ok for row in added):
                break
        return Verdict(_REFERENCE, _TRIED, FedData.of(self.feed, rows), self.by, tuple(rows))

    def _runs(self, coloring: Coloring) -> Run:
        board = self.board
        if board is None or not board.covers(coloring):
            runner = Runner.open(emulate(self.build(coloring), io="float32"))
            return lambda _, batch: runner.run(widened(batch))
        mask = board.mask(coloring)
        return lambda _, batch: board.run(self.twin, mask, batch)

    @cached_property
    def twin(self) -> Runner:
        """The switchable twin, open."""
        assert self.board is not None
        return Runner.open(self.board.model)


def widened(batch: Batch) -> Batch:
    """Return the batch with low types widened to float32, for a float32 twin."""
    return {name: _widened(value) for name, value in batch.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(part) for part in value]
    low = isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16")
    return value.astype(np.float32) if low else value


_REFERENCE = ModelRun("the model", "float32 on CPUExecutionProvider")
_TRIED = ModelRun("the trial", "emulated on CPUExecutionProvider")


@dataclass
class Trials:
    """The trials of one search, each run once.

    `margin`: by how much a score must beat the criterion, learned from real models that were worse than their trials.
    `whole`: all regions that can be pinned.
    """

    trial: Trial
    budget: int
    paints: Callable[[frozenset[int]], Coloring]
    whole: frozenset[int] = frozenset()
    margin: float = 0.0
    trail: list[TrialRow] = field(default_factory=list)
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)

    def passes(self, held: frozenset[int]) -> bool:
        """True if the outputs are close enough with these regions pinned. Raise BudgetSpent beyond the budget."""
        if held not in self.verdicts:
            if len(self.trail) >= self.budget:
                raise BudgetSpent
            coloring = self.paints(held)
            self.add(held, coloring, self.trial.run(coloring))
        return self._ok(held)

    def add(self, held: frozenset[int], coloring: Coloring, verdict: Verdict) -> None:
        """Add a trial that was made."""
        self.verdicts[held] = verdict
        score = worst_score(verdict, self.trial.by)
        self.trail.append(TrialRow(len(held), verdict.ok, verdict.because, coloring.float32_ops, score))

    def _ok(self, held: frozenset[int]) -> bool:
        by, verdict, margin = self.trial.by, self.verdicts[held], self._margin(held)
        scores = (row.difference.score for row in verdict.rows)
        return verdict.ok and all(s is None or by.passes(s - margin if by.higher else s + margin) for s in scores)

    def _margin(self, held: frozenset[int]) -> float:
        verdict = self.verdicts.get(self.whole) if self.whole else None
        best = None if verdict is None else worst_score(verdict, self.trial.by)
        if best is None or held == self.whole:
            return 0.0 if held and held == self.whole else self.margin
        limit = 1.0 if isinstance(self.trial.by, Tolerance) else self.trial.by.limit
        return min(self.margin, abs(limit - best) / 2)

    def learn(self, held: frozenset[int], real: Verdict | None) -> bool:
        """Raise the margin to twice the difference of a real verdict from its trial; return True if this set now fails.

        Other sets may differ by more, since they are chosen because their trials pass.
        """
        tried = worst_score(self.verdicts[held], self.trial.by)
        worst = None if real is None else worst_score(real, self.trial.by)
        if tried is None or worst is None or not np.isfinite(worst) or not np.isfinite(tried):
            return False
        before = self._ok(held)
        self.margin = max(self.margin, 2 * abs(worst - tried))
        return before and not self._ok(held)

    def each_needed(self, held: frozenset[int]) -> bool:
        """True if a trial failed without each one of these regions, whatever the margin."""
        rests = [self.verdicts.get(held - {one}) for one in held]
        return all(verdict is not None and not verdict.ok for verdict in rests)


def worst_score(verdict: Verdict, by: Criterion) -> float | None:
    """Return the worst score of an output in a batch; None where none was scored."""
    scores = [row.difference.score for row in verdict.rows if row.difference.score is not None]
    return (min(scores) if by.higher else max(scores)) if scores else None
