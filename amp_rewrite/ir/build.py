"""Construction of the index: the scopes, ops, values and uses of a model, and the element types of the values."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import onnx
import onnx.checker
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.loading import FIRST_IR_WITH_OPSET_IMPORTS
from amp_rewrite.files.mends import OPSET_BOUND
from amp_rewrite.files.protos import all_nodes, bodies
from amp_rewrite.files.tensors import dtype, elements, in_memory, is_stub
from amp_rewrite.ir.nodes import (
    Op,
    OpId,
    Role,
    Scope,
    ScopeId,
    Use,
    Value,
    ValueId,
    body_input_types,
    result_type,
    state_pairs,
    types_read,
)
from amp_rewrite.ir.schema import PLAIN_CONSTANTS, TENSOR, Signature, ValueType, normal_domain, signature, type_of_proto
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS, FIRST_RESIZE_WITH_REGION

_RESIZES = ("Resize", "Upsample")
_MAX_SCALE = 2.0**31
_MESSAGE_FIELDS = {AttributeProto.GRAPH: "g", AttributeProto.TENSOR: "t"}
"""The attribute fields that contain a message: reading a missing message returns an empty one."""
_PLACEHOLDERS = {
    AttributeProto.GRAPH: AttributeProto(type=AttributeProto.GRAPH, g=GraphProto(name="g")),
    AttributeProto.TENSOR: AttributeProto(
        type=AttributeProto.TENSOR, t=TensorProto(data_type=TensorProto.FLOAT, dims=[0])
    ),
}
_MAX_AXIS = 1 << 31


@dataclass
class Index:
    """The parts of a model (see `View`)."""

    opsets: Mapping[str, int]
    ops: list[Op]
    values: list[Value]
    scopes: list[Scope]
    types: list[ValueType | None]
    uses: list[list[Use]]
    carried: list[tuple[ValueId, ValueId]]
    names: set[str] = field(repr=False)


class UnsortedError(ModelError):
    """A node precedes the producer of one of its inputs."""


def build(proto: ModelProto) -> Index:
    """Index a model. O(nodes + uses).

    ModelError with the node's name if the graph cannot run, UnsortedError if it might run in another order.
    """
    index = Index({normal_domain(o.domain): o.version for o in proto.opset_import}, [], [], [], [], [], [], set())
    _Graph(_Build(proto, index), proto.graph, None, "", [])
    for function in proto.functions:
        index.names.update(name for n in all_nodes(function.node) for name in (n.name, *n.input, *n.output))
    _refuse_bytes(index.names, "a name in the model")
    return index


def check_imports(proto: ModelProto) -> None:
    """Raise ModelError for invalid opset imports and function names."""
    for function in proto.functions:
        _refuse_bytes((function.domain, function.name), "the domain or name of a function")
    holders = (("the model", proto), *((f"function {f.name!r}", f) for f in proto.functions))
    for what, holder in holders:
        versions: dict[str, int] = {}
        for imported in holder.opset_import:
            _refuse_bytes((imported.domain,), "the domain of an opset import")
            domain = normal_domain(imported.domain) or "ai.onnx"
            if not 0 < imported.version < OPSET_BOUND:
                raise ModelError(f"{what} imports {domain} opset {imported.version}, which does not exist; correct it")
            if versions.setdefault(domain, imported.version) != imported.version:
                raise ModelError(f"{what} imports {domain} opsets {versions[domain]} and {imported.version}; keep one")


def _refuse_bytes(texts: Iterable[str], what: str) -> None:
    for text in texts:
        if isinstance(text, bytes):
            raise ModelError(f"{what} is not UTF-8: {text[:80]!r}; the file is damaged, so export the model again")


_Kind = tuple[str, str, str, Signature | None]


@dataclass
class _Build:
    """The state shared by the graphs of a model while they are indexed."""

    proto: ModelProto
    index: Index
    kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict)
    valid_forms: set[object] = field(default_factory=set)
    """The forms (schema, input count, output count) of valid nodes without attributes."""

    def __post_init__(self) -> None:
        check_imports(self.proto)
        self.functions = {(normal_domain(f.domain), f.name) for f in self.proto.functions}

    def kind(self, node: NodeProto, position: int) -> _Kind:
        key = node.domain, node.op_type
        if key not in self.kinds:
            _refuse_bytes(key, f"a string of node {position}")
            domain, op_type = normal_domain(key[0]), key[1]
            kind = f"{domain}::{op_type}" if domain else op_type
            opset = self.index.opsets.get(domain)
            is_op = (domain, op_type) not in self.functions
            if is_op and opset is None and not domain and self.proto.ir_version >= FIRST_IR_WITH_OPSET_IMPORTS:
                raise ModelError("the model uses ai.onnx operators but imports no ai.onnx opset; add the import")
            self.kinds[key] = domain, op_type, kind, signature(domain, op_type, opset or 1) if is_op else None
        return self.kinds[key]


class _Graph:
    """The main graph or a body during its indexing. `outer`: the types that the owner passes to its formal inputs."""

    def __init__(
        self, build: _Build, graph: GraphProto, parent: _Graph | None, path: str, outer: Sequence[ValueType | None]
    ) -> None:
        self.build, self.index = build, build.index
        self.scope: Scope = Scope(ScopeId(len(self.index.scopes)), parent.scope.id if parent else None, path, graph)
        self.index.scopes.append(self.scope)
        self.local: dict[str, ValueId] = {}
        """The innermost map of `visible`; most names are found in it."""
        self.visible: ChainMap[str, ValueId] = ChainMap(self.local, *(parent.visible.maps if parent else ()))
        formals = (*graph.value_info, *graph.output)
        self.index.names.update(v.name for v in formals)
        self.declared = {v.name: vtype for v in formals if (vtype := type_of_proto(v.type)) is not None}
        self.main = parent is None
        self.outputs = frozenset(o.name for o in graph.output) if self.main else frozenset()
        self.where = f"graph {path or 'main'!r}"
        self.scope.inputs = self._inputs(outer)
        self.scope.ops = tuple([self._op(node, i) for i, node in enumerate(graph.node)])
        for out in graph.output:
            if out.name not in self.visible:
                raise ModelError(f"{self.where}: no node produces output {out.name!r}; export the model again")
        self.scope.outputs = tuple(self.visible[out.name] for out in graph.output)

    # -- values --------------------------------------------------------------------------------------

    def _inputs(self, outer: Sequence[ValueType | None]) -> tuple[ValueId, ...]:
        """Define formal inputs and initializers; return the inputs that a caller may feed, in order."""
        graph = self.scope.graph
        constants = {t.name: t for t in graph.initializer}
        may_override = self.main and self.build.proto.ir_version >= FIRST_IR_WITH_FREE_INITIALIZERS
        inputs = []
        for i, formal in enumerate(graph.input):
            tensor = constants.pop(formal.name, None)
            if tensor is not None:
                value = self._initializer(tensor, overridable=may_override)
            else:
                kind, code = formal.type.WhichOneof("value"), formal.type.tensor_type.elem_type
                if self.main and (kind is None or (kind == "tensor_type" and DType.of(code) is None)):
                    fault = f"has the unknown element type {code}" if code else "has no element type"
                    raise ModelError(f"input {formal.name!r} {fault}; declare one, or export the model again")
                vtype = type_of_proto(formal.type) or (outer[i] if i < len(outer) else None)
                value = self._define(formal.name, vtype, Role.INPUT)
            if tensor is None or may_override:
                inputs.append(value)
        for tensor in constants.values():
            self._initializer(tensor)
        for sparse in graph.sparse_initializer:
            self._define(sparse.values.name, ValueType(TENSOR, DType.of(sparse.values.data_type)), Role.INITIALIZER)
        return tuple(inputs)

    def _initializer(self, tensor: TensorProto, *, overridable: bool = False) -> ValueId:
        if not tensor.data_type:
            raise ModelError(f"initializer {tensor.name!r} has no element type; export the model again")
        if not self.main and tensor.name in self.visible:
            raise ModelError(
                f"{self.where}: initializer {tensor.name!r} shadows a value of the outer graph, and runtimes disagree"
                " about which of the two is read; rename one of them"
            )
        elements(tensor)  # raises for impossible dims
        vtype = ValueType(TENSOR, dtype(tensor))
        return self._define(tensor.name, vtype, Role.INITIALIZER, tensor, overridable=overridable)

    def _define(
        self,
        name: str,
        vtype: ValueType | None,
        role: Role,
        tensor: TensorProto | None = None,
        producer: OpId | None = None,
        *,
        overridable: bool = False,
    ) -> ValueId:
        if name in self.local:
            raise ModelError(f"{self.where}: value {name!r} is defined twice; rename one of the two")
        index, value = self.index, ValueId(len(self.index.values))
        self.local[name] = value
        public = name in self.outputs or overridable or (self.main and role is Role.INPUT)
        index.values.append(Value(value, self.scope.id, name, role, producer, public, overridable, tensor))
        index.types.append(vtype)
        index.uses.append([])
        index.names.add(name)
        return value

    # -- nodes ---------------------------------------------------------------------------------------

    def _op(self, node: NodeProto, position: int) -> OpId:
        # Each access to a field of a node creates an object, so each field is read once. Lists are sliced, which is
        # twice as fast as iterating over them.
        node_name, read, written, attributes = node.name, node.input[:], node.output[:], node.attribute[:]
        domain, op_type, kind, schema = self.build.kind(node, position)
        if attributes:
            _refuse_bytes([a.name for a in attributes], f"a string of node {position}")
        index, local = self.index, self.local
        name = node_name or f"{self.scope.path}{op_type}_{position}"
        index.names.add(name)
        inputs = tuple([local[r] if r and r in local else self._read(name, op_type, r) for r in read])
        plain = not (attributes or "" in read or "" in written or op_type in _RESIZES)
        form = (schema, len(read), len(written)) if plain else None
        if form is None or form not in self.build.valid_forms:  # most nodes share their form with many others
            fault = _violation(schema, node, attributes)
            if fault is None and schema is not None and schema.kind in _RESIZES:
                fault = self._wrong_scale(schema, inputs)
            if fault:
                raise ModelError(f"node {name!r} ({op_type}) {fault}")
            self.build.valid_forms.add(form)
        inside = self._bodies(node, domain, name, inputs) if attributes else ()
        ids = count(len(index.values))  # the ids of the values defined below
        outputs = tuple([ValueId(next(ids)) if out else None for out in written])
        op_id = OpId(len(index.ops))
        op = Op(op_id, self.scope.id, domain, op_type, name, node, inputs, outputs, inside, schema, kind)
        for value_read, only_type in types_read(op, index.types):
            index.types[value_read] = only_type
        tensor = _constant_tensor(attributes) if kind == "Constant" else None
        for slot, out in enumerate(written):
            if out:
                vtype = result_type(op, slot, index.types, index.scopes)
                if vtype is None or vtype.dtype is None:
                    vtype = self.declared.get(out, vtype)  # the only other source
                self._define(out, vtype, Role.RESULT, tensor, op_id)
        index.ops.append(op)
        for slot, value in enumerate(inputs):
            if value is not None:
                index.uses[value].append(Use(op_id, slot))
        for body in inside:
            index.scopes[body].owner = op_id
        return op_id

    def _wrong_scale(self, schema: Signature, inputs: Sequence[ValueId | None]) -> str | None:
        """Return a message if a scale makes onnx infer a negative size, and perhaps crash."""
        at = 2 if schema.since >= FIRST_RESIZE_WITH_REGION else 1  # a region precedes the scales
        tensors = [self.index.values[value].tensor for value in inputs[at : at + 1] if value is not None]
        scales = [float(x) for t in tensors if t is not None and not is_stub(t) for x in in_memory(t).ravel()]
        wrong = next((scale for scale in scales if not 0 < scale <= _MAX_SCALE), None)
        return f"has the scale {wrong:g}; use a positive number" if wrong is not None else None

    def _read(self, node: str, op_type: str, name: str) -> ValueId | None:
        if name and name not in self.visible:
            raise UnsortedError(
                f"node {node!r} ({op_type}) reads {name!r}, which no earlier node produces: "
                "the graph has a cycle, is unsorted, or is missing an input; export the model again"
            )
        return self.visible[name] if name else None

    def _bodies(self, node: NodeProto, domain: str, name: str, inputs: Sequence[ValueId | None]) -> tuple[ScopeId, ...]:
        graphs, scopes = list(bodies(node)), list[ScopeId]()
        if not graphs:
            return ()
        types = [self.index.types[v] if v is not None else None for v in inputs]
        outer = body_input_types(node, domain, types, self.index.opsets.get("", 1))
        for attribute, graph in graphs:
            needed = len(node.output) + (domain == "" and node.op_type == "Loop")  # a Loop's condition comes first
            if domain == "" and len(graph.output) < needed:
                raise ModelError(
                    f"node {name!r} ({node.op_type}) has too few outputs in its {attribute} ({len(graph.output)}"
                    f" instead of {needed}); export the model again"
                )
            path = f"{self.scope.path if node.name else ''}{name}/{attribute}/"  # a generated name contains the path
            body = _Graph(self.build, graph, self, path, outer).scope
            self.index.carried.extend(state_pairs(node, domain, body))
            scopes.append(body.id)
        return tuple(scopes)


def _constant_tensor(attributes: Iterable[AttributeProto]) -> TensorProto | None:
    for a in attributes:
        if a.name == "value":
            tensor: TensorProto = a.t
            elements(tensor)  # raises for impossible dims
            return tensor
        dtype, field_name = PLAIN_CONSTANTS.get(a.name, (DType.STRING, ""))
        if dtype is not DType.STRING:
            content = getattr(a, field_name)
            is_list = a.name.endswith("s")
            dims, values = ((len(content),), content) if is_list else ((), [content])
            return onnx.helper.make_tensor("", dtype.code, dims, values)
    return None


# -- nodes against their schemas -------------------------------------------------------------------------


def _violation(schema: Signature | None, node: NodeProto, attributes: Sequence[AttributeProto]) -> str | None:
    """Return a message about a node of a graph (not of a function) that violates its schema; None if it is valid.

    These are onnx's checks and a few more, so other modules may read `op.inputs[1]` or an attribute's `i` without a
    check.
    """
    for a in attributes:
        if a.ref_attr_name:
            return f"takes {a.name!r} from an attribute of a function, but is not in a function; set its value"
        if a.type in _MESSAGE_FIELDS and not a.HasField(_MESSAGE_FIELDS[a.type]):
            return f"has the attribute {a.name!r} without a value; export the model again"
    if schema is None:
        return None
    read = node.input[:]
    missing = [slot for slot in schema.required if slot >= len(read) or not read[slot]]
    if missing:
        return f"is missing input {missing[0]}; add it"
    # onnx's checker accepts the following faults, but they may crash its shape inference.
    numbers = {a.name: a for a in attributes}
    if schema.op_type == "Constant" and not attributes:
        return "does not contain a value; export the model again"
    if "axis" in numbers and abs(numbers["axis"].i) >= _MAX_AXIS:
        return f"has axis {numbers['axis'].i}, which is out of range; export the model again"
    perm = list(numbers["perm"].ints) if schema.op_type == "Transpose" and "perm" in numbers else []
    if sorted(perm) != list(range(len(perm))):
        return f"has perm {perm[:10]}, which is not a permutation; correct the attribute"
    scanned = numbers["num_scan_inputs"].i if schema.op_type == "Scan" and "num_scan_inputs" in numbers else 1
    if not 0 < scanned <= max(len(read), 1):
        return f"scans {scanned} of its {len(read)} inputs; correct num_scan_inputs"
    return _checker_error(schema, node, attributes) if schema.checked else None


def _checker_error(schema: Signature, node: NodeProto, attributes: Sequence[AttributeProto]) -> str | None:
    """Return the error from onnx's checker for a node, ignoring its graphs and tensors; None if there is none."""
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {schema.domain: schema.since}
    light = node
    try:
        if node.domain != schema.domain or any(a.type in _PLACEHOLDERS for a in attributes):
            light = NodeProto(
                name=node.name, op_type=node.op_type, domain=schema.domain, input=node.input, output=node.output
            )
            light.attribute.extend(_PLACEHOLDERS.get(a.type, a) for a in attributes)
            for a, original in zip(light.attribute, attributes, strict=True):
                a.name = original.name
        onnx.checker.check_node(light, context)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:  # the latter for a name that is not UTF-8
        if "Unrecognized attribute" not in str(error):  # the attribute may be from a later opset
            return f"violates its schema: {str(error).rstrip('.')}; correct it, or export the model again"
    return None
