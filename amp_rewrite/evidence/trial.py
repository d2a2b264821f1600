"""Trying colors: does the model that a coloring stands for give what the float32 reference gives?

A trial is one run of the switchable twin with another mask where there is such a twin; elsewhere the model is
converted, emulated and opened anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.switchable import Switchboard
from amp_rewrite.evidence.metric import Criterion, Tolerance
from amp_rewrite.evidence.search import Spent
from amp_rewrite.evidence.verdict import Fed, Ran, Verdict
from amp_rewrite.evidence.verify import rows_of
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner

KEPT = 1 << 30
"""Bytes of the reference's outputs that are kept from trial to trial; what is beyond that is computed each time."""

_FAR = 4.0
"""Times the tolerance from which an error is not one of the last bits."""

Outputs = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """The reference's outputs, the data and what decides; `build` makes a coloring's model where a twin cannot."""

    reference: Runner
    feed: Feed
    by: Criterion
    build: Callable[[Coloring], Model]
    board: Switchboard | None = None
    _twin: list[Runner] = field(default_factory=list, repr=False)
    _seen: dict[int, Outputs] = field(default_factory=dict, repr=False)

    def run(self, coloring: Coloring) -> Verdict:
        """The verdict over all batches, or up to the first that is not near enough."""
        return self._verdict(self._given(coloring))

    def real(self, model: Model) -> Verdict:
        """The verdict on a model as it is when it is emulated."""
        return self._verdict(self._emulated(model))

    def _verdict(self, given: Iterable[tuple[Batch, Outputs]]) -> Verdict:
        verdict = Verdict(_REFERENCE, _TRIED, Fed(self.feed.origin, self.feed.random, 0), self.by, ())
        for number, (batch, outputs) in enumerate(given):
            expected = self._expected(number, batch)
            rows = tuple(rows_of(number, expected, outputs, tuple(expected), self.by))
            verdict = replace(verdict, rows=(*verdict.rows, *rows), fed=replace(verdict.fed, batches=number + 1))
            if not all(row.difference.ok for row in rows):
                break
        return verdict

    def _given(self, coloring: Coloring) -> Iterator[tuple[Batch, Outputs]]:
        """Each batch, and what the coloring's model makes of it."""
        board = self.board
        if board is None or not board.covers(coloring):
            yield from self._emulated(self.build(coloring))
            return
        if not self._twin:
            self._twin.append(Runner.open(board.model))
        mask = board.mask(coloring)
        for batch in self.feed:
            found = self._twin[0].run({**batch, board.input: mask}, list(dict.fromkeys(board.outputs.values())))
            yield batch, {name: found[named] for name, named in board.outputs.items()}

    def _emulated(self, model: Model) -> Iterator[tuple[Batch, Outputs]]:
        runner = Runner.open(emulate(model, io="float32"))
        for batch in self.feed:
            yield batch, runner.run(widened(batch))

    def _expected(self, number: int, batch: Batch) -> Outputs:
        if number in self._seen:
            return self._seen[number]
        found = self.reference.run(widened(batch))
        if sum(map(_size, (*self._seen.values(), found))) <= KEPT:
            self._seen[number] = found
        return found


def widened(batch: Batch) -> Batch:
    """A batch for a float32 twin: what is fed in a low type is fed in float32."""
    return {name: _widened(value) for name, value in batch.items()}


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(part) for part in value]
    low = isinstance(value, np.ndarray) and value.dtype.name in ("float16", "bfloat16")
    return value.astype(np.float32) if low else value


def _size(outputs: Outputs) -> int:
    return sum(int(np.asarray(value).nbytes) for value in outputs.values() if not isinstance(value, list))


_REFERENCE = Ran("the model", "float32 on CPUExecutionProvider")
_TRIED = Ran("the trial", "emulated on CPUExecutionProvider")


@dataclass(frozen=True, slots=True)
class Step:
    """One trial: how many regions were pinned, and whether the outputs were near enough, or why not."""

    pinned: int
    ok: bool
    because: str


@dataclass
class Trials:
    """The trials of one search, each made once. `margin`: by how much a score must be better than the criterion asks,
    since real models turned out to be that much worse than their trials. `whole`: all that can be pinned."""

    trial: Trial
    budget: int
    paints: Callable[[frozenset[int]], Coloring]
    whole: frozenset[int] = frozenset()
    margin: float = 0.0
    trail: list[Step] = field(default_factory=list)
    verdicts: dict[frozenset[int], Verdict] = field(default_factory=dict)

    def passes(self, held: frozenset[int]) -> bool:
        """Whether the outputs are near enough with these regions pinned. Spent when the budget is."""
        if held not in self.verdicts:
            if len(self.trail) >= self.budget:
                raise Spent
            verdict = self.verdicts[held] = self.trial.run(self.paints(held))
            self.trail.append(Step(len(held), verdict.ok, verdict.because))
        return self._ok(held)

    def _ok(self, held: frozenset[int]) -> bool:
        by, verdict, margin = self.trial.by, self.verdicts[held], self._margin(held)
        scores = (row.difference.score for row in verdict.rows)
        return verdict.ok and all(s is None or by.passes(s - margin if by.higher else s + margin) for s in scores)

    def _margin(self, held: frozenset[int]) -> float:
        """The margin; at most half of what the best that can be had, all pinned, has to spare."""
        best = _worst(self.verdicts[self.whole], self.trial.by) if self.whole and self.whole in self.verdicts else None
        if best is None or held == self.whole:
            return 0.0 if held and held == self.whole else self.margin
        limit = 1.0 if isinstance(self.trial.by, Tolerance) else self.trial.by.limit
        return min(self.margin, abs(limit - best) / 2)

    def near(self, held: frozenset[int]) -> bool:
        """Whether a trial was so near to what is asked that the last bits may decide."""
        found = _worst(self.verdicts[held], self.trial.by)
        if found is None or not np.isfinite(found):
            return False
        return found <= _FAR if isinstance(self.trial.by, Tolerance) else True

    def learn(self, held: frozenset[int], real: Verdict | None) -> bool:
        """Ask for more by twice what a real verdict is off its trial: other sets, chosen since their trials passed, are
        off by more. False where that leaves the answer for this set as it was."""
        tried, found = _worst(self.verdicts[held], self.trial.by), _worst(real, self.trial.by) if real else None
        if tried is None or found is None or not np.isfinite(found) or not np.isfinite(tried):
            return False
        before = self._ok(held)
        self.margin = max(self.margin, 2 * abs(found - tried))
        return before and not self._ok(held)

    def each_needed(self, held: frozenset[int]) -> bool:
        """Whether it was tried that without any one of these the outputs are not near enough, margin or not."""
        rests = [self.verdicts.get(held - {one}) for one in held]
        return all(verdict is not None and not verdict.ok for verdict in rests)


def _worst(verdict: Verdict, by: Criterion) -> float | None:
    scores = [row.difference.score for row in verdict.rows if row.difference.score is not None]
    return (min(scores) if by.higher else max(scores)) if scores else None
