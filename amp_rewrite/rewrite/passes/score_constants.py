"""Constants that are added to scores, made small without a change of the softmax.

A position bias is moved to 0 at the best key that each row shows, and a fill beyond the range is bounded. Both only for
numbers that are known, in rows whose keys are known and that show one. What is subtracted from a row is computed in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.arrays import from_array
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.patterns.scores import FILL, ScoredRow, Term, counts_far, scored_rows
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.attention.masks import OUT_OF_REACH
from amp_rewrite.rewrite.const_eval import numbers
from amp_rewrite.rewrite.replacement import Context, Replacement


def shrink_score_constants(view: View, context: Context) -> Iterator[Replacement]:
    """Move biases and bound fills that are added to scores. O(nodes), and the numbers of what is added."""
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    store = _Store(set(view.names))
    for row in scored_rows(view, cache(partial(numbers, view))):
        bias = next((term for term in row.terms if term.alone and counts_far(term.numbers, context.to)), None)
        moved = _rebased(row, bias) if bias is not None and not row.near(context.to) else None
        fill = _bounded(row, context.to)
        if bias is not None and moved is not None:
            yield _replaced("bias", bias, store.tensor(bias, "rebased", moved), _MOVED)
        if fill is not None and (moved is None or fill is not bias):
            bounded = np.maximum(fill.numbers, OUT_OF_REACH).astype(np.float32)
            yield _replaced("selected", fill, store.tensor(fill, "bounded", bounded), _BOUNDED)


_MOVED = "a position bias far from 0 · less what it adds to the best key of each row, which a softmax does not see"
_BOUNDED = (
    f"a mask added to scores before a softmax: its fill becomes {OUT_OF_REACH:g}, with the same result in every type"
)


@dataclass(slots=True)
class _Store:
    """New constants; layers that add the same numbers share one."""

    taken: set[str]
    held: dict[tuple[bytes, tuple[int, ...]], TensorProto] = field(default_factory=dict)

    def tensor(self, term: Term, word: str, array: Array) -> TensorProto:
        """Return numbers as a constant that is named after what a term reads."""
        key = (array.tobytes(), array.shape)
        if key not in self.held:
            name = claimed(f"{term.op.node.input[term.slot]}_{word}", self.taken)
            self.held[key] = from_array(array, name)
        return self.held[key]


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


def _bounded(row: ScoredRow, to: DType) -> Term | None:
    """Return the only term with a fill, if that is beyond half the range and nothing else hides keys of the row."""
    filled = [term for term in row.terms if float(term.numbers.min(initial=0)) <= -FILL]
    if len(filled) != 1 or not filled[0].alone or not bool(row.shown.all()):
        return None
    beyond = bool((filled[0].numbers < -to.max / 2).any()) and bool(np.isfinite(filled[0].numbers).all())
    return filled[0] if beyond and row.total() is not None else None


def _replaced(kind: str, term: Term, numbers: TensorProto, words: str) -> Replacement:
    """Return the sum with other numbers in place of a term."""
    node = clone(term.op.node)
    name, node.input[term.slot] = node.input[term.slot], numbers.name
    return Replacement(kind, (term.op.id,), term.op.id, node, (numbers,), findings=(Finding(kind, name, words),))
