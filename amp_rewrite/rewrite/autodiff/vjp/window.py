"""Sliding windows: strides, dilations and padding of a convolution or pooling, and their backward passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amp_rewrite.rewrite.autodiff.facts import Shape, known_dims
from amp_rewrite.rewrite.autodiff.vjp.rule import Call

_MANY_CHANNELS, _MANY_TAPS = 8, 49
"""Limits within which products by tap are faster than one convolution, as measured (docs/how-to/training.md)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Windows over the spatial axes of a *wide* tensor, one for each position of a *narrow* tensor.

    Position o of the narrow tensor reads the wide one at o·stride + tap·dilation − front, tap < kernel. A convolution
    maps wide to narrow. `wide` and `narrow`: spatial dims, None if unknown.
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
        """Extent of one window along each axis, from the first to the last tap."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def pointwise(self) -> bool:
        """True if each position of the narrow tensor reads only the same position of the wide one."""
        return {*self.kernel, *self.strides} == {1} and not any(self.pads)

    @property
    def _room(self) -> list[int] | None:
        """Elements from the start of the last window to the end of the padded tensor; None if dims are unknown."""
        if self.wide is None or self.narrow is None:
            return None
        sizes = zip(self.wide, self.front, self.back, self.narrow, self.strides, strict=True)
        return [n + f + e - (o - 1) * s for n, f, e, o, s in sizes]

    def taps(self, counts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """For each tap, the begin and the end of the positions that it reads in the padded wide tensor."""
        for tap in np.ndindex(self.kernel):
            begin = [t * d for t, d in zip(tap, self.dilations, strict=True)]
            yield begin, [b + (n - 1) * s + 1 for b, n, s in zip(begin, counts, self.strides, strict=True)]

    def widened(self, v: Call, narrow: str, weight: str, like: str) -> str:
        """Gradient of a convolution by its input: add each narrow element, times the weight, where it was read.

        `weight`: [channels, wide channels per group, kernel…]. The result has the spatial dims of `like`, the wide
        tensor.
        """
        layout: dict[str, Any] = {"strides": self.strides, "dilations": self.dilations, "group": self.group}
        layout["kernel_shape"] = self.kernel
        if self._room is None:
            return self._fitted(v, v.do("ConvTranspose", narrow, weight, **layout), like)
        # the window's own padding leaves a rest at the end; CUDA kernels do not support uneven padding
        rest = [r - span for r, span in zip(self._room, self.spans, strict=True)]
        # a negative rest: windows beyond the padding, as in a pool with ceil_mode
        back = [e + max(-r, 0) for e, r in zip(self.back, rest, strict=True)]
        rest = [max(r, 0) for r in rest]
        layout.update(pads=[*self.front, *back], output_padding=rest if any(rest) else None)
        return v.do("ConvTranspose", narrow, weight, **layout)

    def _fitted(self, v: Call, reached: str, like: str) -> str:
        """Crop the padding in front, and crop or pad the end to the dims of `like`."""
        dims = [v.part(v.b.op("Shape", x), 2, 2 + self.rank) for x in (like, reached)]
        front = v.b.ints(self.front)
        end = v.b.op("Add", v.b.op("Sub", *dims), front)
        none = v.b.ints([0, 0])
        return v.do("Pad", reached, v.b.op("Concat", none, v.b.op("Neg", front), none, end, axis=0))

    def weight(self, v: Call, wide: str, narrow: str, channels: Sequence[int]) -> str:
        """Gradient of a convolution by its weight: per tap, the sum of narrow elements times the values they read.

        The result is [*channels, kernel…], where `channels` are those of the narrow tensor and those of the wide one
        per group.
        """
        taps = math.prod(self.kernel)
        many = channels[1] >= _MANY_CHANNELS or taps == 1
        room = self._room
        # no window goes beyond the padding, and nothing is empty
        inside = room is not None and all(r >= span for r, span in zip(room, self.spans, strict=True))
        inside = inside and 0 not in (*(self.wide or ()), *(self.narrow or ()))
        if self.group == 1 and many and taps <= _MANY_TAPS and inside:
            return self._by_taps(v, wide, narrow, channels)
        return self._convolved(v, wide, narrow, channels[1])

    def _by_taps(self, v: Call, wide: str, narrow: str, channels: Sequence[int]) -> str:
        """One matrix product per tap. Channels are the last axis, so that each tap reads long contiguous rows."""
        assert self.narrow is not None
        x = v.do("Transpose", wide, perm=[0, *range(2, 2 + self.rank), 1])
        if any(self.pads):
            x = v.do("Pad", x, v.b.ints([0, *self.front, 0, 0, *self.back, 0]))
        g = v.b.reshape(v.do("Transpose", narrow, perm=[1, 0, *range(2, 2 + self.rank)]), [channels[0], -1])
        products = []
        for begin, end in self.taps(self.narrow):
            seen = v.b.reshape(self._cut(v, x, begin, end), [-1, channels[1]])
            products.append(v.do("MatMul", g, seen))
        apart = v.b.reshape(v.joined(products, 1), [channels[0], *self.kernel, channels[1]])
        return v.do("Transpose", apart, perm=[0, 1 + self.rank, *range(1, 1 + self.rank)])

    def _cut(self, v: Call, x: str, begin: Sequence[int], end: Sequence[int]) -> str:
        """Slice from `begin` to `end` in strides; return x itself for the whole range."""
        whole = [n + f + e for n, f, e in zip(self.wide or (), self.front, self.back, strict=True)]
        if not any(begin) and list(end) == whole and set(self.strides) == {1}:
            return x
        axes = v.b.ints(range(1, 1 + self.rank))
        return v.do("Slice", x, v.b.ints(begin), v.b.ints(end), axes, v.b.ints(self.strides))

    def _convolved(self, v: Call, wide: str, narrow: str, each: int) -> str:
        """One convolution, with the narrow tensor as its weight.

        Batch and channels are exchanged, and so are strides and dilations.
        """
        spatial = range(2, 2 + self.rank)
        swap = [1, 0, *spatial]
        x, weight = self._grouped(v, wide, each), v.do("Transpose", narrow, perm=swap)
        exchanged = {"strides": self.dilations, "dilations": self.strides}
        taps = v.do("Conv", x, weight, **exchanged, pads=self.pads, group=self.group)
        # the convolution has further taps unless the windows end where the padded tensor ends
        room = self._room or [0] * self.rank
        if any((r - 1) // d + 1 != k for r, d, k in zip(room, self.dilations, self.kernel, strict=True)):
            limits = v.b.ints(self.kernel)
            taps = v.do("Slice", taps, v.b.ints([0] * self.rank), limits, v.b.ints(spatial))
        return v.do("Transpose", taps, perm=swap)

    def _grouped(self, v: Call, wide: str, each: int) -> str:
        """Exchange batch and the `each` channels of every group: [each, group × batch, …]."""
        spatial = range(2, 2 + self.rank)
        if self.group == 1:
            return v.do("Transpose", wide, perm=[1, 0, *spatial])
        shape = v.b.op("Shape", wide)
        batch, dims = v.part(shape, 0, 1), v.part(shape, 2, 2 + self.rank)
        apart = v.b.reshape(wide, v.b.op("Concat", batch, v.b.ints([self.group, each]), dims, axis=0))
        turned = v.do("Transpose", apart, perm=[2, 1, 0, *range(3, 3 + self.rank)])
        return v.b.reshape(turned, v.b.op("Concat", v.b.ints([each, -1]), dims, axis=0))


def unpadded(v: Call, kernel: Sequence[int], *, wide: Shape | None, narrow: Shape | None) -> Window:
    """Return the window of an op's attributes, without its padding."""
    strides, dilations = (tuple(v.attr(name) or [1] * len(kernel)) for name in ("strides", "dilations"))
    dims = [known_dims(None if s is None else s[2:]) for s in (wide, narrow)]
    return Window(tuple(kernel), strides, dilations, (), (), v.attr("group", 1), dims[0], dims[1])


def window(v: Call, kernel: Sequence[int], *, wide: Shape | None, narrow: Shape | None) -> Window:
    """Return the window of an op's attributes. GradientError if `auto_pad` depends on unknown dims."""
    plain = unpadded(v, kernel, wide=wide, narrow=narrow)
    pads = explicit_pads(v, plain.rank)
    if pads is None:
        if plain.wide is None:
            mode = v.attr("auto_pad")
            raise v.error(f"its gradient with auto_pad {mode} needs fixed spatial dims; declare them, or set pads")
        ends = zip(plain.wide, plain.strides, plain.spans, strict=True)
        pads = halves(v, [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in ends])
    return replace(plain, front=pads[0], back=pads[1])


Pads = tuple[tuple[int, ...], tuple[int, ...]]
"""Padding in front and at the back of each spatial axis."""


def explicit_pads(v: Call, rank: int) -> Pads | None:
    """Padding that an op's attributes give; None if `auto_pad` derives it from the dims."""
    mode = v.attr("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "VALID"):
        return None
    pads = [int(p) for p in (mode == "NOTSET" and v.attr("pads")) or [0] * 2 * rank]
    return tuple(pads[:rank]), tuple(pads[rank:])


def halves(v: Call, totals: Sequence[int]) -> Pads:
    """Split padding between front and back; with `auto_pad` SAME_UPPER the odd element goes to the back."""
    smaller = tuple(t // 2 for t in totals)
    larger = tuple(t - t // 2 for t in totals)
    return (smaller, larger) if v.attr("auto_pad", "NOTSET") == "SAME_UPPER" else (larger, smaller)
