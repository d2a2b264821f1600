"""Fixes for unambiguous model defects that runtimes tolerate, applied on loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx.defs
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files import tensors
from amp_rewrite.files.protos import all_nodes, bodies, clone, refill
from amp_rewrite.files.tensors import Sources

OPSET_BOUND = 1 << 31
"""Exclusive upper bound of opset versions, which onnx stores in an int."""
_FIRST_FREE_INITIALIZERS = 4  # IR version; in earlier ones, each initializer must be an input


@dataclass
class _Fixer:
    """A model being fixed, with the defects found. `owned`: edit the model in place instead of copying it first."""

    proto: ModelProto
    owned: bool
    findings: list[Finding] = field(default_factory=list)

    def note(self, subject: str, message: str) -> None:
        self.findings.append(Finding("mended", subject, message))

    def mend(self, subject: str, message: str) -> ModelProto:
        """Record a defect and return the model for editing."""
        self.note(subject, message)
        if not self.owned:
            self.proto, self.owned = clone(self.proto), True
        return self.proto


def mended(proto: ModelProto, *, owned: bool) -> tuple[ModelProto, tuple[Finding, ...]]:
    """Fix the unambiguous defects of a model; return it with findings about them. O(nodes + tensors).

    `owned`: edit the model in place; otherwise, a model with defects is copied. ModelError for two initializers
    with the same name and different values.
    """
    model = _Fixer(proto, owned)
    for fix in (_fix_names, _fix_ir, _fix_initializers, _fix_metadata, _fix_domains, _fix_imports, _fix_declarations):
        fix(model)
    return model.proto, tuple(model.findings)


def _fix_names(model: _Fixer) -> None:
    name, initializers = model.proto.graph.name, model.proto.graph.initializer
    if not name:
        model.mend("graph", "it has no name; it is now named 'graph'").graph.name = "graph"
    elif isinstance(name, bytes):  # protobuf returns text that is not UTF-8 as bytes
        text = name.decode(errors="backslashreplace")
        model.mend("graph", f"its name is not UTF-8; it is now {text!r}").graph.name = text
    if any(not tensor.name for tensor in initializers):
        graph = model.mend(
            "initializer", "an initializer has no name, so nothing can read it; the initializer is removed"
        ).graph
        refill(graph, "initializer", [tensor for tensor in graph.initializer if tensor.name])


def _fix_ir(model: _Fixer) -> None:
    """Raise the IR version of an old model if an initializer is not an input, as in models saved by onnxruntime.

    Initializers are removed from the inputs, so that they remain constant.
    """
    proto = model.proto
    if proto.ir_version >= _FIRST_FREE_INITIALIZERS or not proto.opset_import:
        return
    inputs, initializers = {formal.name for formal in proto.graph.input}, {t.name for t in proto.graph.initializer}
    if free := sorted(initializers - inputs):
        note = f"IR version {proto.ir_version} requires an input for initializer {free[0]!r}"
        proto = model.mend("IR", f"{note}; it is now version {_FIRST_FREE_INITIALIZERS}")
        proto.ir_version = _FIRST_FREE_INITIALIZERS
        refill(proto.graph, "input", [formal for formal in proto.graph.input if formal.name not in initializers])


def _fix_initializers(model: _Fixer) -> None:
    first: dict[str, TensorProto] = {}
    for tensor in model.proto.graph.initializer:
        earlier = first.setdefault(tensor.name, tensor)
        if earlier is not tensor:
            if not _equal(earlier, tensor):
                raise ModelError(f"initializer {tensor.name!r} appears twice, with different values; keep one")
            model.mend(tensor.name, "the initializer appears twice, with the same values; one is kept")
    if len(first) < len(model.proto.graph.initializer):
        refill(model.proto.graph, "initializer", first.values())
    # onnx-graphsurgeon writes bodies that repeat initializers.
    if next(_repeats(model.proto.graph, {}), None) is not None:
        proto = model.mend("model", "bodies repeat initializers of the outer graph; the copies are removed")
        for body, tensor in list(_repeats(proto.graph, {})):
            body.initializer.remove(tensor)


def _repeats(graph: GraphProto, outer: Mapping[str, TensorProto]) -> Iterator[tuple[GraphProto, TensorProto]]:
    local = {formal.name for formal in graph.input} | {name for node in graph.node for name in node.output}
    visible = {name: t for name, t in outer.items() if name not in local} | {t.name: t for t in graph.initializer}
    for node in graph.node:
        for _, body in bodies(node):
            ends = {formal.name for formal in (*body.input, *body.output)}
            repeats = [t for t in body.initializer if t.name in visible and t.name not in ends]
            yield from ((body, t) for t in repeats if _equal(visible[t.name], t))
            yield from _repeats(body, visible)


def _equal(a: TensorProto, b: TensorProto) -> bool:
    if a == b or a.data_type == TensorProto.STRING or (a.data_type, a.dims[:]) != (b.data_type, b.dims[:]):
        return bool(a == b)
    with Sources() as sources:
        return tensors.array(a, sources).tobytes() == tensors.array(b, sources).tobytes()


def _fix_metadata(model: _Fixer) -> None:
    last = {entry.key: entry for entry in model.proto.metadata_props}
    if len(last) < len(model.proto.metadata_props):
        proto = model.mend("metadata", "a metadata key appears twice; the last entry is kept")
        refill(proto, "metadata_props", {entry.key: entry for entry in proto.metadata_props}.values())


def _fix_domains(model: _Fixer) -> None:
    if any(node.domain == "ai.onnx" for holder in _holders(model.proto) for node in _nodes(holder)):
        note = "nodes write the default domain 'ai.onnx' instead of ''; it is now ''"
        for holder in _holders(model.mend("model", note)):
            for item in (*_nodes(holder), *holder.opset_import):
                item.domain = "" if item.domain == "ai.onnx" else item.domain


def _fix_imports(model: _Fixer) -> None:
    local = {function.domain for function in model.proto.functions}
    for number, holder in enumerate(_holders(model.proto)):
        used: dict[str, set[str]] = {}
        for node in _nodes(holder):
            if isinstance(node.domain, str) and isinstance(node.op_type, str):  # bytes if it is not UTF-8
                used.setdefault(node.domain, set()).add(node.op_type)
        subject = f"function {holder.name}" if isinstance(holder, FunctionProto) else "model"
        versions = {imported.domain: imported.version for imported in holder.opset_import}
        for domain, version in versions.items():
            if not 0 < version < OPSET_BOUND and domain not in (*used, ""):
                note = f"it imports {domain} opset {version}, which no node uses; the import is removed"
                fixed = _holders(model.mend(subject, note))[number]
                refill(fixed, "opset_import", [o for o in fixed.opset_import if o.domain != domain])
        for domain in sorted(used.keys() - versions - local - {""}):
            if (version := _only_version(domain, used[domain])) is not None:
                note = f"nodes use {domain}, which is not imported; an import of opset {version} is added"
                _holders(model.mend(subject, note))[number].opset_import.add(domain=domain, version=version)


def _holders(proto: ModelProto) -> Sequence[ModelProto | FunctionProto]:
    return [proto, *proto.functions]


def _nodes(holder: ModelProto | FunctionProto) -> Iterator[NodeProto]:
    return all_nodes(holder.graph.node if isinstance(holder, ModelProto) else holder.node)


def _only_version(domain: str, op_types: set[str]) -> int | None:
    """Return the only possible opset version for these operators; 1 if onnx does not know them, None if ambiguous."""
    newest = 1
    for op_type in op_types:
        if onnx.defs.has(op_type, domain=domain):
            since = onnx.defs.get_schema(op_type, domain).since_version
            if since > 1 and onnx.defs.has(op_type, 1, domain):
                return None
            newest = max(newest, since)
    return newest


def _fix_declarations(model: _Fixer) -> None:
    """Remove contradictory value_info of inputs; report inputs and outputs without a type or a shape."""
    types = {formal.name: formal.type for formal in model.proto.graph.input}
    contradictory = {v.name for v in model.proto.graph.value_info if v.type != types.get(v.name, v.type)}
    if contradictory:
        note = "value_info contradicts the declaration of the input; the declaration is kept"
        graph = model.mend(min(contradictory), note).graph
        refill(graph, "value_info", [v for v in graph.value_info if v.name not in contradictory])
    for kind, formals in (("input", model.proto.graph.input), ("output", model.proto.graph.output)):
        for formal in formals:
            typed = bool(formal.type.tensor_type.elem_type)
            if is_bare(formal) and (typed or kind == "output"):
                missing = "shape" if typed else "type"
                model.note(formal.name, f"the {kind} has no {missing}; onnx checks only the rest of the model")


def is_bare(formal: ValueInfoProto) -> bool:
    """True for an input or output without a type, or with a tensor type but no shape."""
    kind = formal.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not formal.type.tensor_type.HasField("shape"))
