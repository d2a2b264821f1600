"""Constants with equal steps, and their addition to attention scores before a softmax.

Subtracting a number from a whole row does not change its softmax. So a bias that is near 0 at the best visible key of
each row is as safe as a mask, however steeply it falls: keys far below the best have no weight. Deciding
this requires the visible keys of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import is_only_reader, multiples, number, trail
from amp_rewrite.ir.op_classes import CASTS, MOVES, PRODUCTS, SCALINGS, Slots
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, ValueId, View

MIN_GRID = 16
"""Minimum number of distinct positions in a grid; every type can represent a smaller grid."""
MAX_GRID = 1 << 22
"""Maximum number of elements in a grid; a larger constant is assumed to be a weight and is not read."""
_FIRST_CHECKED = 64
"""Number of leading elements of a constant to check first; most weights fail this check."""


def is_grid(view: View, value: ValueId) -> bool:
    """True for a constant that counts: at least 16 distinct values fill most of a row of equal steps."""
    tensor = view.constant(value)
    if tensor is None or not MIN_GRID <= math.prod(tensor.dims) <= MAX_GRID or tensor.data_type == TensorProto.STRING:
        return False
    if not even(next(view.model.chunks(tensor, _FIRST_CHECKED)), minimum=1):
        return False
    numbers = view.model.array(tensor).ravel()
    changes = np.flatnonzero(numbers[1:] != numbers[:-1])[:_FIRST_CHECKED]  # a table of sines begins with zeros
    return changes.size >= MIN_GRID - 1 and even(numbers[changes], minimum=1) and even(numbers, minimum=MIN_GRID)


def even(values: Array, *, minimum: int) -> bool:
    """True if at least `minimum` distinct values fill half or more of a row of equal steps."""
    numbers = np.sort(values.astype(np.float64))
    changes = np.append(True, numbers[1:] != numbers[:-1])  # np.unique spends 20 ms on unneeded imports
    numbers = numbers[changes[: numbers.size]]
    if numbers.size < max(minimum, 2) or not np.isfinite(numbers).all():
        return bool(numbers.size == minimum)
    apart = np.diff(numbers)
    step = (numbers[-1] - numbers[0]) / np.round(apart / apart.min()).sum()  # float32 rounds each difference
    steps = (numbers - numbers[0]) / step
    return bool(steps[-1] < 2 * numbers.size and np.abs(steps - np.round(steps)).max() < 1e-2)


# -- scores ---------------------------------------------------------------------------------------------

SCORE_OPS: Slots = {
    "Mul": (0, 1),
    "Div": (0,),
    "Add": (0, 1),
    "Where": (1, 2),
    "Cast": (0,),
    "Identity": (0,),
    "Tanh": (0,),
}
"""Ops between the product of queries and keys and the softmax, with the inputs that may be scores."""


def scores_are_read(view: View) -> bool:
    """True if an op reads the softmax of possible scores. O(Softmaxes)."""
    softmaxes = view.of_kinds(("Softmax",))
    of_scores = (op for op in softmaxes if view.producer(op.inputs[0], "MatMul", *SCORE_OPS) is not None)
    return any(view.uses[value] for op in of_scores for value in op.results)


# -- rows of scores -----------------------------------------------------------------------------------

FAR = {DType.FLOAT16: 64.0, DType.BFLOAT16: 8.0}
"""Magnitude above which the spacing of the low type, and so the error of the scores, exceeds 2⁻⁵."""
FILL = 1e4
"""A number of at most -FILL is a fill: adding it to a key's score removes the weight of the key."""
Numbers = Callable[[ValueId], Array | None]
"""A function that returns the numbers of a value, or None if they are unknown."""


def counts_far(numbers: Array, to: DType) -> bool:
    """True for numbers in rows of equal steps with magnitudes beyond FAR."""
    if numbers.ndim == 0 or numbers.shape[-1] < MIN_GRID or not bool((abs(numbers) > FAR[to]).any()):
        return False
    rows = numbers.reshape(-1, numbers.shape[-1])
    return any(even(row[abs(row) < FILL], minimum=MIN_GRID) for row in (rows[0], rows[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTerm:
    """Known numbers that a slot of a sum adds to scores. `exclusive`: only the softmax depends on the sum."""

    op: Op
    slot: int
    numbers: Array
    exclusive: bool


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRow:
    """Attention scores, with the known ops between the product and the softmax over the last axis.

    `terms`: the added numbers. `visible`: False where a Where writes a fill.
    """

    terms: tuple[ScoreTerm, ...]
    visible: Array

    def peaks(self) -> tuple[Array, Array] | None:
        """Return the visible keys and the largest sum of terms in each row; None if too large, or if a row is empty."""
        arrays = [term.numbers for term in self.terms]
        shape = np.broadcast_shapes(self.visible.shape, *(array.shape for array in arrays))
        if math.prod(shape) > MAX_GRID or not shape:
            return None
        total = np.broadcast_to(sum((a.astype(np.float64) for a in arrays), np.zeros(())), shape)
        visible = np.broadcast_to(self.visible, shape) & (total > -FILL)
        if not bool(visible.any(axis=-1).all()):
            return None
        return visible, np.where(visible, total, -np.inf).max(axis=-1, keepdims=True)

    def near(self, to: DType) -> bool:
        """True if the sum of the terms is small at the best key of each row."""
        peaks = self.peaks()
        return peaks is not None and float(abs(peaks[1]).max()) <= FAR[to]


def scored_rows(view: View, numbers: Numbers) -> Iterator[ScoredRow]:
    """Yield the float32 scores with known terms before a Softmax over the last axis, from opset 13 on. O(nodes)."""
    for softmax in view.of_kinds(("Softmax",)) if view.opset >= FIRST_ROW_SOFTMAX else ():
        if int_attribute(softmax.node, "axis", -1) == -1 and view.dtype(softmax.inputs[0]) is DType.FLOAT:
            row = _scored_row(view, softmax, numbers)
            if row is not None and row.terms:
                yield row


def _scored_row(view: View, softmax: Op, numbers: Numbers) -> ScoredRow | None:
    """Return the terms and visible keys of the scores of a softmax; None if an unknown op changes them."""
    terms: list[ScoreTerm] = []
    visible, exclusive, reader = np.ones((), bool), True, softmax
    value = softmax.inputs[0]
    while value is not None and (op := view.producer(value, "Add", "Where")) is not None:
        exclusive = exclusive and is_only_reader(view, value, reader)
        reader = op
        step = _added(view, op, numbers, exclusive) if op.kind == "Add" else _selected(view, op, numbers)
        if step is None:
            return None
        found, value = step
        if isinstance(found, ScoreTerm):
            terms.append(found)
        else:
            visible = visible & found
    passed, source = trail(view, value, multiples(view))
    product = view.producer(source)
    scaled = all(op.kind in MOVES | CASTS | SCALINGS for op in passed)
    if product is None or product.kind not in PRODUCTS or not scaled or (product.kind == "Gemm" and product.inputs[2:]):
        return None
    return ScoredRow(tuple(terms), visible)


def _added(view: View, op: Op, numbers: Numbers, exclusive: bool) -> tuple[ScoreTerm, ValueId] | None:
    for slot, value in enumerate(op.inputs):
        other = op.inputs[1 - slot]
        added = numbers(value) if value is not None else None
        if added is not None and other is not None:
            return ScoreTerm(op, slot, added, exclusive), other
    return None


def _selected(view: View, op: Op, numbers: Numbers) -> tuple[Array, ValueId] | None:
    condition = numbers(op.inputs[0]) if op.inputs[0] is not None else None
    for slot in (1, 2):
        scores, fill = op.inputs[slot], number(view, op.inputs[3 - slot], axes=1)
        if condition is not None and scores is not None and fill is not None and fill <= -FILL:
            return np.asarray(condition == (slot == 1)), scores
    return None
