"""The fewest of many suspects that must be held back for a test to pass, in a bounded number of tests.

First the shortest run of the most suspect ones is found by doubling and bisection; then what is not needed of it is
taken out by halves (QuickXplain: Junker, Preferred Explanations and Relaxations for Over-Constrained Problems, AAAI
2004); then each that is left is tried alone, since the test need not be as well-behaved as that assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Enough = Callable[[frozenset[int]], bool]
"""Whether a test passes with these suspects held back."""


@dataclass(frozen=True, slots=True)
class Fewest:
    """The suspects to hold back, in their order; None where no set that was tried passes.

    `minimal`: for each of them it was tested that the others are not enough.
    """

    chosen: tuple[int, ...] | None
    minimal: bool


class Spent(Exception):
    """What a test raises when it may not run any more."""


@dataclass
class _Asker:
    """Asks each question once; `best` is the smallest set that passed."""

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


def fewest(suspects: int, enough: Enough) -> Fewest:
    """The fewest of the suspects 0, 1 …, the most suspect first, that are `enough`; the best so far once it is Spent.

    To hold back more is taken to be no worse than to hold back less; where that does not hold, the set is still one
    that passes, and `minimal` still says what was tested. About 2 log2(n) tests where one suspect is to blame, and
    3 k + 2 k log2(n / k) for k of them.
    """
    ask = _Asker(enough)
    minimal = False
    try:
        everyone = tuple(range(suspects))
        if not ask(()) and ask(everyone):
            last = _shortest(ask, everyone) - 1
            _needed(ask, (last,), everyone[:last])
            _each_needed(ask, tuple(sorted(ask.best or ())))
        minimal = ask.best is not None
    except Spent:
        pass
    return Fewest(tuple(sorted(ask.best)) if ask.best is not None else None, minimal)


def _shortest(ask: _Asker, everyone: tuple[int, ...]) -> int:
    """How many of the first suspects are enough: one less is not."""
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


def _needed(ask: _Asker, given: tuple[int, ...], suspects: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the suspects that are needed beside the given ones, where all of them together are enough."""
    if ask(given) or not suspects:
        return ()
    if len(suspects) == 1:
        return suspects
    more, less = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
    of_less = _needed(ask, given + more, less)
    return _needed(ask, given + of_less, more) + of_less


def _each_needed(ask: _Asker, chosen: tuple[int, ...]) -> None:
    """Take out one by one, the least suspect first, what turns out not to be needed; until nothing does."""
    spared = True
    while spared:
        spared = False
        for one in reversed(chosen):
            rest = tuple(i for i in chosen if i != one)
            if ask(rest):
                chosen, spared = rest, True
