"""Fills: constants with extreme values, such as the −3.4e38 of an attention mask, and their way through the model.

A fill ends where its number no longer matters: in a softmax, an index, a comparison with a near number. Up to there it
may be any number far from all others. An op that adds to it, multiplies it by an unknown number, shows it, or compares
it with a number as far needs the number itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import AttributeProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Fit
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import Flow, number, orders
from amp_rewrite.ir.op_classes import (
    ARITHMETIC,
    ATTENTION_MASKS,
    BOUNDED,
    CLAMPS,
    COMPARISONS,
    COPIES,
    ELEMENTLESS,
    FILLS,
    PERIODIC,
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
_STATES = {
    "ConstantOfShape": ("value",),
    "ai.onnx.ml::LabelEncoder": ("values_floats", "default_float", "values_tensor", "default_tensor"),
}
"""Ops whose results are numbers that their attributes state."""


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
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape and LabelEncoder."""
    return fills_among(view, to, range(len(view.values)))


def fills_among(view: View, to: DType, values: Container[int], least: float | None = None) -> Mapping[ValueId, Fill]:
    """Return the fills among some values; only constants among these are read. `least`: their least size."""
    least = to.max if least is None else least
    extreme: dict[ValueId, Fill] = {}
    constants = (v for v in view.constants if view.uses[v] and view.dtype(v) is DType.FLOAT)
    for value in filter(values.__contains__, constants):
        fit = view.fit(value, to)
        numbers = view.array(value) if fit.absmax >= least else None
        if numbers is not None:
            beyond = numbers[(abs(numbers) >= least) & (abs(numbers) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = Fill(level, fit.overflow > 0, fit.absmax)
    for op in view.of_kinds(_STATES):
        result = op.outputs[0]
        if result is None or view.dtype(result) is not DType.FLOAT or result not in values:
            continue
        stated = [_tensor(a) for name in _STATES[op.kind] if (a := attribute(op.node, name)) is not None]
        tensors = [tensor for tensor in stated if tensor.data_type == TensorProto.FLOAT]
        fit = max((view.model.fit(tensor, to) for tensor in tensors), key=lambda fit: fit.absmax, default=Fit())
        if fit.absmax >= least:
            alone = op.kind == "ConstantOfShape" and math.prod(tensors[0].dims) == 1
            level = float(view.model.array(tensors[0]).item()) if alone else None
            extreme[result] = Fill(level, fit.overflow > 0, fit.absmax)
    return extreme


def _tensor(numbers: AttributeProto) -> TensorProto:
    if numbers.type == AttributeProto.TENSOR:
        return numbers.t
    return from_array(np.array(numbers.floats or [numbers.f], np.float32))


# -- where a fill goes --------------------------------------------------------------------------------

PLACES: Slots = {"Where": (1, 2), **dict.fromkeys(FILLS, (2,))}
"""Inputs that are put in some places of the result."""
_PICKS = {*SELECTIONS, "TopK", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "LogSoftmax"}
"""Ops that order what they read: their results hold a fill where it wins, and more of it is farther."""
_INDICES = {"ArgMax", "ArgMin", "IsInf", "IsNaN", "NonMaxSuppression", "NonZero", "Sign", *ELEMENTLESS}
_SQUEEZES = (BOUNDED - PERIODIC | SOFTMAXES | {"Exp"}) - {"LogSoftmax"}
_RECTIFIES = {"Elu", "Gelu", "HardSwish", "Mish", "Relu", "Selu", "Softplus", "Swish", "com.microsoft::Gelu"}
"""Activations that squeeze negative numbers alone."""
_FEW = 1 << 16  # elements of a constant that are compared with a fill
_MARGIN = 2.0**-10  # what other summands may add to a fill
_MORE = 4.0  # what an unknown factor, or a sum along an axis, may multiply it by
_LEAST, _MOST = 2.0**-6, 2.0**6
"""A fill that is scaled by less is no longer far from other numbers; by more it leaves every margin."""


def bounded(level: float, to: DType) -> float:
    """Return the size of a fill's stand-in in a low type: sums of a few and small multiples fit."""
    return min(abs(level), to.max / 4)


@dataclass(frozen=True, slots=True)
class _Held:
    """A fill in a value: times `least` to `most`, of this sign (0: either). `pure`: nothing else is in the value."""

    least: float = 1.0
    most: float = 1.0
    sign: int = 0
    pure: bool = True

    def __or__(self, other: _Held) -> _Held:
        sign = self.sign if self.sign == other.sign else 0
        return _Held(min(self.least, other.least), max(self.most, other.most), sign, self.pure and other.pure)

    def times(self, factor: float) -> _Held:
        size = abs(factor)
        sign = self.sign if factor > 0 else -self.sign
        return _Held(max(self.least * size, _LEAST / 2), min(self.most * size, _MOST * 2), sign, pure=False)

    @property
    def mixed(self) -> _Held:
        return _Held(self.least, self.most, self.sign, pure=False)


@dataclass(slots=True)
class FillReach:
    """The values with a fill of this `level`, and its readers.

    `exact`: ops that need its number, each with what they do. `shown`: a value outside of ops that holds it. `itself`:
    ops that read the constant before it is put anywhere, as the bound of a Clip. `compared`: an op that compares it
    with the same number.
    """

    view: View
    to: DType
    level: float
    held: dict[ValueId, _Held] = field(default_factory=dict)
    exact: dict[OpId, str] = field(default_factory=dict)
    shown: ValueId | None = None
    itself: set[OpId] = field(default_factory=set)
    compared: OpId | None = None

    @property
    def most(self) -> float:
        """The largest factor of arithmetic on the fill."""
        return max((held.most for held in self.held.values()), default=1.0)

    @property
    def farthest(self) -> float:
        """The size of the largest number made of the fill."""
        return abs(self.level) * self.most

    @property
    def ends(self) -> bool:
        """True if the number of the fill does not matter."""
        return not self.exact and self.shown is None

    def near(self, value: ValueId, held: _Held) -> bool:
        """True for a constant without a number as far as the bounded fill."""
        absmax = self.view.fit(value, self.to).absmax
        return self.view.constant(value) is not None and absmax < held.least * bounded(self.level, self.to)

    @property
    def carriers(self) -> Collection[OpId]:
        """The ops with the fill among other numbers."""
        held = (self.view.values[value].producer for value, held in self.held.items() if not held.pure)
        return {op for op in held if op is not None}


@once
def far_reaches(view: View, to: DType) -> Collection[FillReach]:
    """Return the reach of each fill beyond the type, as it is or multiplied, and of each compared and rounded one."""
    reaches = [reach_of(view, to, view.uses[value], level) for value, level in far_fills(view, to).items()]
    return [reach for reach in reaches if reach.farthest > to.max or reach.compared is not None]


def held_fills(view: View, to: DType) -> Iterator[tuple[OpId, OpId | None, str]]:
    """Yield the ops with a fill of importance or beyond the type, each with an op in need of its number and why."""
    for reach in far_reaches(view, to):
        if reach.ends and reach.most <= 1:
            continue  # the largest number of the type stands for it
        cause = next(iter(reach.exact), None)
        words = (
            reach.exact[cause] if cause is not None else "shows a fill" if reach.shown is not None else "scales a fill"
        )
        where = f" in {view.ops[cause].name!r} ({view.ops[cause].kind})" if cause is not None else ""
        note = f"{words}{where}, which keeps its {reach.level:g}"
        for op_id in {*reach.carriers, *reach.exact}:
            yield op_id, cause, note


def reach_of(view: View, to: DType, uses: Collection[Use], level: float) -> FillReach:
    """Return the way of a fill from these uses of it. O(values reached + their uses)."""
    reach = FillReach(view, to, level)
    start = _Held(sign=1 if level > 0 else -1)
    edges = Flow.of(view, {})
    pending = deque[ValueId]()

    def carry(value: ValueId, held: _Held) -> None:
        known = reach.held.get(value)
        joined = held if known is None else known | held
        if joined != known:
            reach.held[value] = joined
            pending.append(value)

    for use in uses:
        for value, held in _step(reach, use, start):
            carry(value, held)
    while pending:
        value = pending.popleft()
        held = reach.held[value]
        if view.values[value].public and not held.pure:
            reach.shown = value
        for use in view.uses[value]:
            for result, further in _step(reach, use, held):
                carry(result, further)
        for result in edges.results(value):
            carry(result, held)
    _compare(reach)
    return reach


def far_fills(view: View, to: DType) -> Mapping[ValueId, float]:
    """Return the constants put in some places of a value with a number of importance when it is far, by value.

    Those that a product may bring out of the type, and those that the type rounds and a comparison reads.
    """
    extreme = fills_among(view, to, range(len(view.values)), to.max / _MOST)
    far = {value: fill.level for value, fill in extreme.items() if fill.level is not None and fill.selects}
    compared = {n for op in view.of_kinds(COMPARISONS) for v in op.operands if (n := number(view, v)) is not None}
    rounded = {n for n in compared if abs(n) <= to.max and float(np.array(n).astype(to.numpy)) != n}
    if rounded:
        places = {v for op in view.of_kinds(PLACES) for slot in PLACES[op.kind] for v in op.inputs[slot : slot + 1]}
        numbers = {v: n for v in places if v is not None and (n := number(view, v)) in rounded}
        far = {**{v: n for v, n in numbers.items() if n is not None}, **far}
    return far


def _step(reach: FillReach, use: Use, held: _Held) -> Iterator[tuple[ValueId, _Held]]:
    """Yield the results with a fill from an input of an op; note the op if it needs the number."""
    view, op = reach.view, reach.view.ops[use.op]
    kind = op.kind
    if op.bodies or use.slot in ATTENTION_MASKS.get(kind, ()) or (kind in COMPARISONS and not held.pure):
        return  # bodies: by the edges; comparisons: when all that holds the fill is known
    if use.slot in COPIES.get(kind, ()):
        yield from _copied(reach, op, held if len(COPIES[kind]) == 1 else held.mixed)
    elif held.pure and use.slot not in PLACES.get(kind, ()):
        reach.itself.add(op.id)
    elif kind in _PICKS:
        if not _outbid(reach, op, held):
            yield from _floats(view, op, held.mixed)
    elif kind in _INDICES or (kind in _SQUEEZES and held.least >= _LEAST) or (kind in _RECTIFIES and held.sign < 0):
        return
    elif kind == "Neg" or (kind in _RECTIFIES and held.sign > 0):
        yield from _floats(view, op, held.times(-1 if kind == "Neg" else 1))
    elif (factor := _factor(view, op, use.slot)) is not None:
        yield from _floats(view, op, held.times(factor)) if factor else ()
    elif _below_maximum(view, op):
        yield from _floats(view, op, held)
    else:
        reach.exact[op.id] = "adds to a fill" if kind in SUMS else "computes with a fill"
        if kind in ARITHMETIC or kind in REDUCTIONS:
            read = sum(reach.held[v].most for v in op.operands if v in reach.held) or held.most
            terms = read + _MARGIN if kind in SUMS else _MORE * held.most
            yield from _floats(view, op, _Held(held.least, min(terms, _MOST * 2), 0, pure=False))


def _copied(reach: FillReach, op: Op, held: _Held) -> Iterator[tuple[ValueId, _Held]]:
    yield from _floats(reach.view, op, held)
    if any((t := reach.view.dtype(v)) is not None and not t.floating and t is not DType.BOOL for v in op.results):
        reach.exact[op.id] = "makes a fill an integer"


def _floats(view: View, op: Op, held: _Held) -> Iterator[tuple[ValueId, _Held]]:
    yield from ((value, held) for value in op.results if view.dtype(value) is DType.FLOAT)


def _outbid(reach: FillReach, op: Op, held: _Held) -> bool:
    """True if an op puts a near constant in place of the fill."""
    if op.kind not in CLAMPS:
        return False
    lower = op.inputs[1:2] if op.kind == "Clip" else op.inputs if op.kind == "Max" else ()
    upper = op.inputs[2:3] if op.kind == "Clip" else op.inputs if op.kind == "Min" else ()
    bounds = {-1: (lower,), 1: (upper,)}.get(held.sign, (lower, upper))
    return all(any(v is not None and reach.near(v, held) for v in side) for side in bounds)


def _factor(view: View, op: Op, slot: int) -> float | None:
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
            if numbers is not None and bool((numbers == np.float32(reach.level)).any()):
                reach.compared = op.id
            far = view.constant(other) is not None and not reach.near(other, held)
            if other in reach.held or reach.compared == op.id or far:
                reach.exact[op.id] = "compares a fill"
