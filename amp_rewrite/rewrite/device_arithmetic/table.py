"""The ops that a device rounds inside, each with its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.rewrite.device_arithmetic import activations, cuda, norms, products, recurrent, reductions
from amp_rewrite.rewrite.device_arithmetic.low_op import Recipe

WEBGPU: Mapping[str, Recipe] = {
    **reductions.REDUCTIONS,
    "AveragePool": reductions.average_pool,
    "BatchNormalization": norms.batch_norm,
    "Conv": products.conv,
    "ConvTranspose": products.conv,
    "CumSum": reductions.cum_sum,
    "Einsum": products.einsum,
    "Elu": activations.elu(activations.low_exp),
    "Erf": activations.unary(activations.low_erf),
    "Exp": activations.unary(activations.low_exp),
    "Gelu": activations.gelu,
    "Gemm": products.gemm,
    "GlobalAveragePool": reductions.global_average_pool,
    "HardSwish": activations.unary(activations.hard_swish("Mul", 1 / 6)),
    "InstanceNormalization": norms.instance_norm,
    "LayerNormalization": norms.norm(centered=True),
    "Log": activations.unary(activations.low_log),
    "LogSoftmax": reductions.log_softmax,
    "MatMul": products.matmul,
    "RMSNormalization": norms.norm(centered=False),
    "Sigmoid": activations.unary(activations.low_sigmoid),
    "SimplifiedLayerNormalization": norms.norm(centered=False),
    "Softmax": reductions.softmax,
    "Softplus": activations.unary(activations.softplus(activations.low_exp, activations.low_log)),
    "Tanh": activations.unary(activations.low_tanh),
    "com.microsoft::SkipLayerNormalization": norms.norm(centered=True, skips=True),
    "com.microsoft::SkipSimplifiedLayerNormalization": norms.norm(centered=False, skips=True),
}
"""Recipes by kind of op, after the shaders of onnxruntime's WebGPU provider 0.4.0."""

CUDA: Mapping[str, Recipe] = {
    **dict.fromkeys(RECURRENT, recurrent.layer),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), cuda.matrix_sum),
    "Conv": cuda.conv,
    "CumSum": reductions.cum_sum,
    "Elu": activations.elu(activations.rounded("Exp")),
    "HardSwish": activations.unary(activations.hard_swish("Div", 6.0)),
    "InstanceNormalization": cuda.instance_norm,
    "ReduceLogSum": cuda.log_sum,
    "ReduceLogSumExp": cuda.log_sum_exp,
    "Softplus": activations.unary(activations.softplus(activations.rounded("Exp"), activations.rounded("Log"))),
}
"""Recipes by kind of op, after the kernels of onnxruntime's CUDA provider 1.31.1; other ops are float32 inside."""
