"""Facts of values and their joins, limits of a low type, and facts of inputs and constants."""

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
from amp_rewrite.ir.patterns.scores import FILL, MAX_GRID, MIN_GRID, counts_far, is_grid
from amp_rewrite.ir.view import ValueId, View

INF = math.inf
T = TypeVar("T")
Values = frozenset[ValueId]
Pairs = frozenset[Values]
MAX_NAMED = 64
"""Maximum number of values in a fact; it keeps long sums linear in time."""


def union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """Return at most `MAX_NAMED` elements of several sets, small sets first, since they are more specific."""
    several = sorted(sets, key=len)
    together: frozenset[T] = frozenset().union(*several)
    return together if len(together) <= MAX_NAMED else frozenset(islice(dict.fromkeys(chain(*several)), MAX_NAMED))


class Beyond(NamedTuple):
    """Reason for a value to leave the range of the type, or vanish next to a larger one. `mask`: a mask causes it."""

    note: str
    mask: bool = False


class Misfit(NamedTuple):
    """A value too large, too small or too imprecise for the low type on the data: a reason id and a note.

    `inside`: only a number inside the op that computes the value does not fit, so its readers may be low.
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
    """Facts of a value.

    When an op combines values, fields with a join are joined, and the others are reset. `needs/arithmetic.py` then sets
    the fields that an operation changes or ends.
    """

    # -- size ----------------------------------------------------------------------------------------
    low: Annotated[float, min] = -INF
    high: Annotated[float, max] = INF
    """Bounds of the value."""
    number: float | None = None
    """The value of a constant with equal elements."""
    whole: Annotated[float | None, _largest_if_all] = None
    """The largest magnitude, if all elements are known to be whole numbers; otherwise None."""
    grows: Annotated[bool, any] = False
    """It can outgrow its inputs, as a product of two values can."""
    terms: Annotated[float, max] = 1.0
    """Number of terms of one sign that may be added up in it; less than 1 after a division by such a sum."""
    beyond: Annotated[Beyond | None, _first] = None
    fill: bool = False
    """A constant with equal elements beyond the range of the type, meant to lose comparisons."""
    scaled: Annotated[Values, union] = frozenset()
    """Single-element inputs of any magnitude that multiply or divide it, except those that do both (loss scales)."""
    small: Annotated[bool, any] = False
    """Elements may be far smaller than its inputs."""
    guard: Annotated[float, min] = INF
    """The summand or bound that keeps it away from 0."""
    near_one: Annotated[bool, any] = False
    """For large arguments only its distance from 1 varies."""
    beside_one: Annotated[bool, any] = False
    """It is 1 plus or minus another value."""
    peak: tuple[int, ...] = ()
    """Axes, counted from the end, of rows with the largest element 0, or 1 after an exponential."""
    top: tuple[ValueId, tuple[int, ...]] | None = None
    """A value and the axes of its rows, if this is the largest element of each row."""

    # -- origin --------------------------------------------------------------------------------------
    constant: Annotated[bool, all] = False
    """It is computed only from constants."""
    decoded: Annotated[bool, any] = False
    """It is stored as codes, which runtimes do not decode at load time."""
    learned: Annotated[bool, any] = False
    """Part of it is the result of a layer."""
    sources: Annotated[Values, union] = frozenset()
    """Inputs from which it is computed directly, through one layer, or through a linear transform."""
    part_raw: Annotated[bool, any] = False
    """Some of its elements are elements of inputs."""
    levels: Annotated[Values, union] = frozenset()
    """Inputs to which a value is added, or from which it is subtracted."""
    placed: Annotated[bool, any] = False
    """It is a sum or difference of this kind, possibly scaled."""
    nudged: Annotated[bool, any] = False
    """It is computed from an input plus a small step."""
    slope: Annotated[bool, any] = False
    """A difference between a layer's results with a small step and without it."""
    transform: Annotated[bool, all] = False
    """It is a linear transform of inputs: products with constants, and sums of these without a bias."""
    line: Values = frozenset()
    """The value of which it is a linear function; empty for that value itself."""
    squares: Annotated[Pairs, union] = frozenset()
    """Pairs of values with elementwise products among its summands; a single value for its square."""
    products: Annotated[Values, union] = frozenset()
    """Values with other products, usually sums of many terms, among its summands."""
    negative: bool = False
    """It subtracts these summands."""
    averaged: Annotated[bool, any] = False
    """It sums or averages along axes."""
    bent: bool = False
    """A nonlinear function of the result of a layer."""

    # -- positions -----------------------------------------------------------------------------------
    grid: Annotated[float, max] = 0.0
    """It counts in equal steps up to this magnitude; 0 if it does not."""
    best: Annotated[float, max] = 0.0
    """The magnitude of such a bias at the key with the largest bias."""
    hides: Annotated[bool, any] = False
    """An input may mask some of these scores."""
    running: bool = False
    """A triangle of ones, or the number 1/n throughout: a product with it is a running sum or a mean."""

    # -- states and recursions -----------------------------------------------------------------------
    states: Annotated[Values, union] = frozenset()
    """States from which it is computed."""
    moved: Annotated[Values, union] = frozenset()
    """The states among them to which a value was added, or which a factor near 1 multiplied."""
    steps: Annotated[int, max] = 0
    """Number of small steps of a state so far."""
    gated: int = 0
    """Number of steps of a state so far, if a gate multiplies it."""
    small_factor: bool = False
    """It is a small multiple of another value."""
    run: Annotated[int, max] = 0
    """Number of consecutive elementwise sums and products."""
    depth: Annotated[int, max] = 0
    """Number of layers so far."""

    @property
    def size(self) -> float:
        return max(abs(self.low), abs(self.high))

    @property
    def raw(self) -> bool:
        """True if it is computed from inputs of the model without a layer."""
        return bool(self.sources) and not self.learned

    def without(self, *names: str) -> Fact:
        """Return the facts with some fields unknown."""
        return self._replace(**{name: self._field_defaults[name] for name in names})

    def unbounded(self) -> Fact:
        """Return the facts after any number of iterations of a loop."""
        return self.without("low", "high", "whole", "peak")


NOTHING = Fact()
_JOINS: tuple[tuple[int, Callable[[Any], Any]], ...] = tuple(
    (place, hint.__metadata__[0])
    for place, hint in enumerate(get_type_hints(Fact, include_extras=True).values())
    if hasattr(hint, "__metadata__")
)


def joined(facts: Sequence[Fact]) -> Fact:
    """Join the facts of several values."""
    if len(facts) < 2:
        return facts[0] if facts else NOTHING
    known: list[Any] = list(NOTHING)
    columns = list(zip(*facts, strict=True))
    for place, join in _JOINS:
        known[place] = join(columns[place])
    return Fact._make(known)


_MAX_READ = 1 << 16
"""Maximum number of elements of a constant to read; of larger constants only the magnitudes are known."""


class Facts(dict[ValueId | None, Fact]):
    """Facts of values for one low type; those of inputs and constants are computed on first access.

    `most`, `tiny`: the largest and the smallest normal number of the type. `integers`: the largest number below which
    all whole numbers are exact. `beside`: the largest number next to which an added layer result does not vanish.
    `reach`: the largest bias of a softmax with a spacing fine enough for the differences of scores. `narrow`: the range
    is smaller than that of float32. `outside`: the flow across the edges of bodies only.
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
        fact = self[value] = NOTHING if value is None else self.initial(value)
        return fact

    def counts_far(self, value: ValueId | None) -> bool:
        """True for a position bias of scores with a large number at the best key of a row."""
        return self[value].best > self.reach

    def line(self, value: ValueId) -> frozenset[ValueId]:
        return self[value].line or frozenset((value,))

    def origin(self, value: ValueId) -> ValueId:
        return self.origins.get(value, value)

    def floats(self, value: ValueId | None) -> bool:
        """True for a tensor, or a sequence of tensors, of a floating-point type."""
        dtype = self.view.dtype(value)
        return dtype is not None and dtype.floating

    def initial(self, value: ValueId) -> Fact:
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
        public, itself = view.values[value].public, frozenset((value,))
        low, high = range_of(dtype)
        if dtype is not None and not (dtype.floating or "FLOAT8" in dtype.name):
            whole = max(abs(low), abs(high))
            itself = itself if dtype is not DType.BOOL or public else frozenset()
            return Fact(low, high, whole=whole, sources=itself, transform=public)
        if not public or dtype is not DType.FLOAT:
            return Fact(low, high)
        return Fact(sources=itself, levels=itself, transform=True, states=itself)


def fact_of_constant(facts: Facts, value: ValueId) -> Fact:
    view = facts.view
    array = view.array(value, _MAX_READ)
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
    far = fact.size > facts.reach and tensor.dims[-1] >= MIN_GRID
    numbers = facts.view.array(value, MAX_GRID) if far or is_grid(facts.view, value) else None
    if numbers is None or not (is_grid(facts.view, value) or counts_far(numbers, facts.to)):
        return fact
    best = np.where(numbers > -FILL, numbers, -np.inf).max(axis=-1)
    return fact._replace(grid=fact.size, best=float(abs(best[np.isfinite(best)]).max(initial=0.0)))


def leaves(facts: Facts, low: float, high: float) -> Beyond | None:
    size = max(abs(low), abs(high))
    return Beyond(f"its values reach {size:g}") if facts.most < size < INF else None


@cache
def range_of(dtype: DType | None) -> tuple[float, float]:
    """Return the smallest and the largest number of an integer or float8 type of 8 or 16 bits."""
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
