"""Subgraphs: a model reduced to some outputs, and facts about its nodes that matter for running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import GraphProto

from amp_rewrite.errors import ModelError, advice
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.graphs import all_nodes, needed


def reduced(model: Model, names: Sequence[str]) -> Model:
    """Return the model with only these outputs and the nodes that they need."""
    outputs = {v.name: v for v in model.proto.graph.output}
    check_names("output", names, tuple(outputs))
    proto = clone(model.proto)
    refill(proto.graph, "output", [outputs[name] for name in dict.fromkeys(names)])
    refill(proto.graph, "node", needed(model.proto.graph.node, names))
    return Model(proto, model.path)


def written_to(graph: GraphProto) -> frozenset[str]:
    """Inputs that onnxruntime may write into: a BatchNormalization in training mode updates its statistics in place."""
    names = {name for n in all_nodes(graph.node) if n.op_type == "BatchNormalization" for name in n.input[3:]}
    for node in reversed(graph.node):
        if node.op_type == "Identity" and node.output[0] in names:  # the optimizer removes it
            names.update(node.input)
    return frozenset(names)


def check_names(kind: str, names: Sequence[str] | Mapping[str, object], known: tuple[str, ...]) -> None:
    """Raise ModelError for a name that the model does not have, with the nearest known name."""
    for name in names:
        if name not in known:
            hint = advice(name, known, f"it has {', '.join(map(repr, known)) or 'none'}")
            raise ModelError(f"the model has no {kind} {name!r}; {hint}")
