"""Index construction: the scopes, ops, values and uses of a model, and the element type of each value."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import networkx as nx
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.loading import FIRST_IR_WITH_OPSET_IMPORTS
from amp_rewrite.files.mends import OPSETS
from amp_rewrite.files.protos import all_graphs, all_nodes, bodies, clone, graphs_in, refill
from amp_rewrite.files.tensors import dtype, elements, in_memory, is_stub
from amp_rewrite.ir.node_check import unreadable, violation
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

_SCALES: Mapping[str, Callable[[int], int]] = {
    "Resize": lambda since: 1 if since < FIRST_RESIZE_WITH_REGION else 2,
    "Upsample": lambda _: 1,
}
"""The input that holds scales, by the version of the op: a region may stand before it."""
_LARGEST_SCALE = 2.0**31


@dataclass(frozen=True)
class Index:
    """The parts of a model. Ids of ops, values and scopes are positions in these tuples."""

    opsets: Mapping[str, int]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    scopes: tuple[Scope, ...]
    types: tuple[ValueType | None, ...]
    uses: tuple[tuple[Use, ...], ...]
    carried: tuple[tuple[ValueId, ValueId], ...]
    """Pairs (body output, body input) that carry the state of a Loop or Scan to its next iteration."""
    names: frozenset[str] = field(repr=False)
    """All names of values and nodes, in all scopes and functions. New names must differ from them."""


class UnsortedError(ModelError):
    """A node before the producer of its input."""


def build(proto: ModelProto) -> Index:
    """Index a model. ModelError with the node's name if the graph cannot run, UnsortedError if it may by another order.

    O(nodes + uses).
    """
    walk = _Build(proto)
    walk.graph(proto.graph, None, "", "", ChainMap(), [])
    for function in proto.functions:
        walk.names.update(name for n in all_nodes(function.node) for name in (n.name, *n.input, *n.output))
    _refuse_bytes(walk.names, "a name in the model")
    parts = tuple(walk.ops), tuple(walk.values), tuple(walk.scopes), tuple(walk.types)
    return Index(walk.opsets, *parts, tuple(map(tuple, walk.uses)), tuple(walk.carried), frozenset(walk.names))


def in_order(proto: ModelProto) -> ModelProto | None:
    """Return a copy of a model with its nodes in topological order; None if there is none.

    Nodes keep their order as far as possible. O(nodes · log nodes).
    """
    ordered = clone(proto)
    holders = [*all_graphs(ordered.graph), *ordered.functions]
    holders += [body for f in ordered.functions for node in f.node for _, g in bodies(node) for body in all_graphs(g)]
    for holder in reversed(holders):  # a node with bodies depends on what those read
        nodes = _sorted(holder.node)
        if nodes is None:
            return None
        refill(holder, "node", nodes)
    return ordered


def _sorted(nodes: Sequence[NodeProto]) -> list[NodeProto] | None:
    """Return nodes in topological order, the first of several possible ones first; None for a cycle."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for at, node in enumerate(nodes):
        graph.add_edges_from((makers[name], at) for name in _names_needed(node) if name in makers)
    try:
        return [nodes[at] for at in nx.lexicographical_topological_sort(graph)]
    except nx.NetworkXUnfeasible:
        return None


def _names_needed(node: NodeProto) -> set[str]:
    """Return the names read by a node, and by its bodies from outside."""
    read = set(filter(None, node.input))
    for _, body in bodies(node):
        inside = {formal.name for formal in body.output}.union(*map(_names_needed, body.node))
        own = {held.name for held in (*body.input, *body.initializer)}
        own.update(sparse.values.name for sparse in body.sparse_initializer)
        read |= inside - own.union(*(step.output for step in body.node))
    return read


def check_imports(proto: ModelProto) -> None:
    """Raise ModelError for opset imports and names of local functions refused by onnx."""
    for function in proto.functions:
        _refuse_bytes((function.domain, function.name), "the domain or name of a function")
    holders = (("the model", proto), *((f"function {f.name!r}", f) for f in proto.functions))
    for what, holder in holders:
        versions: dict[str, int] = {}
        for imported in holder.opset_import:
            _refuse_bytes((imported.domain,), "the domain of an opset import")
            domain = normal_domain(imported.domain) or "ai.onnx"
            if not 0 < imported.version < OPSETS:
                raise ModelError(f"{what} imports {domain} opset {imported.version}, which does not exist; correct it")
            if versions.setdefault(domain, imported.version) != imported.version:
                raise ModelError(f"{what} imports {domain} opsets {versions[domain]} and {imported.version}; keep one")


def _refuse_untyped(formal: ValueInfoProto) -> None:
    """Raise ModelError for a model input without a known type: onnx's checker accepts it, its inference does not."""
    kind, code = formal.type.WhichOneof("value"), formal.type.tensor_type.elem_type
    if kind == "tensor_type" and code and DType.of(code) is None:
        raise ModelError(f"input {formal.name!r} has the unknown element type {code}; a newer amp-rewrite may know it")
    if kind is None or (kind == "tensor_type" and not code):
        raise ModelError(f"input {formal.name!r} states no element type; declare one, or export the model again")


def _refuse_bytes(texts: Iterable[str], what: str) -> None:
    """Raise ModelError for text not in UTF-8, returned by protobuf as bytes."""
    for text in texts:
        if isinstance(text, bytes):
            raise ModelError(f"{what} is not UTF-8: {text[:80]!r}; the file is damaged, export it again")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A graph under construction: its visible names, declared types and outputs."""

    scope: ScopeId
    path: str
    main: bool
    visible: ChainMap[str, ValueId]
    own: dict[str, ValueId]
    """The innermost map of `visible`, which holds most names that are read."""
    declared: Mapping[str, ValueType]
    outputs: frozenset[str]

    @property
    def where(self) -> str:
        return f"graph {self.path or 'main'!r}"


_Kind = tuple[str, str, str, Signature | None]


@dataclass
class _Build:
    proto: ModelProto
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    types: list[ValueType | None] = field(default_factory=list)
    uses: list[list[Use]] = field(default_factory=list)
    carried: list[tuple[ValueId, ValueId]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict)
    sound: set[tuple[Signature, int, int]] = field(default_factory=set)
    """Schemas, with the numbers of inputs and outputs that nodes without attributes may have."""

    def __post_init__(self) -> None:
        check_imports(self.proto)
        self.opsets = {normal_domain(o.domain): o.version for o in self.proto.opset_import}
        self.functions = {(normal_domain(f.domain), f.name) for f in self.proto.functions}

    # -- graphs --------------------------------------------------------------------------------------

    def graph(
        self,
        graph: GraphProto,
        parent: ScopeId | None,
        attribute: str,
        path: str,
        visible: ChainMap[str, ValueId],
        outer: Sequence[ValueType | None],
    ) -> ScopeId:
        """Index a graph. `outer`: the types of its formal inputs by its owner."""
        scope = Scope(ScopeId(len(self.scopes)), parent, None, attribute, path, graph, (), (), ())
        self.scopes.append(scope)
        formals = (*graph.value_info, *graph.output)
        self.names.update(v.name for v in formals)
        declared = {v.name: stated for v in formals if (stated := type_of_proto(v.type)) is not None}
        public = frozenset(o.name for o in graph.output) if parent is None else frozenset()
        own: dict[str, ValueId] = {}
        frame = _Frame(scope.id, path, parent is None, visible.new_child(own), own, declared, public)
        inputs = self._inputs(graph, frame, outer)
        ops = tuple(self._op(node, i, frame) for i, node in enumerate(graph.node))
        for out in graph.output:
            if out.name not in frame.visible:
                raise ModelError(f"{frame.where}: output {out.name!r} has no producer; fix the model's graph")
        outputs = tuple(frame.visible[out.name] for out in graph.output)
        self.scopes[scope.id] = replace(scope, inputs=inputs, outputs=outputs, ops=ops)
        return scope.id

    def _inputs(self, graph: GraphProto, frame: _Frame, outer: Sequence[ValueType | None]) -> tuple[ValueId, ...]:
        """Define formal inputs and initializers; return the inputs open to a caller, in order."""
        constants = {t.name: t for t in graph.initializer}
        may_override = frame.main and self.proto.ir_version >= FIRST_IR_WITH_FREE_INITIALIZERS
        inputs = []
        for i, formal in enumerate(graph.input):
            tensor = constants.pop(formal.name, None)
            if tensor is not None:
                value = self._initializer(frame, tensor, public=may_override, overridable=may_override)
            else:
                if frame.main:
                    _refuse_untyped(formal)
                vtype = type_of_proto(formal.type) or (outer[i] if i < len(outer) else None)
                fed = Value(self._next, frame.scope, formal.name, Role.INPUT, None, frame.main, False, None)
                value = self._define(frame, fed, vtype)
            if tensor is None or may_override:
                inputs.append(value)
        for tensor in constants.values():
            self._initializer(frame, tensor, public=tensor.name in frame.outputs, overridable=False)
        for sparse in graph.sparse_initializer:
            name, vtype = sparse.values.name, ValueType(TENSOR, DType.of(sparse.values.data_type))
            held = Value(self._next, frame.scope, name, Role.INITIALIZER, None, name in frame.outputs, False, None)
            self._define(frame, held, vtype)
        return tuple(inputs)

    def _initializer(self, frame: _Frame, tensor: TensorProto, *, public: bool, overridable: bool) -> ValueId:
        if not tensor.data_type:
            raise ModelError(f"initializer {tensor.name!r} states no element type; export the model again")
        if not frame.main and tensor.name in frame.visible:
            raise ModelError(
                f"{frame.where}: initializer {tensor.name!r} has the name of a value outside, and runtimes disagree"
                " about which of the two is read; rename one of them"
            )
        elements(tensor)  # raises for dims that no tensor has
        vtype = ValueType(TENSOR, dtype(tensor))
        held = Value(self._next, frame.scope, tensor.name, Role.INITIALIZER, None, public, overridable, tensor)
        return self._define(frame, held, vtype)

    @property
    def _next(self) -> ValueId:
        return ValueId(len(self.values))

    def _define(self, frame: _Frame, value: Value, vtype: ValueType | None) -> ValueId:
        if value.name in frame.own:
            raise ModelError(f"{frame.where}: value {value.name!r} is defined twice; rename one of the two")
        frame.own[value.name] = value.id
        self.values.append(value)
        self.types.append(vtype)
        self.uses.append([])
        self.names.add(value.name)
        return value.id

    # -- nodes ---------------------------------------------------------------------------------------

    def _op(self, node: NodeProto, position: int, frame: _Frame) -> OpId:
        # Each access to a field of a node makes a new object, so each field is read once; lists as a slice, which takes
        # half as long as to iterate over them.
        named, read, written, stated = node.name, node.input[:], node.output[:], node.attribute[:]
        domain, op_type, kind, schema = self._kind(node, position)
        if stated:
            _refuse_bytes([a.name for a in stated], f"node {position}: a part of it")
        name = named or f"{frame.path}{op_type}_{position}"
        self.names.add(name)
        own = frame.own
        inputs = tuple([own[r] if r and r in own else self._read(frame, name, op_type, r) for r in read])
        fault = self._violation(schema, node, read, written, stated) if schema is not None else unreadable(stated)
        if schema is not None and kind in _SCALES and fault is None:
            fault = self._scale_fault(inputs[_SCALES[kind](schema.since) :][:1])
        if fault:
            raise ModelError(f"node {name!r} ({op_type}) {fault}")
        graphs = list(graphs_in(stated)) if stated else ()
        scopes = self._bodies(node, domain, name, frame, inputs, graphs) if graphs else ()
        ids = count(len(self.values))  # the ids of the values that `_result` defines below
        outputs = tuple([ValueId(next(ids)) if out else None for out in written])
        op_id = OpId(len(self.ops))
        op = Op(op_id, frame.scope, domain, op_type, name, node, inputs, outputs, scopes, schema, kind)
        for read_here, vtype in types_read(op, self.types):
            self.types[read_here] = vtype
        for slot, out in enumerate(written):
            if out:
                self._result(op, slot, out, frame, stated)
        self.ops.append(op)
        for slot, value in enumerate(inputs):
            if value is not None:
                self.uses[value].append(Use(op_id, slot))
        for body in scopes:
            self.scopes[body] = replace(self.scopes[body], owner=op_id)
        return op_id

    def _violation(
        self,
        schema: Signature,
        node: NodeProto,
        read: Sequence[str],
        written: Sequence[str],
        stated: Sequence[AttributeProto],
    ) -> str | None:
        """Return how a node breaks its schema, else None. Most nodes are like many others, and are checked once."""
        plain = not (stated or "" in read or "" in written)
        alike = schema, len(read), len(written)
        if plain and alike in self.sound:
            return None
        fault = violation(schema, node, stated)
        if plain and fault is None:
            self.sound.add(alike)
        return fault

    def _scale_fault(self, read: Sequence[ValueId | None]) -> str | None:
        """Return the fault of a constant scale: onnx infers a size below 0 from it, and may crash."""
        tensors = [self.values[value].tensor for value in read if value is not None]
        held = [float(scale) for t in tensors if t is not None and not is_stub(t) for scale in in_memory(t).ravel()]
        wrong = next((scale for scale in held if not 0 < scale <= _LARGEST_SCALE), None)
        return f"has the scale {wrong:g}; state a positive number" if wrong is not None else None

    def _kind(self, node: NodeProto, position: int) -> _Kind:
        key = node.domain, node.op_type
        if key not in self.kinds:
            _refuse_bytes(key, f"node {position}: a part of it")
            domain, op_type = normal_domain(key[0]), key[1]
            kind = f"{domain}::{op_type}" if domain else op_type
            self.kinds[key] = domain, op_type, kind, self._signature(domain, op_type)
        return self.kinds[key]

    def _read(self, frame: _Frame, node: str, op_type: str, name: str) -> ValueId | None:
        if not name:
            return None
        value = frame.visible.get(name)
        if value is None:
            raise UnsortedError(
                f"node {node!r} ({op_type}) reads {name!r}, which nothing before it produces: "
                "the graph is cyclic, unsorted, or lacks an input"
            )
        return value

    def _bodies(
        self,
        node: NodeProto,
        domain: str,
        name: str,
        frame: _Frame,
        inputs: tuple[ValueId | None, ...],
        graphs: Iterable[tuple[str, GraphProto]],
    ) -> tuple[ScopeId, ...]:
        scopes: list[ScopeId] = []
        types = [self.types[v] if v is not None else None for v in inputs]
        outer = body_input_types(node, domain, types, self.opsets.get("", 1))
        for attribute, graph in graphs:
            least = len(node.output) + (domain == "" and node.op_type == "Loop")  # a Loop's condition comes first
            if domain == "" and len(graph.output) < least:
                raise ModelError(
                    f"node {name!r} ({node.op_type}) needs {least} outputs of its {attribute}, which has"
                    f" {len(graph.output)}; export it again"
                )
            path = f"{frame.path if node.name else ''}{name}/{attribute}/"  # a generated name contains the path
            body = self.graph(graph, frame.scope, attribute, path, frame.visible, outer)
            self.carried.extend(state_pairs(node, domain, self.scopes[body]))
            scopes.append(body)
        return tuple(scopes)

    def _result(self, op: Op, slot: int, name: str, frame: _Frame, stated: Sequence[AttributeProto]) -> None:
        vtype = result_type(op, slot, self.types, self.scopes)
        if vtype is None or vtype.dtype is None:
            vtype = frame.declared.get(name, vtype)  # only the declaration tells
        tensor = _constant_tensor(stated) if op.op_type == "Constant" and not op.domain else None
        public = name in frame.outputs
        self._define(frame, Value(self._next, frame.scope, name, Role.RESULT, op.id, public, False, tensor), vtype)

    def _signature(self, domain: str, op_type: str) -> Signature | None:
        if (domain, op_type) in self.functions:
            return None
        opset = self.opsets.get(domain)
        if opset is None and domain == "" and self.proto.ir_version >= FIRST_IR_WITH_OPSET_IMPORTS:
            raise ModelError("the model uses ai.onnx operators but imports no ai.onnx opset; add the import")
        return signature(domain, op_type, opset or 1)


def _constant_tensor(stated: Iterable[AttributeProto]) -> TensorProto | None:
    """Return the tensor of a Constant node; None for sparse values and strings."""
    for a in stated:
        if a.name == "value":
            tensor: TensorProto = a.t
            elements(tensor)  # raises for dims that no tensor has
            return tensor
        dtype, field_name = PLAIN_CONSTANTS.get(a.name, (DType.STRING, ""))
        if dtype is not DType.STRING:
            held = getattr(a, field_name)
            listed = a.name.endswith("s")
            return onnx.helper.make_tensor("", dtype.code, (len(held),) if listed else (), held if listed else [held])
    return None
