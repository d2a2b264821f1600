"""Sliding windows: strides, dilations and padding of a convolution or pooling, and the passes back through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_rewrite.train.facts import Shape, known_dims
from amp_rewrite.train.vjp.row import Call


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

    def weight(self, v: Call, wide: str, narrow: str, wide_channels: int) -> str:
        """For each tap the sum of products of the narrow tensor with what it saw there.

        [narrow channels, wide channels per group, kernel…]: the gradient of a convolution by its weight. It is
        a convolution itself, of the wide tensor with the narrow one as weight, in which batch and channels,
        and strides and dilations, have changed places.
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
