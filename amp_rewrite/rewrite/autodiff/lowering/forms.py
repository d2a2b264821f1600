"""Forms that gradients need: the opset whose ScatterND adds, BatchNormalization spelled out, bodies of functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx
import onnx.defs
import onnx.helper
from onnx import FunctionProto, TypeProto

from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, clone, refill
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.nodes import MAIN, Op
from amp_rewrite.ir.schema import TENSOR, default_attributes
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD, FIRST_TRAINING_MODE
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.facts import ModelFacts
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward
from amp_rewrite.rewrite.opset import moved_to
from amp_rewrite.rewrite.passes.inline import function_body, inlined

_REPEATING = {"Gather", "GatherElements", "GatherND", "Pad", "MaxPool"}
"""Ops that may read an element several times, so that its gradients are added."""


def for_gradients(model: Model) -> tuple[Model, tuple[str, ...]]:
    """Return the model at an opset that has the ops of its gradients, with a note if it was moved there.

    A model that cannot be moved stays; the error comes from the gradient that is not possible.
    """
    opset = next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), FIRST_SCATTER_ADD)
    if opset >= FIRST_SCATTER_ADD:
        return model, ()
    kinds = {node.op_type for graph in all_graphs(model.proto.graph) for node in graph.node if not node.domain}
    if not kinds & _REPEATING:
        return model, ()
    try:
        moved = moved_to(View.of(model), FIRST_SCATTER_ADD)
    except ModelError:
        return model, ()
    if isinstance(moved, str):
        return model, ()
    note = f"the step is at ai.onnx opset {FIRST_SCATTER_ADD}, whose ScatterND adds gradients; the model at {opset}"
    return moved.model, (note,)


def spelled_out(model: Model) -> Model:
    """Return the model with each BatchNormalization in training mode decomposed, or the model itself without one.

    Mean and biased variance are over all axes but the second, in the type of the running statistics. The running
    statistics are updated with weight 1 − momentum, as in the standard. GradientError inside a body, for an unknown
    rank, and before opset 14.
    """
    view = View.of(model)
    if not any(_training(op) for op in view.ops):
        return model
    b = Builder.of(model, region="batch_norm")
    for position, op_id in enumerate(view.scopes[MAIN].ops):
        if _training(view.ops[op_id]):
            _spell_out(b, view.ops[op_id], position)
    inside = next((op for op in view.ops if op.scope != MAIN and _training(op)), None)
    if inside is not None:
        raise GradientError(
            f"node {inside.name!r} (BatchNormalization) is in training mode inside a body, where it has no gradient;"
            " move it out, or set training_mode to 0"
        )
    return b.model()


def _training(op: Op) -> bool:
    if op.op_type != "BatchNormalization" or op.domain:
        return False
    return int_attribute(op.node, "training_mode", 0) != 0 or len(op.outputs) > 1


def _spell_out(b: Builder, op: Op, position: int) -> None:
    v = Forward(b, op)
    b.requires(FIRST_TRAINING_MODE["BatchNormalization"], f"node {op.name!r} (BatchNormalization) in training mode")
    x, scale, bias, mean, variance = op.node.input
    rank, dtype, kept = v.rank(0), v.dtype(0), v.dtype(3)
    axes = [0, *range(2, rank)]
    epsilon, momentum = v.attr("epsilon", 1e-5), v.attr("momentum", 0.9)
    beside = [-1, *[1] * (rank - 2)]
    with b.instead_of(position) as node:
        wide = b.cast(x, kept)
        centre = b.reduce("ReduceMean", wide, axes, keepdims=True)
        centred = b.op("Sub", wide, centre)
        spread = b.reduce("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=True)
        root = b.op("Sqrt", b.op("Add", spread, b.scalar(epsilon, kept)))
        scales, biases = (b.reshape(b.cast(p, kept), beside) for p in (scale, bias))
        # one factor per channel first: every op on the whole tensor costs a pass forward and one backward
        y = b.op("Add", b.op("Mul", centred, b.op("Div", scales, root)), biases)
        b.name(b.cast(y, dtype, of=kept), node.output[0])
        for name, old, new in zip(node.output[1:], (mean, variance), (centre, spread), strict=False):
            if name:
                moved = b.op("Mul", b.reshape(new, [-1]), b.scalar(1 - momentum, kept))
                b.name(b.op("Add", b.op("Mul", old, b.scalar(momentum, kept)), moved), name)


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
