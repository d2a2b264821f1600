"""Fills: constants with extreme values, such as the −3.4e38 of an attention mask, and their way through the model.

A fill ends where its number no longer matters: in a softmax, an index, a comparison with a near number. Up to there it
may be any number far from all others. An op that adds to it, multiplies it by an unknown number, shows it, or compares
it with a number as far needs the number itself.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import Flow, number, orders
from amp_rewrite.ir.op_classes import (
    ARITHMETIC,
    ATTENTION_MASKS,
    BOUNDED,
    COMPARISONS,
    COPIES,
    ELEMENTLESS,
    FILLS,
    REDUCTIONS,
    SCALINGS,
    SELECTIONS,
    SOFTMAXES,
    SUMS,
    Slots,
)
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View, once

_SENTINEL = 1e30
"""No quantity of a network is as large: a larger number is there to win or lose every comparison."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The extreme values of a constant, at or beyond the largest finite number of the low type.

    `level`: the single such value, None if there are several. `overflows`: it rounds to infinity.
    """

    level: float | None
    overflows: bool
    absmax: float

    @property
    def selects(self) -> bool:
        """True for one number beyond all quantities of a network: it is there to win or lose comparisons."""
        return self.level is not None and (self.level < 0 or self.level >= _SENTINEL)


@once
def fills(view: View, to: DType) -> Mapping[ValueId, Fill]:
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape."""
    return fills_among(view, to, range(len(view.values)))


def fills_among(view: View, to: DType, values: Container[int], least: float | None = None) -> Mapping[ValueId, Fill]:
    """Return the fills among some values; only constants among these are read. `least`: their least size."""
    least = to.max if least is None else least
    held = {value: tensor for value, tensor in view.constants.items() if view.uses[value]}
    for op in view.of_kinds(("ConstantOfShape",)):
        result, stated = op.outputs[0], attribute(op.node, "value")
        if result is not None and stated is not None:
            held[result] = stated.t
    extreme: dict[ValueId, Fill] = {}
    for value, tensor in held.items():
        if value not in values or view.dtype(value) is not DType.FLOAT:
            continue
        fit = view.fit(value, to) if value in view.constants else view.model.fit(tensor, to)
        if fit.absmax >= least:
            numbers = view.model.array(tensor)
            beyond = numbers[(abs(numbers) >= least) & (abs(numbers) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = Fill(level, fit.overflow > 0, fit.absmax)
    return extreme


# -- where a fill goes --------------------------------------------------------------------------------

PLACES: Slots = {"Where": (1, 2), **dict.fromkeys(FILLS, (2,))}
"""Inputs that are put in some places of the result."""
_PICKS = {*SELECTIONS, "TopK", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "LogSoftmax"}
"""Ops that order what they read: their results hold a fill where it wins, and more of it is farther."""
_INDICES = {"ArgMax", "ArgMin", "IsInf", "IsNaN", "NonMaxSuppression", "NonZero", "Sign", *ELEMENTLESS}
_SQUEEZES = (BOUNDED | SOFTMAXES | {"Exp"}) - {"Cos", "LogSoftmax", "Sin"}
_FEW = 1 << 16  # elements of a constant that are compared with a fill
_APART = 2.0**-7  # relative distance of numbers that every low type tells apart
_MARGIN = 2.0**-10  # what other summands may add to a fill
_MORE = 4.0  # what an unknown factor, or a sum along an axis, may multiply it by
_LEAST, _MOST = 2.0**-6, 2.0**6
"""A fill that is scaled by less is no longer far from other numbers; by more it leaves every margin."""


def bounded(level: float, to: DType) -> float:
    """Return the size of a fill's stand-in in a low type: sums of a few and small multiples fit."""
    return min(abs(level), to.max / 4)


class _Held(NamedTuple):
    """A fill in a value: times `least` to `most`, of either sign. `pure`: nothing else is in the value."""

    least: float = 1.0
    most: float = 1.0
    pure: bool = True

    def joined(self, other: _Held) -> _Held:
        return _Held(min(self.least, other.least), max(self.most, other.most), self.pure and other.pure)

    def times(self, factor: float) -> _Held:
        size = abs(factor)
        return _Held(max(self.least * size, _LEAST / 2), min(self.most * size, _MOST * 2), pure=False)


@dataclass(slots=True)
class FillReach:
    """The values with a fill of this `level`, and its readers.

    `exact`: ops that need its number. `shown`: a value outside of ops holds it. `itself`: ops that read the constant
    before it is put anywhere, as the bound of a Clip. `compared`: an op compares it with the same number.
    """

    view: View
    to: DType
    level: float
    held: dict[ValueId, _Held] = field(default_factory=dict)
    exact: dict[OpId, None] = field(default_factory=dict)
    shown: bool = False
    itself: set[OpId] = field(default_factory=set)
    compared: bool = False

    @property
    def most(self) -> float:
        return max((held.most for held in self.held.values()), default=1.0)

    @property
    def farthest(self) -> float:
        return abs(self.level) * self.most

    @property
    def ends(self) -> bool:
        """True if the number of the fill does not matter."""
        return not self.exact and not self.shown


@once
def far_reaches(view: View, to: DType) -> Collection[FillReach]:
    """Return the reach of each fill beyond the type, as it is or multiplied, and of each compared and rounded one."""
    reaches = [reach_of(view, to, view.uses[value], level) for value, level in far_fills(view, to).items()]
    return [reach for reach in reaches if reach.farthest > to.max or reach.compared]


def held_fills(view: View, to: DType) -> Iterator[tuple[OpId, OpId | None, float]]:
    """Yield the ops with a fill of importance or beyond the type, each with an op in need of its number, and this."""
    for reach in far_reaches(view, to):
        if reach.ends and reach.most <= 1:
            continue  # the largest number of the type stands for it
        cause = next(iter(reach.exact), None)
        carriers = (view.values[value].producer for value, held in reach.held.items() if not held.pure)
        yield from ((op_id, cause, reach.level) for op_id in {*carriers, *reach.exact} if op_id is not None)


def reach_of(view: View, to: DType, uses: Collection[Use], level: float) -> FillReach:
    """Return the way of a fill from these uses of it. O(values reached + their uses)."""
    reach = FillReach(view, to, level)
    edges = Flow(view, {})
    pending = deque[ValueId]()

    def carry(value: ValueId, held: _Held) -> None:
        known = reach.held.get(value)
        joined = held if known is None else known.joined(held)
        if joined != known:
            reach.held[value] = joined
            pending.append(value)

    for use in uses:
        for value, held in _step(reach, use, _Held()):
            carry(value, held)
    while pending:
        value = pending.popleft()
        held = reach.held[value]
        if view.values[value].public and not held.pure:
            reach.shown = True
        for use in view.uses[value]:
            for result, further in _step(reach, use, held):
                carry(result, further)
        for result in edges.results(value):
            carry(result, held)
    _compare(reach)
    return reach


@once
def far_fills(view: View, to: DType) -> Mapping[ValueId, float]:
    """Return the constants put in some places of a value with a number of importance when it is far, by value.

    Those that a product may bring out of the type, and those that the type rounds and a comparison reads.
    """
    extreme = fills_among(view, to, range(len(view.values)), to.max / _MOST)
    far = {value: fill.level for value, fill in extreme.items() if fill.level is not None and fill.selects}
    read = {
        n for op in view.of_kinds(COMPARISONS) for v in op.operands if (n := number(view, v, copied=True)) is not None
    }
    compared = sorted(n for n in read if abs(n) <= to.max)
    if compared:
        places = {v for op in view.of_kinds(PLACES) for slot in PLACES[op.kind] for v in op.inputs[slot : slot + 1]}
        known = {v: number(view, v, copied=True) for v in places if v is not None}
        numbers = {v: n for v, n in known.items() if n is not None and abs(n) <= to.max}
        far = {**{v: n for v, n in numbers.items() if _confused(n, compared, to)}, **far}
    return far


def _confused(number: float, others: Sequence[float], to: DType) -> bool:
    """True if the type rounds a number or the nearest of others in order, so that a comparison may turn out wrong."""
    at = bisect.bisect_left(others, number)
    near = [other for other in others[max(at - 1, 0) : at + 2] if _close(number, other)]
    return any(float(np.array(n).astype(to.numpy)) != n for n in (number, *near) if near)


def _close(numbers: Any, other: float) -> Any:
    return abs(numbers - other) <= abs(other) * _APART


def _step(reach: FillReach, use: Use, held: _Held) -> Iterator[tuple[ValueId, _Held]]:
    """Yield the results with a fill from an input of an op; note the op if it needs the number."""
    view, op = reach.view, reach.view.ops[use.op]
    kind = op.kind
    if op.bodies or use.slot in ATTENTION_MASKS.get(kind, ()) or (kind in COMPARISONS and not held.pure):
        return  # bodies: by the edges; comparisons: when all that holds the fill is known
    if use.slot in COPIES.get(kind, ()):
        yield from _floats(view, op, held if len(COPIES[kind]) == 1 else held.times(1.0))
        if any((t := view.dtype(v)) is not None and not t.floating and t is not DType.BOOL for v in op.results):
            reach.exact[op.id] = None
    elif held.pure and use.slot not in PLACES.get(kind, ()):
        reach.itself.add(op.id)
    elif kind in _PICKS:
        yield from _floats(view, op, held.times(1.0))
    elif kind in _INDICES or (kind in _SQUEEZES and held.least >= _LEAST):
        return
    elif (factor := _factor(view, op, use.slot)) is not None:
        yield from _floats(view, op, held.times(factor)) if factor else ()
    elif _below_maximum(view, op):
        yield from _floats(view, op, held)
    else:
        reach.exact[op.id] = None
        if kind in ARITHMETIC or kind in REDUCTIONS:
            read = sum(reach.held[v].most for v in op.operands if v in reach.held) or held.most
            terms = read + _MARGIN if kind in SUMS else _MORE * held.most
            yield from _floats(view, op, _Held(held.least, min(terms, _MOST * 2), pure=False))


def _floats(view: View, op: Op, held: _Held) -> Iterator[tuple[ValueId, _Held]]:
    yield from ((value, held) for value in op.results if view.dtype(value) is DType.FLOAT)


def _factor(view: View, op: Op, slot: int) -> float | None:
    if op.kind == "Neg":
        return -1.0
    if op.kind not in SCALINGS or (op.kind == "Div" and slot == 1):
        return None
    size = number(view, op.inputs[1 - slot])
    return size if op.kind == "Mul" or not size else 1 / size


def _below_maximum(view: View, op: Op) -> bool:
    """True for a value less its maximum, as in a written-out softmax: a fill less a fill is 0."""
    maximum = view.producer(op.inputs[1], "ReduceMax") if op.kind == "Sub" else None
    return maximum is not None and maximum.inputs[0] == op.inputs[0]


def _compare(reach: FillReach) -> None:
    """Note the comparisons of a fill with a number as far, or with another value of it."""
    view = reach.view
    readers = {use.op for value, held in reach.held.items() if not held.pure for use in view.uses[value]}
    for op in (view.ops[op_id] for op_id in sorted(readers) if view.ops[op_id].kind in COMPARISONS):
        for value, other in orders(op):
            if (held := reach.held.get(value)) is None or other == value:
                continue
            numbers = view.array(other, _FEW)
            itself = numbers is not None and bool(_close(numbers.astype(np.float64), reach.level).any())
            reach.compared |= itself
            near = view.fit(other, reach.to).absmax < held.least * bounded(reach.level, reach.to)
            if other in reach.held or itself or (view.copied(other) is not None and not near):
                reach.exact[op.id] = None
