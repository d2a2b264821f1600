"""The last look at a converted model before anyone gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from onnx import GraphProto, ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.index import bodies
from amp_rewrite.plan import Plan
from amp_rewrite.schema import Signature, type_of_proto
from amp_rewrite.view import ScopeId, View


def check(source: Model, view: View, plan: Plan, result: Model) -> tuple[Finding, ...]:
    """What onnx has to say against the result that it also says against the source; raises for anything else.

    ModelError when the source was no valid model to begin with; ConversionError when the conversion broke it.
    """
    fault, inferred = _examined(result)
    wanted = _wanted(view, plan)
    told = _told_by_onnx(view, inferred) if inferred is not None else {}
    _compare(wanted, told if wanted.keys() <= told.keys() else _told_by_view(View.of(result)))
    if fault is None:
        return ()
    before, _ = _examined(source)
    if before is None:
        raise ConversionError(
            f"the converted model is invalid, and nothing was written: {_line(fault)}; please report this"
        )
    if isinstance(fault, onnx.checker.ValidationError):
        raise ModelError(_invalid(source, before))
    return (Finding("unchecked", "shapes", f"onnx can not infer the model's own shapes: {_line(before)}"),)


_Fault = onnx.checker.ValidationError | onnx.shape_inference.InferenceError | UnicodeDecodeError


def check_source(source: Model) -> None:
    """ModelError when onnx's checker refuses a model, which is given back as it is where nothing can be lowered."""
    fault, _ = _examined(source)
    if isinstance(fault, onnx.checker.ValidationError):
        raise ModelError(_invalid(source, fault))


def _invalid(model: Model, fault: _Fault) -> str:
    """What the checker refuses, in one line; it does not name an input that states no shape."""
    graph = model.proto.graph
    edges = ((v.name, v.type.tensor_type) for v in (*graph.input, *graph.output) if v.type.HasField("tensor_type"))
    bare = next((name for name, tensor in edges if not tensor.HasField("shape")), None)
    if bare is not None and "'shape'" in str(fault):
        return (
            f"the model is invalid: {bare!r} states no shape; declare one, whose dims may be names, or export it again"
        )
    return f"the model is invalid: {_line(fault)}"


def _examined(model: Model) -> tuple[_Fault, None] | tuple[None, ModelProto]:
    """What the checker, then strict shape inference, finds wrong with a model; if nothing, what the latter inferred."""
    skeleton = model.skeleton()
    try:
        onnx.checker.check_model(skeleton)
        return None, onnx.shape_inference.infer_shapes(skeleton, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError) as fault:
        return fault, None


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())


_Types = Mapping[tuple[ScopeId, str], DType]
"""Of values by scope and name. A result has the scopes of its source, in the same order."""


def _wanted(view: View, plan: Plan) -> _Types:
    """The type that every value of the result has by the plan."""
    gone = {result for op in plan.drop for result in view.ops[op].outputs}
    wanted: dict[tuple[ScopeId, str], DType] = {}
    for value in view.values:
        dtype = plan.retype.get(value.id) or view.dtype(value.id)
        if dtype is not None and value.id not in gone:
            wanted[value.scope, plan.rename.get(value.id, value.name)] = dtype
    for cast in plan.casts:
        wanted[view.values[cast.value].scope, cast.name] = cast.to
    for bake in plan.bakes:
        wanted[view.values[bake.value].scope, bake.name] = bake.to
    return wanted


def _told_by_onnx(view: View, inferred: ModelProto) -> _Types:
    """What onnx's own inference says of the values; nothing where it may have believed a declaration instead.

    It costs a fifth of a second view, and it is not our own arithmetic.
    """
    if inferred.functions or not all(_inferred(schema) for schema in {op.signature for op in view.ops}):
        return {}
    told: dict[tuple[ScopeId, str], DType] = {}
    for number, graph in enumerate(_graphs(inferred.graph, len(view.scopes) > 1)):
        stored = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
        codes = {tensor.name: DType.of(tensor.data_type) for tensor in stored}
        for stated in (*graph.input, *graph.value_info, *graph.output):
            vtype = type_of_proto(stated.type)
            codes[stated.name] = vtype.dtype if vtype else None
        told.update(((ScopeId(number), name), dtype) for name, dtype in codes.items() if dtype is not None)
    return told


def _inferred(schema: Signature | None) -> bool:
    """Whether onnx itself infers what an operator gives: not for those of others, nor for some old versions."""
    if schema is None or schema.domain:
        return False
    try:
        found = onnx.defs.get_schema(schema.op_type, schema.since, schema.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(found.has_type_and_shape_inference_function)


def _graphs(graph: GraphProto, nested: bool) -> Iterator[GraphProto]:
    """A graph and, where there are any, those inside it, in the order of scopes."""
    yield graph
    for node in graph.node if nested else ():
        for _, body in bodies(node):
            yield from _graphs(body, nested)


def _told_by_view(result: View) -> _Types:
    types = ((value, result.dtype(value.id)) for value in result.values)
    return {(value.scope, value.name): dtype for value, dtype in types if dtype is not None}


def _compare(wanted: _Types, told: _Types) -> None:
    for (scope, name), expected in wanted.items():
        actual = told.get((scope, name))
        if actual is not expected:
            found = actual.spelling if actual else "unknown"
            raise ConversionError(
                f"value {name!r} is {found} after the conversion, not {expected.spelling} as planned; "
                "nothing was written; please report this"
            )
