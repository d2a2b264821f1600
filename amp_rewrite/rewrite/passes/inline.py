"""Inlining of a model's local functions, and of standard function ops without a kernel on the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx.checker
import onnx.helper
import onnx.inliner
from onnx import FunctionProto, ModelProto, TypeProto
from onnx.helper import make_tensor_type_proto

from amp_rewrite.decide.coloring.paint import paint
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import Finding, ModelError, one_line
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes, clone, rename
from amp_rewrite.ir.build import check_imports
from amp_rewrite.ir.dataflow import reach
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.schema import normal_domain, signature
from amp_rewrite.ir.view import Op, View
from amp_rewrite.runtime.providers import run_as_bodies
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.list_entry import Color
from amp_rewrite.settings.op_lists import OpLists
from amp_rewrite.settings.request import Request


def inline_functions(view: View, *, low: bool = False) -> tuple[View, tuple[Finding, ...]]:
    """Inline local functions on float32 values, so that their ops can be painted.

    `low`: also inline functions on low types, so that their ops can be raised.
    """
    functions = sorted(_float_functions(view, (DType.FLOAT, *(LOW_TYPES if low else ()))))
    if not functions:
        return view, ()
    message = "a local function, inlined so that each of its ops gets its own type"
    findings = tuple(Finding("inlined", f"{domain}::{name}", message) for domain, name in functions)
    return View.of(inlined(view.model, functions)), findings


def inlined(model: Model, functions: Sequence[tuple[str, str]] | None = None) -> Model:
    """Return the model with calls to local functions, by domain and name (None for all), replaced by their bodies.

    Raises ModelError for functions that are recursive, defined twice, or do not match their calls.
    """
    if functions is None:
        functions = sorted({(f.domain, f.name) for f in model.proto.functions})
    if not functions:
        return model
    check_imports(model.proto)
    counts = Counter((f.domain, f.name, f.overload) for f in model.proto.functions)
    duplicate = next((name for (_, name, _), count in counts.items() if count > 1), None)
    if duplicate is not None:  # onnx before 1.20 picks one of them
        raise ModelError(f"the model's local functions cannot be inlined: {duplicate!r} is defined twice; remove one")
    try:
        return replace(model, proto=onnx.inliner.inline_selected_functions(_prepared(model.proto), list(functions)))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as cause:
        raise ModelError(f"the model's local functions cannot be inlined: {one_line(cause)}") from cause


def _prepared(proto: ModelProto) -> ModelProto:
    """Prepare a model for onnx's inliner: add attribute defaults to calls, and unify opsets.

    The inliner ignores the defaults and requires a single opset. A function with another opset gets the opset of the
    model if its ops are the same there, which the standard requires of called functions (IR.md, "Model Local
    Functions").
    """
    opsets = {normal_domain(imported.domain): imported.version for imported in proto.opset_import}
    prepared = clone(proto)
    defaults = {(f.domain, f.name, f.overload): f.attribute_proto for f in prepared.functions if f.attribute_proto}
    if defaults:
        for node in (n for f in (prepared.graph, *prepared.functions) for n in all_nodes(f.node)):
            present = {a.name for a in node.attribute}
            function_defaults = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(a for a in function_defaults if a.name not in present)
    for function in prepared.functions:
        for imported in function.opset_import:
            domain, current = normal_domain(imported.domain), imported.version
            target = opsets.get(domain, current)
            ops = {node.op_type for node in all_nodes(function.node) if normal_domain(node.domain) == domain}
            if target != current and all(_since(domain, op, current) == _since(domain, op, target) for op in ops):
                imported.version = target
    return prepared


def _since(domain: str, op_type: str, opset: int) -> int | None:
    schema = signature(domain, op_type, opset)
    return None if schema is None else schema.since


def _float_functions(view: View, dtypes: Collection[DType]) -> set[tuple[str, str]]:
    functions = view.model.proto.functions
    callees = {(f.domain, f.name): {(n.domain, n.op_type) for n in all_nodes(f.node)} for f in functions}
    dtypes_or_unknown = {None, *dtypes}
    unknown = (op for op in view.ops if op.signature is None)
    calls = (op for op in unknown if any(view.dtype(v) in dtypes_or_unknown for v in op.ports))
    return reach(((op.node.domain, op.op_type) for op in calls), callees.__getitem__, callees.__contains__)


def inline_schema_functions(view: View, request: Request) -> tuple[View, tuple[Finding, ...]]:
    """Return a view with function bodies in place of ops without a kernel on the target.

    Only op types that gain from inlining are inlined: some node of the type would be lowered if there were a kernel,
    and the body does not contain a denied op, which would need Casts inside the body.
    """
    candidates = run_as_bodies(view, request.target.kernels)
    if not candidates:
        return view, ()
    if request.target == Target.WEBGPU:  # the runtime would run them on the CPU
        chosen = [op for op in candidates if any((t := view.dtype(v)) is not None and t.floating for v in op.ports)]
        note = "only the CPU has a kernel for it, not WebGPU; inlined, the ops of its function body run on the GPU"
    else:
        plain = Request(to=request.to, lists=request.lists, target=Target.ONNX, safety="none")
        coloring = paint(Problem(view, plain))
        decisions = ((op, coloring.of(op.id)) for op in candidates)
        lowered = (op for op, decision in decisions if decision is not None and decision.dtype is request.to)
        chosen = [op for op in lowered if not _has_denied_op(view, op, request.op_lists)]
        note = "without a CUDA kernel, runtimes run its function body; inlined, each op of the body gets its own type"
    findings = []
    for name in sorted({op.op_type for op in chosen}):
        expanded = _expanded(view, name)
        if expanded is not None:
            view = expanded
            findings.append(Finding("inlined", name, note))
    return view, tuple(findings)


def _expanded(view: View, op_type: str) -> View | None:
    """Return a view with the ops of one type inlined; None if onnx cannot build a valid body.

    New values are named after the op type, so that their names and ranges do not depend on other inlined types.
    """
    try:
        proto = onnx.inliner.inline_selected_functions(view.model.proto, [("", op_type)], inline_schema_functions=True)
        results = {name for node in all_nodes(proto.graph.node) for name in node.output if name}
        names = {name: unused(f"{op_type}/{name}", view.names) for name in results - view.names}
        rename(proto.graph, names)
        return View.of(replace(view.model, proto=proto))
    except (RuntimeError, ModelError):
        return None


def _has_denied_op(view: View, op: Op, lists: OpLists) -> bool:
    dtypes = map(view.dtype, op.inputs)
    types = [TypeProto() if dtype is None else make_tensor_type_proto(dtype.code, None) for dtype in dtypes]
    body = function_body(op, view.opset, types)
    return body is None or any(
        lists.classify(node.domain, node.op_type, {}, len(node.input)).color is Color.DENY for node in body.node
    )


def function_body(op: Op, opset: int, types: Sequence[TypeProto]) -> FunctionProto | None:
    """Return the function body of an op at an opset for inputs of these types; None if onnx cannot build it."""
    schema: Any = onnx.defs.get_schema(op.op_type, opset, "")
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    try:
        if versions:
            inputs = [proto.SerializeToString() for proto in types]
            get_body = schema.get_context_dependent_function_with_opset_version
            body = get_body(max(versions), op.node.SerializeToString(), inputs)
        else:
            version = max(v for v in schema.function_opset_versions if v <= opset)
            body = schema.get_function_with_opset_version(version)
        function = FunctionProto.FromString(body if isinstance(body, bytes) else body.SerializeToString())
    except (RuntimeError, ValueError):
        return None
    return function if function.node else None
