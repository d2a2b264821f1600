"""Sliding windows: strides, dilations and padding of a convolution or pooling, and the passes back through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_rewrite.train.facts import Shape, known_dims
from amp_rewrite.train.vjp.row import Call

_MANY_CHANNELS, _MANY_TAPS = 8, 49
"""Up to where products by tap are faster than one convolution, as measured (docs/how-to/training.md)."""


@dataclass(frozen=True, slots=True)
class Window:
    """How windows lie over the spatial axes of a *wide* tensor, one for each place of a *narrow* one.

    Place o of the narrow tensor sees the wide one at o·stride + tap·dilation − front, tap < kernel. A convolution
    goes from wide to narrow. `wide` and `narrow` are the spatial dims, None where they are not known.
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
    def spans(self) -> tuple[int, ...]:
        """From the first to the last tap of one window."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def pointwise(self) -> bool:
        """Whether each place of the narrow tensor sees the one place of the wide one."""
        return {*self.kernel, *self.strides} == {1} and not any((*self.front, *self.back))

    def widened(self, v: Call, narrow: str, weight: str, like: str) -> str:
        """Each element of the narrow tensor, times the weight, added at the places that it saw.

        `weight` is [channels, wide channels per group, kernel…]; the result has the spatial dims of `like`, the
        wide tensor. That is the gradient of a convolution by its input.
        """
        common = {"strides": self.strides, "dilations": self.dilations, "group": self.group}
        if self.wide is None or self.narrow is None:
            reached = v.do("ConvTranspose", narrow, weight, **common, kernel_shape=self.kernel)
            return self._fitted(v, reached, like)
        reach = [
            (o - 1) * s + span - f
            for o, s, span, f in zip(self.narrow, self.strides, self.spans, self.front, strict=True)
        ]
        # With the window's own padding, which no CUDA kernel takes if it is uneven, a rest is left at the end.
        rest = [n + e - r for n, e, r in zip(self.wide, self.back, reach, strict=True)]
        back = list(self.back)
        if min(rest) < 0:  # windows that go beyond the padding, as those of a pool that is rounded up
            back = [e + max(-r, 0) for e, r in zip(self.back, rest, strict=True)]
            rest = [max(r, 0) for r in rest]
        return v.do(
            "ConvTranspose",
            narrow,
            weight,
            **common,
            kernel_shape=self.kernel,
            pads=[*self.front, *back],
            output_padding=rest if any(rest) else None,
        )

    def _fitted(self, v: Call, reached: str, like: str) -> str:
        """Without the padding in front, and cut or filled at the end to the dims of `like`."""
        dims = [v.b.op("Slice", v.b.op("Shape", x), v.b.ints([2]), v.b.ints([2 + self.rank])) for x in (like, reached)]
        front = v.b.ints(self.front)
        end = v.b.op("Add", v.b.op("Sub", dims[0], dims[1]), front)
        none = v.b.ints([0, 0])
        pads = v.b.op("Concat", none, v.b.op("Neg", front), none, end, axis=0)
        return v.do("Pad", reached, pads)

    def weight(self, v: Call, wide: str, narrow: str, channels: tuple[int, int]) -> str:
        """For each tap the sum of products of the narrow tensor with what it saw there.

        [narrow channels, wide channels per group, kernel…]: the gradient of a convolution by its weight. `channels`
        of the narrow tensor, and of the wide one.
        """
        taps = math.prod(self.kernel)
        many = channels[1] >= _MANY_CHANNELS or taps == 1
        if self.group == 1 and many and taps <= _MANY_TAPS and self._inside:
            return self._by_taps(v, wide, narrow, channels)
        return self._convolved(v, wide, narrow, channels[1])

    def _by_taps(self, v: Call, wide: str, narrow: str, channels: tuple[int, int]) -> str:
        """A product of two matrices for each tap. Channels come last, so that a tap's places lie in long rows."""
        assert self.narrow is not None
        x = v.do("Transpose", wide, perm=[0, *range(2, 2 + self.rank), 1])
        if any((*self.front, *self.back)):
            x = v.do("Pad", x, v.b.ints([0, *self.front, 0, 0, *self.back, 0]))
        g = v.b.reshape(v.do("Transpose", narrow, perm=[1, 0, *range(2, 2 + self.rank)]), [channels[0], -1])
        products = []
        for tap in np.ndindex(self.kernel):
            begin = [t * d for t, d in zip(tap, self.dilations, strict=True)]
            end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, self.narrow, self.strides, strict=True)]
            seen = v.b.reshape(self._cut(v, x, begin, end), [-1, channels[1]])
            products.append(v.do("MatMul", g, seen))
        beside = products[0] if len(products) == 1 else v.do("Concat", *products, axis=1)
        apart = v.b.reshape(beside, [channels[0], *self.kernel, channels[1]])
        return v.do("Transpose", apart, perm=[0, 1 + self.rank, *range(1, 1 + self.rank)])

    def _cut(self, v: Call, x: str, begin: Sequence[int], end: Sequence[int]) -> str:
        """The places from `begin` to `end`, a stride apart; x itself if they are all of it."""
        whole = [n + f + e for n, f, e in zip(self.wide or (), self.front, self.back, strict=True)]
        if not any(begin) and list(end) == whole and set(self.strides) == {1}:
            return x
        axes = v.b.ints(range(1, 1 + self.rank))
        return v.do("Slice", x, v.b.ints(begin), v.b.ints(end), axes, v.b.ints(self.strides))

    @property
    def _inside(self) -> bool:
        """Whether all dims are known and there are places, none of them beyond the padding."""
        if self.wide is None or self.narrow is None or 0 in (*self.wide, *self.narrow):
            return False
        sizes = zip(self.wide, self.front, self.back, self.narrow, self.strides, self.spans, strict=True)
        return all((o - 1) * s + span <= n + f + e for n, f, e, o, s, span in sizes)

    def _convolved(self, v: Call, wide: str, narrow: str, wide_channels: int) -> str:
        """A convolution of the wide tensor with the narrow one as its weight.

        Batch and channels, and strides and dilations, have changed places.
        """
        spatial = range(2, 2 + self.rank)
        x = self._grouped(v, wide, wide_channels)
        taps = v.do(
            "Conv",
            x,
            v.do("Transpose", narrow, perm=[1, 0, *spatial]),
            strides=self.dilations,
            dilations=self.strides,
            pads=[*self.front, *self.back],
            group=self.group,
        )
        if not self._exact:
            limits = v.b.ints(self.kernel)
            taps = v.do("Slice", taps, v.b.ints([0] * self.rank), limits, v.b.ints(spatial))
        return v.do("Transpose", taps, perm=[1, 0, *spatial])

    @property
    def _exact(self) -> bool:
        """Whether the windows end where the padded tensor ends, so that the convolution sees no more taps."""
        if self.wide is None or self.narrow is None:
            return False
        sizes = zip(self.wide, self.front, self.back, self.narrow, self.strides, self.dilations, strict=True)
        return all(
            (n + f + e - (o - 1) * s - 1) // d + 1 == k
            for (n, f, e, o, s, d), k in zip(sizes, self.kernel, strict=True)
        )

    def _grouped(self, v: Call, wide: str, channels: int) -> str:
        """[channels per group, group × batch, …]: the batch in the place of the channels, group by group."""
        spatial = range(2, 2 + self.rank)
        if self.group == 1:
            return v.do("Transpose", wide, perm=[1, 0, *spatial])
        each = channels // self.group
        shape = v.b.op("Shape", wide)
        batch, dims = (v.b.op("Slice", shape, v.b.ints([a]), v.b.ints([e])) for a, e in ((0, 1), (2, 2 + self.rank)))
        apart = v.b.reshape(wide, v.b.op("Concat", batch, v.b.ints([self.group, each]), dims, axis=0))
        turned = v.do("Transpose", apart, perm=[2, 1, 0, *range(3, 3 + self.rank)])
        return v.b.reshape(turned, v.b.op("Concat", v.b.ints([each, -1]), dims, axis=0))


def window(v: Call, kernel: Sequence[int], *, wide: Shape | None, narrow: Shape | None) -> Window:
    """The window that the attributes of an op describe. GradientError where `auto_pad` depends on unknown dims."""
    rank = len(kernel)
    strides, dilations = (tuple(v.attr(name) or [1] * rank) for name in ("strides", "dilations"))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    dims = [known_dims(None if s is None else s[2:]) for s in (wide, narrow)]
    front, back = _pads(v, spans, strides, dims[0])
    return Window(tuple(kernel), strides, dilations, tuple(front), tuple(back), v.attr("group", 1), dims[0], dims[1])


def _pads(
    v: Call, spans: Sequence[int], strides: Sequence[int], dims: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    mode, rank = v.attr("auto_pad", "NOTSET"), len(spans)
    if mode == "NOTSET":
        pads = [int(p) for p in v.attr("pads") or [0] * 2 * rank]
        return pads[:rank], pads[rank:]
    if mode == "VALID":
        return [0] * rank, [0] * rank
    if dims is None:
        raise v.error(f"its gradient with auto_pad {mode} needs fixed spatial dims; declare them, or state pads")
    totals = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(dims, strides, spans, strict=True)]
    return halves(totals, upper=mode == "SAME_UPPER")


def halves(totals: Sequence[int], *, upper: bool) -> tuple[list[int], list[int]]:
    """Padding shared out to front and back; an odd one goes to the back if `upper`."""
    smaller = [t // 2 for t in totals]
    larger = [t - s for t, s in zip(totals, smaller, strict=True)]
    return (smaller, larger) if upper else (larger, smaller)
