"""Positions on a grid: boxes, keypoints, flows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, in_float32, results_of
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import Flow, computes_float32, first_input_of, float32, makers, origin
from amp_rewrite.ir.op_classes import COPIES, LAYERS, PAIR_SUMS, RECURRENT, SCALINGS, SELECTIONS, SOFTMAXES
from amp_rewrite.ir.view import Op, ValueId, View

LEARNED = LAYERS | RECURRENT - {"RNN"} | {"Einsum"}
_ELEMENTWISE = {**COPIES, **SELECTIONS, **dict.fromkeys(PAIR_SUMS | SCALINGS, range(2))}
_SAMPLES = {
    "GridSample": 1,
    "NonMaxSuppression": 0,
    "RoiAlign": 1,
    "com.microsoft::CropAndResize": 1,
    "com.microsoft::GridSample": 1,
}
"""Ops that read positions in this input."""
LEAST = 16
"""Different positions in a grid, at least: any type tells fewer apart well enough."""
MOST = 1 << 22
"""Elements of a grid, at most: a larger constant is a weight, and is not read."""
_LOOK = 64
"""Leading elements of a constant that are checked first: most weights fail there."""


@rule(reasons.PLACES, "A predicted offset is added to its place on a grid in float32.")
def places(view: View, to: DType) -> Iterator[Pin]:
    """Pin sums of layer outputs and a grid of positions, which is a constant or counted by Range. O(nodes + uses).

    Where GridSample, RoiAlign or NonMaxSuppression read positions, the ops from the last layer to them are pinned.

    What it protects: Positions in pixels that a network predicts relative to a grid.
    Why: At 640 the float16 spacing is half a pixel, that of bfloat16 four pixels. float32 costs little, since only
        elementwise ops follow. A grid of biases that feeds a softmax (ALiBi) is left alone: distant positions weigh
        nothing there.
    Example: Anchor boxes of detectors, keypoints, optical flow.
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    flow = Flow.of(view, _ELEMENTWISE)
    sampled = {v: op.id for op in view.ops if op.kind in _SAMPLES and (v := op.inputs[_SAMPLES[op.kind]]) is not None}
    for op_id, sampler in in_float32(view, makers(view, flow.back(sampled, float32(view))) if sampled else {}).items():
        if flow.through(view.ops[op_id]):
            yield Pin(op_id, reasons.PLACES, sampler, f"computes the places that {described(view, sampler)} reads")
    sums = [op for op in view.ops if op.kind in PAIR_SUMS and computes_float32(view, op)]
    grids = {op.id: grid for op in sums if (grid := next((v for v in op.inputs if _grid(view, v)), None)) is not None}
    ranges = results_of(view, ("Range",))
    if not grids and not ranges:
        return
    plain, elementwise = Flow.of(view), flow
    learned = plain.forth(results_of(view, LEARNED), float32(view))
    positions = plain.forth(ranges, float32(view)) if ranges else {}
    for op in sums:
        read = op.operands
        grid = grids.get(op.id, next((v for v in read if v in positions and v not in learned), None))
        if grid is not None and any(v in learned for v in read if v != grid) and not _scored(elementwise, op):
            note = f"counts from places on the grid {view.value_name(grid)!r}"
            yield Pin(op.id, reasons.PLACES, positions.get(grid), note)


def _grid(view: View, value: ValueId | None) -> bool:
    """True for a constant, or a copy of one, that counts: its 16 or more values fill most of a row with equal steps."""
    tensor = view.constant(origin(view, value, first_input_of(COPIES))) if value is not None else None
    if tensor is None or not LEAST <= math.prod(tensor.dims) <= MOST or tensor.data_type == TensorProto.STRING:
        return False
    if not even(next(view.model.chunks(tensor, _LOOK)), least=1):
        return False
    numbers = view.model.array(tensor).ravel()
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])[:_LOOK]  # a table of sines begins with zeros
    return changes.size >= LEAST - 1 and even(numbers[changes], least=1) and even(numbers, least=LEAST)


def even(values: Array, *, least: int) -> bool:
    """True if at least so many different values fill half or more of a row with equal steps."""
    known = np.sort(values.astype(np.float64))
    known = known[np.append(True, known[1:] != known[:-1])]  # np.unique takes 20 ms to import what it does not need
    if known.size < max(least, 2) or not np.isfinite(known).all():
        return bool(known.size == least)
    apart = np.diff(known)
    step = (known[-1] - known[0]) / np.round(apart / apart.min()).sum()  # float32 rounds each difference
    steps = (known - known[0]) / step
    return bool(steps[-1] < 2 * known.size and np.abs(steps - np.round(steps)).max() < 1e-2)


def _scored(elementwise: Flow, op: Op) -> bool:
    """True if a softmax reads a result, directly or through elementwise ops."""
    view = elementwise.view
    reached = elementwise.forth(dict.fromkeys(op.results), float32(view))
    return any(reader.kind in SOFTMAXES for value in reached for reader in view.readers(value))
