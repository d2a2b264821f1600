"""The ops that a target computes in the low type inside, each with its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.rewrite.device_arithmetic import activations, norms, products, reductions
from amp_rewrite.rewrite.device_arithmetic.low_op import Recipe

WEBGPU: Mapping[str, Recipe] = {
    **reductions.REDUCTIONS,
    "AveragePool": reductions.average_pool,
    "BatchNormalization": norms.batch_norm,
    "Conv": products.conv,
    "ConvTranspose": products.conv,
    "CumSum": reductions.cum_sum,
    "Einsum": products.einsum,
    "Elu": activations.elu,
    "Erf": activations.unary(activations.low_erf),
    "Exp": activations.unary(activations.low_exp),
    "Gelu": activations.gelu,
    "Gemm": products.gemm,
    "GlobalAveragePool": reductions.global_average_pool,
    "HardSwish": activations.unary(activations.low_hard_swish),
    "InstanceNormalization": norms.instance_norm,
    "LayerNormalization": norms.norm(centered=True),
    "Log": activations.unary(activations.low_log),
    "LogSoftmax": reductions.log_softmax,
    "MatMul": products.matmul,
    "RMSNormalization": norms.norm(centered=False),
    "Sigmoid": activations.unary(activations.low_sigmoid),
    "SimplifiedLayerNormalization": norms.norm(centered=False),
    "Softmax": reductions.softmax,
    "Softplus": activations.unary(activations.low_softplus),
    "Tanh": activations.unary(activations.low_tanh),
    "com.microsoft::SkipLayerNormalization": norms.norm(centered=True, skips=True),
    "com.microsoft::SkipSimplifiedLayerNormalization": norms.norm(centered=False, skips=True),
}
"""Recipes by kind of op, after the shaders of onnxruntime's WebGPU provider 0.4.0."""
