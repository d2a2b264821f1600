"""A model with fusions carried out: the nodes that go, those that come, and what then no one reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto, NodeProto

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.ir.schema import normal_domain
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, Scope, ValueId, View
from amp_rewrite.rewrite.replacement import Fusion


def fused(view: View, fusions: Sequence[Fusion]) -> Model:
    """The model with fusions carried out, no two of which share an op; the view's own is not touched.

    Everything else stays as it is, names, order and declarations included, but for constants that only fused ops read.
    """
    proto = clone(view.model.proto)
    unread = _unread(view, fusions)
    _Emitter(view, fusions, unread).graph(proto.graph, view.scopes[MAIN])
    proto.graph.initializer.extend({w.name: w for fusion in fusions for w in fusion.weights}.values())
    _declare(proto, fusions)
    return replace(view.model, proto=proto)


def _declare(proto: ModelProto, fusions: Sequence[Fusion]) -> None:
    """The types of what foreign nodes make, where the model does not state them, and the domains of such nodes."""
    stated = {v.name for v in (*proto.graph.value_info, *proto.graph.output)}
    proto.graph.value_info.extend(v for fusion in fusions for v in fusion.declared if v.name not in stated)
    imported = {normal_domain(i.domain) for i in proto.opset_import}
    for domain in sorted({normal_domain(fusion.node.domain) for fusion in fusions} - imported):
        proto.opset_import.add(domain=domain, version=1)


@dataclass(frozen=True, slots=True)
class _Unread:
    """What goes: ops, those of the fusions included, and values that are made by none of them."""

    ops: frozenset[OpId]
    values: frozenset[ValueId]


def _unread(view: View, fusions: Sequence[Fusion]) -> _Unread:
    """The fused ops, and the constants and ops without effect that only they read. O(what is looked at)."""
    gone = {op for fusion in fusions for op in fusion.ops}
    kept = {name for fusion in fusions for node in _nodes(fusion) for name in node.input}
    kept |= _named_elsewhere(view.model.proto)
    values: set[ValueId] = set()
    pending = [v for op in sorted(gone) for v in view.ops[op].inputs if v is not None]
    while pending:
        value = pending.pop()
        if value in values or not _removable(view, value, gone, kept):
            continue
        made_by = view.producer(value)
        if made_by is None:
            values.add(value)
        elif (
            made_by.id not in gone
            and _replaceable(made_by)
            and all(_removable(view, v, gone, kept) for v in made_by.outputs if v is not None)
        ):
            gone.add(made_by.id)
            pending.extend(v for v in made_by.inputs if v is not None)
    return _Unread(frozenset(gone), frozenset(values))


def _nodes(fusion: Fusion) -> tuple[NodeProto, ...]:
    return (*fusion.ahead, fusion.node, *fusion.behind)


def _replaceable(op: Op) -> bool:
    """Whether an op is known to do nothing but give its results, the same each time: unread, its end is no loss."""
    return op.kind == "Constant" or (op.signature is not None and not op.bodies and op.kind not in UNREPEATABLE)


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
        self.fusions = {fusion.last if fusion.place is None else fusion.place: fusion for fusion in fusions}
        self.lost = {(view.values[v].scope, view.value_name(v)) for v in unread.values}
        made = {(view.ops[f.last].scope, name) for f in fusions for node in _nodes(f) for name in node.output}
        for op_id in unread.ops:
            op = view.ops[op_id]
            self.lost.update((op.scope, view.value_name(v)) for v in op.outputs if v is not None)
        self.lost -= made

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """Rewrite a copied graph in place; `scope` is its original's index."""
        nodes: list[NodeProto] = []
        made: set[str] = set()
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            if op_id in self.fusions:
                fusion = self.fusions[op_id]
                nodes += [n for n in _nodes(fusion) if n is fusion.node or not made.intersection(n.output)]
                made.update(name for n in fusion.ahead for name in n.output)
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
