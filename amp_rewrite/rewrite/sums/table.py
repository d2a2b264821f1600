"""The ops that a target computes in the low type inside, each with its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.rewrite.sums import activations, norms, products, reductions
from amp_rewrite.rewrite.sums.site import Recipe

WEBGPU: Mapping[str, Recipe] = {
    **reductions.REDUCTIONS,
    "AveragePool": reductions.average_pool,
    "BatchNormalization": norms.batch_norm,
    "Conv": products.conv,
    "ConvTranspose": products.conv_transpose,
    "CumSum": reductions.cum_sum,
    "Einsum": products.einsum,
    "Elu": activations.elu,
    "Erf": activations.error_function,
    "Exp": activations.exponential,
    "Gelu": activations.gelu,
    "Gemm": products.gemm,
    "GlobalAveragePool": reductions.global_average_pool,
    "HardSwish": activations.hard_swish,
    "InstanceNormalization": norms.instance_norm,
    "LayerNormalization": norms.layer_norm,
    "Log": activations.logarithm,
    "LogSoftmax": reductions.log_softmax,
    "MatMul": products.matmul,
    "RMSNormalization": norms.rms_norm,
    "Sigmoid": activations.sigmoid,
    "SimplifiedLayerNormalization": norms.rms_norm,
    "Softmax": reductions.softmax,
    "Softplus": activations.softplus,
    "Tanh": activations.tanh,
    "com.microsoft::SkipLayerNormalization": norms.skip_layer_norm,
    "com.microsoft::SkipSimplifiedLayerNormalization": norms.skip_rms_norm,
}
"""As the shaders of onnxruntime's WebGPU provider 0.4.0 do, by kind of op."""
