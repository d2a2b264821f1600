"""VJPs of convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from amp_rewrite.rewrite.autodiff.vjp.indexing import Positions, scattered
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Family, Stop, row
from amp_rewrite.rewrite.autodiff.vjp.window import Pads, Window, explicit_pads, halves, unpadded, window

_PURPOSE = "its gradient"


def _of_conv(v: Call) -> Window:
    return _window(v, v.dims(1, _PURPOSE)[2:])


def _window(v: Call, kernel: Sequence[int]) -> Window:
    return window(v, kernel, wide=v.shape(0), narrow=v.out_shape)


def _conv_x(v: Call, slot: int) -> str:
    """Pointwise: a Conv by the transposed weight, which has more kernels than a ConvTranspose."""
    conv = _of_conv(v)
    if conv.group == 1 and conv.pointwise:
        transposed = v.do("Transpose", v.x(1), perm=[1, 0, *range(2, 2 + conv.rank)])
        return v.do("Conv", v.g, transposed, kernel_shape=conv.kernel)
    return conv.widened(v, v.g, v.x(1), v.x(0))


def _conv_bias(v: Call, slot: int) -> str:
    spatial = range(2, len(v.dims(1, _PURPOSE)))
    return v.b.reduce("ReduceSum", v.g, [0, *spatial], keepdims=False)


def _of_transpose(v: Call) -> Window:
    """Window of a ConvTranspose, whose output is the wide tensor: it is the gradient of a Conv by its input."""
    kernel = v.dims(1, _PURPOSE)[2:]
    pads = explicit_pads(v, len(kernel)) if v.attr("output_shape") is None else None
    front, back = pads or _transposed_pads(v, kernel)
    return replace(window(v, kernel, wide=v.out_shape, narrow=v.shape(0)), front=front, back=back)


def _transposed_pads(v: Call, kernel: Sequence[int]) -> Pads:
    """Padding that the op removes so that its output has the dims of `auto_pad` or `output_shape`."""
    narrow = v.dims(0, "its gradient with auto_pad or output_shape")
    plain, rank = unpadded(v, kernel, wide=None, narrow=narrow), len(kernel)
    extra = v.attr("output_padding") or [0] * rank
    wide = v.attr("output_shape") or [n * s for n, s in zip(narrow[2:], plain.strides, strict=True)]
    sizes = zip(narrow[2:], plain.strides, plain.spans, extra, wide[-rank:], strict=True)
    return halves(v, [max(s * (n - 1) + e + span - w, 0) for n, s, span, e, w in sizes])


def _transpose_x(v: Call, slot: int) -> str:
    conv = _of_transpose(v)
    layout = {"kernel_shape": conv.kernel, "strides": conv.strides, "dilations": conv.dilations}
    convolved = v.do("Conv", v.g, v.x(1), **layout, pads=conv.pads, group=conv.group)
    extra = v.attr("output_padding") or [0]
    if all(e < s for e, s in zip(extra, conv.strides, strict=False)) and not v.attr("output_shape"):
        return convolved
    dims = v.b.shape_of(v.x(0))  # drop windows that read only the output's extra end
    return v.do("Slice", convolved, v.b.ints([0] * (2 + conv.rank)), dims)


def _max_pool(v: Call, slot: int) -> str:
    """Scatter the gradient by the op's own output Indices."""
    if v.attr("storage_order", 0):
        raise v.error("no gradient with storage_order 1, whose indices count columns first; set it to 0")
    pool = unpadded(v, v.attr("kernel_shape"), wide=None, narrow=None)
    overlap = any(span > stride for span, stride in zip(pool.spans, pool.strides, strict=True))
    total = v.b.reshape(v.b.op("Size", v.x(0)), [1])
    taken, g = (v.b.reshape(x, [-1]) for x in (v.y(1), v.g))
    return v.b.reshape_like(scattered(v, Positions("ScatterElements", taken, 0), total, g, repeats=overlap), v.x(0))


def _average_pool(v: Call, slot: int) -> str:
    """Divide the gradient by each window's count and spread it over the window."""
    pool = _window(v, v.attr("kernel_shape"))
    return _spread_alone(v, pool, v.do("Div", v.g, _counted(v, pool)))


def _spread_alone(v: Call, pool: Window, share: str) -> str:
    """Spread a value per window over all its positions, each channel separately."""
    shape = v.part(v.b.shape_of(share) if v.b.known(share) else v.b.op("Shape", share), 2, 2 + pool.rank)
    alone = v.b.reshape(share, v.b.op("Concat", v.b.ints([-1, 1]), shape, axis=0))
    ones = v.b.full(v.b.ints([1, 1, *pool.kernel]), 1.0, v.dtype(0))
    return v.b.reshape_like(pool.widened(v, alone, ones, v.x(0)), v.x(0))


def _counted(v: Call, pool: Window) -> str | float:
    """Divisor of each window's sum: one number, or one per window."""
    ceiled, padded = bool(v.attr("ceil_mode", 0)), any(pool.pads)
    included = bool(v.attr("count_include_pad", 0))
    if not ceiled and (included or not padded):
        return float(math.prod(pool.kernel))
    if pool.wide is None or pool.narrow is None:
        raise v.error("its gradient with padding or ceil_mode needs fixed spatial dims; declare them")
    counts = np.ones((), v.dtype(0).numpy)
    for axis in range(pool.rank):
        front, back = (pool.front[axis], pool.back[axis]) if included else (0, 0)
        starts = np.arange(pool.narrow[axis]) * pool.strides[axis] - pool.front[axis]
        places = starts[:, None] + np.arange(pool.kernel[axis]) * pool.dilations[axis]
        inside = ((places >= -front) & (places < pool.wide[axis] + back)).sum(1)
        counts = counts[..., None] * inside.astype(counts.dtype)
    return v.b.constant(counts[None, None])


def _lp_pool(v: Call, slot: int) -> str:
    """sign(x)·|x|ᵖ⁻¹ times the spread of g·y¹⁻ᵖ, for y = (Σ|x|ᵖ)^(1/p); 0 where y is 0."""
    pool = _window(v, v.attr("kernel_shape"))
    return v.do("Mul", _powered(v), _spread_alone(v, pool, _unpowered(v)))


def _powered(v: Call) -> str:
    """sign(x)·|x|ᵖ⁻¹; x itself for p = 2."""
    p = v.attr("p", 2)
    return v.x(0) if p == 2 else v.do("Mul", v.do("Sign", v.x(0)), _power(v, v.do("Abs", v.x(0)), p - 1))


def _unpowered(v: Call) -> str:
    """g·y¹⁻ᵖ."""
    zero = v.do("Equal", v.y(), 0.0)
    return v.do("Div", v.g, _power(v, v.do("Where", zero, 1.0, v.y()), v.attr("p", 2) - 1))


def _power(v: Call, x: str, exponent: int) -> str:
    return x if exponent == 1 else v.do("Pow", x, float(exponent))


def _max_unpool(v: Call, slot: int) -> str:
    """Gather the gradient from the positions of the elements."""
    flat = v.b.reshape(v.g, [-1])
    if v.has(2):
        raise v.error("no gradient with an output shape, which moves the indices; leave it out")
    return v.do("Gather", flat, v.x(1))


def _col2im(v: Call, slot: int) -> str:
    """Cut the image gradient into blocks again, tap by tap."""
    image, block = v.constant(1), v.constant(2)
    if image is None or block is None:
        raise v.error("its gradient needs the shapes of image and block as constants; make them initializers")
    blocks = window(v, [int(k) for k in block], wide=(None, None, *[int(n) for n in image]), narrow=None)
    ends = zip(blocks.wide or (), blocks.front, blocks.back, blocks.spans, blocks.strides, strict=True)
    counts = [(n + f + e - span) // s + 1 for n, f, e, span, s in ends]
    padded = v.do("Pad", v.g, v.b.ints([0, 0, *blocks.front, 0, 0, *blocks.back]))
    axes, strides = v.b.ints(range(2, 2 + blocks.rank)), v.b.ints(blocks.strides)
    taps = [
        v.b.unsqueeze(v.do("Slice", padded, v.b.ints(begin), v.b.ints(end), axes, strides), [2])
        for begin, end in blocks.taps(counts)
    ]
    return v.b.reshape_like(v.do("Concat", *taps, axis=2), v.x(0))


def _global_average(v: Call, slot: int) -> str:
    shape = v.b.shape_of(v.x(0))
    return v.b.spread(v.shared(v.g, v.part(shape, 2, v.rank(0))), shape)


_WHOLE = Stop("positions and shapes are integers")

ROWS: Family = {
    "Conv": row(_conv_x, lambda v, slot: _of_conv(v).weight(v, v.x(0), v.g, v.dims(slot, _PURPOSE)[:2]), _conv_bias),
    "ConvTranspose": row(
        _transpose_x, lambda v, slot: _of_transpose(v).weight(v, v.g, v.x(0), v.dims(slot, _PURPOSE)[:2]), _conv_bias
    ),
    "MaxPool": row(_max_pool),
    "AveragePool": row(_average_pool),
    "GlobalAveragePool": row(_global_average),
    "LpPool": row(_lp_pool),
    "GlobalLpPool": row(lambda v, slot: v.do("Mul", _powered(v), _unpowered(v))),
    "MaxUnpool": row(_max_unpool, _WHOLE, _WHOLE),
    "Col2Im": row(_col2im, _WHOLE, _WHOLE),
}
