"""Evaluation of values computed from constants, and a pass to fold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute, ints_attribute
from amp_rewrite.ir.dataflow import first_input, reach, upstream
from amp_rewrite.ir.op_classes import (
    BROADCASTS,
    CARRIERS,
    CASTS,
    ELEMENTLESS,
    MOVES,
    SAME_SHAPE,
    SCATTERS,
    UNREPEATABLE,
)
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once
from amp_rewrite.rewrite.builder import new_node
from amp_rewrite.rewrite.reference import run
from amp_rewrite.rewrite.replacement import CONSTANT, Context, Replacement

TRACED_MOVES = MOVES - {"Flatten"}
"""The moves traced to recognize attention."""
_EVALUATED = frozenset(
    (CARRIERS.keys() | BROADCASTS | SAME_SHAPE | ELEMENTLESS | {"ConstantOfShape", "EyeLike", "OneHot", "Range"})
    - UNREPEATABLE
    - SCATTERS
)
"""Ops with a low cost per element; onnx's reference evaluator runs windows, cells and scatters in Python loops."""
_MAX_OPS = 64
_MAX_ELEMENTS = 1 << 24  # in a constant to read
_MAX_MASK_ELEMENTS = 1 << 28  # in a constant mask, which is cut to one batch if all batches are equal


def moves_before(view: View, value: ValueId) -> Iterator[tuple[Op, ValueId]]:
    """Yield the moves upstream of a value, nearest first, each with its operand."""
    return upstream(view, value, first_input(TRACED_MOVES))


def permutation(op: Op) -> tuple[int, ...]:
    """Return the `perm` attribute of a Transpose; () if it is missing, and for other ops."""
    return ints_attribute(op.node, "perm") if op.kind == "Transpose" else ()


def numbers(view: View, value: ValueId) -> Array | None:
    """Return the numbers of a constant, or of a value computed from constants; None if they are unknown."""
    if view.constant(value) is None:
        return _evaluated(view, value)
    array = view.array(value, _size_limit(view, value))
    if array is None or array.size <= _MAX_ELEMENTS or array.ndim != 4:
        return array
    return array[:1] if all(np.array_equal(batch, array[0]) for batch in array[1:]) else array


@once
def _evaluated(view: View, value: ValueId) -> Array | None:
    """Return the numbers of a value computed from constants.

    None if this takes more than 64 ops, an expensive op, or a large weight.
    """
    ops, leaves, pending = set[OpId](), set[ValueId](), [value]
    while pending:
        current = pending.pop()
        if (tensor := view.constant(current)) is not None and math.prod(tensor.dims) <= _size_limit(view, current):
            leaves.add(current)
            continue
        op = view.producer(current) if tensor is None else None
        if op is None or op.kind not in _EVALUATED or len(ops) >= _MAX_OPS:
            return None
        if op.id not in ops:
            ops.add(op.id)
            pending.extend(op.operands)
    feed = {view.value_name(v): array for v in leaves if (array := numbers(view, v)) is not None}
    if len(feed) < len(leaves):
        return None
    results = run([view.ops[op].node for op in sorted(ops)], view.value_name(value), [feed], view.opsets)
    return None if isinstance(results, str) else results[0]


def _size_limit(view: View, value: ValueId) -> int:
    return _MAX_MASK_ELEMENTS if view.dtype(value) is DType.BOOL else _MAX_ELEMENTS


# -- folding ---------------------------------------------------------------------------------------


MAX_FOLDED = 1 << 12
"""Maximum number of elements of a folded result, and of each operand."""

_CORRECTLY_ROUNDED = frozenset(("Abs", "Add", "Div", "Mul", "Neg", "Reciprocal", "Sqrt", "Sub"))
"""Arithmetic with the same bits on every machine (IEEE 754-2019, section 5.4.1)."""
EXACT = MOVES | CASTS | _CORRECTLY_ROUNDED | {"Concat", "ConstantOfShape", "Gather", "Shape", "Slice", "Where"}
_TYPES = frozenset((DType.FLOAT, DType.INT32, DType.INT64, DType.BOOL))


def fold_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each float32 value computed from constants, unless only other replaced values read it. O(nodes).

    Only operations with the same bits on every machine are folded: copies, conversions and correctly rounded
    arithmetic. Large values are weights, which remain in their files. Ops with other readers are preserved.
    """
    folded = _folded_values(view)
    for op in view.ops:
        result = op.outputs[0] if len(op.outputs) == 1 else None
        if result is None or result not in folded or view.dtype(result) is not DType.FLOAT:
            continue
        intermediate = all(folded.keys() & set(view.ops[use.op].outputs) for use in view.uses[result])
        if (intermediate and result not in view.yielded) or not _worth_folding(view, op, folded):
            continue
        tensor = from_array(folded[result])
        node = new_node("Constant", [], op.node.output[0], op.node.name, value=tensor)
        yield Replacement(CONSTANT, (op.id,), op.id, node)


_ARITHMETIC = _CORRECTLY_ROUNDED | CASTS | {"Expand", "Where"}


def _worth_folding(view: View, op: Op, folded: Mapping[ValueId, Array]) -> bool:
    """True if folding saves arithmetic; without arithmetic, a reshaped weight would be stored twice."""

    def before(op_id: OpId) -> Iterator[OpId]:
        sources = (v for v in view.ops[op_id].operands if v in folded and view.dtype(v) is DType.FLOAT)
        return (producer.id for v in sources if (producer := view.producer(v)) is not None)

    return any(view.ops[step].kind in _ARITHMETIC for step in reach((op.id,), before))


def _folded_values(view: View) -> Mapping[ValueId, Array]:
    folded: dict[ValueId, Array] = {}
    for op in view.ops:
        if op.kind not in EXACT or op.bodies or not op.inputs or len(op.outputs) != 1:
            continue
        result = op.outputs[0]
        dtype = view.dtype(result)
        if result is None or view.values[result].public or dtype is None or dtype not in _TYPES:
            continue
        if op.kind == "Shape":  # the shape of a constant is known without its values
            if (tensor := view.constant(op.inputs[0])) is not None:
                start, end = int_attribute(op.node, "start", 0), int_attribute(op.node, "end", len(tensor.dims))
                folded[result] = np.array(tensor.dims[start:end], np.int64)
            continue
        values = op.operands
        if any(value not in folded and value not in view.constants for value in values):
            continue
        if dtype is not DType.FLOAT and any(view.dtype(v) is DType.FLOAT for v in values):
            continue  # for example a Cast to integers, whose saturation depends on the machine
        arrays = (folded[v] if v in folded else view.array(v, MAX_FOLDED) for v in values if view.dtype(v) in _TYPES)
        operands = [array for array in arrays if array is not None]
        if len(operands) < len(values):
            continue
        feed = dict(zip(filter(None, op.node.input), operands, strict=True))
        results = run([op.node], op.node.output[0], [feed], view.opsets, MAX_FOLDED)
        if isinstance(results, str) or results[0].dtype != dtype.numpy or results[0].size > MAX_FOLDED:
            continue
        # NaNs have several encodings, and divisions by zero are left to the runtime.
        if dtype is not DType.FLOAT or bool(np.isfinite(results[0]).all()):
            folded[result] = results[0]
    return folded
