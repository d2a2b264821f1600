"""BatchNormalization in the Conv, ConvTranspose or Gemm before it, whose weights then carry its factor and shift.

y = γ (W x + b − μ) / √(σ² + ε) + β is W' x + b' with W' = s W, b' = s (b − μ) + β and s = γ / √(σ² + ε), all per output
channel (Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference,
CVPR 2018, section 3.2). Computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx.numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.dataflow import alone
from amp_rewrite.ir.op_classes import LAYERS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.versions import FIRST_INFERENCE_BATCH_NORM
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.equivalence import Arrays, mismatch, run
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, Replacement

KIND = "batch_normalization"
_TRIED = 15
"""The opset in which both are run, at least: for that of opset 9 onnx's reference computes statistics, as in training.
Nothing that is folded changed from then to opset 15 but in the types that it takes."""
_CARRIERS = LAYERS - {"MatMul"}  # it takes no bias


def fold_batch_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Fold each BatchNormalization into the linear op before it, or refuse it. Reads the weights that it folds."""
    for op in view.ops:
        linear = view.producer(op.inputs[0]) if op.kind == "BatchNormalization" else None
        if linear is not None and linear.kind in _CARRIERS:
            outcome = _folded(view, linear, op, context.to)
            yield Refusal(KIND, op.id, outcome) if isinstance(outcome, str) else outcome


@dataclass(frozen=True, slots=True)
class _Parts:
    """Weight and bias of the linear op, factor and shift of the normalization, all in float64.

    `read`: the constants that they come from, by name.
    """

    read: Arrays
    weight: Array
    bias: Array
    factor: Array
    shift: Array


def _folded(view: View, linear: Op, norm: Op, to: DType) -> Replacement | str:
    refused = _unfit(view, linear, norm)
    if refused:
        return refused
    parts = _parts(view, linear, norm)
    if isinstance(parts, str):
        return parts
    weight = parts.weight * parts.factor.reshape(_along_channels(linear, parts.weight.ndim))
    bias = parts.bias * parts.factor + parts.shift
    refused = _unfit_numbers(_channel_axis(linear), parts.weight, weight, bias, to)
    if refused:
        return refused
    stored = [array.astype(np.float32) for array in (weight, bias)]
    names = _names(view, linear)
    node = clone(linear.node)
    del node.input[1:]
    node.input.extend(names)
    del node.output[:]
    node.output.append(norm.node.output[0])
    tensors = tuple(onnx.numpy_helper.from_array(a, n) for a, n in zip(stored, names, strict=True))
    fusion = Replacement(KIND, (linear.id, norm.id), norm.id, node, tensors)
    return _mismatch(view, linear, norm, fusion, parts.read) or fusion


def _unfit(view: View, linear: Op, norm: Op) -> str | None:
    """Return what in the structure forbids folding; None if nothing does."""
    mode = attribute(norm.node, "training_mode")
    if (mode is not None and mode.i) or sum(out is not None for out in norm.outputs) > 1:
        return "it trains: its statistics change"
    if view.opsets.get("", 1) < FIRST_INFERENCE_BATCH_NORM:
        return f"opset {view.opsets.get('', 1)} has another BatchNormalization"
    if not alone(view, linear.outputs[0], norm):
        return f"others read what {linear.name} gives, or it lies in another graph"
    if any(view.dtype(v) is not DType.FLOAT for op in (linear, norm) for v in op.inputs if v is not None):
        return "not all of it is float32"
    return _unfit_form(linear)


def _unfit_form(linear: Op) -> str | None:
    group = attribute(linear.node, "group")
    if linear.kind == "ConvTranspose" and group is not None and group.i != 1:
        return "its ConvTranspose has groups"
    beta = attribute(linear.node, "beta")
    if linear.kind == "Gemm" and len(linear.inputs) > 2 and beta is not None and beta.f != 1:
        return "its Gemm scales its bias"
    return None


def _parts(view: View, linear: Op, norm: Op) -> _Parts | str:
    read = [linear.inputs[1], *norm.inputs[1:5]]
    bias = linear.inputs[2] if len(linear.inputs) > 2 else None
    arrays, names = [], []
    for value in (*read, *([bias] if bias is not None else [])):
        tensor = view.constant(value)
        if tensor is None:
            return f"{view.value_name(value) if value is not None else 'an operand'} is not a constant"
        arrays.append(view.model.array(tensor).astype(np.float64))
        names.append(tensor.name if value is None else view.value_name(value))
    weight, gamma, beta, mean, variance, *rest = arrays
    channels = gamma.shape[0] if gamma.ndim == 1 else -1
    if weight.ndim < 2 or weight.shape[_channel_axis(linear)] != channels:
        return "its channels are not those of the weights before it"
    offset = rest[0] if rest else np.zeros(channels)
    if offset.shape != (channels,):
        return "its bias is not one number per channel"
    epsilon = attribute(norm.node, "epsilon")
    with np.errstate(all="ignore"):
        factor = gamma / np.sqrt(variance + np.float64(np.float32(epsilon.f if epsilon is not None else 1e-5)))
        return _Parts(dict(zip(names, arrays, strict=True)), weight, offset, factor, beta - mean * factor)


def _channel_axis(linear: Op) -> int:
    """The axis of the weight that counts output channels."""
    if linear.kind == "Gemm":
        transposed = attribute(linear.node, "transB")
        return 0 if transposed is not None and transposed.i else 1
    return 1 if linear.kind == "ConvTranspose" else 0


def _along_channels(linear: Op, rank: int) -> tuple[int, ...]:
    return tuple(-1 if axis == _channel_axis(linear) else 1 for axis in range(rank))


def _unfit_numbers(axis: int, old: Array, weight: Array, bias: Array, to: DType) -> str | None:
    """Return what in the numbers forbids folding.

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


def _names(view: View, linear: Op) -> list[str]:
    """New names for weight and bias. Weights that several ops share are folded for each: the result is named, too."""
    weight, result = linear.inputs[1], linear.outputs[0]
    assert weight is not None and result is not None
    shared = f"_{view.value_name(result)}" if len(view.uses[weight]) > 1 else ""
    names = [f"{view.value_name(weight)}{shared}_{part}" for part in ("folded", "folded_bias")]
    while any(name in view.names for name in names):
        names = [f"{name}_" for name in names]
    return names


# -- proof -----------------------------------------------------------------------------------------


def _mismatch(view: View, linear: Op, norm: Op, fusion: Replacement, read: Arrays) -> str | None:
    """Return how folded and unfolded differ; None if they agree on random inputs.

    The bound is that of each product rounded once: |W' x + b'| taken with absolute values throughout (Higham, Accuracy
    and Stability of Numerical Algorithms, 2nd edition, section 3.1). Of large weights the first channels are tried:
    each is computed by itself, and all of them by the same array operations.
    """
    brought = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in fusion.weights}
    few = _channels_tried(linear, brought[fusion.node.input[1]])
    old, new = (_cut(linear, arrays, few) for arrays in (read, brought))
    shape = _input_shape(linear, new[fusion.node.input[1]])
    x = {linear.node.input[0]: np.random.default_rng(0).standard_normal(shape)}
    opsets = {**view.opsets, "": max(_TRIED, view.opsets.get("", 1))}
    result = norm.node.output[0]
    before = run([linear.node, norm.node], result, [{**x, **old}], opsets)
    after = run([fusion.node], result, [{**x, **new}], opsets)
    absolute = {name: np.abs(array) for name, array in {**x, **new}.items()}
    magnitudes = run([fusion.node], result, [absolute], opsets)
    return magnitudes if isinstance(magnitudes, str) else mismatch(before, after, magnitudes)


_MOST = 1 << 18  # elements of a weight that is tried whole


def _channels_tried(linear: Op, weight: Array) -> int | None:
    """The number of channels of a weight to try; None for all, as always where channels come in groups."""
    group = attribute(linear.node, "group")
    if weight.size <= _MOST or (group is not None and group.i != 1):
        return None
    return max(1, int(_MOST * weight.shape[_channel_axis(linear)]) // weight.size)


def _cut(linear: Op, arrays: Arrays, few: int | None) -> dict[str, Array]:
    """The first channels of weights, biases and statistics, in float64."""
    axis = _channel_axis(linear)
    at = {1: (slice(few),)}  # of a bias; of a weight its own axis
    return {
        name: array[at.get(array.ndim, (*(slice(None),) * axis, slice(few)))].astype(np.float64)
        for name, array in arrays.items()
    }


def _input_shape(linear: Op, weight: Array) -> tuple[int, ...]:
    """The least input on which every element of a kernel is used more than once."""
    if linear.kind == "Gemm":
        inner = weight.shape[1 - _channel_axis(linear)]
        transposed = attribute(linear.node, "transA")
        return (inner, 2) if transposed is not None and transposed.i else (2, inner)
    group, stated = attribute(linear.node, "group"), attribute(linear.node, "dilations")
    spatial = weight.shape[2:]
    dilations = stated.ints if stated is not None else (1,) * len(spatial)
    extent = tuple((k - 1) * d + 2 for k, d in zip(spatial, dilations, strict=True))
    inner = weight.shape[0] if linear.kind == "ConvTranspose" else weight.shape[1] * (group.i if group else 1)
    return (1, inner, *extent)
