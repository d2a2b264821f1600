"""float32 numbers that are computed from constants, computed now.

Only what every machine computes to the bit: copies, conversions, and the operations that IEEE 754 rounds correctly.
Only small ones: a large one is a weight, and weights stay where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.builder import new_node
from amp_rewrite.ir.dataflow import reach
from amp_rewrite.ir.op_classes import CASTS, CORRECTLY_ROUNDED, MOVES
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.equivalence import run
from amp_rewrite.rewrite.replacement import Context, Replacement

LARGEST = 1 << 12
"""Largest number of elements of a folded result, and of its operands."""

EXACT = MOVES | CASTS | CORRECTLY_ROUNDED | {"Concat", "ConstantOfShape", "Gather", "Shape", "Slice", "Where"}
_TYPES = frozenset((DType.FLOAT, DType.INT32, DType.INT64, DType.BOOL))


def fold_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each float32 value that is computed from constants, unless only other such values are made of it.

    The ops before it stay as far as others read them. O(nodes).
    """
    known = _computed(view)
    for op in view.ops:
        result = op.outputs[0] if len(op.outputs) == 1 else None
        if result is None or result not in known or view.dtype(result) is not DType.FLOAT:
            continue
        step = all(known.keys() & set(view.ops[use.op].outputs) for use in view.uses[result])
        if (step and result not in view.yielded) or not _worth(view, op, known):
            continue
        tensor = from_array(known[result])
        node = new_node("Constant", [], op.node.output[0], op.node.name, value=tensor)
        yield Replacement("constant", (op.id,), op.id, node)


_MAKING = CORRECTLY_ROUNDED | CASTS | {"Expand", "Where"}


def _worth(view: View, op: Op, known: Mapping[ValueId, Array]) -> bool:
    """True if folding does arithmetic. Chains that only reshape a weight are left alone, so it is not stored twice."""

    def before(op_id: OpId) -> Iterator[OpId]:
        read = (v for v in view.ops[op_id].operands if v in known and view.dtype(v) is DType.FLOAT)
        return (made_by.id for v in read if (made_by := view.producer(v)) is not None)

    return any(view.ops[step].kind in _MAKING for step in reach({op.id: None}, before))


def _computed(view: View) -> Mapping[ValueId, Array]:
    """Return the values that are computed from constants, with their numbers; without inputs and outputs."""
    known: dict[ValueId, Array] = {}
    for op in view.ops:
        if op.kind not in EXACT or op.bodies or not op.inputs or len(op.outputs) != 1:
            continue
        result = op.outputs[0]
        if result is None or view.values[result].public or view.dtype(result) not in _TYPES:
            continue
        if op.kind == "Shape":  # for the shape of a constant its values need not be read
            if (tensor := view.constant(op.inputs[0])) is not None:
                start, end = int_attribute(op.node, "start", 0), int_attribute(op.node, "end", len(tensor.dims))
                known[result] = np.array(tensor.dims[start:end], np.int64)
            continue
        values = op.operands
        if any(value not in known and value not in view.constants for value in values):
            continue
        if view.dtype(result) is not DType.FLOAT and any(view.dtype(v) is DType.FLOAT for v in values):
            continue  # a Cast to integers, say, which machines saturate each in its way
        small = (known[v] if v in known else _small(view, v) for v in values)
        operands = [array for array in small if array is not None]
        array = _run(view, op, operands) if len(operands) == len(values) else None
        if array is None or array.size > LARGEST:
            continue
        # A NaN has several forms, and a division by zero is left to the runtime.
        if array.dtype.kind != "f" or bool(np.isfinite(array).all()):
            known[result] = array
    return known


def _small(view: View, value: ValueId) -> Array | None:
    return view.array(value, LARGEST) if view.dtype(value) in _TYPES else None


def _run(view: View, op: Op, operands: list[Array]) -> Array | None:
    """Run an op; None if onnx's reference does not run it, or gives another type than the schema says."""
    feed = dict(zip(filter(None, op.node.input), operands, strict=True))
    results = run([op.node], op.node.output[0], [feed], view.opsets, LARGEST)
    dtype = view.dtype(op.outputs[0])
    if isinstance(results, str) or dtype is None or results[0].dtype != dtype.numpy:
        return None
    return results[0]
