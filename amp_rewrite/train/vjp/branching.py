"""The VJP of If: another If, whose branches compute their forward pass again and then their own backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import onnx.helper
from onnx import GraphProto, NodeProto

from amp_rewrite.index import bodies
from amp_rewrite.op import ScopeId
from amp_rewrite.schema import RANDOM_OPS
from amp_rewrite.train.builder import declared
from amp_rewrite.train.vjp.row import Call, Row, Rows, Stop

_ANY = 1 << 30


def _if(v: Call, names: Sequence[str]) -> Sequence[str]:
    """The gradients of the values that the branches read from outside; zeros from a branch that does not."""
    node = NodeProto(op_type="If", name=v.b.fresh(f"{v.op.name}_grad"), input=v.op.node.input)
    outputs = [v.b.fresh(f"{node.name}_{i}") for i in range(len(names))]
    node.output.extend(outputs)
    for scope, (attribute, _) in zip(v.op.bodies, bodies(v.op.node), strict=True):
        node.attribute.append(onnx.helper.make_attribute(attribute, _branch(v, scope, names)))
    v.b.append(node)
    return outputs


def _branch(v: Call, scope: ScopeId, names: Sequence[str]) -> GraphProto:
    """A branch that gives gradients where the original gives results."""
    _refuse_random(v, scope)
    b = v.b.body(scope)
    given = [o.name for o in b.graph.output]
    arrived = {name: g for name, g in zip(given, v.gradients, strict=True) if g is not None}
    found = v.backward(b, arrived, names)
    graph = b.finished()
    del graph.output[:]
    for name in names:
        dtype = b.dtype(name)
        assert dtype is not None
        out = b.fresh(f"{graph.name}_grad")
        graph.node.append(onnx.helper.make_node("Identity", [found[name]], [out], name=out))
        graph.output.append(declared(out, dtype, b.shape(name)))
    _prune(graph)
    return graph


def _refuse_random(v: Call, scope: ScopeId) -> None:
    view = v.b.facts.view
    for op_id in view.scopes[scope].ops:
        op = view.ops[op_id]
        if op.op_type in RANDOM_OPS or (op.op_type == "Dropout" and len(op.inputs) > 2):
            raise v.error(
                f"its branch holds {op.op_type} {op.name!r}, which would draw other numbers in the backward pass;"
                " move it out of the branch"
            )


def _prune(graph: GraphProto) -> None:
    """Leave out the nodes of which nothing reaches an output."""
    wanted = {o.name for o in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(_read(node))
    live = GraphProto()
    live.node.extend(reversed(kept))
    del graph.node[:]
    graph.node.extend(live.node)


def _read(node: NodeProto) -> set[str]:
    """What a node reads, inside its bodies too."""
    found = set(node.input)
    for _, body in bodies(node):
        found.update(o.name for o in body.output)
        for inner in body.node:
            found |= _read(inner)
    return found


ROWS: Rows = {("", "If"): Row((Stop("a condition"),), outputs=_ANY, captures=_if)}
