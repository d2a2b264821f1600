"""Operators replaced by their function bodies from the standard.

onnx's own inliner cannot build a type-dependent body if an optional input is absent or is an initializer. It also
ignores the default values of attributes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx
import onnx.defs
import onnx.helper
from onnx import FunctionProto, TypeProto

from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.graphs import all_graphs
from amp_rewrite.ir.nodes import Op
from amp_rewrite.ir.schema import TENSOR, default_attributes
from amp_rewrite.rewrite.autodiff.facts import ModelFacts
from amp_rewrite.rewrite.passes.inline import function_body, inlined

_DOMAIN = "amp_rewrite.bodies"


def with_bodies(model: Model, op_types: Collection[str]) -> Model:
    """Return the model with all ai.onnx ops of these types replaced, in bodies too; value names stay.

    GradientError if onnx cannot build a function body.
    """
    facts = ModelFacts.of(model)
    proto = clone(model.proto)
    functions: list[FunctionProto] = []
    scopes = zip(facts.view.scopes, all_graphs(proto.graph), strict=True)
    for op_id, node in (pair for scope, graph in scopes for pair in zip(scope.ops, graph.node, strict=True)):
        op = facts.view.ops[op_id]
        if not op.domain and op.op_type in op_types:
            function = _body(facts, op)
            function.name, function.domain = f"{op.op_type}_{len(functions)}", _DOMAIN
            node.op_type, node.domain = function.name, _DOMAIN
            defaults = default_attributes(op.signature) if op.signature is not None else {}
            node.attribute.extend(held for name, held in defaults.items() if attribute(node, name) is None)
            functions.append(function)
    proto.functions.extend(functions)
    proto.opset_import.add(domain=_DOMAIN, version=1)
    out = inlined(replace(model, proto=proto), [(_DOMAIN, f.name) for f in functions]).proto
    refill(out, "opset_import", [o for o in out.opset_import if o.domain != _DOMAIN])
    return replace(model, proto=out)


def _body(facts: ModelFacts, op: Op) -> FunctionProto:
    """Build the function body of an op at the model's opset."""
    opset = facts.view.opsets[""]
    function = function_body(op, opset, [_type(facts, op, slot) for slot in range(len(op.inputs))])
    if function is None:
        raise GradientError(
            f"node {op.name!r} ({op.kind}) has no gradient rule, and onnx {onnx.__version__} cannot build its function"
            " body; replace the op"
        )
    del function.opset_import[:]
    function.opset_import.add(domain="", version=opset)
    return function


def _type(facts: ModelFacts, op: Op, slot: int) -> TypeProto:
    """Type of an input; an empty TypeProto for an absent one."""
    value = op.inputs[slot]
    vtype = facts.view.types[value] if value is not None else None
    if value is None or vtype is None or vtype.dtype is None:
        return TypeProto()
    if vtype.container != TENSOR:
        raise ModelError(f"node {op.name!r} ({op.kind}) reads a {vtype}; only tensors have gradients, replace the op")
    return onnx.helper.make_tensor_type_proto(vtype.dtype.code, facts.shapes.get(value))
