"""Defects of a model overlooked by runtimes: mended as the model is loaded, if they have one meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx.defs
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto

from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files import tensors
from amp_rewrite.files.protos import all_nodes, bodies, clone, refill
from amp_rewrite.files.tensors import Sources

OPSETS = 1 << 31
"""The bound of opset versions: onnx stores them in an int."""
_FREE_INITIALIZERS = 4  # the first IR version in which an initializer need not be an input
UNNAMED = "graph"
"""The name of a graph without one."""


@dataclass
class _Mending:
    """A model under repair, and its defects so far. `ours`: it may be changed; else the first edit copies it."""

    proto: ModelProto
    ours: bool
    findings: list[Finding] = field(default_factory=list)

    def note(self, subject: str, message: str) -> None:
        self.findings.append(Finding("mended", subject, message))

    def mend(self, subject: str, message: str) -> ModelProto:
        """Note a defect; return the model to edit."""
        self.note(subject, message)
        if not self.ours:
            self.proto, self.ours = clone(self.proto), True
        return self.proto


def mended(proto: ModelProto, *, ours: bool) -> tuple[ModelProto, tuple[Finding, ...]]:
    """Return a model without its defects of one meaning, and findings about them. O(nodes + tensors).

    `ours`: the model may be changed; without that, one with defects is copied. ModelError for tensors of one name with
    different values.
    """
    model = _Mending(proto, ours)
    for rule in _RULES:
        rule(model)
    return model.proto, tuple(model.findings)


def _names(model: _Mending) -> None:
    name, initializers = model.proto.graph.name, model.proto.graph.initializer
    if not name:
        model.mend("graph", f"it has no name; {UNNAMED!r} is its name now").graph.name = UNNAMED
    elif isinstance(name, bytes):  # protobuf returns text that is not UTF-8 as bytes
        text = name.decode(errors="backslashreplace")
        model.mend("graph", f"its name is not UTF-8; it is {text!r} now").graph.name = text
    if any(not tensor.name for tensor in initializers):
        graph = model.mend("initializer", "an initializer has no name, so nothing can read it; it is left out").graph
        refill(graph, "initializer", [tensor for tensor in graph.initializer if tensor.name])


def _old_ir(model: _Mending) -> None:
    """Raise the IR version of a model with free initializers, as onnxruntime saves old models.

    Initializers listed as inputs stay constant.
    """
    proto = model.proto
    if proto.ir_version >= _FREE_INITIALIZERS or not proto.opset_import:
        return
    listed, named = {formal.name for formal in proto.graph.input}, {t.name: t for t in proto.graph.initializer}
    free = [name for name in named if name not in listed]
    if free or proto.ir_version < 1:
        what = f"initializer {free[0]!r} is not an input, which" if free else "it"
        note = f"{what} needs IR version {_FREE_INITIALIZERS}, not {proto.ir_version}; it has that one now"
        proto = model.mend("IR", note)
        proto.ir_version = _FREE_INITIALIZERS
        refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in named])


def _twice(model: _Mending) -> None:
    first: dict[str, TensorProto] = {}
    for tensor in model.proto.graph.initializer:
        known = first.setdefault(tensor.name, tensor)
        if known is not tensor:
            if not _equal(known, tensor):
                raise ModelError(f"initializer {tensor.name!r} is there twice, with different values; keep one")
            model.mend(tensor.name, "the initializer is there twice, with the same values; one is left")
    if len(first) < len(model.proto.graph.initializer):
        refill(model.proto.graph, "initializer", first.values())
    last: dict[str, StringStringEntryProto] = {}
    for entry in model.proto.metadata_props:
        if entry.key in last:
            model.mend(entry.key, "the key of metadata is there twice; the last entry is left")
        last[entry.key] = entry
    if len(last) < len(model.proto.metadata_props):
        refill(model.proto, "metadata_props", last.values())


def _equal(a: TensorProto, b: TensorProto) -> bool:
    if (a.data_type, a.dims[:]) != (b.data_type, b.dims[:]):
        return False
    if a == b or a.data_type == TensorProto.STRING:
        return bool(a == b)
    with Sources() as sources:
        return tensors.array(a, sources).tobytes() == tensors.array(b, sources).tobytes()


def _repeated(model: _Mending) -> None:
    """Remove initializers of bodies that are also in the graph around them, as onnx-graphsurgeon writes them."""
    if next(_repeats(model.proto.graph, {}), None) is not None:
        proto = model.mend("model", "bodies repeat initializers of the graph around them; the result has each once")
        for body, tensor in list(_repeats(proto.graph, {})):
            body.initializer.remove(tensor)


def _repeats(graph: GraphProto, outer: Mapping[str, TensorProto]) -> Iterator[tuple[GraphProto, TensorProto]]:
    own = {formal.name for formal in graph.input} | {name for node in graph.node for name in node.output}
    known = {name: t for name, t in outer.items() if name not in own} | {t.name: t for t in graph.initializer}
    for node in graph.node:
        for _, body in bodies(node):
            ends = {formal.name for formal in (*body.input, *body.output)}
            repeats = [t for t in body.initializer if t.name in known and t.name not in ends]
            yield from ((body, t) for t in repeats if _equal(known[t.name], t))
            yield from _repeats(body, known)


_SPELLED_OUT = "ai.onnx"


def _domains(model: _Mending) -> None:
    local = {function.domain for function in model.proto.functions}
    for number in range(-1, len(model.proto.functions)):
        holder = _holder(model.proto, number)
        used: dict[str, set[str]] = {}
        for node in _nodes(holder):
            if isinstance(node.domain, str) and isinstance(node.op_type, str):  # bytes are not UTF-8
                used.setdefault(node.domain, set()).add(node.op_type)
        subject = "model" if isinstance(holder, ModelProto) else f"function {holder.name}"
        versions = {imported.domain: imported.version for imported in holder.opset_import}
        if used.pop(_SPELLED_OUT, None):
            note = "nodes state the domain 'ai.onnx', which is written as ''; it is '' now"
            own = _holder(model.mend(subject, note), number)
            for named in (*_nodes(own), *own.opset_import):
                named.domain = "" if named.domain == _SPELLED_OUT else named.domain
        for domain, version in versions.items():
            if not 0 < version < OPSETS and domain not in (*used, "", _SPELLED_OUT):
                note = f"it imports {domain} opset {version}, which no node uses; it is left out"
                own = _holder(model.mend(subject, note), number)
                refill(own, "opset_import", [imported for imported in own.opset_import if imported.domain != domain])
        for domain in sorted(used.keys() - versions - local - {""}):
            if (version := _only_version(domain, used[domain])) is not None:
                note = f"nodes are of {domain}, which is not imported; opset {version} of it is now"
                own = _holder(model.mend(subject, note), number)
                own.opset_import.add(domain=domain, version=version)


def _holder(proto: ModelProto, number: int) -> ModelProto | FunctionProto:
    """Return a function of a model; the model itself for a number below 0."""
    return proto.functions[number] if number >= 0 else proto


def _nodes(holder: ModelProto | FunctionProto) -> Iterator[NodeProto]:
    return all_nodes(holder.graph.node if isinstance(holder, ModelProto) else holder.node)


def _only_version(domain: str, op_types: set[str]) -> int | None:
    """Return an opset with the only meaning of operators known to onnx: 1 in a domain unknown to onnx."""
    newest = 1
    for op_type in op_types:
        if onnx.defs.has(op_type, domain=domain):
            since = onnx.defs.get_schema(op_type, domain).since_version
            if since > 1 and onnx.defs.has(op_type, 1, domain):
                return None
            newest = max(newest, since)
    return newest


def _declarations(model: _Mending) -> None:
    """Remove declarations in conflict with those of inputs; note ends without a type or a shape."""
    graph = model.proto.graph
    stated = {formal.name: formal for formal in graph.input}
    wrong = {v.name for v in graph.value_info if v.name in stated and v.type != stated[v.name].type}
    if wrong:
        note = "value_info declares the input otherwise than the graph; the graph's declaration is left"
        graph = model.mend(min(wrong), note).graph
        refill(graph, "value_info", [v for v in graph.value_info if v.name not in wrong])
    for kind, formals in (("input", graph.input), ("output", graph.output)):
        for formal in formals:
            if bare(formal) and not (kind == "input" and not formal.type.tensor_type.elem_type):
                lack = "shape" if formal.type.tensor_type.elem_type else "type"
                model.note(
                    formal.name, f"the {kind} states no {lack}; it stays so, and onnx checks the model without that"
                )


def bare(formal: ValueInfoProto) -> bool:
    """True for an end of a model without a type, or of a tensor without a shape, of any rank."""
    kind = formal.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not formal.type.tensor_type.HasField("shape"))


_RULES: Sequence[Callable[[_Mending], None]] = (
    _names,
    _old_ir,
    _twice,
    _repeated,
    _domains,
    _declarations,
)
