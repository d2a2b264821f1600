"""Masks of scores as exporters write them: by selection, by addition, by multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import number
from amp_rewrite.ir.op_classes import PAIR_SUMS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.const_eval import TRACED_MOVES, moves_behind, numbers

LOST = -1e30
"""The largest float32 number that swallows any score that it is added to, as −3.4e38 is meant to."""
OUT_OF_REACH = -DType.FLOAT16.max / 4
"""The largest number without any weight beside a score of a network, also twice: masks are bounded to it."""


@dataclass(frozen=True, slots=True)
class ScoreMask:
    """A mask of scores: `fill` stands for the scores at which `value`, a bool, is not `shows`.

    `shown`: True where a score is seen, if that is known; `value` is then what the ops read, a bool or what is added.
    `nothing`: another operand of the ops, which is 0 where a score is seen.
    `counts`: what is added is more than `fill` where a score is seen, and no more than that where it is not.
    """

    value: ValueId
    shows: bool
    fill: float
    shown: Array | None = None
    counts: bool = False
    nothing: ValueId | None = None


def selected(view: View, op: Op, slot: int) -> ScoreMask | None:
    """Return the mask of a Where between scores and a number far below them."""
    condition, fill = op.inputs[0], number(view, op.inputs[3 - slot], axes=1)
    if condition is None or fill is None or not fill <= OUT_OF_REACH:
        return None
    return ScoreMask(condition, slot == 1, fill, _seen(view, condition, slot == 1))


def added(view: View, value: ValueId | None) -> ScoreMask | None:
    """Return the mask in a summand of scores, if it is 0 and one number far below them."""
    op = view.producer(value)
    if value is None:
        return None
    if op is not None and op.kind == "Where" and op.inputs[0] is not None:
        branches = [number(view, branch, axes=1) for branch in op.inputs[1:]]
        test = view.producer(op.inputs[0], "Cast")  # a bool that states that a number is not 0
        for at, fill in enumerate(branches):
            tested = op.inputs[2] if at == 0 and test is not None and test.inputs[0] == op.inputs[2] else None
            if fill is not None and fill <= OUT_OF_REACH and (branches[1 - at] == 0 or tested is not None):
                shown = _seen(view, op.inputs[0], at == 1)
                return ScoreMask(op.inputs[0], at == 1, fill, shown, nothing=tested) if hides(fill, shown) else None
    held = numbers(view, value)
    if held is None and op is not None and op.kind == "Mul":
        return _multiple(view, op, value)
    fill = float(held.min(initial=0)) if held is not None else 0.0
    if held is None or not hides(fill, held == 0) or not bool(((held == 0) | (held == fill)).all()):
        return None
    return ScoreMask(value, True, fill, held == 0)


def hides(fill: float, shown: Array | None) -> bool:
    """True if a score to which a number is added is lost: wholly, or beside another one that its row shows."""
    seeing = shown is not None and (shown.ndim == 0 or bool(shown.any(axis=-1).all()))
    return fill <= (OUT_OF_REACH if seeing else LOST)


def _seen(view: View, condition: ValueId, shows: bool) -> Array | None:
    held = numbers(view, condition)
    if held is not None:
        return np.asarray(held == shows)
    kinds = set()
    for move, moved in moves_behind(view, condition):
        kinds.add(move.kind)
        held = numbers(view, moved)
        if held is not None:  # Expand leaves an axis of more than one as it is
            shown, wide = np.asarray(held == shows), kinds == {"Expand"} and min(held.shape[-2:], default=0) > 1
            return np.ones((), bool) if bool(shown.all()) else shown if wide else None
    return None


def _multiple(view: View, op: Op, value: ValueId) -> ScoreMask | None:
    """Return the mask (1 − m) · fill: a whole number, made of integers or bools, times one far below scores."""
    for slot in (0, 1):
        fill = number(view, op.inputs[slot], axes=1)
        if fill is not None and np.isfinite(fill) and fill <= LOST and _whole(view, op.inputs[1 - slot]):
            return ScoreMask(value, True, fill, counts=True)
    return None


def _whole(view: View, value: ValueId | None) -> bool:
    pending, seen = [value], 0
    while pending:
        read, seen = pending.pop(), seen + 1
        dtype, held = view.dtype(read), number(view, read, axes=1)
        if (held is not None and held.is_integer()) or (dtype is not None and not dtype.floating):
            continue
        op = view.producer(read)
        if op is None or seen > _MOST_VALUES or op.kind not in (*TRACED_MOVES, *_KEEPING):
            return False
        pending += op.inputs[:1] if op.kind in TRACED_MOVES else op.inputs
    return True


_MOST_VALUES = 32
_KEEPING = PAIR_SUMS | {"Cast", "Mul"}
