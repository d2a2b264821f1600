"""Advice on a converted model before it runs: padding for tensor cores, ops without kernels, expected speed.

Everything derives from shapes, types and tables, not from measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import onnx.defs
from onnx import TensorShapeProto, ValueInfoProto

from amp_rewrite.decide.coloring.gate import kernel_types
from amp_rewrite.decide.sizes import Sizes
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.op_classes import PICKS, VIEWS
from amp_rewrite.ir.schema import signature, unknown
from amp_rewrite.ir.shapes.onnx_shapes import Shape, elements, shape_of
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.runtime.kernels import Kernels
from amp_rewrite.runtime.roofline import Roof

# A row of this many 16-bit elements is 16 bytes, the unit of tensor core loads: NVIDIA, Matrix Multiplication
# Background User's Guide, "Tensor Core Requirements".
ALIGNED = 8

LARGEST = (1 << 63) - 1
"""The largest dimension: ONNX stores int64."""


@dataclass(frozen=True, slots=True)
class TimeBound:
    """Lower bound on the time of a model's ops on a GPU, in seconds, in float32 and as converted.

    `counted` of `ops` ops have known shapes and are included. Products count their operations, other ops the bytes that
    they read and write; without fusion, caches and kernel launches.
    """

    gpu: str
    float32: float
    converted: float
    counted: int
    ops: int

    @property
    def ratio(self) -> float:
        return self.float32 / self.converted


NAMELESS = "?"
"""Stands for all free dimensions without a name."""

Dimension = TensorShapeProto.Dimension
Dimensions = tuple[tuple[str, int | None], ...]


def with_dimensions(model: Model, sizes: Mapping[str, int], otherwise: int) -> Model:
    """Return the model with free input dimensions fixed by name, else as `otherwise`, wherever they recur."""
    proto = clone(model.proto)
    named = {name: sizes.get(name, otherwise) for name in free_dimensions(model)}
    for dim in _free(*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        if dim.dim_param in named:
            dim.dim_value = named[dim.dim_param]
    for dim in _free(*proto.graph.input):
        dim.dim_value = sizes.get(NAMELESS, otherwise)
    return Model(proto, model.path)


def free_dimensions(model: Model) -> tuple[str, ...]:
    """Return the free dimensions of a model's inputs, in order; NAMELESS for those without a name."""
    return tuple(dict.fromkeys(dim.dim_param or NAMELESS for dim in _free(*model.proto.graph.input)))


def _free(*values: ValueInfoProto) -> list[Dimension]:
    dims = (dim for value in values for dim in value.type.tensor_type.shape.dim)
    return [dim for dim in dims if not dim.HasField("dim_value")]


def aligned_dimensions(view: View, op: Op) -> Dimensions:
    """Return the dimensions to align for tensor cores, of an op that computes a matrix product."""
    dimensions = _DIMENSIONS.get(op.kind)
    weight = shape_of(view, op.inputs[1]) if dimensions and len(op.inputs) > 1 else None
    return dimensions(op, weight) if dimensions and weight is not None else ()


def _matmul(op: Op, weight: Shape) -> Dimensions:
    return (("k", weight[-2]), ("n", weight[-1])) if len(weight) > 1 else ()


def _gemm(op: Op, weight: Shape) -> Dimensions:
    return _matmul(op, tuple(reversed(weight)) if int_attribute(op.node, "transB", 0) else weight)


def _conv(op: Op, weight: Shape) -> Dimensions:
    """Return the dimensions of a convolution; none if depthwise, which does not run on tensor cores."""
    return (("in", weight[1]), ("out", weight[0])) if len(weight) > 2 and weight[1] != 1 else ()


def _transposed(op: Op, weight: Shape) -> Dimensions:
    return _conv(op, (weight[1], weight[0], *weight[2:])) if len(weight) > 2 and weight[1] != 1 else ()


_DIMENSIONS = {"MatMul": _matmul, "Gemm": _gemm, "Conv": _conv, "ConvTranspose": _transposed}


def misaligned(view: View, low: DType) -> dict[tuple[str, str, int], list[str]]:
    """Return the names of low products with a fixed dimension that is not a multiple of 8, in order. O(nodes).

    Keys are the kind of op, the dimension and its size.
    """
    groups = defaultdict[tuple[str, str, int], list[str]](list)
    for op in view.ops:
        for dimension, size in aligned_dimensions(view, op) if _main(view, op) is low else ():
            if size is not None and size % ALIGNED:
                groups[op.kind, dimension, size].append(op.name)
    return groups


def better_size(size: int) -> int:
    """Return the next size that tensor cores run well: a power of two below 256, else a multiple of 8."""
    power = 1 << max(size - 1, ALIGNED - 1).bit_length()
    return power if size < _LARGE else -(-size // ALIGNED) * ALIGNED


_LARGE = 256
"""From this size on, NVIDIA asks for multiples of 8 only (TensorFlow's mixed precision guide)."""


def on_cpu(view: View, kernels: Kernels) -> dict[tuple[str, int | None], list[str]]:
    """Return the names of float ops without a kernel in the CUDA provider, in order. O(nodes).

    Keys are the reason and the nearest ai.onnx opset with a kernel. Functions, ops with bodies, unknown ones are
    skipped.
    """
    groups = defaultdict[tuple[str, int | None], list[str]](list)
    for op in view.ops:
        if op.signature is None or op.bodies or op.kind == "Constant" or op.signature.expandable:
            continue
        floats = any(v.type and v.type.dtype and v.type.dtype.floating for v in view.variables[op.id])
        if not floats or any(unknown(view.types[value]) for value in op.ports):
            continue
        types = kernel_types(view, op)
        why = kernels.refusal(op.domain, op.op_type, op.signature.since, types)
        if why is not None:
            groups[why, _served_at(op, types, kernels, view.opset)].append(op.name)
    return groups


def _served_at(op: Op, types: Mapping[str, str], kernels: Kernels, opset: int) -> int | None:
    """Return the nearest opset to move to at which the op has a kernel, the older of two; None for other domains."""
    known = range(OLDEST_MOVED, onnx.defs.onnx_opset_version() + 1) if op.domain == "" else ()
    for other in sorted(known, key=lambda other: abs(other - opset)):
        schema = signature("", op.op_type, other)
        if schema is not None and kernels.runs("", op.op_type, schema.since, types):
            return other
    return None


def bound(view: View, roof: Roof, low: DType) -> TimeBound | None:
    """Return the bound of a converted model whose dimensions are fixed; None without known shapes. O(nodes)."""
    work, reached = Sizes(view), roof.attained
    full = converted = 0.0
    counted = ops = 0
    for op in view.ops:
        if op.kind in VIEWS or op.bodies:
            continue
        ops += 1
        ports = [v for v in (*op.inputs[op.kind in PICKS :], *op.outputs) if v is not None]
        moved = {value: elements(shape_of(view, value)) or 0 for value in ports}
        if not all(moved.values()):
            continue
        counted += 1
        flops = work.flops(op)
        converted += reached.seconds(flops, _nbytes(view, moved), low=_main(view, op) is low)
        if not _placed(op, view, low):
            full += reached.seconds(flops, _nbytes(view, moved, instead_of=low), low=False)
    return TimeBound(roof.gpu, full, converted, counted, ops) if converted else None


def _placed(op: Op, view: View, low: DType) -> bool:
    """True if an op is a Cast to or from the low type, absent in the float32 model."""
    return op.kind == "Cast" and any(view.dtype(v) is low for v in (*op.inputs, *op.outputs) if v is not None)


def _nbytes(view: View, moved: Mapping[ValueId, int], *, instead_of: DType | None = None) -> int:
    """Return the bytes of so many elements of each value, with float32 in place of a low type."""
    types = {value: view.dtype(value) or DType.FLOAT for value in moved}
    return sum((DType.FLOAT if types[v] is instead_of else types[v]).nbytes(count) for v, count in moved.items())


def _main(view: View, op: Op) -> DType | None:
    """Return the type that an op computes in: that of its first floating variable."""
    types = (v.type.dtype for v in view.variables[op.id] if v.type is not None)
    return next((dtype for dtype in types if dtype is not None and dtype.floating), None)
