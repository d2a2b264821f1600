"""VJPs of convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amp_rewrite.rewrite.autodiff.builder import Shape, fixed_dims
from amp_rewrite.rewrite.autodiff.vjp.movement import Positions, scatter
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Rows, row

_MIN_CHANNELS, _MAX_TAPS = 8, 49
"""Limits for computing one product per tap; within them, it is faster than a convolution on a CPU, as measured."""


@dataclass(frozen=True, slots=True)
class Window:
    """Windows over the spatial axes of a *wide* tensor, one for each position of a *narrow* tensor.

    Position o of the narrow tensor reads the wide one at o·stride + tap·dilation − front, for tap < kernel. A
    convolution maps wide to narrow. `wide` and `narrow` are spatial dims, or None if unknown.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    front: tuple[int, ...]
    back: tuple[int, ...]
    group: int
    wide: tuple[int, ...] | None
    narrow: tuple[int, ...] | None

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def pads(self) -> list[int]:
        return [*self.front, *self.back]

    @property
    def spans(self) -> tuple[int, ...]:
        """The extent of a window along each axis, from the first to the last tap."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def _last_extent(self) -> list[int] | None:
        """The size from the start of the last window to the end of the padded tensor; None if dims are unknown."""
        if self.wide is None or self.narrow is None:
            return None
        sizes = zip(self.wide, self.front, self.back, self.narrow, self.strides, strict=True)
        return [n + f + e - (o - 1) * s for n, f, e, o, s in sizes]

    def input_grad(self, v: Call, narrow: str, weight: str, like: str) -> str:
        """Append the input gradient of a convolution: add each narrow element, times the weight, to its window.

        `weight` is [channels, wide channels per group, kernel…]. The result has the spatial dims of `like`, the wide
        tensor.
        """
        attributes: dict[str, Any] = {"strides": self.strides, "dilations": self.dilations, "group": self.group}
        attributes["kernel_shape"] = self.kernel
        if self._last_extent is None:  # crop the padding in front, and crop or pad the end to the dims of `like`
            spread = v.do("ConvTranspose", narrow, weight, **attributes)
            dims = [v.shape_part(v.b.op("Shape", x), 2, 2 + self.rank) for x in (like, spread)]
            front = v.b.ints(self.front)
            end = v.b.op("Add", v.b.op("Sub", *dims), front)
            none = v.b.ints([0, 0])
            return v.do("Pad", spread, v.b.op("Concat", none, v.b.op("Neg", front), none, end, axis=0))
        # the remainder at the end becomes output_padding, because CUDA kernels do not support uneven padding
        remainder = [r - span for r, span in zip(self._last_extent, self.spans, strict=True)]
        # a negative remainder means that windows extend beyond the padding, as in a pool with ceil_mode
        back = [e + max(-r, 0) for e, r in zip(self.back, remainder, strict=True)]
        remainder = [max(r, 0) for r in remainder]
        attributes.update(pads=[*self.front, *back], output_padding=remainder if any(remainder) else None)
        return v.do("ConvTranspose", narrow, weight, **attributes)

    def weight_grad(self, v: Call, wide: str, narrow: str, channels: Sequence[int]) -> str:
        """Append the weight gradient of a convolution: for each tap, sum narrow elements times the values they read.

        The result is [*channels, kernel…]. `channels`: the number of channels of the narrow tensor, and of the wide
        tensor per group.
        """
        taps = math.prod(self.kernel)
        enough_work = channels[1] >= _MIN_CHANNELS or taps == 1
        extents = self._last_extent
        # no window extends beyond the padding, and no tensor is empty
        inside = extents is not None and all(r >= span for r, span in zip(extents, self.spans, strict=True))
        inside = inside and 0 not in (*(self.wide or ()), *(self.narrow or ()))
        if self.group == 1 and enough_work and taps <= _MAX_TAPS and inside:
            return self._weight_by_taps(v, wide, narrow, channels)
        return self._weight_by_conv(v, wide, narrow, channels[1])

    def _weight_by_taps(self, v: Call, wide: str, narrow: str, channels: Sequence[int]) -> str:
        """Append one matrix product per tap. Channels are the last axis, so that each tap reads contiguous rows."""
        assert self.narrow is not None
        x = v.do("Transpose", wide, perm=[0, *range(2, 2 + self.rank), 1])
        if any(self.pads):
            x = v.do("Pad", x, v.b.ints([0, *self.front, 0, 0, *self.back, 0]))
        g = v.b.reshape(v.do("Transpose", narrow, perm=[1, 0, *range(2, 2 + self.rank)]), [channels[0], -1])
        products, axes = [], v.b.ints(range(1, 1 + self.rank))
        for tap in np.ndindex(self.kernel):
            begin = [t * d for t, d in zip(tap, self.dilations, strict=True)]
            end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, self.narrow, self.strides, strict=True)]
            taps = v.do("Slice", x, v.b.ints(begin), v.b.ints(end), axes, v.b.ints(self.strides))
            products.append(v.do("MatMul", g, v.b.reshape(taps, [-1, channels[1]])))
        by_tap = v.b.reshape(v.joined(products, 1), [channels[0], *self.kernel, channels[1]])
        return v.do("Transpose", by_tap, perm=[0, 1 + self.rank, *range(1, 1 + self.rank)])

    def _weight_by_conv(self, v: Call, wide: str, narrow: str, channels: int) -> str:
        """Append one convolution with the narrow tensor as its weight.

        Batch and channels are exchanged, as are strides and dilations.
        """
        spatial = range(2, 2 + self.rank)
        swap = [1, 0, *spatial]
        x, weight = self._exchanged(v, wide, channels), v.do("Transpose", narrow, perm=swap)
        exchanged = {"strides": self.dilations, "dilations": self.strides}
        taps = v.do("Conv", x, weight, **exchanged, pads=self.pads, group=self.group)
        # the result has extra taps unless the last window ends at the end of the padded tensor
        extents = self._last_extent or [0] * self.rank
        if any((r - 1) // d + 1 != k for r, d, k in zip(extents, self.dilations, self.kernel, strict=True)):
            limits = v.b.ints(self.kernel)
            taps = v.do("Slice", taps, v.b.ints([0] * self.rank), limits, v.b.ints(spatial))
        return v.do("Transpose", taps, perm=swap)

    def _exchanged(self, v: Call, wide: str, channels: int) -> str:
        """Exchange the batch and the channels of each group: [channels per group, group × batch, …]."""
        spatial = range(2, 2 + self.rank)
        if self.group == 1:
            return v.do("Transpose", wide, perm=[1, 0, *spatial])
        shape = v.b.op("Shape", wide)
        batch, dims = v.shape_part(shape, 0, 1), v.shape_part(shape, 2, 2 + self.rank)
        grouped = v.b.reshape(wide, v.b.op("Concat", batch, v.b.ints([self.group, channels]), dims, axis=0))
        exchanged = v.do("Transpose", grouped, perm=[2, 1, 0, *range(3, 3 + self.rank)])
        return v.b.reshape(exchanged, v.b.op("Concat", v.b.ints([channels, -1]), dims, axis=0))


def window_without_pads(v: Call, kernel: Sequence[int], *, wide: Shape | None, narrow: Shape | None) -> Window:
    """Return the window described by an op's attributes, without padding."""
    strides, dilations = (tuple(v.attr(name) or [1] * len(kernel)) for name in ("strides", "dilations"))
    dims = [fixed_dims(None if s is None else s[2:]) for s in (wide, narrow)]
    return Window(tuple(kernel), strides, dilations, (), (), v.attr("group", 1), dims[0], dims[1])


def window(v: Call, kernel: Sequence[int], *, wide: Shape | None, narrow: Shape | None) -> Window:
    """Return the window described by an op's attributes; raise GradientError if `auto_pad` depends on unknown dims."""
    unpadded = window_without_pads(v, kernel, wide=wide, narrow=narrow)
    pads = explicit_pads(v, unpadded.rank)
    if pads is None:
        if unpadded.wide is None:
            mode = v.attr("auto_pad")
            raise v.error(f"its gradient with auto_pad {mode} needs fixed spatial dims; declare them, or set pads")
        ends = zip(unpadded.wide, unpadded.strides, unpadded.spans, strict=True)
        pads = split_pads(v, [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in ends])
    return replace(unpadded, front=pads[0], back=pads[1])


Pads = tuple[tuple[int, ...], tuple[int, ...]]
"""Padding at the front and at the back of each spatial axis."""


def explicit_pads(v: Call, rank: int) -> Pads | None:
    """Return the padding in an op's attributes; None if `auto_pad` derives it from the dims."""
    mode = v.attr("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "VALID"):
        return None
    pads = [int(p) for p in (mode == "NOTSET" and v.attr("pads")) or [0] * 2 * rank]
    return tuple(pads[:rank]), tuple(pads[rank:])


def split_pads(v: Call, totals: Sequence[int]) -> Pads:
    """Split padding between front and back. An odd element goes to the back for SAME_UPPER, else to the front."""
    smaller = tuple(t // 2 for t in totals)
    larger = tuple(t - t // 2 for t in totals)
    return (smaller, larger) if v.attr("auto_pad", "NOTSET") == "SAME_UPPER" else (larger, smaller)


_PURPOSE = "its gradient"


def _conv(v: Call) -> Window:
    return window(v, v.dims(1, _PURPOSE)[2:], wide=v.shape(0), narrow=v.out_shape)


def _conv_x(v: Call, slot: int) -> str:
    """Append the input gradient. For a pointwise Conv, it is another Conv.

    More kernels exist for Conv than for ConvTranspose.
    """
    conv = _conv(v)
    if conv.group == 1 and {*conv.kernel, *conv.strides} == {1} and not any(conv.pads):
        transposed = v.do("Transpose", v.x(1), perm=[1, 0, *range(2, 2 + conv.rank)])
        return v.do("Conv", v.g, transposed, kernel_shape=conv.kernel)
    return conv.input_grad(v, v.g, v.x(1), v.x(0))


def _conv_bias(v: Call, slot: int) -> str:
    spatial = range(2, len(v.dims(1, _PURPOSE)))
    return v.b.reduce("ReduceSum", v.g, [0, *spatial], keepdims=False)


def _transposed_window(v: Call) -> Window:
    """Return the window of a ConvTranspose.

    A ConvTranspose computes the input gradient of a Conv, so its output is the wide tensor. With `auto_pad` or
    `output_shape`, the padding is the excess of the full result over the output.
    """
    kernel = v.dims(1, _PURPOSE)[2:]
    unpadded = window_without_pads(v, kernel, wide=v.out_shape, narrow=v.shape(0))
    pads = explicit_pads(v, unpadded.rank) if v.attr("output_shape") is None else None
    if pads is None:
        narrow = v.dims(0, "its gradient with auto_pad or output_shape")[2:]
        output_padding = v.attr("output_padding") or [0] * unpadded.rank
        wide = v.attr("output_shape") or [n * s for n, s in zip(narrow, unpadded.strides, strict=True)]
        sizes = zip(narrow, unpadded.strides, unpadded.spans, output_padding, wide[-unpadded.rank :], strict=True)
        pads = split_pads(v, [max(s * (n - 1) + e + span - w, 0) for n, s, span, e, w in sizes])
    return replace(unpadded, front=pads[0], back=pads[1])


def _transpose_x(v: Call, slot: int) -> str:
    conv = _transposed_window(v)
    attributes = {"kernel_shape": conv.kernel, "strides": conv.strides, "dilations": conv.dilations}
    convolved = v.do("Conv", v.g, v.x(1), **attributes, pads=conv.pads, group=conv.group)
    output_padding = v.attr("output_padding") or [0]
    if all(e < s for e, s in zip(output_padding, conv.strides, strict=False)) and not v.attr("output_shape"):
        return convolved
    dims = v.b.shape_of(v.x(0))  # drop windows that read only output padding
    return v.do("Slice", convolved, v.b.ints([0] * (2 + conv.rank)), dims)


def _max_pool(v: Call, slot: int) -> str:
    """Scatter the gradient to the positions in the op's Indices output."""
    if v.attr("storage_order", 0):
        raise v.error("there is no gradient rule for storage_order 1 (column-major indices); set it to 0")
    pool = window_without_pads(v, v.attr("kernel_shape"), wide=None, narrow=None)
    overlap = any(span > stride for span, stride in zip(pool.spans, pool.strides, strict=True))
    total = v.b.reshape(v.b.op("Size", v.x(0)), [1])
    indices, g = (v.b.reshape(x, [-1]) for x in (v.y(1), v.g))
    return v.b.reshape_like(scatter(v, Positions("ScatterElements", indices, 0), total, g, repeats=overlap), v.x(0))


def _average_pool(v: Call, slot: int) -> str:
    """Divide each gradient by its window's number of elements and spread it over the window, channel by channel."""
    pool = window(v, v.attr("kernel_shape"), wide=v.shape(0), narrow=v.out_shape)
    share = v.do("Div", v.g, _window_counts(v, pool))
    shape = v.shape_part(v.b.shape_of(share) if v.b.original(share) else v.b.op("Shape", share), 2, 2 + pool.rank)
    by_channel = v.b.reshape(share, v.b.op("Concat", v.b.ints([-1, 1]), shape, axis=0))
    ones = v.b.full(v.b.ints([1, 1, *pool.kernel]), 1.0, v.dtype(0))
    return v.b.reshape_like(pool.input_grad(v, by_channel, ones, v.x(0)), v.x(0))


def _window_counts(v: Call, pool: Window) -> str | float:
    """Return the divisor of the window sums: a number, or the name of a constant with one number per window."""
    ceil_mode, padded = bool(v.attr("ceil_mode", 0)), any(pool.pads)
    included = bool(v.attr("count_include_pad", 0))
    if not ceil_mode and (included or not padded):
        return float(math.prod(pool.kernel))
    if pool.wide is None or pool.narrow is None:
        raise v.error("its gradient with padding or ceil_mode needs fixed spatial dims; declare them")
    counts = np.ones((), v.dtype(0).numpy)
    for axis in range(pool.rank):
        front, back = (pool.front[axis], pool.back[axis]) if included else (0, 0)
        starts = np.arange(pool.narrow[axis]) * pool.strides[axis] - pool.front[axis]
        positions = starts[:, None] + np.arange(pool.kernel[axis]) * pool.dilations[axis]
        inside = ((positions >= -front) & (positions < pool.wide[axis] + back)).sum(1)
        counts = counts[..., None] * inside.astype(counts.dtype)
    return v.b.constant(counts[None, None])


ROWS: Rows = {
    "Conv": row(_conv_x, lambda v, slot: _conv(v).weight_grad(v, v.x(0), v.g, v.dims(slot, _PURPOSE)[:2]), _conv_bias),
    "ConvTranspose": row(
        _transpose_x,
        lambda v, slot: _transposed_window(v).weight_grad(v, v.g, v.x(0), v.dims(slot, _PURPOSE)[:2]),
        _conv_bias,
    ),
    "MaxPool": row(_max_pool),
    "AveragePool": row(_average_pool),
}
