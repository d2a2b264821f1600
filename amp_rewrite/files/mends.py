"""Defects of a model overlooked by runtimes: mended as the model is loaded, if they have one meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx.defs
from onnx import FunctionProto, GraphProto, ModelProto, TensorProto, ValueInfoProto

from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files import tensors
from amp_rewrite.files.protos import all_nodes, bodies, clone, refill
from amp_rewrite.files.tensors import Sources

OPSETS = 1 << 31
"""The bound of opset versions: onnx stores them in an int."""
_FREE_INITIALIZERS = 4  # the first IR version in which an initializer need not be an input
UNNAMED = "graph"
"""The name of a graph without one."""

_Edit = Callable[[ModelProto], None]


@dataclass(frozen=True, slots=True)
class Mend:
    """A defect of a model, and the edit of it or of a copy; None to leave the model as it is."""

    subject: str
    message: str
    edit: _Edit | None = None


def mended(proto: ModelProto, *, ours: bool) -> tuple[ModelProto, tuple[Finding, ...]]:
    """Return a model without its defects of one meaning, and findings about them. O(nodes + tensors).

    `ours`: the model may be changed; without that, one with defects is copied. ModelError for tensors of one name with
    different values.
    """
    found = [mend for rule in _RULES for mend in rule(proto)]
    edits = [mend.edit for mend in found if mend.edit is not None]
    if edits and not ours:
        proto = clone(proto)
    for edit in edits:
        edit(proto)
    return proto, tuple(Finding("mended", mend.subject, mend.message) for mend in found)


def _names(proto: ModelProto) -> Iterator[Mend]:
    name = proto.graph.name
    if not name:
        yield Mend("graph", f"it has no name; {UNNAMED!r} is its name now", lambda p: _call(p.graph, UNNAMED))
    elif isinstance(name, bytes):  # protobuf returns text that is not UTF-8 as bytes
        text = name.decode(errors="backslashreplace")
        yield Mend("graph", f"its name is not UTF-8; it is {text!r} now", lambda p: _call(p.graph, text))
    if any(not tensor.name for tensor in proto.graph.initializer):
        yield Mend("initializer", "an initializer has no name, so nothing can read it; it is left out", _drop_nameless)


def _call(graph: GraphProto, name: str) -> None:
    graph.name = name


def _drop_nameless(proto: ModelProto) -> None:
    refill(proto.graph, "initializer", [tensor for tensor in proto.graph.initializer if tensor.name])


def _old_ir(proto: ModelProto) -> Iterator[Mend]:
    """Yield the mend of a model of IR version 3 with free initializers, as onnxruntime saves old models."""
    if proto.ir_version >= _FREE_INITIALIZERS or not proto.opset_import:
        return
    listed = {formal.name for formal in proto.graph.input}
    free = [t.name for t in proto.graph.initializer if t.name not in listed]
    if free or proto.ir_version < 1:
        what = f"initializer {free[0]!r} is not an input, which" if free else "it"
        note = f"{what} needs IR version {_FREE_INITIALIZERS}, not {proto.ir_version}; it has that one now"
        yield Mend("IR", note, _of_free_initializers)


def _of_free_initializers(proto: ModelProto) -> None:
    """Raise the IR version; initializers listed as inputs stay constant."""
    proto.ir_version = _FREE_INITIALIZERS
    held = {tensor.name for tensor in proto.graph.initializer}
    refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in held])


def _twice(proto: ModelProto) -> Iterator[Mend]:
    first: dict[str, TensorProto] = {}
    for tensor in proto.graph.initializer:
        known = first.setdefault(tensor.name, tensor)
        if known is not tensor and tensor.name:
            if not _equal(known, tensor):
                raise ModelError(f"initializer {tensor.name!r} is there twice, with different values; keep one")
            yield Mend(tensor.name, "the initializer is there twice, with the same values; one is left", _once)
    keys: set[str] = set()
    for entry in proto.metadata_props:
        if entry.key in keys:
            yield Mend(entry.key, "the key of metadata is there twice; the last entry is left", _last_of_each_key)
        keys.add(entry.key)


def _equal(a: TensorProto, b: TensorProto) -> bool:
    if (a.data_type, a.dims[:]) != (b.data_type, b.dims[:]):
        return False
    if a == b or a.data_type == TensorProto.STRING:
        return bool(a == b)
    with Sources() as sources:
        return tensors.array(a, sources).tobytes() == tensors.array(b, sources).tobytes()


def _once(proto: ModelProto) -> None:
    first = {tensor.name: tensor for tensor in reversed(proto.graph.initializer)}
    refill(proto.graph, "initializer", [t for t in proto.graph.initializer if first[t.name] is t])


def _last_of_each_key(proto: ModelProto) -> None:
    refill(proto, "metadata_props", {entry.key: entry for entry in proto.metadata_props}.values())


def _repeated(proto: ModelProto) -> Iterator[Mend]:
    """Yield the mend of bodies with initializers of the graph around them, as onnx-graphsurgeon writes them."""
    if next(_repeats(proto.graph, {}), None) is not None:
        note = "bodies repeat initializers of the graph around them; the result has each once"
        yield Mend("model", note, _without_repeats)


def _repeats(graph: GraphProto, outer: Mapping[str, TensorProto]) -> Iterator[tuple[GraphProto, TensorProto]]:
    own = {formal.name for formal in graph.input} | {name for node in graph.node for name in node.output}
    known = {name: t for name, t in outer.items() if name not in own} | {t.name: t for t in graph.initializer}
    for node in graph.node:
        for _, body in bodies(node):
            ends = {formal.name for formal in (*body.input, *body.output)}
            repeats = [t for t in body.initializer if t.name in known and t.name not in ends]
            yield from ((body, t) for t in repeats if _equal(known[t.name], t))
            yield from _repeats(body, known)


def _without_repeats(proto: ModelProto) -> None:
    for body, tensor in list(_repeats(proto.graph, {})):
        body.initializer.remove(tensor)


def _domains(proto: ModelProto) -> Iterator[Mend]:
    """Yield mends of the domains of nodes, and of the opset imports of the model and its functions."""
    local = {function.domain for function in proto.functions}
    for number, holder in enumerate((proto, *proto.functions)):
        used: dict[str, set[str]] = {}
        for node in all_nodes(holder.graph.node if isinstance(holder, ModelProto) else holder.node):
            if isinstance(node.domain, str) and isinstance(node.op_type, str):  # bytes are not UTF-8
                used.setdefault(node.domain, set()).add(node.op_type)
        subject = "model" if isinstance(holder, ModelProto) else f"function {holder.name}"
        if used.pop(_SPELLED_OUT, None):
            note = "nodes state the domain 'ai.onnx', which is written as ''; it is '' now"
            yield Mend(subject, note, _at(number, _to_default_domain))
        known = {imported.domain for imported in holder.opset_import}
        for imported in holder.opset_import:
            if not 0 < imported.version < OPSETS and imported.domain not in (*used, "", _SPELLED_OUT):
                note = f"it imports {imported.domain} opset {imported.version}, which no node uses; it is left out"
                yield Mend(subject, note, _at(number, _without_import(imported.domain)))
        for domain in sorted(used.keys() - known - local - {""}):
            if (version := _only_version(domain, used[domain])) is not None:
                note = f"nodes are of {domain}, which is not imported; opset {version} of it is now"
                yield Mend(subject, note, _at(number, _with_import(domain, version)))


_SPELLED_OUT = "ai.onnx"

_Holder = ModelProto | FunctionProto


def _at(number: int, edit: Callable[[_Holder], None]) -> _Edit:
    return lambda proto: edit(proto.functions[number - 1] if number else proto)


def _to_default_domain(holder: _Holder) -> None:
    for node in all_nodes(holder.graph.node if isinstance(holder, ModelProto) else holder.node):
        if node.domain == _SPELLED_OUT:
            node.domain = ""
    for imported in holder.opset_import:
        if imported.domain == _SPELLED_OUT:
            imported.domain = ""


def _without_import(domain: str) -> Callable[[_Holder], None]:
    return lambda holder: refill(holder, "opset_import", [o for o in holder.opset_import if o.domain != domain])


def _with_import(domain: str, version: int) -> Callable[[_Holder], None]:
    return lambda holder: holder.opset_import.extend([onnx.OperatorSetIdProto(domain=domain, version=version)])


def _only_version(domain: str, op_types: set[str]) -> int | None:
    """Return an opset with the only meaning of operators known to onnx: 1 in a domain unknown to onnx."""
    newest = 1
    for op_type in op_types:
        try:
            schema = onnx.defs.get_schema(op_type, domain)
        except onnx.defs.SchemaError:
            continue
        if schema.since_version > 1 and _known_at_first(op_type, domain):
            return None
        newest = max(newest, schema.since_version)
    return newest


def _known_at_first(op_type: str, domain: str) -> bool:
    try:
        onnx.defs.get_schema(op_type, 1, domain)
    except onnx.defs.SchemaError:
        return False
    return True


def _declarations(proto: ModelProto) -> Iterator[Mend]:
    """Yield mends of declarations in conflict with those of inputs, and notes on ends without a type or a shape."""
    stated = {formal.name: formal for formal in proto.graph.input}
    wrong = {v.name for v in proto.graph.value_info if v.name in stated and v.type != stated[v.name].type}
    if wrong:
        note = "value_info declares the input otherwise than the graph; the graph's declaration is left"
        yield Mend(min(wrong), note, _without_value_info(wrong))
    for kind, formals in (("input", proto.graph.input), ("output", proto.graph.output)):
        for formal in formals:
            if bare(formal) and not (kind == "input" and not formal.type.tensor_type.elem_type):
                lack = "shape" if formal.type.tensor_type.elem_type else "type"
                note = f"the {kind} states no {lack}; it stays so, and onnx checks the model without that"
                yield Mend(formal.name, note)


def bare(formal: ValueInfoProto) -> bool:
    """True for an end of a model without a type, or of a tensor without a shape, of any rank."""
    kind = formal.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not formal.type.tensor_type.HasField("shape"))


def _without_value_info(names: set[str]) -> _Edit:
    return lambda proto: refill(proto.graph, "value_info", [v for v in proto.graph.value_info if v.name not in names])


_RULES: Sequence[Callable[[ModelProto], Iterator[Mend]]] = (
    _names,
    _old_ir,
    _twice,
    _repeated,
    _domains,
    _declarations,
)
