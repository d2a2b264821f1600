"""Bodies of a backward pass: what a body must not hold to be computed again, and what of it is left in the end."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto

from amp_rewrite.files.protos import refill
from amp_rewrite.ir.graphs import names_read, needed
from amp_rewrite.ir.nodes import ScopeId
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.train.vjp.row import Call


def refuse_random(v: Call, scope: ScopeId, where: str) -> None:
    """GradientError where a body draws random numbers: computed again, it would draw others."""
    view = v.b.facts.view
    for op_id in view.scopes[scope].ops:
        op = view.ops[op_id]
        if op.op_type in RANDOM or (op.op_type == "Dropout" and len(op.inputs) > 2):
            raise v.error(
                f"its {where} holds {op.op_type} {op.name!r}, which would draw other numbers in the backward pass;"
                f" move it out of the {where}"
            )
        for body in op.bodies:
            refuse_random(v, body, where)


def arrivals(v: Call, pairs: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    """The gradients that arrive at the outputs of a body, by name.

    GradientError where one value is two outputs: onnxruntime leaves the second one unwritten.
    """
    found: dict[str, str] = {}
    for name, gradient in pairs:
        if name in found:
            raise v.error(f"its body gives {name!r} twice, which onnxruntime does not compute; give an Identity of it")
        if gradient is not None:
            found[name] = gradient
    return found


def prune(graph: GraphProto) -> None:
    """Leave out the nodes of which nothing reaches an output."""
    refill(graph, "node", needed(graph.node, [o.name for o in graph.output]))


def reads(graph: GraphProto) -> set[str]:
    """The names that the nodes of a graph and of the bodies in it read, and those of its outputs."""
    return {o.name for o in graph.output}.union(names_read(graph.node))
