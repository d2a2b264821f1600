"""Forms that gradients need: ops replaced by function bodies, and the opset whose ScatterND adds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx.defs
import onnx.helper
from onnx import FunctionProto, NodeProto, TypeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, clone, refill
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.nodes import Op, OpId
from amp_rewrite.ir.schema import TENSOR, default_attributes
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder, ModelFacts
from amp_rewrite.rewrite.autodiff.lowering.recurrent import CELLS, layer
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward
from amp_rewrite.rewrite.opset import moved_to
from amp_rewrite.rewrite.passes.inline import function_body, inlined


def for_gradients(model: Model) -> tuple[Model, tuple[str, ...]]:
    """Return the model at an opset that has the ops of its gradients, with a note if it was moved there."""
    opset = next((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), FIRST_SCATTER_ADD)
    if opset >= FIRST_SCATTER_ADD:
        return model, ()
    moved = moved_to(View.of(model), FIRST_SCATTER_ADD)
    if isinstance(moved, str):
        raise GradientError(
            f"gradients are made from ai.onnx opset {FIRST_SCATTER_ADD} on, and this model of opset {opset} cannot be"
            f" moved there: {moved}; export it again"
        )
    note = f"the step is at ai.onnx opset {FIRST_SCATTER_ADD}, whose ScatterND adds gradients; the model at {opset}"
    return moved.model, (note,)


# -- bodies of our own -----------------------------------------------------------------------------


def _batch_norm(v: Forward) -> list[str]:
    """Normalize by the statistics given, or by those of the batch: mean and biased variance, in their own type.

    The running statistics are updated with weight 1 − momentum, as in the standard.
    """
    b, kept, shape = v.b, v.dtype(3), _beside(v)
    given = [b.reshape(v.x(slot), shape) for slot in (3, 4)]
    if not in_training(v.op):
        return [_normalized(v, kept, b.op("Sub", b.cast(v.x(0), kept), given[0]), given[1])]

    centred, *moments = _moments(v, kept, [0, *range(2, v.rank())])
    momentum = v.attr("momentum", 0.9)
    results = [_normalized(v, kept, centred, moments[1])]
    for slot, new in zip((3, 4), moments, strict=True):
        moved = b.op("Mul", b.reshape(new, [-1]), b.scalar(1 - momentum, kept))
        results.append(b.op("Add", b.op("Mul", v.x(slot), b.scalar(momentum, kept)), moved))
    return results


def in_training(op: Op) -> bool:
    """True for a BatchNormalization with the statistics of the batch: no CUDA kernel of onnxruntime runs it."""
    if op.kind != "BatchNormalization":
        return False
    mode = attribute(op.node, "training_mode")
    return (mode is not None and mode.i != 0) or len(op.outputs) > 1


def _instance_norm(v: Forward) -> list[str]:
    kept = DType.FLOAT if v.dtype().low else v.dtype()
    centred, _, spread = _moments(v, kept, range(2, v.rank()))
    return [_normalized(v, kept, centred, spread)]


def _beside(v: Forward) -> list[int]:
    """Shape by which a value per channel broadcasts with [N, C, d…]."""
    return [-1, *[1] * (v.rank() - 2)]


def _moments(v: Forward, kept: DType, axes: Sequence[int]) -> tuple[str, str, str]:
    """Return x less its mean, the mean, and the biased variance."""
    b, wide = v.b, v.b.cast(v.x(0), kept)
    centre = b.reduce("ReduceMean", wide, axes, keepdims=True)
    centred = b.op("Sub", wide, centre)
    return centred, centre, b.reduce("ReduceMean", b.op("Mul", centred, centred), axes, keepdims=True)


def _normalized(v: Forward, kept: DType, centred: str, spread: str) -> str:
    """One factor per channel first: every op on the whole tensor costs a pass forward and one backward."""
    b = v.b
    root = b.op("Sqrt", b.op("Add", spread, b.scalar(v.attr("epsilon", 1e-5), kept)))
    scale, bias = (b.reshape(b.cast(v.x(slot), kept), _beside(v)) for slot in (1, 2))
    return b.cast(b.op("Add", b.op("Mul", centred, b.op("Div", scale, root)), bias), v.dtype(), of=kept)


def _cross_entropy(v: Forward) -> list[str]:
    b, words = v.b, {name: v.attr(name) for name in ("reduction", "ignore_index")}
    logs = b.op("LogSoftmax", v.x(0), axis=1)
    return [b.op("NegativeLogLikelihoodLoss", logs, *v.op.node.input[1:], **words), logs]


def _lp_norm(v: Forward) -> list[str]:
    norm = v.b.reduce(f"ReduceL{v.attr('p', 2)}", v.x(0), [v.axis(-1)], keepdims=True)
    zero, one = (v.b.scalar(number, v.dtype()) for number in (0.0, 1.0))
    return [v.b.op("Div", v.x(0), v.b.op("Where", v.b.op("Equal", norm, zero), one, norm))]


def _one_hot(v: Forward) -> list[str]:
    b, off_and_on = v.b, v.b.split(v.x(2), [1, 1], 0, results=2)
    hot = b.op("OneHot", v.x(0), v.x(1), b.constant(np.array([0, 1], np.int64)), axis=v.attr("axis", -1))
    return [b.op("Where", b.op("Cast", hot, to=DType.BOOL.code), *off_and_on[::-1])]


# Klambauer et al., Self-Normalizing Neural Networks, 2017; the defaults of the standard.
_SELU = {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}


def _selu(v: Forward) -> list[str]:
    alpha, gamma = (v.attr(name, default) for name, default in _SELU.items())
    return [v.b.op("Mul", v.b.op("Elu", v.x(0), alpha=alpha), v.b.scalar(gamma, v.dtype()))]


Recipe = Callable[[Forward], Sequence[str]]
"""Append the body of an op; return its results, in the order of its outputs."""

OWN_BODIES: Mapping[str, Recipe] = {
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LpNormalization": _lp_norm,
    "OneHot": _one_hot,
    "Selu": _selu,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    **dict.fromkeys(CELLS, layer),
}


# -- bodies in place of ops ------------------------------------------------------------------------


def has_body(op: Op) -> bool:
    """True if `with_bodies` can replace the op: by a body of our own, or one of the standard."""
    return op.kind in OWN_BODIES or (not op.domain and op.signature is not None and op.signature.expandable)


_DOMAIN = "amp_rewrite.bodies"


def with_bodies(model: Model, ops: Collection[OpId]) -> Model:
    """Return the model with these ops replaced by function bodies, in bodies too; value names stay.

    GradientError if there is no body of an op with its attributes.
    """
    facts = ModelFacts.of(model)
    proto = clone(model.proto)
    functions: list[FunctionProto] = []
    scopes = zip(facts.view.scopes, all_graphs(proto.graph), strict=True)
    for op_id, node in (pair for scope, graph in scopes for pair in zip(scope.ops, graph.node, strict=True)):
        op = facts.view.ops[op_id]
        if op_id in ops:
            function = _own_body(facts, op, node) if op.kind in OWN_BODIES else _standard_body(facts, op)
            function.name, function.domain = f"{op.op_type}_{len(functions)}", _DOMAIN
            function.opset_import.add(domain="", version=facts.view.opset)
            node.op_type, node.domain = function.name, _DOMAIN
            defaults = default_attributes(op.signature) if op.signature is not None else {}
            node.attribute.extend(held for name, held in defaults.items() if attribute(node, name) is None)
            functions.append(function)
    proto.functions.extend(functions)
    proto.opset_import.add(domain=_DOMAIN, version=1)
    out = inlined(replace(model, proto=proto), [(_DOMAIN, f.name) for f in functions]).proto
    refill(out, "opset_import", [o for o in out.opset_import if o.domain != _DOMAIN])
    return replace(model, proto=out)


def _own_body(facts: ModelFacts, op: Op, node: NodeProto) -> FunctionProto:
    """Build a body with the names of the op's inputs as its own, and let the node call it."""
    names = [name for name in dict.fromkeys(op.node.input) if name]
    b = Builder(facts, op.scope, taken=set(facts.view.names), region=op.op_type)
    results = zip(op.node.output, OWN_BODIES[op.op_type](Forward(b, op)), strict=False)
    made = {name: result for name, result in results if name}
    refill(node, "input", names)
    refill(node, "output", made)
    return FunctionProto(input=names, output=made.values(), node=b.nodes)


def _standard_body(facts: ModelFacts, op: Op) -> FunctionProto:
    opset = facts.view.opsets[""]
    function = function_body(op, opset, [_type(facts, op, slot) for slot in range(len(op.inputs))])
    if function is None:
        raise GradientError(
            f"node {op.name!r} ({op.kind}) has no gradient rule, and onnx {onnx.__version__} cannot build its function"
            " body; replace the op"
        )
    del function.opset_import[:]
    return function


def _type(facts: ModelFacts, op: Op, slot: int) -> TypeProto:
    value = op.inputs[slot]
    vtype = facts.view.types[value] if value is not None else None
    if value is None or vtype is None or vtype.dtype is None:
        return TypeProto()
    if vtype.container != TENSOR:
        raise ModelError(f"node {op.name!r} ({op.kind}) reads a {vtype}; only tensors have gradients, replace the op")
    return onnx.helper.make_tensor_type_proto(vtype.dtype.code, facts.shapes.get(value))
