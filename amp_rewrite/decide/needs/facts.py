"""Facts of a value, each with the way in which those of several values become that of one; limits of a low type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.view import ValueId

INF = math.inf
T = TypeVar("T")
Values = frozenset[ValueId]
Pairs = frozenset[Values]
MOST = 64
"""The most values that a fact names: sums of more stay linear in time."""


def union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """Return the elements of several sets, at most `MOST`: those of small sets first, since they tell more."""
    several = sorted(sets, key=len)
    together: frozenset[T] = frozenset().union(*several)
    return together if len(together) <= MOST else frozenset(islice(dict.fromkeys(chain(*several)), MOST))


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def _largest_if_all(numbers: Sequence[float | None]) -> float | None:
    known = [n for n in numbers if n is not None]
    return max(known) if len(known) == len(numbers) else None


def _states(several: Iterable[tuple[tuple[ValueId, bool], ...]]) -> tuple[tuple[ValueId, bool], ...]:
    found: dict[ValueId, bool] = {}
    smallest_first = sorted(several, key=len)
    for state, moved in chain(*smallest_first):
        found[state] = found.get(state, False) or moved
    return tuple(islice(found.items(), MOST))


class Fact(NamedTuple):
    """What is known of a value. A fact without a join is lost where values meet."""

    # -- size ----------------------------------------------------------------------------------------
    low: Annotated[float, min] = -INF
    high: Annotated[float, max] = INF
    """It lies between these."""
    number: float | None = None
    """Its only number, if it is constant."""
    whole: Annotated[float | None, _largest_if_all] = None
    """It is a whole number of at most this magnitude."""
    grows: Annotated[bool, any] = False
    """It can outgrow what it is computed from, as a product of two values."""
    terms: Annotated[float, max] = 1.0
    """How many terms of one sign may have been added up in it; less than 1 for what divides by such a sum."""
    beyond: Annotated[str, _first] = ""
    """Why it leaves the range of the type, or loses itself in it."""
    fill: bool = False
    """A constant whose numbers beyond the type are one number, there to lose comparisons."""
    small: Annotated[bool, any] = False
    """Elements may be far smaller than what it is computed from."""
    guard: Annotated[float, min] = INF
    """The summand or bound that keeps it from 0."""
    near_one: Annotated[bool, any] = False
    """Large arguments differ only in how far it is from 1."""
    beside_one: Annotated[bool, any] = False
    """It is 1 plus or minus something."""
    peak: bool = False
    """The largest element of each row is 0, or 1 behind an exponential."""
    top: ValueId | None = None
    """The value of whose rows it is the largest element."""
    ones: float | None = None
    """What it is if the input is all ones."""

    # -- origin --------------------------------------------------------------------------------------
    constant: Annotated[bool, all] = False
    """It is computed from constants alone."""
    decoded: Annotated[bool, any] = False
    """Codes stand for it, which runtimes do not decode at load time."""
    learned: Annotated[bool, any] = False
    """A layer made part of it."""
    sources: Annotated[Values, union] = frozenset()
    """Inputs from which it is computed without a layer between, or with one, or behind a transform of them."""
    levels: Annotated[Values, union] = frozenset()
    """Inputs to which something is added, or from which it is subtracted."""
    placed: Annotated[bool, any] = False
    """Such a sum, scaled or not."""
    nudged: Annotated[bool, any] = False
    """It is computed from an input plus a small step."""
    slope: Annotated[bool, any] = False
    """A difference between what a step made of a layer, and what the layer is without it."""
    transform: Annotated[bool, all] = False
    """It is a linear transform of inputs: products with constants, in any number, and sums of such without a bias."""
    line: Values = frozenset()
    """The value of which it is a linear function; nothing for that value itself."""
    squares: Annotated[Pairs, union] = frozenset()
    """Pairs of values whose elementwise products are among its summands; a single value for its square."""
    products: Annotated[Values, union] = frozenset()
    """Values whose other products, sums of many terms as a rule, are among its summands."""
    negative: bool = False
    """These summands are subtracted."""
    averaged: Annotated[bool, any] = False
    """It sums or averages along axes."""
    bent: bool = False
    """A function of what a layer made."""

    # -- positions -----------------------------------------------------------------------------------
    grid: Annotated[float, max] = 0.0
    """It counts in equal steps up to this magnitude."""
    best: Annotated[float, max] = 0.0
    """The magnitude of such a bias at the key where it is largest."""
    hides: Annotated[bool, any] = False
    """An input may hide some of these scores."""
    running: bool = False
    """A triangle of ones, or the number 1/n throughout: a sum or a mean, if a product reads it."""

    # -- states and recursions -----------------------------------------------------------------------
    states: Annotated[tuple[tuple[ValueId, bool], ...], _states] = ()
    """States that it carries, with True if something was added to them."""
    steps: Annotated[int, max] = 0
    """Small steps taken by a state so far."""
    gated: int = 0
    """Steps that it has taken if a gate multiplies it."""
    small_factor: bool = False
    """It is a small multiple of something."""
    run: Annotated[int, max] = 0
    """Elementwise sums and products in a row."""
    depth: Annotated[int, max] = 0
    """Layers passed."""

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def raw(self) -> bool:
        """True if inputs of the model made it, without a layer between."""
        return bool(self.sources) and not self.learned


NOTHING = Fact()
_JOINS: tuple[tuple[int, Callable[[Any], Any]], ...] = tuple(
    (place, hint.__metadata__[0])
    for place, hint in enumerate(get_type_hints(Fact, include_extras=True).values())
    if hasattr(hint, "__metadata__")
)


def joined(facts: Sequence[Fact]) -> Fact:
    """Return what holds of a value whose numbers are those of several values."""
    if len(facts) < 2:
        return facts[0] if facts else NOTHING
    known: list[Any] = list(NOTHING)
    columns = list(zip(*facts, strict=True))
    for place, join in _JOINS:
        known[place] = join(columns[place])
    return Fact._make(known)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a low type can hold.

    Args:
        most: the largest number.
        tiny: the smallest normal number.
        least: half the smallest subnormal number; what is smaller becomes 0.
        integers: whole numbers up to here are exact.
        beside: the largest number beside which the result of a layer is not small: an eighth of `integers`.
        reach: the largest bias of a softmax whose spacing keeps the differences of scores.
        narrow: its range is smaller than that of float32.
    """

    most: float
    tiny: float
    least: float
    integers: float
    beside: float
    reach: float
    narrow: bool

    @classmethod
    def of(cls, to: DType) -> Limits:
        integers = 2.0**11 if to is DType.FLOAT16 else 2.0**8
        narrow = to.tiny > DType.FLOAT.tiny
        return cls(to.max, to.tiny, to.smallest_subnormal / 2, integers, integers / 8, integers / 32, narrow)
