"""Functions inlined before painting: a model's own, and schema functions that the target has no kernel for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import onnx
import onnx.checker
import onnx.helper
import onnx.inliner
from onnx import FunctionProto, GraphProto, NodeProto, TypeProto
from onnx.helper import make_tensor_type_proto

from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Color
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.index import bodies
from amp_rewrite.kernels import load_kernels
from amp_rewrite.lists import OpLists
from amp_rewrite.painting.painter import paint
from amp_rewrite.policy import Target
from amp_rewrite.view import MAIN, Op, OpId, ValueId, View


def inline_functions(model: Model) -> tuple[Model, tuple[Finding, ...]]:
    """The model with the local functions inlined that handle float32, so that what is in them is painted too."""
    if not model.proto.functions:
        return model, ()
    wanted = sorted(_float_functions(View.of(model)))
    note = "a local function, inlined so that what is inside it is painted too"
    return inlined(model, wanted), tuple(Finding("inlined", f"{domain}::{name}", note) for domain, name in wanted)


def inlined(model: Model, functions: Sequence[tuple[str, str]]) -> Model:
    """The model with calls of these local functions, by domain and name, replaced by their bodies.

    ModelError for functions that call each other in a circle, stand twice, or do not fit their calls.
    """
    if not model.proto.functions:
        return model
    try:
        return replace(model, proto=onnx.inliner.inline_selected_functions(model.proto, list(functions)))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as cause:
        raise ModelError(f"the model's local functions can not be inlined: {' '.join(str(cause).split())}") from cause


def _float_functions(view: View) -> set[tuple[str, str]]:
    """The functions that some call gives or takes float32, or a type that is unknown, and those that they call."""
    called = {(f.domain, f.name): {(n.domain, n.op_type) for n in _nodes(f.node)} for f in view.model.proto.functions}
    found: set[tuple[str, str]] = set()
    pending = [(op.node.domain, op.op_type) for op in view.ops if op.signature is None and _handles_float32(view, op)]
    while pending:
        name = pending.pop()
        if name in called and name not in found:
            found.add(name)
            pending.extend(called[name])
    return found


def _nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for _, body in bodies(node):
            yield from _nodes(body.node)


def _handles_float32(view: View, op: Op) -> bool:
    types = (view.types[v] for v in (*op.inputs, *op.outputs) if v is not None)
    return any(t is None or t.dtype in (None, DType.FLOAT) for t in types)


def inline_schema_functions(view: View, lists: OpLists, to: DType, target: Target) -> tuple[View, tuple[Finding, ...]]:
    """A view in which ops that the target runs only as function bodies are those bodies.

    Only where painting gains by it: op types of which some node would be lowered if there were a kernel, and
    whose body holds no denied op, which would bring the Casts inside instead of sparing them.
    """
    if target is not Target.ORT_CUDA:
        return view, ()
    candidates = [op for op in view.ops if _runs_as_body(op)]
    if not candidates:
        return view, ()
    wished = paint(view, lists, to, target=Target.ONNX)
    lowered = [op for op in candidates if (found := wished.of(op.id)) is not None and found.dtype is to]
    wanted = sorted({op.op_type for op in lowered if not _holds_denied(view, op, lists)})
    note = "no CUDA kernel: the runtime runs its function body, so that was painted"
    findings = []
    for name in wanted:
        expanded = _expanded(view, name)
        if expanded is not None:
            view = expanded
            findings.append(Finding("inlined", name, note))
    return view, tuple(findings)


def _expanded(view: View, op_type: str) -> View | None:
    """A view with the ops of one type inlined; None where onnx can not build their body, or builds a broken one."""
    try:
        proto = onnx.inliner.inline_selected_functions(view.model.proto, [("", op_type)], inline_schema_functions=True)
        return View.of(replace(view.model, proto=proto))
    except (RuntimeError, ModelError):
        return None


def spell_out_casts(view: View) -> View:
    """A view in which each CastLike is the Cast that it amounts to, so that its model tensor is not read.

    No runtime of note has a kernel for CastLike: it runs as this very Cast.
    """
    wanted = {op.id: dtype for op in view.ops if op.kind == "CastLike" and (dtype := _like(view, op)) is not None}
    if not wanted:
        return view
    proto = onnx.ModelProto()
    proto.CopyFrom(view.model.proto)
    copies = _nodes_by_op(view, proto.graph)
    for op, dtype in wanted.items():
        node = copies[op]
        del node.input[1:]
        if view.dtype(_input(view.ops[op])) is dtype:
            node.op_type = "Identity"
            del node.attribute[:]
        else:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", dtype.code))
    return View.of(replace(view.model, proto=proto))


def _input(op: Op) -> ValueId:
    assert op.inputs[0] is not None
    return op.inputs[0]


def _like(view: View, op: Op) -> DType | None:
    return view.dtype(op.inputs[1]) if len(op.inputs) > 1 and op.inputs[1] is not None else None


def _nodes_by_op(view: View, main: GraphProto) -> dict[OpId, NodeProto]:
    """The nodes of a copied main graph and its bodies, by the ops of the original."""
    found: dict[OpId, NodeProto] = {}
    pending = [(MAIN, main)]
    while pending:
        scope, graph = pending.pop()
        for op_id, node in zip(view.scopes[scope].ops, graph.node, strict=True):
            found[op_id] = node
            pending.extend(zip(view.ops[op_id].bodies, (body for _, body in bodies(node)), strict=True))
    return found


def _runs_as_body(op: Op) -> bool:
    signature = op.signature
    if signature is None or op.domain or not signature.expandable or op.bodies:
        return False
    return not load_kernels("cuda").has("", op.op_type, signature.since)


def _holds_denied(view: View, op: Op, lists: OpLists) -> bool:
    body = _body(view, op)
    return body is None or any(
        lists.classify(node.domain, node.op_type, {}, len(node.input)).color is Color.DENY for node in body.node
    )


def _body(view: View, op: Op) -> FunctionProto | None:
    """The function body behind a node; None where onnx can not build it from types alone."""
    schema = onnx.defs.get_schema(op.op_type, view.opsets.get("", 1), "")
    if schema.has_function:  # type: ignore[attr-defined]
        return schema.function_body
    types = [view.types[v] if v is not None else None for v in op.inputs]
    protos = [
        TypeProto() if t is None or t.dtype is None else make_tensor_type_proto(t.dtype.code, None) for t in types
    ]
    types_bytes = [p.SerializeToString() for p in protos]
    build = schema.get_context_dependent_function  # type: ignore[attr-defined]
    built = build(op.node.SerializeToString(), types_bytes)
    return FunctionProto.FromString(built) if built else None
