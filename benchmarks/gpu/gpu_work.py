"""Work of a model on a GPU: for each kernel its operations and bytes, as the cost model of the package counts them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from amp_rewrite import DType, Model, View
from amp_rewrite.decide import sizes
from amp_rewrite.ir.op_classes import ELEMENTLESS, PICKS, RELABELS
from amp_rewrite.ir.view import Op

VIEWS = RELABELS | ELEMENTLESS | {"Constant"}
"""Ops that rename or relabel memory: a kernel moves nothing."""

FLOATS = (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16, DType.DOUBLE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Ops that are as large as each other: operations and bytes of one, the type that it computes in, how many."""

    flops: float
    nbytes: float
    low: bool
    times: int

    def __str__(self) -> str:
        return f"{self.flops:.0f}:{self.nbytes:.0f}:{self.low:d}:{self.times}"


def kernels(text: str) -> list[Kernel]:
    """Return kernels from their text: operations, bytes, whether they are low, and times, with spaces between."""
    words = (word.split(":") for word in text.split())
    return [Kernel(float(flops), float(nbytes), low == "1", int(times)) for flops, nbytes, low, times in words]


def work_of(stripped: onnx.ModelProto, inputs: Mapping[str, Sequence[int]]) -> list[Kernel]:
    """Return the kernels of a model whose weights may be gone, on inputs of these shapes, the largest first.

    What constants alone make is folded before the model runs, and views move nothing.
    """
    view = View.of(Model.load(_shaped(_fixed(_with_weights_as_inputs(stripped), inputs))))
    weights = {tensor.name for tensor in stripped.graph.initializer}
    found: Counter[tuple[float, float, bool]] = Counter()
    for op in _live(view, weights):
        if op.kind not in VIEWS and not op.bodies:
            found[sizes.flops(view, op), _bytes(view, op), _is_low(view, op)] += 1
    return sorted((Kernel(*key, times) for key, times in found.items()), key=lambda k: (-k.flops, -k.nbytes))


def _live(view: View, weights: set[str]) -> Iterator[Op]:
    """Yield the ops that read more than constants."""
    fixed = {value.id for value in view.values if value.name in weights or value.tensor is not None}
    for op in view.ops:
        read = [v for v in op.inputs if v is not None]
        if op.kind == "Constant" or (read and all(v in fixed for v in read)):
            fixed.update(v for v in op.outputs if v is not None)
        else:
            yield op


def _bytes(view: View, op: Op) -> float:
    """Return the bytes that an op reads and writes; of a tensor that it picks from, as much as it takes."""
    moved = [v for v in op.inputs if v is not None and not (op.kind in PICKS and v == op.inputs[0])]
    moved += [v for v in op.outputs if v is not None] + (list(op.results[:1]) if op.kind in PICKS else [])
    total = 0.0
    for value in moved:
        dtype, count = view.dtype(value), sizes.size(view, value)
        total += dtype.nbytes(count) if dtype is not None else 4 * count
    return total


def _is_low(view: View, op: Op) -> bool:
    """True if the first float that an op reads is of a low type."""
    types = (view.dtype(v) for v in op.inputs if v is not None)
    first = next((t for t in types if t in FLOATS), None)
    return first is not None and first.low


def _with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in which tensors without data are inputs."""
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
    """Return a model with the shapes of its inputs; free dimensions that others state by name are theirs, too."""
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
    """Return a model with all shapes that can be inferred; those of onnxruntime's own ops by its own tool."""
    with contextlib.suppress(Exception):  # it needs sympy, and raises whatever its rules raise
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        found = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
        if found is not None:
            return found
    with contextlib.suppress(onnx.shape_inference.InferenceError, ValueError):
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model
