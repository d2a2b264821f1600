"""The walk that indexes a model: its scopes, ops, values and uses, each value with its element type."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import FIRST_IR_WITH_OPSET_IMPORTS
from amp_rewrite.ir.node_check import unstated, violation
from amp_rewrite.ir.nodes import Op, OpId, Role, Scope, ScopeId, Use, Value, ValueId
from amp_rewrite.ir.schema import TENSOR, Signature, ValueType, normal_domain, signature, type_of_proto
from amp_rewrite.ir.type_inference import handed_in, result_type, settle, state_pairs
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS

_OPSETS = 1 << 31  # onnx counts them in an int


@dataclass(frozen=True)
class Index:
    """What the walk finds. Positions in the tuples are the ids of ops, values and scopes."""

    opsets: Mapping[str, int]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    scopes: tuple[Scope, ...]
    types: tuple[ValueType | None, ...]
    uses: tuple[tuple[Use, ...], ...]
    carried: tuple[tuple[ValueId, ValueId], ...]
    """Pairs (body output, body input) through which a Loop or Scan hands state to its next iteration."""
    names: frozenset[str] = field(repr=False)
    """Every value and node name of the model, all scopes and functions: what a new name must avoid."""


def build(proto: ModelProto) -> Index:
    """Index a model. ModelError, naming the node, when the graph is not one that can run. O(nodes + uses)."""
    walk = _Build(proto)
    walk.graph(proto.graph, None, "", "", ChainMap(), [])
    for function in proto.functions:
        walk.names.update(_names(function.node))
    _refuse_bytes(walk.names, "a name in the model")
    settle(walk.ops, walk.values, walk.uses, walk.types, walk.scopes)
    return Index(
        walk.opsets,
        tuple(walk.ops),
        tuple(walk.values),
        tuple(walk.scopes),
        tuple(walk.types),
        tuple(tuple(uses) for uses in walk.uses),
        tuple(walk.carried),
        frozenset(walk.names),
    )


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The graphs in a node's attributes, each with the attribute's name."""
    return _graphs(node.attribute[:])


def _graphs(stated: Iterable[AttributeProto]) -> Iterator[tuple[str, GraphProto]]:
    for a in stated:
        if a.type == AttributeProto.GRAPH:
            yield a.name, a.g
        elif a.type == AttributeProto.GRAPHS:
            yield from ((a.name, graph) for graph in a.graphs)


def check_imports(proto: ModelProto) -> None:
    """ModelError for opsets, and names of local functions, that onnx does not take."""
    for function in proto.functions:
        _refuse_bytes((function.domain, function.name), "the domain or name of a function")
    for holder in (proto, *proto.functions):
        what = f"function {holder.name!r}" if isinstance(holder, FunctionProto) else "the model"
        _refuse_bytes([imported.domain for imported in holder.opset_import], "the domain of an opset import")
        versions: dict[str, int] = {}
        for imported in holder.opset_import:
            domain = normal_domain(imported.domain) or "ai.onnx"
            if not 0 < imported.version < _OPSETS:
                raise ModelError(f"{what} imports {domain} opset {imported.version}, which is none; correct it")
            if versions.setdefault(domain, imported.version) != imported.version:
                raise ModelError(f"{what} imports {domain} opsets {versions[domain]} and {imported.version}; keep one")


def _refuse_untyped(formal: ValueInfoProto) -> None:
    """Of what is fed to a model the type is known; onnx's checker lets pass what its inference then refuses."""
    tensor = formal.type.tensor_type
    if formal.type.WhichOneof("value") == "tensor_type" and tensor.elem_type and DType.of(tensor.elem_type) is None:
        raise ModelError(
            f"input {formal.name!r} has the unknown element type {tensor.elem_type}; a newer amp-rewrite may know it"
        )
    if formal.type.WhichOneof("value") is None or (formal.type.HasField("tensor_type") and not tensor.elem_type):
        raise ModelError(f"input {formal.name!r} states no element type; declare one, or export the model again")


def _refuse_bytes(texts: Iterable[str], what: str) -> None:
    """ModelError for text that is not UTF-8, which protobuf hands out as bytes."""
    for text in texts:
        if isinstance(text, bytes):
            raise ModelError(f"{what} is not UTF-8: {text[:80]!r}; the file is damaged, export it again")


def _names(nodes: Iterable[NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from (node.name, *node.input, *node.output)
        for _, graph in bodies(node):
            yield from _names(graph.node)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The graph being walked: what its names mean, what it declares, what it gives out."""

    scope: ScopeId
    path: str
    main: bool
    visible: ChainMap[str, ValueId]
    own: dict[str, ValueId]
    """The innermost map of `visible`: most reads end there."""
    declared: Mapping[str, ValueType]
    outputs: frozenset[str]

    def define(self, name: str, value: ValueId) -> None:
        if name in self.own:
            where = f"graph {self.path or 'main'!r}"
            raise ModelError(f"{where}: value {name!r} is defined twice; rename one of the two")
        self.own[name] = value

    def find(self, name: str) -> ValueId | None:
        """The value that a name means here; None if it means none."""
        found = self.own.get(name)
        return found if found is not None else self.visible.get(name)


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
    """Schemas that nodes of so many inputs and outputs, and without attributes, do not break."""

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
        outer: list[ValueType | None],
    ) -> ScopeId:
        """Index one graph. `outer` are the types that the owner hands to the formal inputs."""
        scope = Scope(ScopeId(len(self.scopes)), parent, None, attribute, path, graph, (), (), ())
        self.scopes.append(scope)
        declared = ((v.name, type_of_proto(v.type)) for v in (*graph.value_info, *graph.output))
        own: dict[str, ValueId] = {}
        frame = _Frame(
            scope.id,
            path,
            parent is None,
            visible.new_child(own),
            own,
            {name: t for name, t in declared if t is not None},
            frozenset(o.name for o in graph.output) if parent is None else frozenset(),
        )
        self.names.update(v.name for v in (*graph.value_info, *graph.output))
        inputs = self._inputs(graph, frame, outer)
        ops = tuple(self._op(node, i, frame) for i, node in enumerate(graph.node))
        outputs = []
        for out in graph.output:
            if out.name not in frame.visible:
                where = f"graph {path or 'main'!r}"
                raise ModelError(f"{where}: output {out.name!r} is produced by nothing; mend the model's graph")
            outputs.append(frame.visible[out.name])
        self.scopes[scope.id] = replace(scope, inputs=inputs, outputs=tuple(outputs), ops=ops)
        return scope.id

    def _inputs(self, graph: GraphProto, frame: _Frame, outer: list[ValueType | None]) -> tuple[ValueId, ...]:
        """Define formal inputs and initializers; the inputs that a caller may feed, in order."""
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
        vtype = ValueType(TENSOR, DType.of(tensor.data_type))
        held = Value(self._next, frame.scope, tensor.name, Role.INITIALIZER, None, public, overridable, tensor)
        return self._define(frame, held, vtype)

    @property
    def _next(self) -> ValueId:
        return ValueId(len(self.values))

    def _define(self, frame: _Frame, value: Value, vtype: ValueType | None) -> ValueId:
        """Add a value, and let its name mean it in the frame."""
        self.values.append(value)
        self.types.append(vtype)
        self.uses.append([])
        self.names.add(value.name)
        frame.define(value.name, value.id)
        return value.id

    # -- nodes ---------------------------------------------------------------------------------------

    def _op(self, node: NodeProto, position: int, frame: _Frame) -> OpId:
        # Each look at a field of a node makes an object anew: every field is asked for once, lists by a slice, which
        # takes half as long as to iterate over them.
        named, read, written, stated = node.name, node.input[:], node.output[:], node.attribute[:]
        domain, op_type, kind, schema = self._kind(node, position)
        if stated:
            _refuse_bytes([a.name for a in stated], f"node {position}: a part of it")
        name = named or f"{frame.path}{op_type}_{position}"
        self.names.add(name)
        own = frame.own
        inputs = tuple([own[r] if r and r in own else self._read(frame, name, op_type, r) for r in read])
        fault = self._violation(schema, read, written, stated) if schema is not None else unstated(stated)
        if fault:
            raise ModelError(f"node {name!r} ({op_type}) {fault}")
        graphs = list(_graphs(stated)) if stated else ()
        mine = self._bodies(node, domain, name, frame, inputs, graphs) if graphs else ()
        ids = count(len(self.values))  # what `_result` is about to give
        outputs = tuple([ValueId(next(ids)) if out else None for out in written])
        made = OpId(len(self.ops))
        op = Op(made, frame.scope, domain, op_type, name, node, inputs, outputs, mine, schema, kind)
        for slot, out in enumerate(written):
            if out:
                self._result(op, slot, out, frame, stated)
        self.ops.append(op)
        for slot, value in enumerate(inputs):
            if value is not None:
                self.uses[value].append(Use(made, slot))
        for body in mine:
            self.scopes[body] = replace(self.scopes[body], owner=made)
        return made

    def _violation(
        self, schema: Signature, read: Sequence[str], written: Sequence[str], stated: Sequence[AttributeProto]
    ) -> str | None:
        """How a node breaks its schema; most nodes of a model are like many others, which do not."""
        if stated or "" in read or "" in written:
            return violation(schema, read, written, stated)
        alike = schema, len(read), len(written)
        if alike in self.sound:
            return None
        fault = violation(schema, read, written, stated)
        if fault is None:
            self.sound.add(alike)
        return fault

    def _kind(self, node: NodeProto, position: int) -> _Kind:
        """Domain, type, both together, and schema of a node."""
        key = node.domain, node.op_type
        found = self.kinds.get(key)
        if found is None:
            _refuse_bytes(key, f"node {position}: a part of it")
            domain = normal_domain(key[0])
            kind = f"{domain}::{key[1]}" if domain else key[1]
            found = self.kinds[key] = domain, key[1], kind, self._signature(node, domain, key[1])
        return found

    def _read(self, frame: _Frame, node: str, op_type: str, name: str) -> ValueId | None:
        if not name:
            return None
        found = frame.find(name)
        if found is None:
            raise ModelError(
                f"node {node!r} ({op_type}) reads {name!r}, which nothing before it produces: "
                "the graph is cyclic, unsorted, or lacks an input"
            )
        return found

    def _bodies(
        self,
        node: NodeProto,
        domain: str,
        name: str,
        frame: _Frame,
        inputs: tuple[ValueId | None, ...],
        graphs: Iterable[tuple[str, GraphProto]],
    ) -> tuple[ScopeId, ...]:
        found: list[ScopeId] = []
        for attribute, graph in graphs:
            least = len(node.output) + (domain == "" and node.op_type == "Loop")  # first comes whether it goes on
            if domain == "" and len(graph.output) < least:
                raise ModelError(
                    f"node {name!r} ({node.op_type}) needs {least} outputs of its {attribute}, which has"
                    f" {len(graph.output)}; export it again"
                )
            given = [self.types[v] if v is not None else None for v in inputs]
            outer = handed_in(node, domain, given, self.opsets.get("", 1))
            path = f"{frame.path if node.name else ''}{name}/{attribute}/"  # a made name has the path in it already
            body = self.graph(graph, frame.scope, attribute, path, frame.visible, outer)
            self.carried.extend(state_pairs(node, domain, self.scopes[body]))
            found.append(body)
        return tuple(found)

    def _result(self, op: Op, slot: int, name: str, frame: _Frame, stated: Sequence[AttributeProto]) -> None:
        """Define what the op writes there."""
        vtype = result_type(op, slot, self.types, self.scopes)
        if op.signature is None and (vtype is None or vtype.dtype is None):
            vtype = frame.declared.get(name, vtype)  # an unknown op: the declaration is all there is
        tensor = _constant_tensor(stated) if op.op_type == "Constant" and not op.domain else None
        public = name in frame.outputs
        self._define(frame, Value(self._next, frame.scope, name, Role.RESULT, op.id, public, False, tensor), vtype)

    def _signature(self, node: NodeProto, domain: str, op_type: str) -> Signature | None:
        if (domain, op_type) in self.functions:
            return None
        opset = self.opsets.get(domain)
        if opset is None and domain == "" and self.proto.ir_version >= FIRST_IR_WITH_OPSET_IMPORTS:
            raise ModelError("the model uses ai.onnx operators but imports no ai.onnx opset; add the import")
        found = signature(domain, op_type, opset or 1)
        if found is None and domain == "":
            raise ModelError(
                f"node {node.name or node.op_type!r}: ai.onnx opset {opset} has no operator {node.op_type!r} "
                f"that onnx {onnx.__version__} knows; upgrade onnx or correct the opset import"
            )
        return found


def _constant_tensor(stated: Iterable[AttributeProto]) -> TensorProto | None:
    """What a Constant node holds, as a tensor; None for sparse values."""
    for a in stated:
        if a.name == "value":
            tensor: TensorProto = a.t
            return tensor
        if a.name in _PLAIN:
            code, field_name = _PLAIN[a.name]
            found = getattr(a, field_name)
            listed = a.name.endswith("s")
            return onnx.helper.make_tensor(
                "", code, (len(found),) if listed else (), list(found) if listed else [found]
            )
    return None


_PLAIN = {
    "value_float": (TensorProto.FLOAT, "f"),
    "value_floats": (TensorProto.FLOAT, "floats"),
    "value_int": (TensorProto.INT64, "i"),
    "value_ints": (TensorProto.INT64, "ints"),
}
