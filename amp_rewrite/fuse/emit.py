"""A model with fusions carried out: the nodes that go, those that come, and what then no one reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto, NodeProto

from amp_rewrite.files.model import Model
from amp_rewrite.fuse.constants import EXACT
from amp_rewrite.fuse.fusion import Fusion
from amp_rewrite.index import bodies
from amp_rewrite.view import MAIN, Op, OpId, Role, Scope, ValueId, View


def fused(view: View, fusions: Sequence[Fusion]) -> Model:
    """The model with fusions carried out, no two of which share an op; the view's own is not touched.

    Everything else stays as it is, names, order and declarations included, but for constants that only fused ops read.
    """
    proto = ModelProto()
    proto.CopyFrom(view.model.proto)
    unread = _unread(view, fusions)
    _Emitter(view, fusions, unread).graph(proto.graph, view.scopes[MAIN])
    proto.graph.initializer.extend(weight for fusion in fusions for weight in fusion.weights)
    return replace(view.model, proto=proto)


@dataclass(frozen=True, slots=True)
class _Unread:
    """What goes: ops, those of the fusions included, and values that are made by none of them."""

    ops: frozenset[OpId]
    values: frozenset[ValueId]


def _unread(view: View, fusions: Sequence[Fusion]) -> _Unread:
    """The fused ops, and the constants and exact ops on constants that only they read. O(what is looked at)."""
    gone = {op for fusion in fusions for op in fusion.ops}
    kept = {name for fusion in fusions for name in fusion.node.input} | _named_elsewhere(view.model.proto)
    values: set[ValueId] = set()
    pending = [v for op in sorted(gone) for v in view.ops[op].inputs if v is not None]
    while pending:
        value = pending.pop()
        if value in values or not _removable(view, value, gone, kept):
            continue
        made_by = view.producer(value)
        if made_by is None:
            values.add(value)
        elif made_by.id not in gone and _computed_here(view, made_by):
            gone.add(made_by.id)
            pending.extend(v for v in made_by.inputs if v is not None)
    return _Unread(frozenset(gone), frozenset(values))


def _computed_here(view: View, op: Op) -> bool:
    """Whether an op is a Constant, or computed from constants alone by exact ops: so its end is no loss."""
    pending = [op]
    while pending:
        found = pending.pop()
        if found.kind == "Constant":
            continue
        if found.kind not in EXACT or len(found.outputs) != 1:
            return False
        for value in found.inputs:
            made_by = view.producer(value)
            if made_by is not None:
                pending.append(made_by)
            elif value is not None and view.constant(value) is None:
                return False
    return True


def _named_elsewhere(proto: ModelProto) -> set[str]:
    """Names by which something outside the nodes refers to a value."""
    found = {a.tensor_name for a in proto.graph.quantization_annotation}
    for annotation in proto.graph.quantization_annotation:
        found.update(entry.value for entry in annotation.quant_parameter_tensor_names)
    return found | {formal.name for formal in proto.graph.input}


def _removable(view: View, value: ValueId, gone: Collection[OpId], kept: Collection[str]) -> bool:
    held = view.values[value]
    if held.public or held.overridable or value in view.yielded or held.name in kept or held.role is Role.INPUT:
        return False
    return all(use.op in gone for use in view.uses[value])


class _Emitter:
    def __init__(self, view: View, fusions: Sequence[Fusion], unread: _Unread) -> None:
        self.view = view
        self.unread = unread
        self.nodes = {fusion.last: fusion.node for fusion in fusions}
        self.lost = {(view.values[v].scope, view.value_name(v)) for v in unread.values}
        for op_id in unread.ops - self.nodes.keys():
            op = view.ops[op_id]
            self.lost.update((op.scope, view.value_name(v)) for v in op.outputs if v is not None)

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """Rewrite a copied graph in place; `scope` is its original's index."""
        nodes: list[NodeProto] = []
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            if op_id in self.nodes:
                nodes.append(self.nodes[op_id])
            elif op_id not in self.unread.ops:
                for body, (_, inner) in zip(self.view.ops[op_id].bodies, bodies(node), strict=True):
                    self.graph(inner, self.view.scopes[body])
                nodes.append(node)
        fresh = GraphProto()
        fresh.node.extend(nodes)
        fresh.value_info.extend(v for v in graph.value_info if (scope.id, v.name) not in self.lost)
        fresh.initializer.extend(t for t in graph.initializer if (scope.id, t.name) not in self.lost)
        for name in ("node", "value_info", "initializer"):
            graph.ClearField(name)
            getattr(graph, name).MergeFrom(getattr(fresh, name))
