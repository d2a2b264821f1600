"""The VJP of If: another If, whose branches recompute their forward pass and append their backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import onnx.helper
from onnx import GraphProto, NodeProto

from amp_rewrite.files.protos import bodies
from amp_rewrite.ir.nodes import ScopeId
from amp_rewrite.rewrite.autodiff.vjp.rule import ALL_OUTPUTS, Call, Family, GradientRule, Stop
from amp_rewrite.rewrite.autodiff.vjp.subgraph import arrivals, body_graph, copied, declared_like, refuse_random


def _if(v: Call, slots: Sequence[int], names: Sequence[str]) -> Sequence[str]:
    """Gradients of the captured values; a branch that does not read a value gives zeros."""
    node = NodeProto(op_type="If", name=v.b.fresh(f"{v.op.name}_grad"), input=v.op.node.input)
    outputs = [v.b.fresh(f"{node.name}_{i}") for i in range(len(names))]
    node.output.extend(outputs)
    for scope, (attribute, _) in zip(v.op.bodies, bodies(v.op.node), strict=True):
        node.attribute.append(onnx.helper.make_attribute(attribute, _branch(v, scope, names)))
    v.b.append(node)
    return outputs


def _branch(v: Call, scope: ScopeId, names: Sequence[str]) -> GraphProto:
    """Build a branch that outputs gradients instead of results."""
    refuse_random(v, scope, "branch")
    b = v.b.body(scope)
    results = [o.name for o in b.graph.output]
    gradients = v.backward(b, arrivals(v, zip(results, v.gradients, strict=True)), names)
    outputs = [declared_like(b, b.fresh(f"{b.graph.name}_grad"), name) for name in names]
    for name, output in zip(names, outputs, strict=True):
        b.append(copied(gradients[name], output.name))
    return body_graph(b, outputs)


ROWS: Family = {"If": GradientRule((Stop("a condition"),), outputs=ALL_OUTPUTS, together=_if)}
