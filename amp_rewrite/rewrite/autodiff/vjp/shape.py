"""VJPs of operators that change shapes: reshaping, permuting, repeating, joining and cutting."""

from __future__ import annotations

import numpy as np

from amp_rewrite.rewrite.autodiff.facts import known_dims
from amp_rewrite.rewrite.autodiff.vjp.rule import ALL_OUTPUTS, Call, Family, Stop, row

_WHOLE = Stop("shapes, axes and counts are integers")


def _reshape_back(v: Call, slot: int) -> str:
    return v.b.reshape_like(v.g, v.x(0))


def _transpose(v: Call, slot: int) -> str:
    perm = v.attr("perm")
    return v.do("Transpose", v.g, perm=None if perm is None else [int(i) for i in np.argsort(perm)])


def _concat(v: Call, slot: int) -> str:
    """Take this input's part of the gradient; one Split serves all inputs."""
    count = len(v.op.inputs)
    if count == 1:
        return v.g
    axis = v.axis(0)
    dims = known_dims(tuple(None if (s := v.shape(i)) is None else s[axis] for i in range(count)))
    if dims is not None:
        return v.b.split(v.g, dims, axis, results=count)[slot]
    index = v.b.ints([axis])
    sizes = v.b.op("Concat", *[v.b.op("Gather", v.b.shape_of(v.x(i)), index) for i in range(count)], axis=0)
    return v.b.split(v.g, sizes, axis, results=count)[slot]


def _split(v: Call, slot: int) -> str:
    parts = [g or v.b.zeros_like(v.y(i), v.dtype(0)) for i, g in enumerate(v.gradients)]
    return v.joined(parts, v.attr("axis", 0))


def _tile(v: Call, slot: int) -> str:
    """Reshape to (repeat, dim, repeat, dim …) and sum over the repeats."""
    rank = v.rank(0)
    repeats, dims = v.constant(1), known_dims(v.shape(0))
    if repeats is not None and dims is not None:
        shape = v.b.ints([int(n) for pair in zip(repeats, dims, strict=True) for n in pair])
    else:
        pairs = [v.b.unsqueeze(s, [1]) for s in (v.x(1), v.b.shape_of(v.x(0)))]
        shape = v.b.reshape(v.b.op("Concat", *pairs, axis=1), [-1])
    return v.b.reduce("ReduceSum", v.b.reshape(v.g, shape), range(0, 2 * rank, 2), keepdims=False)


def _depth_to_space(v: Call, slot: int) -> str:
    """SpaceToDepth, which orders channels block by block; for CRD, transpose them to channel by channel."""
    block = v.attr("blocksize")
    deep = v.do("SpaceToDepth", v.g, blocksize=block)
    if v.attr("mode", "DCR") == "DCR":
        return deep
    shape = v.b.shape_of(v.x(0))
    batch, dims = v.part(shape, 0, 1), v.part(shape, 2, 4)
    apart = v.b.reshape(deep, v.b.op("Concat", batch, v.b.ints([block * block, -1]), dims, axis=0))
    return v.b.reshape(v.do("Transpose", apart, perm=[0, 2, 1, 3, 4]), shape)


ROWS: Family = {
    "Reshape": row(_reshape_back, _WHOLE),
    "Flatten": row(_reshape_back),
    "Squeeze": row(_reshape_back, _WHOLE),
    "Unsqueeze": row(_reshape_back, _WHOLE),
    "Transpose": row(_transpose),
    "Expand": row(lambda v, slot: v.sum_to(v.g, slot), _WHOLE),
    "Concat": row(_concat),
    "Split": row(_split, _WHOLE, outputs=ALL_OUTPUTS),
    "Tile": row(_tile, _WHOLE),
    "DepthToSpace": row(_depth_to_space),
    "SpaceToDepth": row(lambda v, slot: v.do("DepthToSpace", v.g, blocksize=v.attr("blocksize"))),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike", "EyeLike"), row(Stop("only its shape is read"))),
    "Trilu": row(lambda v, slot: v.do("Trilu", v.g, *([v.x(1)] if v.has(1) else []), upper=v.attr("upper", 1)), _WHOLE),
}
