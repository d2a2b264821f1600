"""Position biases moved to 0 at the best key that each row shows: the same softmax, and small numbers where it counts.

Only for numbers that are known, in rows whose keys are known. The constant that is subtracted from a row is computed in
float64; a fill beside the bias is bounded, as other masks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import onnx.numpy_helper
from onnx import TensorProto

from amp_rewrite.decide.hazards.position_biases import ScoredRow, Term, counts_far, scored_rows
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.attention.masks import OUT_OF_REACH
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.replacement import Context, Replacement


def rebase_biases(view: View, context: Context) -> Iterator[Replacement]:
    """Subtract from each row of a far bias what it adds to the best key. O(nodes), and the numbers of the biases."""
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    stored, taken = dict[tuple[bytes, tuple[int, ...]], str](), set(view.names)
    for row in scored_rows(view, cache(partial(numbers, view))):
        biases = (
            t for t in row.terms if t.alone and computes_float32(view, t.op) and counts_far(t.numbers, context.to)
        )
        bias = next(biases, None)
        if bias is None or row.near(context.to):
            continue
        moved = _rebased(row, bias)
        if moved is not None:
            key = (moved.tobytes(), moved.shape)  # layers that add the same bias share a constant
            if key not in stored:
                stored[key] = claimed(f"{bias.op.node.input[bias.slot]}_rebased", taken)
            yield _replaced(bias, onnx.numpy_helper.from_array(moved, stored[key]))


def _rebased(row: ScoredRow, bias: Term) -> Array | None:
    """Return the bias less the peak of each row; at keys that are not shown it is 0 at most."""
    held, peaks = row.total(), row.peaks()
    if held is None or peaks is None:
        return None
    moved = bias.numbers.astype(np.float64) - peaks
    moved = np.maximum(np.where(held[1], moved, np.minimum(moved, 0)), OUT_OF_REACH).astype(np.float32)
    while moved.ndim > max(bias.numbers.ndim, 1) and moved.shape[0] == 1:
        moved = moved[0]
    return moved


def _replaced(bias: Term, moved: TensorProto) -> Replacement:
    """Return the sum with the moved bias."""
    node = clone(bias.op.node)
    name, node.input[bias.slot] = node.input[bias.slot], moved.name
    words = "less what it adds to the best key of each row, which a softmax does not see"
    finding = Finding("bias", name, f"a position bias far from 0 · {words}")
    return Replacement("bias", (bias.op.id,), bias.op.id, node, (moved,), findings=(finding,))
