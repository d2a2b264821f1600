"""A copied model beside the view of the original: which graph is which scope, which node which op."""

from __future__ import annotations

from onnx import GraphProto, NodeProto

from amp_rewrite.ir.build import bodies
from amp_rewrite.ir.view import MAIN, OpId, ScopeId, View


def graphs_of(view: View, main: GraphProto) -> list[tuple[ScopeId, GraphProto]]:
    """The graphs of a copied model with their scopes, outer ones first."""
    pending = [(MAIN, main)]
    found: list[tuple[ScopeId, GraphProto]] = []
    while pending:
        scope, graph = pending.pop()
        found.append((scope, graph))
        for op_id, node in zip(view.scopes[scope].ops, graph.node, strict=True):
            pending.extend(zip(view.ops[op_id].bodies, (body for _, body in bodies(node)), strict=True))
    return found


def nodes_of(view: View, main: GraphProto) -> dict[OpId, NodeProto]:
    """The nodes of a copied model by the ops of the original."""
    return {
        op: node
        for scope, graph in graphs_of(view, main)
        for op, node in zip(view.scopes[scope].ops, graph.node, strict=True)
    }
