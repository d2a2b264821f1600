"""Places on a grid of positions: boxes, keypoints, flows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import Flow, computes_float32, first_input_of, float32, origin
from amp_rewrite.ir.op_classes import COPIES, LAYERS, PAIR_SUMS, RECURRENT, SCALINGS, SELECTIONS, SOFTMAXES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_LAYERS = LAYERS | RECURRENT - {"RNN"} | {"Einsum"}
_LEAST = 16
"""Of different positions in a grid: fewer are told apart well enough in any type."""
_MOST = 1 << 22
"""Elements of a grid: what is larger is a weight, and not read for this."""
_LOOK = 64
"""How many elements in a row of a constant are looked at first: weights give themselves away at once."""


@rule(reasons.PLACES, "A predicted offset is added to its place on a grid in float32.")
def places(view: View, to: DType) -> Iterator[Pin]:
    """Pin sums of layer outputs and a grid of positions: a constant, or counted by Range. O(nodes + uses).

    What it protects: Positions in pixels that a network predicts relative to a grid.
    Why: At 640 neighbouring float16 numbers are half a pixel apart, those of bfloat16 four pixels. The offset itself is
        small and accurate in half precision; the sum is not, and float32 costs little, since elementwise ops alone
        follow. A grid of biases that a softmax reads (ALiBi) is left alone: distant positions weigh nothing there.
    Example: Anchor boxes of detectors, keypoints, optical flow.
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    found = {op.id: value for op in view.ops if (value := _grid_of(view, op)) is not None}
    counted = _counted(view)
    if not found and not counted:
        return
    plain, elementwise = Flow.of(view), Flow.of(view, _ELEMENTWISE)
    layers = {op.outputs[0]: op.id for op in view.ops if op.kind in _LAYERS and op.outputs[0] is not None}
    learned = plain.forth(layers, float32(view))
    positions = plain.forth(counted, float32(view)) if counted else {}
    for op in view.ops:
        if op.kind not in PAIR_SUMS or not computes_float32(view, op):
            continue
        given = [v for v in op.inputs if v is not None]
        ranged = next((v for v in given if v in positions and v not in learned), None)
        grid = found.get(op.id, ranged)
        if grid is not None and any(v in learned for v in given if v != grid) and not _scored(elementwise, op):
            note = f"counts from places on the grid {view.value_name(grid)!r}"
            yield Pin(op.id, reasons.PLACES, positions.get(grid), note)


def _counted(view: View) -> dict[ValueId, OpId]:
    """What Range gives."""
    return {op.outputs[0]: op.id for op in view.ops if op.kind == "Range" and op.outputs[0] is not None}


def _grid_of(view: View, op: Op) -> ValueId | None:
    """The operand of a sum that is a constant grid, or a copy of one."""
    if op.kind not in PAIR_SUMS or not computes_float32(view, op):
        return None
    return next((v for v in op.inputs if v is not None and _grid(view, v)), None)


def _grid(view: View, value: ValueId) -> bool:
    """Whether a constant counts: 16 or more numbers, of which most that stand in a row with equal steps are there."""
    tensor = view.constant(origin(view, value, first_input_of(COPIES)))
    if tensor is None or not _LEAST <= math.prod(tensor.dims) <= _MOST or tensor.data_type == TensorProto.STRING:
        return False
    if not _even(next(view.model.chunks(tensor, _LOOK)), least=1):
        return False
    numbers = view.model.array(tensor).ravel()
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])[:_LOOK]  # a table of sines begins with zeros
    return changes.size >= _LEAST - 1 and _even(numbers[changes], least=1) and _even(numbers, least=_LEAST)


def _even(values: Array, *, least: int) -> bool:
    """Whether so many different numbers fill at least half of a row with equal steps."""
    known = np.sort(values.astype(np.float64))
    known = known[np.append(True, known[1:] != known[:-1])]  # np.unique takes 20 ms to import what it does not need
    if known.size < max(least, 2) or not np.isfinite(known).all():
        return bool(known.size == least)
    steps = (known - known[0]) / np.diff(known).min()
    return bool(steps[-1] < 2 * known.size and np.abs(steps - np.round(steps)).max() < 1e-2)


_ELEMENTWISE = {**COPIES, **SELECTIONS, **dict.fromkeys(PAIR_SUMS | SCALINGS, range(2))}


def _scored(elementwise: Flow, op: Op) -> bool:
    """Whether a softmax reads a result, elementwise ops between."""
    view = elementwise.view
    reached = elementwise.forth({v: None for v in op.outputs if v is not None}, float32(view))
    return any(view.ops[use.op].kind in SOFTMAXES for value in reached for use in view.uses[value])
