"""VJPs of operators that pick elements by position, or put them there: gathers, scatters, slices, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD
from amp_rewrite.train.facts import known_dims
from amp_rewrite.train.vjp.row import Call, Partial, Rows, Stop, positive, row

_EXTREMES = ("max", "min")
_END = (1 << 63) - 1


def scattered(v: Call, op_type: str, shape: str, index: str, g: str, *, repeats: bool, axis: int | None = None) -> str:
    """The gradient g put at an index of zeros of a shape; what arrives at one place several times is added up.

    In float32 for a low type: a sum of many terms, and no CPU kernel adds up in a low one.
    """
    if repeats:
        v.b.requires(FIRST_SCATTER_ADD, f"the gradient of {v.op.op_type}, which adds up at repeated positions,")
    own = v.dtype(0)
    dtype = DType.FLOAT if own.low and repeats else own
    wide = g if dtype is own else v.do("Cast", g, to=dtype.code)
    reduction = "add" if repeats else None
    added = v.do(op_type, v.b.full(shape, 0.0, dtype), index, wide, axis=axis, reduction=reduction)
    return added if dtype is own else v.do("Cast", added, to=own.code)


# -- any op that only moves elements -------------------------------------------------------------------------


def by_position(v: Call, *, repeats: bool) -> str:
    """The gradient of input 0 of an op whose output holds elements of it: each goes back to where it came from.

    Where that is tells the op itself, run on the positions of the elements. `repeats`: an element may stand in
    the output several times.
    """
    x, int64 = v.x(0), DType.INT64
    count = v.b.op("Size", x)
    span = v.b.op("Range", v.b.scalar(0, int64), count, v.b.scalar(1, int64))
    positions = v.b.reshape(span, v.b.shape_of(x))
    node = clone(v.op.node)
    inputs = [positions, *node.input[1:]]
    if v.op.op_type == "Pad":
        inputs[2:3] = [""] if len(inputs) > 2 else []  # the value to fill with is of another type, and not used
    origin = v.b.like(node, inputs)[0]
    flat = [v.b.reshape(i, [-1]) for i in (origin, v.g)]
    total = v.b.reshape(count, [1])
    return v.b.reshape_like(scattered(v, "ScatterElements", total, *flat, repeats=repeats, axis=0), x)


def _moved(*, repeats: bool) -> Partial:
    return lambda v, slot: by_position(v, repeats=repeats)


# -- Gather --------------------------------------------------------------------------------------------------


def _gather(v: Call, slot: int) -> str:
    """What arrived is added at its index; along another axis than the first with that axis put in front."""
    rank, axis = v.rank(0), v.axis(0)
    picked = v.rank(1)
    index = v.b.unsqueeze(v.b.cast(v.x(1), DType.INT64), [picked])
    if axis == 0:
        return scattered(v, "ScatterND", v.b.shape_of(v.x(0)), index, v.g, repeats=True)
    front = [axis, *[a for a in range(rank) if a != axis]]
    of_g = [*range(axis, axis + picked), *range(axis), *range(axis + picked, rank - 1 + picked)]
    shape = v.b.op("Gather", v.b.shape_of(v.x(0)), v.b.ints(front))
    added = scattered(v, "ScatterND", shape, index, v.do("Transpose", v.g, perm=of_g), repeats=True)
    return v.do("Transpose", added, perm=[int(i) for i in np.argsort(front)])


def _gather_elements(v: Call, slot: int) -> str:
    shape = v.b.shape_of(v.x(0))
    return scattered(v, "ScatterElements", shape, v.x(1), v.g, repeats=True, axis=v.attr("axis", 0))


def _gather_nd(v: Call, slot: int) -> str:
    if v.attr("batch_dims", 0):
        return by_position(v, repeats=True)
    return scattered(v, "ScatterND", v.b.shape_of(v.x(0)), v.x(1), v.g, repeats=True)


def _top_k(v: Call, slot: int) -> str:
    return v.do("ScatterElements", v.zeros(0), v.y(1), v.g, axis=v.attr("axis", -1))


# -- scatters ------------------------------------------------------------------------------------------------


def _scattered_over(v: Call, slot: int) -> str:
    """Nothing where something was written; all where it was added; its part where it is the extreme."""
    if _reduction(v) == "add":
        return v.g
    if _reduction(v) in _EXTREMES:
        return v.do("Mul", _shares(v), _hits(v)[0])
    axis = v.attr("axis", 0) if v.op.op_type == "ScatterElements" else None
    return v.do(v.op.op_type, v.g, v.x(1), v.zeros(2), axis=axis)


def _scattered(v: Call, slot: int) -> str:
    if _reduction(v) in _EXTREMES:
        return v.do("Mul", _picked(v, _shares(v)), _hits(v)[1])
    return _picked(v, v.g)


def _picked(v: Call, x: str) -> str:
    """What stands where something was scattered to."""
    if v.op.op_type == "ScatterND":
        return v.do("GatherND", x, v.x(1))
    return v.do("GatherElements", x, v.x(1), axis=v.attr("axis", 0))


def _hits(v: Call) -> tuple[str, str]:
    """1 for each element, of what was there and of what was scattered, that is the extreme of its place; else 0."""
    found = (v.do("Equal", v.x(0), v.y()), v.do("Equal", v.x(2), _picked(v, v.y())))
    there, scattered_ = (v.b.op("Cast", hit, to=v.dtype(0).code) for hit in found)
    return there, scattered_


def _shares(v: Call) -> str:
    """What arrived, in equal parts for all that are the extreme of a place (as torch.scatter_reduce)."""
    there, mine = _hits(v)
    axis = v.attr("axis", 0) if v.op.op_type == "ScatterElements" else None
    others = scattered(v, v.op.op_type, v.b.shape_of(v.x(0)), v.x(1), mine, repeats=True, axis=axis)
    return v.do("Div", v.g, v.do("Add", there, others))


def _reduction(v: Call) -> str:
    found = v.attr("reduction", "none")
    if found not in ("none", "add", *_EXTREMES):
        raise v.error(f"no gradient with reduction {found!r}, only with none, add, max and min; replace the op")
    return str(found)


# -- Slice, Pad ----------------------------------------------------------------------------------------------


def _slice(v: Call, slot: int) -> str:
    """Zeros around it, in steps of 1 from where constants say; else by position."""
    starts, steps = v.constant(1), v.constant(4) if v.has(4) else np.ones(1)
    axes = v.constant(3) if v.has(3) else None if starts is None else np.arange(len(starts))
    if starts is None or axes is None or steps is None or (steps != 1).any():
        return by_position(v, repeats=False)
    begins = [0] * v.rank(0)
    for axis, start in zip(axes, starts, strict=True):
        begins[positive(int(axis), v.rank(0))] = int(start)
    own, cut = known_dims(v.shape(0)), known_dims(v.b.shape(v.op.node.output[0]))
    if own is None or cut is None:
        return v.do("Pad", v.g, _pads_at_run_time(v, begins))
    front = [min(max(b + n if b < 0 else b, 0), n) for b, n in zip(begins, own, strict=True)]
    back = [n - b - c for n, b, c in zip(own, front, cut, strict=True)]
    return v.do("Pad", v.g, v.b.ints([*front, *back])) if any((*front, *back)) else v.g


def _pads_at_run_time(v: Call, begins: Sequence[int]) -> str:
    own, cut = v.b.op("Shape", v.x(0)), v.b.op("Shape", v.g)
    front = v.b.ints(begins)
    if min(begins, default=0) < 0:
        from_back = v.b.constant(np.array([b < 0 for b in begins]))
        front = v.b.op("Max", v.b.op("Where", from_back, v.b.op("Add", front, own), front), v.b.ints([0]))
    front = v.b.op("Min", front, own)
    return v.b.op("Concat", front, v.b.op("Sub", v.b.op("Sub", own, front), cut), axis=0)


def _pad(v: Call, slot: int) -> str:
    """The part that was there before; with a mode that repeats elements, each place added to its origin."""
    if v.attr("mode", "constant") != "constant":
        return by_position(v, repeats=True)
    return _cropped(v)


def _cropped(v: Call) -> str:
    axes = (v.x(3),) if v.has(3) else ()
    pads = v.constant(1)
    if pads is None:
        return v.do("Pad", v.g, v.b.op("Neg", v.x(1)), "", *axes)
    half = len(pads) // 2
    front, back = [int(p) for p in pads[:half]], [int(p) for p in pads[half:]]
    inner = v.g
    if any(p > 0 for p in (*front, *back)):
        ends = [-p if p > 0 else _END for p in back]
        along = axes or (v.b.ints(range(half)),)
        inner = v.do("Slice", inner, v.b.ints([max(p, 0) for p in front]), v.b.ints(ends), *along)
    if any(p < 0 for p in (*front, *back)):
        inner = v.do("Pad", inner, v.b.ints([max(-p, 0) for p in (*front, *back)]), *(("", *axes) if axes else ()))
    return inner


def _filling(v: Call, slot: int) -> str:
    """All that arrived outside of the part that was there before."""
    if v.attr("mode", "constant") != "constant":
        return v.zeros(slot)
    totals = [v.b.reduce("ReduceSum", part, None, keepdims=False) for part in (v.g, _cropped(v))]
    return v.b.reshape_like(v.do("Sub", *totals), v.x(slot))


def _one_hot(v: Call, slot: int) -> str:
    """Of the two values: all that arrived where the second stands, and the rest."""
    places = v.b.constant(np.array([0, 1], v.dtype(2).numpy))
    hot = v.b.op("OneHot", v.x(0), v.x(1), places, axis=v.attr("axis", -1))
    on = v.b.reduce("ReduceSum", v.b.op("Mul", v.g, hot), None, keepdims=False)
    both = v.b.reduce("ReduceSum", v.g, None, keepdims=False)
    return v.b.op("Concat", *[v.b.unsqueeze(part, [0]) for part in (v.b.op("Sub", both, on), on)], axis=0)


_WHERE = Stop("positions are whole numbers")

ROWS: Rows = {
    ("", "Gather"): row(_gather, _WHERE),
    ("", "GatherElements"): row(_gather_elements, _WHERE),
    ("", "GatherND"): row(_gather_nd, _WHERE),
    ("", "ScatterElements"): row(_scattered_over, _WHERE, _scattered),
    ("", "ScatterND"): row(_scattered_over, _WHERE, _scattered),
    ("", "Slice"): row(_slice, _WHERE),
    ("", "Pad"): row(_pad, _WHERE, _filling, _WHERE),
    ("", "Compress"): row(_moved(repeats=False), _WHERE),
    ("", "ReverseSequence"): row(_moved(repeats=False), _WHERE),
    ("", "TopK"): row(_top_k, _WHERE),
    ("", "OneHot"): row(_WHERE, _WHERE, _one_hot),
}
