"""Bodies of a backward pass: the check that a body can be recomputed, and removal of its dead nodes."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto

from amp_rewrite.files.protos import refill
from amp_rewrite.ir.graphs import names_read, needed
from amp_rewrite.ir.nodes import ScopeId
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.train.vjp.row import Call


def refuse_random(v: Call, scope: ScopeId, where: str) -> None:
    """Raise GradientError if a body draws random numbers: recomputed, it would draw different ones."""
    view = v.b.facts.view
    for op_id in view.scopes[scope].ops:
        op = view.ops[op_id]
        if op.op_type in RANDOM or (op.op_type == "Dropout" and len(op.inputs) > 2):
            raise v.error(
                f"its {where} has {op.op_type} {op.name!r}, which would draw other numbers in the backward pass;"
                f" move it out of the {where}"
            )
        for body in op.bodies:
            refuse_random(v, body, where)


def arrivals(v: Call, pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """Return the gradients of a body's outputs, by name.

    GradientError if one value is two outputs: onnxruntime leaves the second one unwritten.
    """
    by_name: dict[str, str] = {}
    for name, gradient in pairs:
        if name in by_name:
            raise v.error(f"its body outputs {name!r} twice, which onnxruntime does not support; output an Identity")
        if gradient is not None:
            by_name[name] = gradient
    return by_name


def prune(graph: GraphProto) -> None:
    """Remove nodes that do not affect an output."""
    refill(graph, "node", needed(graph.node, [o.name for o in graph.output]))


def reads(graph: GraphProto) -> set[str]:
    """Names read by the nodes of a graph and of its bodies, and names of its outputs."""
    return {o.name for o in graph.output}.union(names_read(graph.node))
