"""Constant factors that lose digits, balanced with a neighbour: one times 2ᵏ, the other times 2⁻ᵏ.

Powers of two change no digit of float32: the numbers between are exact multiples of the original ones, and the result
is the same to the bit. Both constants then lie where the low type has all its digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import only_reader
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.op_classes import LAYERS, MOVES, SCALINGS
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.ir.weights import float32_constant, loses_digits
from amp_rewrite.rewrite.replacement import Context, Replacement

_BETWEEN = MOVES | {"Relu"}
"""Ops whose results scale with their first input, to the bit."""
_LEAST_SCALE = 16.0
_SMALL = 1 << 12
"""Elements of a scale; the weights before one are read only if the scale is so large that they may be tiny."""
_SPREAD = 2.0**8
"""Largest ratio of the elements of a scale: balanced, the smallest is still a normal number."""
_ORDINARY = 2.0**6
"""Balanced factors lie between the inverse of this and this: else the results are out of range as well."""


@dataclass(frozen=True, slots=True)
class _Factor:
    """An op that multiplies its first numbers by a constant `value` in a slot, or (`divides`) divides them by it."""

    op: Op
    slot: int
    value: ValueId

    @property
    def divides(self) -> bool:
        return self.op.kind == "Div"


def balance_factors(view: View, context: Context) -> Iterator[Replacement]:
    """Balance tiny weights with the scale behind them, and a tiny scale with the weights behind it. O(ops)."""
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    names, used = set(view.names), set[OpId]()
    for op in view.of_kinds(LAYERS | {"Mul"}):
        first = _factor(view, op)
        second = _behind(view, first) if first is not None else None
        if first is None or second is None or not used.isdisjoint((first.op.id, second.op.id)):
            continue
        shift = _shift(view, first, second, context.to)
        pair = list(_scaled(view, first, second, shift, names)) if shift is not None else []
        if len(pair) == 2:
            used.update((first.op.id, second.op.id))
            yield from pair


def _factor(view: View, op: Op, value: ValueId | None = None) -> _Factor | None:
    """Return an op as a factor of `value`, or of whatever it multiplies by a float32 constant."""
    for slot in (1,) if op.kind != "Mul" else (1, 0):
        constant, other = float32_constant(view, op, slot), op.inputs[1 - slot]
        if constant is not None and view.constant(other) is None and value in (None, other):
            return _Factor(op, slot, constant)
    return None


def _behind(view: View, first: _Factor) -> _Factor | None:
    """Return the factor that alone reads a factor's result, if one of the two is a scale and the other weights."""
    value = first.op.outputs[0]
    while (reader := only_reader(view, value)) is not None and reader.kind in _BETWEEN and reader.inputs[0] == value:
        value = reader.outputs[0]
    if value is None or reader is None or (first.op.kind in LAYERS) is (reader.kind in LAYERS):
        return None
    return _factor(view, reader, value) if reader.kind in LAYERS | SCALINGS else None


def _shift(view: View, first: _Factor, second: _Factor, to: DType) -> int | None:
    """Return k, for 2ᵏ times the first and 2⁻ᵏ times the second factor; None if there is nothing to gain."""
    scale, weights = (first, second) if second.op.kind in LAYERS else (second, first)
    tensor = view.constant(scale.value)
    if tensor is None or math.prod(tensor.dims) > _SMALL:
        return None
    if view.fit(scale.value, to).absmax > _SPREAD * view.fit(scale.value, to).absmin:
        return None
    large = _magnitude(view, scale, to)
    if large < _LEAST_SCALE if scale is second else not _is_lossy(view, scale, to):
        return None
    if not math.isfinite(large) or (weights is first and not _is_lossy(view, weights, to)):
        return None
    sizes = [_magnitude(view, factor, to) for factor in (first, second)]
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return None
    if not _ORDINARY**-2 <= sizes[0] * sizes[1] <= _ORDINARY**2:
        return None
    return round((math.log2(sizes[1]) - math.log2(sizes[0])) / 2)


def _is_lossy(view: View, factor: _Factor, to: DType) -> bool:
    """True if the constant loses digits in the low type; of scales only single numbers count."""
    counts = view.fit(factor.value, to).count == 1 or factor.op.kind in LAYERS
    return counts and loses_digits(view, factor.value, to)


def _magnitude(view: View, factor: _Factor, to: DType) -> float:
    """Return by how much a factor multiplies at most."""
    fit = view.fit(factor.value, to)
    if fit.nonfinite or not fit.absmax:
        return math.nan
    return 1 / fit.absmin if factor.divides else fit.absmax


def _scaled(view: View, first: _Factor, second: _Factor, shift: int, names: set[str]) -> Iterator[Replacement]:
    """Yield both ops with scaled constants; fewer if a constant would not be scaled to the bit."""
    for factor, by in ((first, shift), (second, -shift)):
        slots = [(factor.slot, -by if factor.divides else by)]
        if factor is first and len(factor.op.inputs) > 2 and factor.op.inputs[2] is not None:
            slots.append((2, by))  # the bias, which the second factor multiplies, too
        node, tensors = clone(factor.op.node), list[TensorProto]()
        for slot, power in slots:
            array = _times(view.array(factor.op.inputs[slot]), power)
            if array is None:
                return
            name = claimed(f"{node.input[slot]}_scaled", names)
            tensors.append(from_array(array, name))
            node.input[slot] = name
        finding = Finding("scaled", factor.op.name, f"its constant is stored times 2^{slots[0][1]}")
        yield Replacement("scaled", (factor.op.id,), factor.op.id, node, tuple(tensors), findings=(finding,))


def _times(array: Array | None, power: int) -> Array | None:
    """Return an array times a power of two; None if that is not exact."""
    if array is None or array.dtype != np.float32:
        return None
    with np.errstate(all="ignore"):
        scaled = np.ldexp(array, power)
        back = np.ldexp(scaled, -power)
    return scaled if np.array_equal(back, array) and bool(np.isfinite(scaled).all()) else None
