"""Shapes of values, as far as a model tells them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import onnx.checker
import onnx.shape_inference
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from amp_rewrite.files.protos import clone
from amp_rewrite.ir.graphs import all_graphs
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.shapes.symbolic import Dim
from amp_rewrite.ir.versions import FIRST_ALLOWZERO
from amp_rewrite.ir.view import ScopeId, View

Shape = tuple[int | None, ...]
Shapes = Mapping[tuple[ScopeId, str], Shape]
Dims = tuple[Dim, ...]
"""A shape whose free dimensions may have names: equal names, equal sizes."""
AllDims = Mapping[tuple[ScopeId, str], Dims]
MADE_UP = "unk__"
"""What a name begins with that inference made up: it may be another's tomorrow."""

# What inference raises of models that it finds at odds with themselves: it is not asked whether they are.
_FAULTS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, UnicodeDecodeError)


def elements(sizes: Sequence[int | None]) -> int | None:
    """How many elements axes of these sizes have together; None where one is not known."""
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def shapes_of(view: View) -> Shapes:
    """The shape of each value whose rank is known, by scope and name; None for a dimension that is not a number.

    By onnx's inference on the model without its heavy weights. O(nodes).
    """
    numbers = dims_of(view, through_values=False).items()
    return {key: tuple([d if isinstance(d, int) else None for d in dims]) for key, dims in numbers}


def dims_of(view: View, *, through_values: bool = True) -> AllDims:
    """The same with the names of free dimensions. `through_values`: also what Shape, Gather and Concat compute."""
    skeleton = view.model.skeleton()
    told = _inferred(skeleton, through_values)
    found: dict[tuple[ScopeId, str], Dims] = {}
    for number, graph in enumerate(all_graphs(told.graph) if len(view.scopes) > 1 else (told.graph,)):
        scope = ScopeId(number)
        found.update(((scope, v.name), s) for v in _stated(graph) if (s := _shape(v)) is not None)
        found.update(((scope, t.name), tuple(t.dims)) for t in graph.initializer)
    # A stub is an input of the skeleton; Constants have no declaration of their own.
    found.update(((v.scope, v.name), _dims(v.tensor)) for v in view.values if v.tensor is not None)
    return found


def _inferred(skeleton: ModelProto, through_values: bool) -> ModelProto:
    """The model with what onnx infers; as it is where onnx objects."""
    opsets = {o.version for o in skeleton.opset_import if normal_domain(o.domain) == ""}
    if through_values and opsets == {FIRST_ALLOWZERO - 1}:
        # Other shapes are the same at the next opset.
        later = clone(skeleton)
        for imported in later.opset_import:
            imported.version = FIRST_ALLOWZERO if normal_domain(imported.domain) == "" else imported.version
        try:
            return onnx.shape_inference.infer_shapes(later, data_prop=True)
        except _FAULTS:
            pass
    try:
        return onnx.shape_inference.infer_shapes(skeleton, data_prop=through_values)
    except _FAULTS:
        return skeleton


def _stated(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from (*graph.input, *graph.value_info, *graph.output)


def _shape(stated: ValueInfoProto) -> Dims | None:
    tensor = stated.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    # A slice takes half as long as to iterate.
    return tuple([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim[:]])


def _dims(tensor: TensorProto) -> Dims:
    return tuple(tensor.dims)
