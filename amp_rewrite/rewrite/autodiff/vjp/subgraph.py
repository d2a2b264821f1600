"""Bodies of a backward pass: checks that a body can be recomputed, and the nodes that bodies consist of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx.helper
from onnx import GraphProto, NodeProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import needed, refill
from amp_rewrite.ir.builder import declared
from amp_rewrite.ir.nodes import ScopeId
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.vjp.paths import nested
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, element_type


def refuse_random(v: Call, scope: ScopeId, where: str) -> None:
    """Raise GradientError if a body draws random numbers: recomputed, it would draw different ones."""
    view = v.b.facts.view
    for op in (view.ops[op_id] for body in nested(view, [scope]) for op_id in view.scopes[body].ops):
        if op.op_type in RANDOM or (op.op_type == "Dropout" and len(op.inputs) > 2):
            raise v.error(
                f"its {where} has {op.op_type} {op.name!r}, which would draw other numbers in the backward pass;"
                f" move it out of the {where}"
            )


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


def declared_like(b: Builder, name: str, like: str, dtype: DType | None = None) -> ValueInfoProto:
    """Declare a name with the type and shape of a known value, or with another type."""
    return declared(name, dtype or element_type(b, like), b.shape(like))


def copied(source: str, name: str) -> NodeProto:
    """Make an Identity."""
    return NodeProto(op_type="Identity", input=[source], output=[name], name=name)


def body_graph(b: Builder, outputs: Iterable[ValueInfoProto]) -> GraphProto:
    """Return the graph of a builder with other outputs, without nodes that do not affect them."""
    graph = b.finished()
    refill(graph, "output", outputs)
    refill(graph, "node", needed(graph.node, [o.name for o in graph.output]))
    return graph


def append_scan(
    b: Builder, name: str, body: GraphProto, begin: Sequence[str], scanned: Sequence[str], **layout: Any
) -> list[str]:
    """Append a Scan from initial states and scanned inputs; return its outputs. `layout`: axes and directions."""
    outputs = [b.fresh(f"{name}_{i}") for i in range(len(body.output))]
    inputs = [*begin, *scanned]
    b.append(
        onnx.helper.make_node("Scan", inputs, outputs, name=name, body=body, num_scan_inputs=len(scanned), **layout)
    )
    return outputs
