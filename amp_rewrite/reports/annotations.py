"""Annotations: type, rule and reason of each op in the metadata of its node, where viewers of ONNX files show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.plan import Plan
from amp_rewrite.files.protos import refill
from amp_rewrite.ir.graphs import all_graphs, all_nodes
from amp_rewrite.ir.view import Scope, View
from amp_rewrite.reports.rows import Row

DTYPE, RULE, REASON = "amp.type", "amp.rule", "amp.reason"
"""Keys of a node's `metadata_props`; short, because viewers cut long ones."""
KEYS = frozenset((DTYPE, RULE, REASON))
INSERTED = "inserted"
"""Rule of a node that a conversion adds: a Cast, or the Clip before one."""


def reason(row: Row) -> str:
    """Return the reason for the type of a row in words; "" for an op that no rule decided."""
    if not row.rule:
        return ""
    words = reasons.words(row.rule)
    note = f": {row.note}" if row.note else ""
    due = f"; because of {row.because}" if row.because else ""
    return f"{words}{note}{due}"


def annotation(node: NodeProto) -> dict[str, str]:
    """Return the annotation of a node by key; empty if it has none."""
    return {entry.key: entry.value for entry in node.metadata_props if entry.key in KEYS}


def annotate(proto: ModelProto, view: View, plan: Plan, rows: Sequence[Row]) -> None:
    """Write annotations to the nodes of a converted model, in place. O(nodes).

    Annotations of an earlier conversion stay if they state the right type, and either this one changed no op or no
    rule decided about the op. Nodes that are not in the view lose theirs.
    """
    for graph, scope in zip(all_graphs(proto.graph), view.scopes, strict=False):  # the view may inline functions
        known = dict(_entries(view, plan, rows, scope))
        for node in graph.node:
            new, held = known.get(next(filter(None, node.output), ""), {}), annotation(node)
            if not (held and held.get(DTYPE) == new.get(DTYPE) and (plan.empty or RULE not in new)):
                _state(node, new)
    _clear(proto.functions)


def annotated(view: View) -> bool:
    """True if nodes of a model have metadata, which an earlier conversion may have written."""
    return bool(view.model.proto.functions) or any(op.node.metadata_props for op in view.ops)


def unannotate(proto: ModelProto) -> None:
    """Remove the annotations of all nodes of a model, in place, with those in bodies and functions.

    Example:
        >>> import onnx
        >>> from amp_rewrite.reports.annotations import unannotate
        >>> proto = onnx.load("model.onnx")
        >>> unannotate(proto)
    """
    _clear((proto.graph, *proto.functions))


def _clear(holders: Iterable[GraphProto | FunctionProto]) -> None:
    for holder in holders:
        for node in all_nodes(holder.node):
            _state(node, {})


def _entries(view: View, plan: Plan, rows: Sequence[Row], scope: Scope) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the annotations of the nodes of one graph, by the first value that a node makes."""
    for op_id in scope.ops:
        row = rows[op_id]
        stated = {DTYPE: row.dtype, RULE: row.rule or "", REASON: reason(row)}
        first = next((v for v in view.ops[op_id].outputs if v is not None), None)
        name = "" if first is None else plan.rename.get(first, view.values[first].name)
        yield name, {key: text for key, text in stated.items() if text}
    for cast in plan.casts:
        if view.values[cast.value].scope == scope.id:
            why = {RULE: INSERTED, REASON: cast.reason}
            yield cast.name, {DTYPE: cast.to.spelling, **why}
            if cast.saturates:
                yield f"{cast.name}_clamped", {DTYPE: "float32", **why}


def _state(node: NodeProto, stated: Mapping[str, str]) -> None:
    """Give a node these annotations and no others."""
    if annotation(node):
        refill(node, "metadata_props", [entry for entry in node.metadata_props if entry.key not in KEYS])
    for key, text in stated.items():
        node.metadata_props.add(key=key, value=text)
