"""Fills: constants with extreme values, such as the −3.4e38 of an attention mask, and their path through the model.

A fill ends where its exact number no longer matters: in a softmax, an index, or a comparison with a small number. Until
then, it may be any number far from all others. An op needs the exact number if it adds a number to the fill, multiplies
it by an unknown number, exposes it, or compares it with a number of similar magnitude.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.ir import op_classes as kinds
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import Flow, number, orders
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View, once

_SENTINEL = 1e30
"""Larger magnitudes are beyond all quantities of a network, and meant to win or lose every comparison."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The extreme values of a constant, at or beyond the largest finite number of the low type.

    `level`: the extreme value; None if there are several. `overflows`: at least one of them rounds to infinity.
    """

    level: float | None
    overflows: bool
    absmax: float

    @property
    def selects(self) -> bool:
        """True for a single number meant to win or lose comparisons, beyond all quantities of a network."""
        return self.level is not None and (self.level < 0 or self.level >= _SENTINEL)


@once
def fills(view: View, to: DType) -> Mapping[ValueId, Fill]:
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape."""
    return fills_among(view, to, range(len(view.values)))


def fills_among(view: View, to: DType, values: Container[int], minimum: float | None = None) -> Mapping[ValueId, Fill]:
    """Return the fills among these values, without reading others. `minimum`: the smallest magnitude of a fill."""
    minimum = to.max if minimum is None else minimum
    constants = {value: tensor for value, tensor in view.constants.items() if view.uses[value]}
    for op in view.of_kinds(("ConstantOfShape",)):
        result, element = op.outputs[0], attribute(op.node, "value")
        if result is not None and element is not None:
            constants[result] = element.t
    extreme: dict[ValueId, Fill] = {}
    for value, tensor in constants.items():
        if value not in values or view.dtype(value) is not DType.FLOAT:
            continue
        fit = view.fit(value, to) if value in view.constants else view.model.fit(tensor, to)
        if fit.absmax >= minimum:
            numbers = view.model.array(tensor)
            beyond = numbers[(abs(numbers) >= minimum) & (abs(numbers) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = Fill(level, fit.overflow > 0, fit.absmax)
    return extreme


# -- the path of a fill -------------------------------------------------------------------------------

PLACES: kinds.Slots = {"Where": (1, 2), **dict.fromkeys(kinds.FILLS, (2,))}
"""Inputs that are written to some places of the result."""
_PICKS = {*kinds.SELECTIONS, "TopK", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "LogSoftmax"}
"""Ops that compare their inputs. The result is the fill where it wins, and a larger multiple only wins more clearly."""
_INDICES = {"ArgMax", "ArgMin", "IsInf", "IsNaN", "NonMaxSuppression", "NonZero", "Sign", *kinds.ELEMENTLESS}
_SQUEEZES = (kinds.BOUNDED | kinds.SOFTMAXES | {"Exp"}) - {"Cos", "LogSoftmax", "Sin"}
_MAX_COMPARED = 1 << 16  # elements; a larger constant is not compared with a fill
_MIN_DISTANCE = 2.0**-7  # relative; numbers farther apart differ in every low type
_MARGIN = 2.0**-10  # other summands may change a fill by this share
_MAX_FACTOR = 4.0  # assumed maximum of an unknown factor, and of the growth in a sum along an axis
_MIN_MULTIPLE, _MAX_MULTIPLE = 2.0**-6, 2.0**6
"""A smaller multiple of a fill is no longer far from other numbers; a larger one exceeds every margin."""


def bounded(level: float, to: DType) -> float:
    """Return the magnitude of a fill's replacement in a low type, with room for small sums and multiples."""
    return min(abs(level), to.max / 4)


class _Multiple(NamedTuple):
    """The multiple of a fill in a value, from `least` to `most` in magnitude. `pure`: the value is only the fill."""

    least: float = 1.0
    most: float = 1.0
    pure: bool = True

    def joined(self, other: _Multiple) -> _Multiple:
        return _Multiple(min(self.least, other.least), max(self.most, other.most), self.pure and other.pure)

    def times(self, factor: float) -> _Multiple:
        k = abs(factor)
        return _Multiple(max(self.least * k, _MIN_MULTIPLE / 2), min(self.most * k, _MAX_MULTIPLE * 2), pure=False)


@dataclass(slots=True)
class FillReach:
    """The values that contain multiples of a fill of this `level`, and the readers of the fill.

    `exact`: ops that need its exact number. `public`: an input or output of the model contains it. `direct_readers`:
    ops that read the constant itself, for example as the bound of a Clip. `compared`: an op compares the fill with the
    same number.
    """

    view: View
    to: DType
    level: float
    multiples: dict[ValueId, _Multiple] = field(default_factory=dict)
    exact: dict[OpId, None] = field(default_factory=dict)
    public: bool = False
    direct_readers: set[OpId] = field(default_factory=set)
    compared: bool = False

    @property
    def most(self) -> float:
        return max((multiple.most for multiple in self.multiples.values()), default=1.0)

    @property
    def farthest(self) -> float:
        return abs(self.level) * self.most

    @property
    def ends(self) -> bool:
        """True if the exact number of the fill does not matter."""
        return not self.exact and not self.public


@once
def far_reaches(view: View, to: DType) -> Collection[FillReach]:
    """Return the reach of each fill that overflows, perhaps after a product, or that is rounded and compared."""
    reaches = [follow_fill(view, to, view.uses[value], level) for value, level in far_fills(view, to).items()]
    return [reach for reach in reaches if reach.farthest > to.max or reach.compared]


def fill_carriers(view: View, to: DType) -> Iterator[tuple[OpId, OpId | None, float]]:
    """Yield the ops that must compute with the exact fill, each with an op that needs the number, and the number."""
    for reach in far_reaches(view, to):
        if reach.ends and reach.most <= 1:
            continue  # the largest number of the type can replace it
        cause = next(iter(reach.exact), None)
        carriers = (view.values[value].producer for value, multiple in reach.multiples.items() if not multiple.pure)
        yield from ((op_id, cause, reach.level) for op_id in {*carriers, *reach.exact} if op_id is not None)


def follow_fill(view: View, to: DType, uses: Collection[Use], level: float) -> FillReach:
    """Follow a fill from these uses. O(reached values + their uses)."""
    reach = FillReach(view, to, level)
    edges = Flow(view, {})
    pending = deque[ValueId]()

    def carry(value: ValueId, multiple: _Multiple) -> None:
        earlier = reach.multiples.get(value)
        joined = multiple if earlier is None else earlier.joined(multiple)
        if joined != earlier:
            reach.multiples[value] = joined
            pending.append(value)

    for use in uses:
        for value, multiple in _step(reach, use, _Multiple()):
            carry(value, multiple)
    while pending:
        value = pending.popleft()
        multiple = reach.multiples[value]
        if view.values[value].public and not multiple.pure:
            reach.public = True
        for use in view.uses[value]:
            for result, further in _step(reach, use, multiple):
                carry(result, further)
        for result in edges.results(value):
            carry(result, multiple)
    _compare(reach)
    return reach


@once
def far_fills(view: View, to: DType) -> Mapping[ValueId, float]:
    """Return the fills with a possible need for their exact number, by value.

    These fills overflow the type, perhaps after a product, or are rounded by it and compared with a close number.
    """
    extreme = fills_among(view, to, range(len(view.values)), to.max / _MAX_MULTIPLE)
    far = {value: fill.level for value, fill in extreme.items() if fill.level is not None and fill.selects}
    bounds = {
        n
        for op in view.of_kinds(kinds.COMPARISONS)
        for v in op.operands
        if (n := number(view, v, copied=True)) is not None
    }
    compared = sorted(n for n in bounds if abs(n) <= to.max)
    if compared:
        placed = {v for op in view.of_kinds(PLACES) for slot in PLACES[op.kind] for v in op.inputs[slot : slot + 1]}
        constants = {v: number(view, v, copied=True) for v in placed if v is not None}
        numbers = {v: n for v, n in constants.items() if n is not None and abs(n) <= to.max}
        far = {**{v: n for v, n in numbers.items() if _confused(n, compared, to)}, **far}
    return far


def _confused(number: float, others: Sequence[float], to: DType) -> bool:
    """True if rounding may change the comparison of a number with the closest of the others, which are sorted."""
    at = bisect.bisect_left(others, number)
    closest = [other for other in others[max(at - 1, 0) : at + 2] if _close(number, other)]
    return any(float(np.array(n).astype(to.numpy)) != n for n in (number, *closest) if closest)


def _close(numbers: Any, other: float) -> Any:
    return abs(numbers - other) <= abs(other) * _MIN_DISTANCE


def _step(reach: FillReach, use: Use, multiple: _Multiple) -> Iterator[tuple[ValueId, _Multiple]]:
    """Yield the results that contain a fill after an op; record the op if it needs the exact number."""
    view, op = reach.view, reach.view.ops[use.op]
    kind = op.kind
    if (
        op.bodies
        or use.slot in kinds.ATTENTION_MASKS.get(kind, ())
        or (kind in kinds.COMPARISONS and not multiple.pure)
    ):
        return  # the edges lead into bodies; comparisons need all values with the fill
    if use.slot in kinds.COPIES.get(kind, ()):
        yield from _floats(view, op, multiple if len(kinds.COPIES[kind]) == 1 else multiple.times(1.0))
        if any((t := view.dtype(v)) is not None and not t.floating and t is not DType.BOOL for v in op.results):
            reach.exact[op.id] = None
    elif multiple.pure and use.slot not in PLACES.get(kind, ()):
        reach.direct_readers.add(op.id)
    elif kind in _PICKS:
        yield from _floats(view, op, multiple.times(1.0))
    elif kind in _INDICES or (kind in _SQUEEZES and multiple.least >= _MIN_MULTIPLE):
        return
    elif (factor := _factor(view, op, use.slot)) is not None:
        yield from _floats(view, op, multiple.times(factor)) if factor else ()
    elif _below_maximum(view, op):
        yield from _floats(view, op, multiple)
    else:
        reach.exact[op.id] = None
        if kind in kinds.ARITHMETIC or kind in kinds.REDUCTIONS:
            total = sum(reach.multiples[v].most for v in op.operands if v in reach.multiples) or multiple.most
            most = total + _MARGIN if kind in kinds.SUMS else _MAX_FACTOR * multiple.most
            yield from _floats(view, op, _Multiple(multiple.least, min(most, _MAX_MULTIPLE * 2), pure=False))


def _floats(view: View, op: Op, multiple: _Multiple) -> Iterator[tuple[ValueId, _Multiple]]:
    yield from ((value, multiple) for value in op.results if view.dtype(value) is DType.FLOAT)


def _factor(view: View, op: Op, slot: int) -> float | None:
    if op.kind == "Neg":
        return -1.0
    if op.kind not in kinds.SCALINGS or (op.kind == "Div" and slot == 1):
        return None
    size = number(view, op.inputs[1 - slot])
    return size if op.kind == "Mul" or not size else 1 / size


def _below_maximum(view: View, op: Op) -> bool:
    """True for a value minus its maximum, as in a decomposed softmax, where a fill minus a fill is 0."""
    maximum = view.producer(op.inputs[1], "ReduceMax") if op.kind == "Sub" else None
    return maximum is not None and maximum.inputs[0] == op.inputs[0]


def _compare(reach: FillReach) -> None:
    """Record comparisons of a fill with a number of similar magnitude, or with another value that contains the fill."""
    view = reach.view
    readers = {use.op for value, multiple in reach.multiples.items() if not multiple.pure for use in view.uses[value]}
    for op in (view.ops[op_id] for op_id in sorted(readers) if view.ops[op_id].kind in kinds.COMPARISONS):
        for value, other in orders(op):
            if (multiple := reach.multiples.get(value)) is None or other == value:
                continue
            numbers = view.array(other, _MAX_COMPARED)
            same = numbers is not None and bool(_close(numbers.astype(np.float64), reach.level).any())
            reach.compared |= same
            small = view.fit(other, reach.to).absmax < multiple.least * bounded(reach.level, reach.to)
            if other in reach.multiples or same or (view.copied(other) is not None and not small):
                reach.exact[op.id] = None
