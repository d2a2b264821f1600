"""Operators in float64 that neither onnxruntime has nor onnx's reference computes right, by their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray
Pads = list[tuple[int, int]]


class Mean(OpRun):
    """onnx's own adds in place, so that it does not broadcast."""

    op_domain = ""

    def _run(self, *terms: Array) -> tuple[Array]:
        return (np.asarray(sum(terms) / len(terms)),)


class Erf(OpRun):
    """onnx's own rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.asarray(np.vectorize(math.erf, otypes="d")(x), x.dtype),)


class Conv(OpRun):
    """A sum over taps."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, b=None, auto_pad=None, dilations=None, group=1, kernel_shape=None, pads=None, strides=None
    ) -> tuple[Array]:
        kernel = w.shape[2:]
        strides, dilations = strides or [1] * len(kernel), dilations or [1] * len(kernel)
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        padding = _padding(auto_pad, pads, [(-(-n // s) - 1) * s + p - n for n, s, p in _zip(x, strides, spans)])
        padded = np.pad(x, [(0, 0), (0, 0), *padding])
        dims = [(n - p) // s + 1 for n, s, p in _zip(padded, strides, spans)]
        y = np.zeros((len(x), len(w), *dims), x.dtype)
        for tap in np.ndindex(*kernel):
            seen = padded[(..., *_places(tap, dims, strides, dilations))]
            for i, (mine, weights) in enumerate(zip(np.split(seen, group, 1), np.split(w, group), strict=True)):
                share = len(w) // group
                y[:, i * share : (i + 1) * share] += np.einsum("nc...,mc->nm...", mine, weights[(..., *tap)])
        return (_plus(y, b),)


class ConvTranspose(OpRun):
    """The sum over taps, turned round."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, b=None, auto_pad=None, dilations=None, group=1, kernel_shape=None, output_padding=None,
        output_shape=None, pads=None, strides=None,
    ) -> tuple[Array]:  # fmt: skip
        kernel, rank = w.shape[2:], w.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        extra = output_padding or [0] * rank
        dims = x.shape[2:]
        full = [
            (n - 1) * s + (k - 1) * d + 1 + e
            for n, s, k, d, e in zip(dims, strides, kernel, dilations, extra, strict=True)
        ]
        y = np.zeros((len(x), w.shape[1] * group, *full), x.dtype)
        for tap in np.ndindex(*kernel):
            there = _places(tap, dims, strides, dilations)
            for i, (mine, weights) in enumerate(zip(np.split(x, group, 1), np.split(w, group), strict=True)):
                share = w.shape[1]
                y[(slice(None), slice(i * share, (i + 1) * share), *there)] += np.einsum(
                    "nc...,cm->nm...", mine, weights[(..., *tap)]
                )
        wanted = output_shape or [n * s for n, s in zip(dims, strides, strict=True)]
        totals = [f - o for f, o in zip(full, wanted[-rank:], strict=True)]
        shared = auto_pad if output_shape is None or auto_pad == "SAME_UPPER" else "SAME_LOWER"
        padding = _padding(shared, pads, totals)
        cut = tuple(slice(a, n - e) for n, (a, e) in zip(full, padding, strict=True))
        return (_plus(y[(..., *cut)], b),)


class AveragePool(OpRun):
    """Sums over windows and the places that they hold."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, auto_pad=None, ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape=None, pads=None,
        strides=None,
    ) -> tuple[Array]:  # fmt: skip
        rank = len(kernel_shape)
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        spans = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations, strict=True)]
        padding = _padding(auto_pad, pads, [(-(-n // s) - 1) * s + p - n for n, s, p in _zip(x, strides, spans)])
        counted = np.pad(np.ones(x.shape[2:]), padding, constant_values=float(bool(count_include_pad)))
        padded = np.pad(x, [(0, 0), (0, 0), *padding])
        dims = []
        for axis, (n, s, p) in enumerate(_zip(padded, strides, spans)):
            windows = (-(-(n - p) // s) if ceil_mode else (n - p) // s) + 1
            if ceil_mode and (windows - 1) * s >= n - padding[axis][1]:
                windows -= 1  # it would begin in the padding
            dims.append(windows)
        over = [max((o - 1) * s + p - n, 0) for o, (n, s, p) in zip(dims, _zip(padded, strides, spans), strict=True)]
        beyond = [(0, e) for e in over]
        padded, counted = np.pad(padded, [(0, 0), (0, 0), *beyond]), np.pad(counted, beyond)
        total, count = np.zeros((*x.shape[:2], *dims), x.dtype), np.zeros(dims, x.dtype)
        for tap in np.ndindex(*kernel_shape):
            there = (..., *_places(tap, dims, strides, dilations))
            total += padded[there]
            count += counted[there]
        return (total / count,)


class Pad(OpRun):
    """onnx's own takes nothing away by negative pads."""

    op_domain = ""

    def _run(
        self, x: Array, pads: Array, value: Array | None = None, axes: Array | None = None, mode: str = "constant"
    ) -> tuple[Array]:
        along = range(x.ndim) if axes is None else axes.tolist()
        padding = [(0, 0)] * x.ndim
        for axis, front, back in zip(along, *np.split(pads, 2), strict=True):
            padding[axis] = (int(front), int(back))
        grown = [(max(a, 0), max(b, 0)) for a, b in padding]
        words = {"constant_values": 0 if value is None else value.item()} if mode == "constant" else {}
        y = np.pad(x, grown, mode, **words)  # type: ignore[call-overload]
        cut = [slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(y.shape, padding, strict=True)]
        return (y[tuple(cut)],)


class Gelu(OpRun):
    """onnx's own rounds to float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        if approximate == "tanh":
            return (x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,)
        return (x * (1 + np.vectorize(math.erf, otypes="d")(x / math.sqrt(2))) / 2,)


class LayerNormalization(OpRun):
    """onnx's own computes the statistics in float32."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, scale, bias=None, axis=-1, epsilon=1e-5, stash_type=1
    ) -> tuple[Array, Array, Array]:
        axes = tuple(range(axis % x.ndim, x.ndim))
        mean = x.mean(axes, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + epsilon)
        return (x - mean) * inverse * scale + (0 if bias is None else bias), mean, inverse


class LRN(OpRun):
    """onnx's own has as many channels as there are images."""

    op_domain = ""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):  # type: ignore[no-untyped-def]
        before, after = (size - 1) // 2, size // 2
        padded = np.pad(x**2, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        around = sum(padded[:, at : at + x.shape[1]] for at in range(size))
        return (x / (float(bias) + float(alpha) / size * around) ** float(beta),)


REPAIRED = [LRN, Mean, Erf, Gelu, LayerNormalization, Pad, Conv, ConvTranspose, AveragePool]


def _zip(x: Array, strides: Sequence[int], spans: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(x.shape[2:], strides, spans, strict=True))


def _places(
    tap: Sequence[int], dims: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[slice, ...]:
    return tuple(
        slice(t * d, t * d + (o - 1) * s + 1, s) for t, o, s, d in zip(tap, dims, strides, dilations, strict=True)
    )


def _padding(auto_pad: str | None, pads: Sequence[int] | None, totals: Sequence[int]) -> Pads:
    """Padding in front and behind, by axis."""
    if auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        pads = pads or [0] * 2 * len(totals)
        return list(zip(pads[: len(totals)], pads[len(totals) :], strict=True))
    halves = [(max(t, 0) // 2, max(t, 0) - max(t, 0) // 2) for t in totals]
    return halves if auto_pad == "SAME_UPPER" else [(b, a) for a, b in halves]


def _plus(y: Array, b: Array | None) -> Array:
    return y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2))
