"""A model with some of its outputs alone, and what its nodes say about being run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.build import bodies


def reduced(model: Model, names: Sequence[str]) -> Model:
    """The model with these outputs alone, and the nodes that they need."""
    outputs = {v.name: v for v in model.proto.graph.output}
    check_names("output", names, tuple(outputs))
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    needed, kept = set(names), []
    for node in reversed(model.proto.graph.node):
        if needed.intersection(node.output):
            needed.update(_read(node))
            kept.append(node)
    del proto.graph.output[:]
    proto.graph.output.extend(outputs[name] for name in dict.fromkeys(names))
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(kept))
    return Model(proto, model.path)


def _read(node: NodeProto) -> Iterator[str]:
    """The names that a node and its bodies read; the bodies' own among them, which does no harm."""
    yield from node.input
    for _, body in bodies(node):
        yield from (value.name for value in body.output)
        for inner in body.node:
            yield from _read(inner)


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for _, body in bodies(node):
            yield from nodes_of(body)


def size(graph: GraphProto) -> int:
    return sum(1 for _ in nodes_of(graph))


def written_to(graph: GraphProto) -> frozenset[str]:
    """Inputs that onnxruntime may write into: a BatchNormalization in training updates its statistics in place."""
    found = {name for n in nodes_of(graph) if n.op_type == "BatchNormalization" for name in n.input[3:]}
    for node in reversed(graph.node):
        if node.op_type == "Identity" and node.output[0] in found:  # the optimizer removes it
            found.update(node.input)
    return frozenset(found)


def check_names(kind: str, names: Sequence[str] | Mapping[str, object], known: tuple[str, ...]) -> None:
    """Nothing, where a model has all of the names; ModelError with the nearest for one that it has not."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, known)) or 'none'}"
            raise ModelError(f"the model has no {kind} {name!r}; {hint}")
