"""Final checks of a converted model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from onnx import ModelProto, helper

from amp_rewrite.decide.plan import Bake, Cast, Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError, Finding, ModelError, one_line
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, all_nodes, clone
from amp_rewrite.ir.schema import (
    Signature,
    is_refused_by_onnx,
    is_runtime_only,
    normal_domain,
    onnx_schema,
    type_of_proto,
)
from amp_rewrite.ir.versions import FIRST_CAST_BY_CODE
from amp_rewrite.ir.view import ScopeId, View


def check(source: Model, view: View, plan: Plan, result: Model) -> tuple[Finding, ...]:
    """Check the result with onnx and against the plan; return findings about unchecked parts.

    Raises:
        ModelError: the source was already invalid.
        ConversionError: the conversion broke the model.
    """
    fault, inferred = examine(result)
    doubts = () if fault is None else _doubts(source, fault, view.opsets.get("", FIRST_CAST_BY_CODE))
    planned = _planned(view, plan)
    types = _inferred_types(view, inferred) if inferred is not None else {}
    try:
        if not all(names.keys() <= types.get(scope, {}).keys() for scope, names in planned.items()):
            view_after = View.of(result)
            types = {
                scope.id: {v.name: view_after.dtype(v.id) for v in view_after.values_of[scope.id]}
                for scope in view_after.scopes
            }
        _compare(planned, types)
    except ConversionError as mismatch:
        cause = misdeclared_output(view) if fault is None else f"the model is invalid: {one_line(fault)}"
        if cause is None:
            raise
        raise ModelError(cause) from mismatch  # onnx rejects the source, or trusted a wrong declaration in it
    for kind, (op, *_) in view.by_kind.items():
        operator = op.domain, op.op_type, view.opset
        if is_refused_by_onnx(*operator) and not is_runtime_only(*operator):
            doubts += (Finding("unchecked", kind, f"not checked: onnx does not accept it at opset {view.opset}"),)
    return doubts


def misdeclared_output(view: View) -> str | None:
    """Describe an output declared with the wrong type; None if there is none.

    onnx trusts the declaration after unknown ops.
    """
    for formal, value in zip(view.model.proto.graph.output, view.scopes[0].outputs, strict=True):
        types = {type_of_proto(formal.type), view.types[value]}
        if None not in types and len(types) > 1:
            name = repr(formal.name)
            return f"the model is invalid: output {name} is declared with the wrong type; export the model again"
    return None


def _doubts(source: Model, fault: _Fault, opset: int) -> tuple[Finding, ...]:
    if opset < FIRST_CAST_BY_CODE and isinstance(fault, onnx.shape_inference.InferenceError):
        return (Finding("unchecked", "shapes", f"not checked: onnx cannot infer the type of a Cast at opset {opset}"),)
    cause, _ = examine(source)
    if cause is None:
        raise ConversionError(
            f"the converted model is invalid, and nothing was written: {one_line(fault)}; please report this"
        )
    if not isinstance(fault, onnx.shape_inference.InferenceError | UnicodeDecodeError):
        raise ModelError(f"the model is invalid: {one_line(cause)}")
    return (Finding("unchecked", "shapes", f"not checked: shape inference fails on the source: {one_line(cause)}"),)


_Fault = onnx.checker.ValidationError | onnx.shape_inference.InferenceError | ValueError
# ValueError: std::invalid_argument in onnx, for example for element type 0, and text that is not UTF-8.


def check_source(source: Model) -> None:
    """Raise ModelError if onnx's checker rejects a model returned unchanged because no op can be lowered."""
    fault, _ = examine(source)
    if isinstance(fault, onnx.checker.ValidationError):
        raise ModelError(f"the model is invalid: {one_line(fault)}")


def examine(model: Model) -> tuple[_Fault, None] | tuple[None, ModelProto]:
    """Run the checker and strict shape inference; return the first fault, or the inferred model.

    ai.onnx operators that onnx does not accept are moved to another domain, which onnx does not check.
    """
    skeleton = model.skeleton()
    outcome = fault, _ = _run_checks(skeleton)
    if isinstance(fault, onnx.checker.ValidationError):
        _move_unaccepted(skeleton)
        return _run_checks(skeleton)
    return outcome


def _run_checks(skeleton: ModelProto) -> tuple[_Fault, None] | tuple[None, ModelProto]:
    serialized = skeleton.SerializeToString()  # once for both checks
    try:
        onnx.checker.check_model(serialized)
        if skeleton.graph.sparse_initializer:
            serialized = _dense(skeleton).SerializeToString()
        return None, onnx.shape_inference.infer_shapes(serialized, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as fault:
        return fault, None


def _dense(skeleton: ModelProto) -> ModelProto:
    """Return the model with inputs in place of sparse initializers, since onnx would infer sparse tensors."""
    dense = clone(skeleton)
    for sparse in skeleton.graph.sparse_initializer:
        values = sparse.values
        dense.graph.input.append(helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    dense.graph.ClearField("sparse_initializer")
    return dense


def _move_unaccepted(proto: ModelProto) -> None:
    for holder, nodes in ((proto, proto.graph.node), *((function, function.node) for function in proto.functions)):
        opset = next((o.version for o in holder.opset_import if not normal_domain(o.domain)), 1)
        unaccepted = [node for node in all_nodes(nodes) if is_refused_by_onnx(node.domain, node.op_type, opset)]
        for node in unaccepted:
            node.domain = _UNCHECKED_DOMAIN
        if unaccepted:
            holder.opset_import.add(domain=_UNCHECKED_DOMAIN, version=1)


_UNCHECKED_DOMAIN = "com.microsoft.default"


_Planned = Mapping[ScopeId, Mapping[str, DType]]
_Types = Mapping[ScopeId, Mapping[str, DType | None]]
"""Types of values by scope, then name. The converted model has the same scopes as its source, in the same order.

None: the type was known only from the readers of the value, which now read Casts.
"""


def _planned(view: View, plan: Plan) -> _Planned:
    dropped = {result for op in plan.drop for result in view.ops[op].outputs}
    planned: dict[ScopeId, dict[str, DType]] = {scope.id: {} for scope in view.scopes}
    for value in view.values:
        dtype = plan.retype.get(value.id) or view.dtype(value.id)
        if dtype is not None and value.id not in dropped:
            planned[value.scope][plan.rename.get(value.id, value.name)] = dtype
    additions: tuple[Cast | Bake, ...] = (*plan.casts, *plan.bakes)
    for new in additions:
        planned[view.values[new.value].scope][new.name] = new.to
    return planned


def _inferred_types(view: View, inferred: ModelProto) -> _Types:
    """Return the types inferred by onnx; an empty mapping if onnx may have copied a declaration instead.

    This takes a fifth of the time needed for a second view, and is independent of our own inference.
    """
    if inferred.functions or not all(_has_inference(schema) for schema in {op.signature for op in view.ops}):
        return {}
    types: dict[ScopeId, dict[str, DType]] = {}
    for number, graph in enumerate(all_graphs(inferred.graph) if len(view.scopes) > 1 else (inferred.graph,)):
        tensors = chain(graph.initializer, (sparse.values for sparse in graph.sparse_initializer))
        stored = ((tensor.name, DType.of(tensor.data_type)) for tensor in tensors)
        infos = ((v.name, type_of_proto(v.type)) for v in chain(graph.input, graph.value_info, graph.output))
        declared = ((name, info.dtype if info is not None else None) for name, info in infos)
        last = dict(chain(stored, declared))  # the last entry counts, even if its type is unknown
        types[ScopeId(number)] = {name: dtype for name, dtype in last.items() if dtype is not None}
    return types


def _has_inference(signature: Signature | None) -> bool:
    if signature is None or signature.domain:
        return False
    schema = onnx_schema("", signature.op_type, signature.since)
    return schema is not None and bool(schema.has_type_and_shape_inference_function)


def _compare(planned: _Planned, types: _Types) -> None:
    for scope, dtypes in planned.items():
        for name, expected in dtypes.items():
            actual = types.get(scope, {}).get(name)
            if actual is not expected and (actual is not None or name not in types.get(scope, {})):
                raise ConversionError(
                    f"the type of {name!r} is {actual.spelling if actual else 'unknown'} after the conversion, not "
                    f"{expected.spelling} as planned; nothing was written; please report this"
                )
