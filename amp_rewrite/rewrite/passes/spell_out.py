"""Operators without kernels of their own, spelled out by others: CastLike and GroupNormalization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx.helper
from onnx import TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.builder import new_node
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.equivalence import double, mismatch, run, runs_of, trial_shape
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, judged, only_float32

GROUP_NORM = "group_normalization"


def spell_out_casts(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each CastLike by the equivalent Cast, which does not read the model tensor.

    The usual runtimes have no kernel for CastLike: they run this Cast.
    """
    for op in view.of_kinds(("CastLike",)):
        like = op.inputs[1]
        dtype = view.dtype(like)
        if dtype is None or op.inputs[0] is None:
            continue
        node = clone(op.node)
        del node.input[1:]
        if view.dtype(op.inputs[0]) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
        yield Replacement("cast_like", (op.id,), op.id, node, findings=())


def spell_group_norms(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each GroupNormalization with constant scale and bias, one number per channel. O(ops).

    By InstanceNormalization between two Reshapes, as PyTorch exports it below opset 21: onnxruntime has no CUDA kernel
    for GroupNormalization, and opens it into some 25 nodes with Casts between.
    """
    for op in view.of_kinds(("GroupNormalization",)):
        if only_float32(view, (op.id,)):
            yield judged(GROUP_NORM, op.id, _spelled(view, op, context))


def _spelled(view: View, op: Op, context: Context) -> Replacement | str:
    source, *affine = op.operands
    shape, arrays = context.shape(view, source), [view.array(value) for value in affine]
    numbers = [array for array in arrays if array is not None]
    groups = int_attribute(op.node, "num_groups", 0)
    if shape is None or len(shape) < 3 or len(numbers) != 2:
        return "its rank, or its scale or bias, is not known"
    channels = numbers[0].size
    if groups < 1 or channels % groups or numbers[1].size != channels or shape[1] not in (None, channels):
        return "it has no scale and bias for each channel"
    (result,), (x, *_) = op.node.output, op.node.input

    def name(part: str) -> str:
        return unused(f"{result}_{part}", view.names)

    def stored(part: str, values: object, dtype: type) -> TensorProto:
        return from_array(np.array(values, dtype), name(part))

    wide = (channels, *[1] * (len(shape) - 2))
    scale, bias = (array.reshape(wide) for array in numbers)
    weights = [stored("groups", (0, groups, -1), np.int64), stored("ones", np.ones(groups), np.float32)]
    weights += [stored("zeros", np.zeros(groups), np.float32)]
    # onnxruntime's quantizers name the scale of a value NAME_scale, and take what has that name for it
    weights += [stored("gamma", scale, np.float32), stored("bias", bias, np.float32)]
    ahead, dims = [new_node("Reshape", [x, weights[0].name], name("grouped"))], (0, channels, *shape[2:])
    if dims.count(None) > 1:
        ahead.append(new_node("Shape", [x], name("shape")))
    else:
        weights.append(stored("shape", [-1 if dim is None else dim for dim in dims], np.int64))
    read = [name("grouped"), weights[1].name, weights[2].name]
    epsilon = float_attribute(op.node, "epsilon", 1e-5)
    node = new_node("InstanceNormalization", read, name("normal"), op.name, epsilon=epsilon)
    behind = [
        new_node("Reshape", [name("normal"), name("shape")], name("apart")),
        new_node("Mul", [name("apart"), weights[3].name], name("scaled")),
        new_node("Add", [name("scaled"), weights[4].name], result),
    ]
    feed = {x: np.random.default_rng(0).standard_normal((2, channels, *trial_shape(len(shape) - 2)))}
    fed = {**feed, **{tensor.name: double(view.model.array(tensor)) for tensor in weights}}
    fed[name("shape")] = np.array(feed[x].shape)
    spelled = run([*ahead, node, *behind], result, [fed], view.opsets)
    before = runs_of(view, (op.id,), result, [feed])
    why = mismatch(before, spelled, [np.abs(y).max() for y in spelled] if not isinstance(spelled, str) else [])
    return why or Replacement(
        GROUP_NORM, (op.id,), op.id, node, tuple(weights), ahead=tuple(ahead), behind=tuple(behind)
    )
