"""Count a model's floating-point operations with the package's cost model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import onnx

from amp_rewrite import Model, View
from amp_rewrite.ir.view import Op
from amp_rewrite.reports.work import flops


def flops_of(stripped: onnx.ModelProto, inputs: Mapping[str, Sequence[int]]) -> float:
    """Return a model's operations for inputs of the given shapes; its weights may be missing.

    Ops with only constant inputs do not count, since they are folded before the model runs.
    """
    view = View.of(Model.load(_shaped(_fixed(_with_weights_as_inputs(stripped), inputs))))
    weights = {tensor.name for tensor in stripped.graph.initializer}
    return sum(flops(view, op) for op in _live(view, weights) if not op.bodies)


def _live(view: View, weights: set[str]) -> Iterator[Op]:
    """Yield the ops with inputs that are not constant."""
    fixed = {value.id for value in view.values if value.name in weights or value.tensor is not None}
    for op in view.ops:
        read = [v for v in op.inputs if v is not None]
        if op.kind == "Constant" or (read and all(v in fixed for v in read)):
            fixed.update(v for v in op.outputs if v is not None)
        else:
            yield op


def _with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model with tensors without data as inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    gone = [t for t in copy.graph.initializer if not _has_data(t)]
    named = {value.name for value in copy.graph.input}
    for tensor in gone:
        if tensor.name not in named:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            copy.graph.input.append(value)
    names = {tensor.name for tensor in gone}
    kept = [t for t in copy.graph.initializer if t.name not in names]
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(kept)
    return copy


def _fixed(model: onnx.ModelProto, inputs: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Set the shapes of a model's inputs, and named dimensions of equal names elsewhere."""
    named: dict[str, int] = {}
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs.get(value.name, ()), strict=False):
            if dim.dim_param:
                named[dim.dim_param] = size
            dim.dim_value = size
    for value in (*model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in named:
                dim.dim_value = named[dim.dim_param]
    return model


def _has_data(tensor: onnx.TensorProto) -> bool:
    if 0 in tensor.dims or tensor.raw_data:
        return True
    return any(len(getattr(tensor, name)) for name in ("float_data", "int32_data", "int64_data", "double_data"))


def _shaped(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with inferred shapes, using onnxruntime's tool for its own ops if possible."""
    with contextlib.suppress(Exception):  # it needs sympy, and raises any error
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        found = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
        if found is not None:
            return found
    with contextlib.suppress(onnx.shape_inference.InferenceError, ValueError):
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model
