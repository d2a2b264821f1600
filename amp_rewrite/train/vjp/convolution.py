"""VJPs of convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from amp_rewrite.train.vjp.indexing import scattered
from amp_rewrite.train.vjp.row import Call, Rows, Stop, row
from amp_rewrite.train.vjp.window import Window, halves, window

# -- Conv ----------------------------------------------------------------------------------------------------


def _of_conv(v: Call) -> tuple[Window, int]:
    """The window of a Conv, and its input channels."""
    weight = v.dims(1, "its gradient")
    kernel = weight[2:]
    found = window(v, kernel, wide=v.shape(0), narrow=v.b.shape(v.op.node.output[0]))
    return found, weight[1] * found.group


def _conv_x(v: Call, slot: int) -> str:
    """Where each place stands for itself a Conv by the turned weight, which has more kernels than a ConvTranspose."""
    found, _ = _of_conv(v)
    if found.group == 1 and found.pointwise:
        turned = v.do("Transpose", v.x(1), perm=[1, 0, *range(2, 2 + found.rank)])
        return v.do("Conv", v.g, turned, kernel_shape=found.kernel)
    return found.widened(v, v.g, v.x(1), v.x(0))


def _conv_weight(v: Call, slot: int) -> str:
    found, channels = _of_conv(v)
    return found.weight(v, v.x(0), v.g, (v.dims(1, "its gradient")[0], channels))


def _conv_bias(v: Call, slot: int) -> str:
    spatial = range(2, len(v.dims(1, "its gradient")))
    return v.b.reduce("ReduceSum", v.g, [0, *spatial], keepdims=False)


# -- ConvTranspose: the gradient of a Conv by its input, so its own gradients are that Conv and its weight's ---


def _of_transpose(v: Call) -> tuple[Window, int]:
    """The window of a ConvTranspose, whose output is the wide side, and its output channels."""
    weight = v.dims(1, "its gradient")
    wide = v.b.shape(v.op.node.output[0])
    front, back = _transposed_pads(v, weight[2:])
    plain = window(v, weight[2:], wide=wide, narrow=v.shape(0))
    found = Window(
        plain.kernel, plain.strides, plain.dilations, tuple(front), tuple(back), plain.group, plain.wide, plain.narrow
    )
    return found, weight[1] * found.group


def _transposed_pads(v: Call, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """The padding that the op itself takes off, by `pads`, `auto_pad` or `output_shape`."""
    rank, mode, stated = len(kernel), v.attr("auto_pad", "NOTSET"), v.attr("output_shape")
    if stated is None and mode in ("NOTSET", "VALID"):
        pads = [0] * 2 * rank if mode == "VALID" else [int(p) for p in v.attr("pads") or [0] * 2 * rank]
        return pads[:rank], pads[rank:]
    narrow = v.dims(0, "its gradient with auto_pad or output_shape")[2:]
    strides, dilations, extra = (
        v.attr(n) or [d] * rank for n, d in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    wide = stated or [n * s for n, s in zip(narrow, strides, strict=True)]
    sizes = zip(narrow, strides, kernel, dilations, extra, list(wide)[-rank:], strict=True)
    totals = [max(s * (n - 1) + e + (k - 1) * d + 1 - w, 0) for n, s, k, d, e, w in sizes]
    return halves(totals, upper=mode == "SAME_UPPER")


def _transpose_x(v: Call, slot: int) -> str:
    found, _ = _of_transpose(v)
    slid = v.do(
        "Conv",
        v.g,
        v.x(1),
        kernel_shape=found.kernel,
        strides=found.strides,
        dilations=found.dilations,
        pads=[*found.front, *found.back],
        group=found.group,
    )
    extra = v.attr("output_padding") or [0]
    if all(e < s for e, s in zip(extra, found.strides, strict=False)) and not v.attr("output_shape"):
        return slid
    dims = v.b.shape_of(v.x(0))  # windows that lie in the output's extra end alone are none of the input's
    return v.do("Slice", slid, v.b.ints([0] * (2 + found.rank)), dims)


def _transpose_weight(v: Call, slot: int) -> str:
    found, channels = _of_transpose(v)
    return found.weight(v, v.g, v.x(0), (v.dims(1, "its gradient")[0], channels))


# -- poolings ------------------------------------------------------------------------------------------------


def _max_pool(v: Call, slot: int) -> str:
    """To the element that was taken, by the op's own output Indices."""
    if v.attr("storage_order", 0):
        raise v.error("no gradient with storage_order 1, whose indices count columns first; set it to 0")
    rank = len(v.attr("kernel_shape"))
    strides, dilations = (v.attr(name) or [1] * rank for name in ("strides", "dilations"))
    spans = [(k - 1) * d + 1 for k, d in zip(v.attr("kernel_shape"), dilations, strict=True)]
    overlap = any(span > stride for span, stride in zip(spans, strides, strict=True))
    total = v.b.reshape(v.b.op("Size", v.x(0)), [1])
    taken, g = (v.b.reshape(x, [-1]) for x in (v.y(1), v.g))
    return v.b.reshape_like(scattered(v, "ScatterElements", total, taken, g, repeats=overlap, axis=0), v.x(0))


def _average_pool(v: Call, slot: int) -> str:
    """Each window's share to all of its places."""
    found = window(v, v.attr("kernel_shape"), wide=v.shape(0), narrow=v.b.shape(v.op.node.output[0]))
    return _spread_alone(v, found, v.do("Div", v.g, _counted(v, found)))


def _spread_alone(v: Call, found: Window, share: str) -> str:
    """What each window has to all of its places, every channel by itself."""
    shape = v.b.op(
        "Slice",
        v.b.shape_of(share) if v.b.known(share) else v.b.op("Shape", share),
        v.b.ints([2]),
        v.b.ints([2 + found.rank]),
    )
    alone = v.b.reshape(share, v.b.op("Concat", v.b.ints([-1, 1]), shape, axis=0))
    ones = v.b.full(v.b.ints([1, 1, *found.kernel]), 1.0, v.dtype(0))
    return v.b.reshape_like(found.widened(v, alone, ones, v.x(0)), v.x(0))


def _counted(v: Call, found: Window) -> str | float:
    """By how many places each window's sum was divided: one number, or one per window."""
    ceiled, padded = bool(v.attr("ceil_mode", 0)), any((*found.front, *found.back))
    included = bool(v.attr("count_include_pad", 0))
    if not ceiled and (included or not padded):
        return float(math.prod(found.kernel))
    if found.wide is None or found.narrow is None:
        raise v.error("its gradient with padding or ceil_mode needs fixed spatial dims; declare them")
    counts = np.ones((), v.dtype(0).numpy)
    for axis in range(found.rank):
        front, back = (found.front[axis], found.back[axis]) if included else (0, 0)
        starts = np.arange(found.narrow[axis]) * found.strides[axis] - found.front[axis]
        places = starts[:, None] + np.arange(found.kernel[axis]) * found.dilations[axis]
        inside = ((places >= -front) & (places < found.wide[axis] + back)).sum(1)
        counts = counts[..., None] * inside.astype(counts.dtype)
    return v.b.constant(counts[None, None])


def _lp_pool(v: Call, slot: int) -> str:
    """y = (Σ|x|ᵖ)^(1/p): to each place its sign·|x|ᵖ⁻¹, times what its windows give of g·y¹⁻ᵖ; 0 where y is 0."""
    found = window(v, v.attr("kernel_shape"), wide=v.shape(0), narrow=v.b.shape(v.op.node.output[0]))
    return v.do("Mul", _powered(v), _spread_alone(v, found, _unpowered(v)))


def _global_lp_pool(v: Call, slot: int) -> str:
    return v.do("Mul", _powered(v), _unpowered(v))


def _powered(v: Call) -> str:
    """sign(x)·|x|ᵖ⁻¹: for a square x itself."""
    p = v.attr("p", 2)
    return v.x(0) if p == 2 else v.do("Mul", v.do("Sign", v.x(0)), _power(v, v.do("Abs", v.x(0)), p - 1))


def _unpowered(v: Call) -> str:
    """g·y¹⁻ᵖ."""
    zero = v.do("Equal", v.y(), 0.0)
    return v.do("Div", v.g, _power(v, v.do("Where", zero, 1.0, v.y()), v.attr("p", 2) - 1))


def _power(v: Call, x: str, exponent: int) -> str:
    return x if exponent == 1 else v.do("Pow", x, float(exponent))


def _max_unpool(v: Call, slot: int) -> str:
    """From the place where each element was put."""
    flat = v.b.reshape(v.g, [-1])
    if v.has(2):
        raise v.error("no gradient with an output shape, which moves the indices; leave it out")
    return v.do("Gather", flat, v.x(1))


def _col2im(v: Call, slot: int) -> str:
    """What each block sees of the image: the blocks again, tap by tap."""
    image, block = v.constant(1), v.constant(2)
    if image is None or block is None:
        raise v.error("its gradient needs the image's and the block's shape as constants")
    found = window(v, [int(k) for k in block], wide=(None, None, *[int(n) for n in image]), narrow=None)
    ends = zip(found.wide or (), found.front, found.back, found.spans, found.strides, strict=True)
    counts = [(n + f + e - span) // s + 1 for n, f, e, span, s in ends]
    padded = v.do("Pad", v.g, v.b.ints([0, 0, *found.front, 0, 0, *found.back]))
    axes, strides = v.b.ints(range(2, 2 + found.rank)), v.b.ints(found.strides)
    taps = []
    for tap in np.ndindex(found.kernel):
        begin = [t * d for t, d in zip(tap, found.dilations, strict=True)]
        end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, counts, found.strides, strict=True)]
        taps.append(v.b.unsqueeze(v.do("Slice", padded, v.b.ints(begin), v.b.ints(end), axes, strides), [2]))
    return v.b.reshape_like(v.do("Concat", *taps, axis=2), v.x(0))


def _global_average(v: Call, slot: int) -> str:
    shape = v.b.shape_of(v.x(0))
    places = v.b.op("Slice", shape, v.b.ints([2]), v.b.ints([v.rank(0)]))
    return v.do("Expand", v.shared(v.g, places), shape)


def _global_max(v: Call, slot: int) -> str:
    """To the elements that are the largest, in equal parts."""
    held = v.do("Equal", v.x(0), v.y())
    spatial = range(2, v.rank(0))
    ties = v.b.reduce("ReduceSum", v.b.op("Cast", held, to=v.dtype(0).code), spatial, keepdims=True)
    return v.do("Where", held, v.do("Div", v.g, ties), 0.0)


_WHOLE = Stop("places and shapes are whole numbers")

ROWS: Rows = {
    ("", "Conv"): row(_conv_x, _conv_weight, _conv_bias),
    ("", "ConvTranspose"): row(_transpose_x, _transpose_weight, _conv_bias),
    ("", "MaxPool"): row(_max_pool),
    ("", "AveragePool"): row(_average_pool),
    ("", "GlobalAveragePool"): row(_global_average),
    ("", "LpPool"): row(_lp_pool),
    ("", "GlobalLpPool"): row(_global_lp_pool),
    ("", "MaxUnpool"): row(_max_unpool, _WHOLE, _WHOLE),
    ("", "Col2Im"): row(_col2im, _WHOLE, _WHOLE),
    ("", "GlobalMaxPool"): row(_global_max),
}
