"""VJPs of data movement: Gather, Scatter, Slice, Pad, reshapes, Concat and Split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.builder import fixed_dims
from amp_rewrite.rewrite.autodiff.vjp.rule import ALL_OUTPUTS, END, Call, Rows, Stop, from_front, row

PADDING_KEY = "amp_rewrite.padding_idx"
"""Metadata key of a Gather for the one row without a gradient, as with torch.nn.Embedding(padding_idx=…)."""

_EXTREMES = ("max", "min")


def padding_index(node: NodeProto) -> int | None:
    """Return the padding row of a Gather, or None."""
    return next((int(entry.value) for entry in node.metadata_props if entry.key == PADDING_KEY), None)


class Positions(NamedTuple):
    """Positions in a tensor, as the indices of ScatterND or ScatterElements."""

    op_type: str
    indices: str
    axis: int | None = None


def scatter(v: Call, to: Positions, shape: str, g: str, *, repeats: bool) -> str:
    """Scatter the gradient g into zeros of this shape; with `repeats`, add the gradients of repeated positions.

    Low types are summed in float32, because a sum may have many terms, and CPU kernels cannot add in a low type.
    """
    target = v.dtype(0)
    dtype = DType.FLOAT if target.low and repeats else target
    terms, reduction = v.b.cast(g, dtype, of=target), "add" if repeats else None
    added = v.do(to.op_type, v.b.full(shape, 0.0, dtype), to.indices, terms, axis=to.axis, reduction=reduction)
    return v.b.cast(added, target, of=dtype)


def scatter_by_position(v: Call, *, repeats: bool) -> str:
    """Append the gradient of input 0 for pure data movement: scatter each element back to its origin.

    The origins are found by running the op on the positions of the elements. `repeats`: whether an element may occur
    several times in the output.
    """
    x = v.x(0)
    count = v.b.op("Size", x)
    positions = v.b.reshape(v.arange(count), v.b.shape_of(x))
    inputs = [positions, *v.op.node.input[1:]]
    if v.op.op_type == "Pad":
        inputs[2:3] = [""] if len(inputs) > 2 else []  # the fill value has another type and is irrelevant
    origin, g = (v.b.reshape(i, [-1]) for i in (v.b.like(v.op.node, inputs)[0], v.g))
    total = v.b.reshape(count, [1])
    return v.b.reshape_like(scatter(v, Positions("ScatterElements", origin, 0), total, g, repeats=repeats), x)


def _gather(v: Call, slot: int) -> str:
    """Scatter-add the gradient; an axis other than 0 is first transposed to the front."""
    rank, axis = v.rank(0), v.axis(0)
    index_rank = v.rank(1)
    index = v.b.unsqueeze(v.b.cast(v.x(1), DType.INT64), [index_rank])
    if axis == 0:
        g = v.g
        padding = padding_index(v.op.node)
        if padding is not None:
            padded = v.b.op("Equal", v.x(1), v.b.scalar(padding, v.dtype(1)))
            g = v.do("Where", v.b.unsqueeze(padded, [*range(index_rank, index_rank + rank - 1)]), 0.0, g)
        return scatter(v, Positions("ScatterND", index), v.b.shape_of(v.x(0)), g, repeats=True)
    front = [axis, *[a for a in range(rank) if a != axis]]
    g_perm = [*range(axis, axis + index_rank), *range(axis), *range(axis + index_rank, rank - 1 + index_rank)]
    shape = v.b.op("Gather", v.b.shape_of(v.x(0)), v.b.ints(front))
    added = scatter(v, Positions("ScatterND", index), shape, v.do("Transpose", v.g, perm=g_perm), repeats=True)
    return v.do("Transpose", added, perm=[int(i) for i in np.argsort(front)])


def _gather_elements(v: Call, slot: int) -> str:
    axis, index_shape = v.axis(0), v.shape(1)
    to, repeats = Positions("ScatterElements", v.x(1), axis), index_shape is None or index_shape[axis] != 1
    return scatter(v, to, v.b.shape_of(v.x(0)), v.g, repeats=repeats)


def _gather_nd(v: Call, slot: int) -> str:
    if v.attr("batch_dims", 0):
        return scatter_by_position(v, repeats=True)
    return scatter(v, Positions("ScatterND", v.x(1)), v.b.shape_of(v.x(0)), v.g, repeats=True)


def _scatter_data(v: Call, slot: int) -> str:
    """Append the gradient of the data: zero for overwritten elements, but unchanged with the add reduction."""
    reduction = _reduction(v)
    if reduction in _EXTREMES:
        return _extreme_gradients(v)[0]
    if reduction == "add":
        return v.g
    return v.do(v.op.op_type, v.g, v.x(1), v.zeros(2), axis=_scatter_axis(v))


def _scatter_axis(v: Call) -> int | None:
    return v.attr("axis", 0) if v.op.op_type == "ScatterElements" else None


def _reduction(v: Call) -> str:
    reduction = v.attr("reduction", "none")
    if reduction not in ("none", "add", *_EXTREMES):
        raise v.error(f"reduction {reduction!r} has no gradient rule; use none, add, max or min")
    return str(reduction)


def _scatter_updates(v: Call, slot: int) -> str:
    return _extreme_gradients(v)[1] if _reduction(v) in _EXTREMES else _gather_updates(v, v.g)


def _gather_updates(v: Call, x: str) -> str:
    return v.do(v.op.op_type.replace("Scatter", "Gather"), x, v.x(1), axis=_scatter_axis(v))


def _extreme_gradients(v: Call) -> tuple[str, str]:
    """Append the gradients of data and updates, split equally among ties, as in torch.scatter_reduce."""
    equal = [v.do("Equal", v.x(0), v.y()), v.do("Equal", v.x(2), _gather_updates(v, v.y()))]
    data, updates = map(v.typed, equal)
    to = Positions(v.op.op_type, v.x(1), _scatter_axis(v))
    ties = v.do("Add", data, scatter(v, to, v.b.shape_of(v.x(0)), updates, repeats=True))
    share = v.do("Div", v.g, ties)
    return v.do("Mul", share, data), v.do("Mul", _gather_updates(v, share), updates)


def _slice(v: Call, slot: int) -> str:
    """Pad with zeros if starts and axes are constants and steps are 1; otherwise scatter by position."""
    starts, steps = v.constant(1), v.constant(4) if v.has(4) else np.ones(1)
    axes = v.constant(3) if v.has(3) else None if starts is None else np.arange(len(starts))
    if starts is None or axes is None or steps is None or (steps != 1).any():
        return scatter_by_position(v, repeats=False)
    begins = [0] * v.rank(0)
    for axis, start in zip(axes, starts, strict=True):
        begins[from_front(int(axis), v.rank(0))] = int(start)
    dims, result = fixed_dims(v.shape(0)), fixed_dims(v.out_shape)
    if dims is not None and result is not None:
        front = [min(max(b + n if b < 0 else b, 0), n) for b, n in zip(begins, dims, strict=True)]
        back = [n - b - c for n, b, c in zip(dims, front, result, strict=True)]
        return v.do("Pad", v.g, v.b.ints([*front, *back])) if any((*front, *back)) else v.g
    return v.do("Pad", v.g, _pads_at_run_time(v, begins))


def _pads_at_run_time(v: Call, begins: Sequence[int]) -> str:
    dims, result = v.b.op("Shape", v.x(0)), v.b.op("Shape", v.g)
    front = v.b.ints(begins)
    if min(begins, default=0) < 0:
        from_back = v.b.constant(np.array([b < 0 for b in begins]))
        front = v.b.op("Max", v.b.op("Where", from_back, v.b.op("Add", front, dims), front), v.b.ints([0]))
    front = v.b.op("Min", front, dims)
    return v.b.op("Concat", front, v.b.op("Sub", v.b.op("Sub", dims, front), result), axis=0)


def _pad(v: Call, slot: int) -> str:
    """Crop to the original part, or, in a mode with repeated elements, scatter-add each one to its origin."""
    if v.attr("mode", "constant") != "constant":
        return scatter_by_position(v, repeats=True)
    axes = (v.x(3),) if v.has(3) else ()
    constant = v.constant(1)
    if constant is None:
        return v.do("Pad", v.g, v.b.op("Neg", v.x(1)), "", *axes)
    pads = [int(p) for p in constant]
    half, inner = len(pads) // 2, v.g
    if max(pads, default=0) > 0:
        ends = [-p if p > 0 else END for p in pads[half:]]
        along = axes or (v.b.ints(range(half)),)
        inner = v.do("Slice", inner, v.b.ints([max(p, 0) for p in pads[:half]]), v.b.ints(ends), *along)
    if min(pads, default=0) < 0:
        inner = v.do("Pad", inner, v.b.ints([max(-p, 0) for p in pads]), *(("", *axes) if axes else ()))
    return inner


def _pad_value(v: Call, slot: int) -> str:
    """Append the gradient of the fill value: the sum of the gradient over the padding."""
    if v.attr("mode", "constant") != "constant":
        return v.zeros(slot)
    totals = [v.b.reduce("ReduceSum", x, None, keepdims=False) for x in (v.g, _pad(v, 0))]
    return v.b.reshape_like(v.do("Sub", *totals), v.x(slot))


# -- shapes ----------------------------------------------------------------------------------------


def _reshape_back(v: Call, slot: int) -> str:
    return v.b.reshape_like(v.g, v.x(0))


def _transpose(v: Call, slot: int) -> str:
    perm = v.attr("perm")
    return v.do("Transpose", v.g, perm=None if perm is None else [int(i) for i in np.argsort(perm)])


def _concat(v: Call, slot: int) -> str:
    """Return the input's part of the gradient; all inputs share one Split."""
    count = len(v.op.inputs)
    if count == 1:
        return v.g
    axis = v.axis(0)
    sizes: Sequence[int] | str | None
    sizes = fixed_dims(tuple(None if (s := v.shape(i)) is None else s[axis] for i in range(count)))
    if sizes is None:
        index = v.b.ints([axis])
        sizes = v.b.op("Concat", *[v.b.op("Gather", v.b.shape_of(v.x(i)), index) for i in range(count)], axis=0)
    return v.b.split(v.g, sizes, axis, results=count)[slot]


def _split(v: Call, slot: int) -> str:
    parts = [g or v.b.zeros_like(v.y(i), v.dtype(0)) for i, g in enumerate(v.gradients)]
    return v.joined(parts, v.attr("axis", 0))


def _tile(v: Call, slot: int) -> str:
    """Reshape to (repeat, dim, repeat, dim, …) and sum over the repeats."""
    pairs = [v.b.unsqueeze(s, [1]) for s in (v.x(1), v.b.shape_of(v.x(0)))]
    shape = v.b.reshape(v.b.op("Concat", *pairs, axis=1), [-1])
    return v.b.reduce("ReduceSum", v.b.reshape(v.g, shape), range(0, 2 * v.rank(0), 2), keepdims=False)


def _depth_to_space(v: Call, slot: int) -> str:
    """Append a SpaceToDepth and, for CRD mode, reorder the channels from block by block to channel by channel."""
    block = v.attr("blocksize")
    channels = v.do("SpaceToDepth", v.g, blocksize=block)
    if v.attr("mode", "DCR") == "DCR":
        return channels
    shape = v.b.shape_of(v.x(0))
    batch, dims = v.shape_part(shape, 0, 1), v.shape_part(shape, 2, 4)
    by_block = v.b.reshape(channels, v.b.op("Concat", batch, v.b.ints([block * block, -1]), dims, axis=0))
    return v.b.reshape(v.do("Transpose", by_block, perm=[0, 2, 1, 3, 4]), shape)


_POSITIONS = Stop("positions are integers")
_SIZES = Stop("shapes, axes and counts are integers")

ROWS: Rows = {
    "Gather": row(_gather, _POSITIONS),
    "GatherElements": row(_gather_elements, _POSITIONS),
    "GatherND": row(_gather_nd, _POSITIONS),
    "ScatterElements": row(_scatter_data, _POSITIONS, _scatter_updates),
    "ScatterND": row(_scatter_data, _POSITIONS, _scatter_updates),
    "Slice": row(_slice, _POSITIONS),
    "Pad": row(_pad, _POSITIONS, _pad_value, _POSITIONS),
    "Compress": row(lambda v, slot: scatter_by_position(v, repeats=False), _POSITIONS),
    "ReverseSequence": row(lambda v, slot: scatter_by_position(v, repeats=False), _POSITIONS),
    "TopK": row(lambda v, slot: v.do("ScatterElements", v.zeros(0), v.y(1), v.g, axis=v.attr("axis", -1)), _POSITIONS),
    "Reshape": row(_reshape_back, _SIZES),
    "Flatten": row(_reshape_back),
    "Squeeze": row(_reshape_back, _SIZES),
    "Unsqueeze": row(_reshape_back, _SIZES),
    "Transpose": row(_transpose),
    "Expand": row(lambda v, slot: v.sum_to(v.g, slot), _SIZES),
    "Concat": row(_concat),
    "Split": row(_split, _SIZES, outputs=ALL_OUTPUTS),
    "Tile": row(_tile, _SIZES),
    "DepthToSpace": row(_depth_to_space),
    "SpaceToDepth": row(lambda v, slot: v.do("DepthToSpace", v.g, blocksize=v.attr("blocksize"))),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike", "EyeLike"), row(Stop("only its shape is read"))),
    "Trilu": row(lambda v, slot: v.do("Trilu", v.g, *v.op.node.input[1:], upper=v.attr("upper", 1)), _SIZES),
}
