"""BatchNormalization in the Conv, ConvTranspose or Gemm before it, whose weights then carry its factor and shift.

y = γ (W x + b − μ) / √(σ² + ε) + β is W' x + b' with W' = s W, b' = s (b − μ) + β and s = γ / √(σ² + ε), all per output
channel (Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
CVPR 2018, section 3.2). Computed in float64 and rounded once.
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
from amp_rewrite.rewrite.builder import Surroundings
from amp_rewrite.rewrite.equivalence import Trial, as_float64, disagreement
from amp_rewrite.rewrite.reference import MAX_ELEMENTS, Arrays
from amp_rewrite.rewrite.replacement import BATCH_NORM, Context, Outcome, Replacement, as_outcome

_TRIED = 15
"""The opset in which both are run, at least: for that of opset 9 onnx's reference computes statistics, as in training.
From then to opset 15 the folded operators changed only in the types that they take."""
_CARRIERS = LAYERS - {"MatMul"}  # it takes no bias


def fold_batch_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Fold each BatchNormalization into the linear op before it, or refuse it. Reads the weights that it folds."""
    for op in view.of_kinds(("BatchNormalization",)):
        linear = view.producer(op.inputs[0], *_CARRIERS)
        if linear is not None:
            yield as_outcome(BATCH_NORM, op.id, _unfit(view, linear, op) or _folded(view, linear, op, context.to))


def _folded(view: View, linear: Op, norm: Op, to: DType) -> Replacement | str:
    axis = _channel_axis(linear)
    constants = _constants(view, linear, norm)
    if isinstance(constants, str):
        return constants
    old, gamma, beta, mean, variance, *rest = (array for _, array in constants)
    channels = gamma.shape[0] if gamma.ndim == 1 else -1
    if old.ndim < 2 or old.shape[axis] != channels:
        return "its channel count differs from that of the weights before it"
    offset = rest[0] if rest else np.zeros(channels)
    if any(array.shape != (channels,) for array in (beta, mean, variance, offset)):
        return "its bias or its statistics are not one number per channel"
    with np.errstate(all="ignore"):
        factor = gamma / np.sqrt(variance + np.float64(np.float32(float_attribute(norm.node, "epsilon", 1e-5))))
        weight = old * factor.reshape([-1 if a == axis else 1 for a in range(old.ndim)])
        bias = offset * factor + (beta - mean * factor)
    refused = _unfit_numbers(axis, old, weight, bias, to)
    if refused:
        return refused
    around, node = Surroundings(view, norm), clone(linear.node)
    stored = {"folded": weight.astype(np.float32), "folded_bias": bias.astype(np.float32)}
    node.input[1:] = [around.constant(f"{linear.node.input[1]}_{word}", array) for word, array in stored.items()]
    node.output[:] = norm.node.output[:1]
    fusion = Replacement(BATCH_NORM, (linear.id, norm.id), norm.id, node, **around.parts())
    tried = replace(view, opsets={**view.opsets, "": max(_TRIED, view.opset)})
    written = dict(zip(node.input[1:], map(as_float64, stored.values()), strict=True))
    return disagreement(tried, fusion, _trials(linear, dict(constants), written)) or fusion


def _unfit(view: View, linear: Op, norm: Op) -> str | None:
    if int_attribute(norm.node, "training_mode", 0) or sum(out is not None for out in norm.outputs) > 1:
        return "it is in training mode"
    if view.opset < FIRST_INFERENCE_BATCH_NORM:
        return f"opset {view.opsets.get('', 1)} has another BatchNormalization"
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


def _unfit_numbers(axis: int, old: Array, weight: Array, bias: Array, to: DType) -> str | None:
    """Return the fault of the numbers for folding.

    Rounding to subnormals is off by half the least of them; beside a largest weight of `tiny` or more that is no more
    than half an epsilon. So each channel has to keep one weight of that size, if it had one.
    """
    largest = max(np.abs(weight).max(initial=0), np.abs(bias).max(initial=0))
    if not np.isfinite(largest):
        return "its folded weights are not finite"
    if largest > to.max:
        return f"its folded weights would reach {largest:.3g}, beyond the range of {to.spelling}"
    before, after = (np.abs(w).max(axis=tuple(a for a in range(w.ndim) if a != axis), initial=0) for w in (old, weight))
    lost = int(np.count_nonzero((after < to.tiny) & (after > 0) & (before >= to.tiny)))
    return f"the folded weights of {lost} channels would be subnormal in {to.spelling}" if lost else None


# -- proof -----------------------------------------------------------------------------------------

_MOST = 1 << 18  # elements of a weight that is tried whole


def _trials(linear: Op, read: Arrays, written: Arrays) -> list[Trial]:
    """Return a trial; none for attributes that do not fit the weight.

    Of large weights the first channels are tried, unless they are in groups: each is computed by itself, and all of
    them by the same array operations.
    """
    axis, weight = _channel_axis(linear), next(iter(written.values()))
    shape = _input_shape(linear, weight)
    large = weight.size > _MOST and int_attribute(linear.node, "group", 1) == 1
    few = max(1, _MOST * weight.shape[axis] // weight.size) if large else None

    def cut(array: Array) -> Array:
        return array[:, :few] if array.ndim > 1 and axis else array[:few]

    before, after = ({name: cut(array) for name, array in arrays.items()} for arrays in (read, written))
    if shape is None:
        return []
    return [Trial({**before, linear.node.input[0]: np.random.default_rng(0).standard_normal(shape)}, after)]


def _input_shape(linear: Op, weight: Array) -> tuple[int, ...] | None:
    """Return the least input on which every element of a kernel is used more than once; None for attributes that do
    not fit the weight."""
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
