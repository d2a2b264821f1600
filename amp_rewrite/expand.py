"""Functions inlined before painting: a model's own, and schema functions that the target has no kernel for."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx.inliner
from onnx import FunctionProto, TypeProto
from onnx.helper import make_tensor_type_proto

from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Color
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.kernels import load_kernels
from amp_rewrite.lists import OpLists
from amp_rewrite.painting.painter import paint
from amp_rewrite.policy import Target
from amp_rewrite.view import Op, View


def inline_functions(model: Model) -> tuple[Model, tuple[Finding, ...]]:
    """The model with its local functions inlined, so that what is inside them is painted like the rest."""
    if not model.proto.functions:
        return model, ()
    names = sorted({f"{f.domain}::{f.name}" for f in model.proto.functions})
    try:
        inlined = onnx.inliner.inline_local_functions(model.proto)
    except (RuntimeError, ValueError) as cause:  # what onnx raises for cyclic or ill-typed functions
        raise ModelError(f"the model's local functions can not be inlined: {cause}") from cause
    note = "a local function, inlined so that what is inside it is painted too"
    return replace(model, proto=inlined), tuple(Finding("inlined", name, note) for name in names)


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
    if not wanted:
        return view, ()
    inlined = onnx.inliner.inline_selected_functions(
        view.model.proto, [("", name) for name in wanted], inline_schema_functions=True
    )
    note = "no CUDA kernel: the runtime runs its function body, so that was painted"
    return View.of(replace(view.model, proto=inlined)), tuple(Finding("inlined", name, note) for name in wanted)


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
