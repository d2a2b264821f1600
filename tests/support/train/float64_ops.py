"""float64 operators that onnxruntime lacks and onnx's reference gets wrong, written from their definitions."""

import math

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray


class Mean(OpRun):
    """onnx's version adds in place and cannot broadcast."""

    op_domain = ""

    def _run(self, *terms: Array) -> tuple[Array]:
        return (np.asarray(sum(terms) / len(terms)),)


class Erf(OpRun):
    """onnx's version rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.asarray(np.vectorize(math.erf, otypes="d")(x), x.dtype),)


class Gelu(OpRun):
    """onnx's version rounds to float32."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        if approximate == "tanh":
            return (x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,)
        return (x * (1 + np.vectorize(math.erf, otypes="d")(x / math.sqrt(2))) / 2,)


class LayerNormalization(OpRun):
    """onnx's version computes the statistics in float32."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, scale, bias=None, axis=-1, epsilon=1e-5, stash_type=1
    ) -> tuple[Array, Array, Array]:
        axes = tuple(range(axis % x.ndim, x.ndim))
        mean = x.mean(axes, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + epsilon)
        return (x - mean) * inverse * scale + (0 if bias is None else bias), mean, inverse


REPAIRED = [Mean, Erf, Gelu, LayerNormalization]
