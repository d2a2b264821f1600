"""Facts of a value with their joins, limits of a low type, and facts of inputs and constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import ml_dtypes
import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import Flow
from amp_rewrite.ir.ops import Way, row_of
from amp_rewrite.ir.patterns.fills import fills
from amp_rewrite.ir.patterns.scores import FILL, LEAST, MOST, counts_far, is_grid
from amp_rewrite.ir.view import ValueId, View

INF = math.inf
T = TypeVar("T")
Values = frozenset[ValueId]
Pairs = frozenset[Values]
MAX_NAMED = 64
"""The most values that a fact names: sums of more stay linear in time."""


def union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """Return the elements of several sets, at most `MAX_NAMED`: those of small sets first, since they tell more."""
    several = sorted(sets, key=len)
    together: frozenset[T] = frozenset().union(*several)
    return together if len(together) <= MAX_NAMED else frozenset(islice(dict.fromkeys(chain(*several)), MAX_NAMED))


class Beyond(NamedTuple):
    """Why a value leaves the range of the type, or loses itself in it. `mask`: a mask does so."""

    note: str
    mask: bool = False


class Misfit(NamedTuple):
    """Fact of a value that does not fit the low type on data: the reason ("overflow" …), and what the data showed.

    `inside`: it does not fit inside the op that makes the value. Readers may be low.
    """

    reason: str
    note: str
    inside: bool = False


def _first(known: Iterable[Beyond | None]) -> Beyond | None:
    return next(filter(None, known), None)


def _largest_if_all(numbers: Sequence[float | None]) -> float | None:
    known = [n for n in numbers if n is not None]
    return max(known) if len(known) == len(numbers) else None


class Fact(NamedTuple):
    """Knowledge of a value. A fact without a join is lost when values meet; one with a join passes sums and products.

    `needs/arithmetic.py` sets those that an operation changes or ends.
    """

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
    beyond: Annotated[Beyond | None, _first] = None
    fill: bool = False
    """A constant whose numbers beyond the type are one number, there to lose comparisons."""
    scaled: Annotated[Values, union] = frozenset()
    """Fed numbers, of any size, that multiply or divide it; none that does both, as a loss scale does."""
    small: Annotated[bool, any] = False
    """Elements may be far smaller than what it is computed from."""
    guard: Annotated[float, min] = INF
    """The summand or bound that keeps it from 0."""
    near_one: Annotated[bool, any] = False
    """Large arguments differ only in how far it is from 1."""
    beside_one: Annotated[bool, any] = False
    """It is 1 plus or minus something."""
    peak: tuple[int, ...] = ()
    """The axes, counted from the end, of rows whose largest element is 0, or 1 after an exponential."""
    top: tuple[ValueId, tuple[int, ...]] | None = None
    """A value and the axes of its rows of which it is the largest element."""

    # -- origin --------------------------------------------------------------------------------------
    constant: Annotated[bool, all] = False
    """It is computed from constants alone."""
    decoded: Annotated[bool, any] = False
    """Codes stand for it, which runtimes do not decode at load time."""
    learned: Annotated[bool, any] = False
    """A layer made part of it."""
    sources: Annotated[Values, union] = frozenset()
    """Inputs from which it is computed without a layer between, or with one, or after a transform of them."""
    part_raw: Annotated[bool, any] = False
    """Some of its numbers are those of inputs, beside others."""
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
    states: Annotated[Values, union] = frozenset()
    """States that it carries."""
    moved: Annotated[Values, union] = frozenset()
    """Those of them to which something was added, or that a factor near 1 multiplied."""
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
        return max(abs(self.low), abs(self.high))

    @property
    def raw(self) -> bool:
        """True if inputs of the model made it, without a layer between."""
        return bool(self.sources) and not self.learned

    def without(self, *names: str) -> Fact:
        """Return the facts with some of them unknown."""
        return self._replace(**{name: self._field_defaults[name] for name in names})

    def unbounded(self) -> Fact:
        """Return the facts of a value beyond the reach of a loop."""
        return self.without("low", "high", "whole", "peak")


NOTHING = Fact()
_JOINS: tuple[tuple[int, Callable[[Any], Any]], ...] = tuple(
    (place, hint.__metadata__[0])
    for place, hint in enumerate(get_type_hints(Fact, include_extras=True).values())
    if hasattr(hint, "__metadata__")
)


def joined(facts: Sequence[Fact]) -> Fact:
    """Return the facts of a value with the numbers of several values."""
    if len(facts) < 2:
        return facts[0] if facts else NOTHING
    known: list[Any] = list(NOTHING)
    columns = list(zip(*facts, strict=True))
    for place, join in _JOINS:
        known[place] = join(columns[place])
    return Fact._make(known)


_READ = 1 << 16
"""Elements of the largest constant that is read whole; of larger ones the magnitudes are known."""


class Facts(dict[ValueId | None, Fact]):
    """Facts of values, for one low type: those of inputs and constants come by themselves.

    `most`, `tiny`: the largest and the smallest normal number of the type. `integers`: whole numbers up to here are
    exact. `beside`: the largest number beside which the result of a layer is not small. `reach`: the largest bias of a
    softmax whose spacing keeps the differences of scores. `narrow`: the range is smaller than that of float32.
    `outside`: the walk across the edges of bodies alone.
    """

    def __init__(self, view: View, to: DType) -> None:
        super().__init__()
        self.view, self.to = view, to
        self.origins: dict[ValueId, ValueId] = {}
        self.most, self.tiny, self.integers = self.to.max, self.to.tiny, 2 / self.to.eps
        self.beside, self.reach = self.integers / 8, self.integers / 32
        self.narrow = self.tiny > DType.FLOAT.tiny
        self.outside = Flow(self.view, {})
        self._looped = {out for out, _ in self.view.carried}
        self._carried = {into for _, into in self.view.carried}

    def __missing__(self, value: ValueId | None) -> Fact:
        fact = self[value] = NOTHING if value is None else self.given(value)
        return fact

    def counts_far(self, value: ValueId | None) -> bool:
        """True for a bias of scores by position with a large number at the best key of a row."""
        return self[value].best > self.reach

    def line(self, value: ValueId) -> frozenset[ValueId]:
        return self[value].line or frozenset((value,))

    def origin(self, value: ValueId) -> ValueId:
        return self.origins.get(value, value)

    def floats(self, value: ValueId | None) -> bool:
        """True for a tensor of a floating type, or a sequence of such."""
        dtype = self.view.dtype(value)
        return dtype is not None and dtype.floating

    def given(self, value: ValueId) -> Fact:
        view, dtype = self.view, self.view.dtype(value)
        if view.constant(value) is not None:
            return fact_of_constant(self, value)
        sources = [self[source] for source in self.outside.sources(value) if source not in self._looped]
        if sources:
            fact = joined(sources)
            if value in self._carried:
                states = frozenset((value,)) if dtype is DType.FLOAT else frozenset()
                fact = fact.unbounded()._replace(states=states, moved=frozenset(), transform=False)
            return fact._replace(number=None, constant=False)
        public, own = view.values[value].public, frozenset((value,))
        low, high = range_of(dtype)
        if dtype is not None and not (dtype.floating or "FLOAT8" in dtype.name):
            whole = max(abs(low), abs(high))
            own = own if dtype is not DType.BOOL or public else frozenset()
            return Fact(low, high, whole=whole, sources=own, transform=public)
        if not public or dtype is not DType.FLOAT:
            return Fact(low, high)
        return Fact(sources=own, levels=own, transform=True, states=own)


def fact_of_constant(facts: Facts, value: ValueId) -> Fact:
    view = facts.view
    array = view.array(value, _READ)
    if array is None:
        return _large_constant(facts, value)
    if array.size == 0 or (array.dtype.kind not in "fiub" and "float" not in array.dtype.name):
        return Fact(constant=True)
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if finite.size == 0:
        return Fact(constant=True)
    low, high = float(finite.min()), float(finite.max())
    fill = fills(facts.view, facts.to).get(value) if max(-low, high) >= facts.most else None
    fact = Fact(
        low,
        high,
        constant=True,
        number=low if low == high else None,
        whole=max(abs(low), abs(high)) if bool((finite == np.round(finite)).all()) else None,
        running=_is_running(numbers),
        peak=(-1,) if high == 0 and low < 0 else (),
        fill=fill is not None and fill.selects,
    )
    return _counting(facts, value, fact)


def _large_constant(facts: Facts, value: ValueId) -> Fact:
    if not facts.floats(value):
        return Fact(constant=True, whole=INF)
    fit, tensor = facts.view.fit(value, facts.to), facts.view.copied(value)
    fact = Fact(-fit.absmax, fit.absmax, constant=True)
    if 0 < fit.absmax == fit.absmin <= 1 and tensor is not None and len(tensor.dims) == 2:
        array = facts.view.array(value)
        fact = fact._replace(running=array is not None and _is_running(array))
    return _counting(facts, value, fact)


def _counting(facts: Facts, value: ValueId, fact: Fact) -> Fact:
    tensor = facts.view.copied(value)
    reads = ((row_of(facts.view.ops[use.op].kind), use.slot) for use in facts.view.uses[value])
    weight = all(row.way is Way.PRODUCT and slot in row.slots for row, slot in reads)
    if tensor is None or not tensor.dims or weight:
        return fact
    far = fact.size > facts.reach and tensor.dims[-1] >= LEAST
    numbers = facts.view.array(value, MOST) if far or is_grid(facts.view, value) else None
    if numbers is None or not (is_grid(facts.view, value) or counts_far(numbers, facts.to)):
        return fact
    best = np.where(numbers > -FILL, numbers, -np.inf).max(axis=-1)
    return fact._replace(grid=fact.size, best=float(abs(best[np.isfinite(best)]).max(initial=0.0)))


def leaves(facts: Facts, low: float, high: float) -> Beyond | None:
    size = max(abs(low), abs(high))
    return Beyond(f"its values reach {size:g}") if facts.most < size < INF else None


@cache
def range_of(dtype: DType | None) -> tuple[float, float]:
    """Return the smallest and the largest number of an integer or a code of 8 or 16 bits."""
    if dtype is DType.BOOL:
        return 0.0, 1.0
    if dtype in (None, DType.FLOAT8E8M0) or dtype.floating or not 8 <= dtype.bits <= 16:
        return -INF, INF
    known = np.iinfo(dtype.numpy) if dtype.numpy.kind in "iu" else ml_dtypes.finfo(dtype.numpy)
    return float(known.min), float(known.max)


def _is_running(numbers: Array) -> bool:
    if numbers.ndim != 2 or max(numbers.shape) < 3:
        return False
    first, last = numbers.flat[0], numbers.flat[-1]
    if first == last and 0 < first < 1:
        return any(np.float32(1 / n) == np.float32(first) for n in numbers.shape) and bool((numbers == first).all())
    ones = np.tri(len(numbers), dtype=bool) if numbers.shape[0] == numbers.shape[1] else None
    return ones is not None and bool((numbers == ones).all() or (numbers == ones.T).all())
