"""Search: the smallest set of suspects to hold back, by tests.

Delta debugging finds the set in a bounded number of tests. Doubling and bisection find the shortest prefix of the
sorted suspects that passes. QuickXplain (Junker, Preferred Explanations and Relaxations for Over-Constrained Problems,
AAAI 2004) removes unneeded suspects by halves. Finally each remaining suspect is tested alone, since the test need not
be monotone as both steps assume.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

Enough = Callable[[frozenset[int]], bool]
"""True if the test passes with these suspects held back."""


class BudgetSpent(Exception):
    """Raised by a test once its budget is spent."""


@dataclass
class _Tests:
    """Cache of tests, each run once; `best` is the smallest passing set."""

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
    """Return a minimal set of the suspects 0, 1 … (sorted), by the test `enough`; None if no tested set passes.

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
    """Return the suspects needed besides the held ones, if all of them together are enough."""
    if ask(held) or not suspects:
        return ()
    if len(suspects) == 1:
        return suspects
    more, less = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    of_less = _needed(ask, held + more, less)
    return _needed(ask, held + of_less, more) + of_less


def _each_needed(ask: _Tests, chosen: tuple[int, ...]) -> None:
    spared = True
    while spared:
        spared = False
        for one in reversed(chosen):
            rest = tuple(i for i in chosen if i != one)
            if ask(rest):
                chosen, spared = rest, True
