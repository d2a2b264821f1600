"""The ops that kernels of CUDA round inside, each with its recipe."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.ir.op_classes import RECURRENT
from amp_rewrite.rewrite.device_arithmetic import activations, cuda, recurrent
from amp_rewrite.rewrite.device_arithmetic.low_op import Recipe

CUDA: Mapping[str, Recipe] = {
    **dict.fromkeys(RECURRENT, recurrent.layer),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), cuda.matrix_sum),
    "Conv": cuda.conv,
    "CumSum": cuda.cum_sum,
    "Elu": activations.elu,
    "HardSwish": activations.hard_swish,
    "InstanceNormalization": cuda.instance_norm,
    "ReduceLogSum": cuda.log_sum,
    "ReduceLogSumExp": cuda.log_sum_exp,
    "Softplus": activations.softplus,
}
"""Recipes by kind of op, after the kernels of onnxruntime's CUDA provider 1.31.1; other ops are float32 inside."""
