"""Trials: compare the model of a coloring with the float32 reference.

A trial is one run of the switchable twin with another mask. Without such a twin, each trial converts, emulates and
opens a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.switchable import SwitchableModel
from amp_rewrite.evidence.metric import Criterion, Tolerance
from amp_rewrite.evidence.search import BudgetSpent
from amp_rewrite.evidence.states import Run, Stepped
from amp_rewrite.evidence.verdict import FedData, ModelRun, Verdict
from amp_rewrite.evidence.verify import Comparison, Side, rows_of
from amp_rewrite.files.model import Model
from amp_rewrite.reports.measurements import OutputRow, TrialRow
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner


@dataclass(frozen=True)
class Trial:
    """Reference, data and criterion of a search; `build` converts by a coloring without a twin."""

    reference: Side
    feed: Feed
    by: Criterion
    build: Callable[[Coloring], Model]
    board: SwitchableModel | None = None

    def run(self, coloring: Coloring) -> Verdict:
        """Return the verdict on a coloring over all runs, or up to the first that fails."""
        reference, tried = Stepped(self.feed, self.reference.run), Stepped(self.feed, self._runs(coloring))
        rows: list[OutputRow] = []
        for number, batch in enumerate(self.feed):
            expected = reference(number, batch)
            outputs = tried(number, batch)
            added = list(rows_of(self.feed.place(number), expected, outputs, expected, Comparison(self.by)))
            rows += added
            if not all(row.difference.ok for row in added):
                break
        return Verdict(_REFERENCE, _TRIED, FedData.of(self.feed, rows), self.by, tuple(rows))

    def _runs(self, coloring: Coloring) -> Run:
        """Return the runs of the coloring's model."""
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
        """Return the margin, at most half the slack of the trial with all regions pinned."""
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
