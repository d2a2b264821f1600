"""Defects of a model overlooked by runtimes: mended as the model is loaded, if they have one meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx.defs
from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import all_nodes, clone, refill

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

    def mend(self, subject: str, message: str) -> ModelProto:
        """Note a defect; return the model to edit."""
        self.findings.append(Finding("mended", subject, message))
        if not self.ours:
            self.proto, self.ours = clone(self.proto), True
        return self.proto


def mended(proto: ModelProto, *, ours: bool) -> tuple[ModelProto, tuple[Finding, ...]]:
    """Return a model without its defects of one meaning, and findings about them. O(nodes + tensors).

    `ours`: the model may be changed; without that, one with defects is copied.
    """
    model = _Mending(proto, ours)
    for rule in _RULES:
        rule(model)
    return model.proto, tuple(model.findings)


def _name(model: _Mending) -> None:
    if not model.proto.graph.name:
        model.mend("graph", f"it has no name; {UNNAMED!r} is its name now").graph.name = UNNAMED


def _old_ir(model: _Mending) -> None:
    """Raise the IR version of a model with free initializers, as onnxruntime saves old models.

    Initializers listed as inputs stay constant.
    """
    proto = model.proto
    if proto.ir_version >= _FREE_INITIALIZERS or not proto.opset_import:
        return
    listed, named = {formal.name for formal in proto.graph.input}, {t.name for t in proto.graph.initializer}
    if free := sorted(named - listed):
        note = f"initializer {free[0]!r} is not an input, which needs IR version {_FREE_INITIALIZERS}, not"
        proto = model.mend("IR", f"{note} {proto.ir_version}; it has that one now")
        proto.ir_version = _FREE_INITIALIZERS
        refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in named])


def _metadata(model: _Mending) -> None:
    last = {entry.key: entry for entry in model.proto.metadata_props}
    if len(last) < len(model.proto.metadata_props):
        proto = model.mend("metadata", "a key of metadata is there twice; the last entry is left")
        refill(proto, "metadata_props", {entry.key: entry for entry in proto.metadata_props}.values())


_SPELLED_OUT = "ai.onnx"


def _spelled_out(model: _Mending) -> None:
    if any(node.domain == _SPELLED_OUT for holder in _holders(model.proto) for node in _nodes(holder)):
        note = "nodes state the domain 'ai.onnx', which is written as ''; it is '' now"
        for holder in _holders(model.mend("model", note)):
            for named in (*_nodes(holder), *holder.opset_import):
                named.domain = "" if named.domain == _SPELLED_OUT else named.domain


def _imports(model: _Mending) -> None:
    local = {function.domain for function in model.proto.functions}
    for number, holder in enumerate(_holders(model.proto)):
        used: dict[str, set[str]] = {}
        for node in _nodes(holder):
            if isinstance(node.domain, str) and isinstance(node.op_type, str):  # bytes are not UTF-8
                used.setdefault(node.domain, set()).add(node.op_type)
        for domain in sorted(used.keys() - {imported.domain for imported in holder.opset_import} - local - {""}):
            if (version := _only_version(domain, used[domain])) is not None:
                note = f"nodes are of {domain}, which is not imported; opset {version} of it is now"
                subject = f"function {holder.name}" if isinstance(holder, FunctionProto) else "model"
                _holders(model.mend(subject, note))[number].opset_import.add(domain=domain, version=version)


def _holders(proto: ModelProto) -> Sequence[ModelProto | FunctionProto]:
    return [proto, *proto.functions]


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
    stated = {formal.name: formal.type for formal in model.proto.graph.input}
    wrong = {v.name for v in model.proto.graph.value_info if v.type != stated.get(v.name, v.type)}
    if wrong:
        note = "value_info declares the input otherwise than the graph; the graph's declaration is left"
        graph = model.mend(min(wrong), note).graph
        refill(graph, "value_info", [v for v in graph.value_info if v.name not in wrong])


def bare(formal: ValueInfoProto) -> bool:
    """True for an end of a model without a type, or of a tensor without a shape, of any rank."""
    kind = formal.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not formal.type.tensor_type.HasField("shape"))


_RULES: Sequence[Callable[[_Mending], None]] = (
    _name,
    _old_ir,
    _metadata,
    _spelled_out,
    _imports,
    _declarations,
)
