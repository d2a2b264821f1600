"""Shapes of values, as far as a model tells them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx.checker
import onnx.shape_inference
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from amp_rewrite.index import bodies
from amp_rewrite.view import ScopeId, View

Shape = tuple[int | None, ...]
Shapes = Mapping[tuple[ScopeId, str], Shape]

# What inference raises of models that it finds at odds with themselves: it is not asked whether they are.
_FAULTS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, UnicodeDecodeError)


def shapes_of(view: View) -> Shapes:
    """The shape of each value whose rank is known, by scope and name; None for a dimension that is not a number.

    By onnx's inference on the model without its heavy weights. O(nodes).
    """
    skeleton = view.model.skeleton()
    try:
        told = onnx.shape_inference.infer_shapes(skeleton)
    except _FAULTS:
        told = skeleton
    found: dict[tuple[ScopeId, str], Shape] = {}
    for number, graph in enumerate(_graphs(told)):
        scope = ScopeId(number)
        found.update(((scope, v.name), s) for v in _stated(graph) if (s := _shape(v)) is not None)
        found.update(((scope, t.name), tuple(t.dims)) for t in graph.initializer)
    # A stub is an input of the skeleton; Constants have no declaration of their own.
    found.update(((v.scope, v.name), _dims(v.tensor)) for v in view.values if v.tensor is not None)
    return found


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The graphs of a model in the order of a view's scopes."""

    def inside(graph: GraphProto) -> Iterator[GraphProto]:
        yield graph
        for node in graph.node:
            for _, body in bodies(node):
                yield from inside(body)

    return inside(model.graph)


def _stated(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from (*graph.input, *graph.value_info, *graph.output)


def _shape(stated: ValueInfoProto) -> Shape | None:
    tensor = stated.type.tensor_type
    if not stated.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)


def _dims(tensor: TensorProto) -> Shape:
    return tuple(tensor.dims)
