"""Folding of BatchNormalization into the weights of the preceding Conv, ConvTranspose or Gemm.

y = γ (W x + b − μ) / √(σ² + ε) + β is W' x + b' with W' = s W, b' = s (b − μ) + β and s = γ / √(σ² + ε), all per output
channel (Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
CVPR 2018, section 3.2). The new weights are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute, ints_attribute
from amp_rewrite.ir.dataflow import is_only_reader
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.versions import FIRST_INFERENCE_BATCH_NORM
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.builder import NewNodes
from amp_rewrite.rewrite.equivalence import Trial, as_float64, disagreement
from amp_rewrite.rewrite.reference import MAX_ELEMENTS, Arrays
from amp_rewrite.rewrite.replacement import BATCH_NORM, Context, Outcome, Replacement, as_outcome

_MIN_TRIAL_OPSET = 15
"""The lowest opset of a trial: at opset 9, onnx's reference computes statistics as in training.
Between opsets 9 and 15, the operators only changed in the types they accept."""
_BIASED_LAYERS = LAYERS - {"MatMul"}  # a MatMul does not have a bias


def fold_batch_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Fold each BatchNormalization into the preceding linear op, or refuse it. Reads the weights."""
    for op in view.of_kinds(("BatchNormalization",)):
        linear = view.producer(op.inputs[0], *_BIASED_LAYERS)
        if linear is not None:
            yield as_outcome(BATCH_NORM, op.id, _obstacle(view, linear, op) or _folded(view, linear, op, context.to))


def _folded(view: View, linear: Op, norm: Op, to: DType) -> Replacement | str:
    axis = _channel_axis(linear)
    constants = _constants(view, linear, norm)
    if isinstance(constants, str):
        return constants
    original, gamma, beta, mean, variance, *optional = (array for _, array in constants)
    channels = gamma.shape[0] if gamma.ndim == 1 else -1
    if original.ndim < 2 or original.shape[axis] != channels:
        return "its number of channels differs from that of the preceding weights"
    offset = optional[0] if optional else np.zeros(channels)
    if any(array.shape != (channels,) for array in (beta, mean, variance, offset)):
        return "its bias or statistics do not have one number per channel"
    with np.errstate(all="ignore"):
        factor = gamma / np.sqrt(variance + np.float64(np.float32(float_attribute(norm.node, "epsilon", 1e-5))))
        weight = original * factor.reshape([-1 if each == axis else 1 for each in range(original.ndim)])
        bias = offset * factor + (beta - mean * factor)
    obstacle = _numeric_obstacle(axis, original, weight, bias, to)
    if obstacle:
        return obstacle
    new, node = NewNodes(view, norm), clone(linear.node)
    stored = {"folded": weight.astype(np.float32), "folded_bias": bias.astype(np.float32)}
    node.input[1:] = [new.constant(f"{linear.node.input[1]}_{suffix}", array) for suffix, array in stored.items()]
    node.output[:] = norm.node.output[:1]
    fusion = Replacement(BATCH_NORM, (linear.id, norm.id), norm.id, node, **new.parts())
    trial_view = replace(view, opsets={**view.opsets, "": max(_MIN_TRIAL_OPSET, view.opset)})
    folded = dict(zip(node.input[1:], map(as_float64, stored.values()), strict=True))
    return disagreement(trial_view, fusion, _trials(linear, dict(constants), folded)) or fusion


def _obstacle(view: View, linear: Op, norm: Op) -> str | None:
    if int_attribute(norm.node, "training_mode", 0) or sum(out is not None for out in norm.outputs) > 1:
        return "it is in training mode"
    if view.opset < FIRST_INFERENCE_BATCH_NORM:
        return f"BatchNormalization is defined differently at opset {view.opsets.get('', 1)}"
    if not is_only_reader(view, linear.outputs[0], norm):
        return f"other ops read the result of {linear.name}, or it is in another graph"
    if any(view.dtype(v) is not DType.FLOAT for op in (linear, norm) for v in op.operands):
        return "not all of it is float32"
    if linear.kind == "ConvTranspose" and int_attribute(linear.node, "group", 1) != 1:
        return "its ConvTranspose has groups"
    if linear.kind == "Gemm" and len(linear.inputs) > 2 and float_attribute(linear.node, "beta", 1.0) != 1:
        return "its Gemm scales its bias"
    return None


def _constants(view: View, linear: Op, norm: Op) -> list[tuple[str, Array]] | str:
    arrays: list[tuple[str, Array]] = []
    for value in (linear.inputs[1], *norm.inputs[1:5], *linear.operands[2:3]):
        array = view.array(value)
        if value is None or array is None:
            return f"{view.value_name(value) if value is not None else 'an operand'} is not a constant"
        arrays.append((view.value_name(value), array.astype(np.float64)))
    return arrays


def _channel_axis(linear: Op) -> int:
    if linear.kind == "Gemm":
        return 0 if int_attribute(linear.node, "transB", 0) else 1
    return 1 if linear.kind == "ConvTranspose" else 0


def _numeric_obstacle(axis: int, original: Array, weight: Array, bias: Array, to: DType) -> str | None:
    """Return why the folded weights are not usable; None if they are.

    Rounding to a subnormal has an error of up to half the smallest subnormal, which is at most half an epsilon relative
    to a weight of `tiny` or more. So each channel that contained such a weight must still contain one.
    """
    largest = max(np.abs(weight).max(initial=0), np.abs(bias).max(initial=0))
    if not np.isfinite(largest):
        return "the folded weights would not be finite"
    if largest > to.max:
        return f"the folded weights would reach {largest:.3g}, beyond the range of {to.spelling}"
    others = tuple(a for a in range(weight.ndim) if a != axis)
    before, after = (np.abs(array).max(axis=others, initial=0) for array in (original, weight))
    lost = int(np.count_nonzero((after < to.tiny) & (after > 0) & (before >= to.tiny)))
    return f"the folded weights of {lost} channels would be subnormal in {to.spelling}" if lost else None


# -- verification ----------------------------------------------------------------------------------

_MAX_TRIAL_ELEMENTS = 1 << 18  # of a weight to try with all channels


def _trials(linear: Op, constants: Arrays, folded: Arrays) -> list[Trial]:
    """Return one trial, or none if the attributes do not match the weight.

    A large weight without groups is tried with its first channels only: channels are independent, and the array
    operations are the same for all of them.
    """
    axis, weight = _channel_axis(linear), next(iter(folded.values()))
    shape = _input_shape(linear, weight)
    large = weight.size > _MAX_TRIAL_ELEMENTS and int_attribute(linear.node, "group", 1) == 1
    count = max(1, _MAX_TRIAL_ELEMENTS * weight.shape[axis] // weight.size) if large else None

    def truncated(array: Array) -> Array:
        return array[:, :count] if array.ndim > 1 and axis else array[:count]

    before, after = ({name: truncated(array) for name, array in arrays.items()} for arrays in (constants, folded))
    if shape is None:
        return []
    return [Trial({**before, linear.node.input[0]: np.random.default_rng(0).standard_normal(shape)}, after)]


def _input_shape(linear: Op, weight: Array) -> tuple[int, ...] | None:
    """Return the smallest input to use each element of a kernel more than once; None if attributes do not match."""
    if linear.kind == "Gemm":
        inner = weight.shape[1 - _channel_axis(linear)]
        return (inner, 2) if int_attribute(linear.node, "transA", 0) else (2, inner)
    spatial = weight.shape[2:]
    steps = ints_attribute(linear.node, "dilations") or (1,) * len(spatial)
    groups = int_attribute(linear.node, "group", 1)
    if len(steps) != len(spatial) or min((groups, *steps)) < 1:
        return None
    extent = tuple((k - 1) * d + 2 for k, d in zip(spatial, steps, strict=True))
    transposed = linear.kind == "ConvTranspose"
    inner = weight.shape[0] if transposed else weight.shape[1] * groups
    return (1, inner, *extent) if inner * math.prod(extent) <= MAX_ELEMENTS else None
