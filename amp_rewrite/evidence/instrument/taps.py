"""Taps: the measured values of a model, and the model with measuring nodes inside.

Each measured tensor gives one row of numbers (`range_nodes`). The rows of a graph form one vector. The op that owns a
body returns the body's vector, merged over iterations; the vector of the main graph is one small output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from onnx import GraphProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.instrument.range_nodes import WIDTH, RangeNodes, chosen, merging, neutral
from amp_rewrite.evidence.ranges import key
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.builder import NodeBuilder, declared, new_constant, new_node
from amp_rewrite.ir.graphs import bodies
from amp_rewrite.ir.names import unused_prefix
from amp_rewrite.ir.op_classes import PERMUTES
from amp_rewrite.ir.schema import TENSOR, ValueType
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN, FIRST_WHERE
from amp_rewrite.ir.view import MAIN, Op, Scope, ScopeId, ValueId, View

# Ops whose result has the same magnitudes as their first input, equally often.
_COPIES = PERMUTES | {"Abs", "Neg"}


@dataclass(frozen=True, slots=True)
class Taps:
    """Values of a model by how they are measured.

    `taps`: measured values, in topological order. `copies`: values with the magnitudes of another one of the same
    graph, which is measured or a constant. `constants`: known values. `untapped`: by key, the reason why a floating
    value is not measured.
    """

    taps: tuple[ValueId, ...]
    copies: Mapping[ValueId, ValueId]
    constants: tuple[ValueId, ...]
    untapped: Mapping[str, str]

    @classmethod
    def of(cls, view: View) -> Taps:
        """Return the taps of a model: every floating tensor in every graph that can return its rows."""
        closed = _closed(view)
        taps: list[ValueId] = []
        copies: dict[ValueId, ValueId] = {}
        constants: list[ValueId] = []
        untapped: dict[str, str] = {}
        for value in view.values:
            type_ = view.types[value.id]
            if type_ is not None and type_.dtype is not None and not type_.dtype.floating:
                continue
            reason = _unfit(type_) or closed.get(value.scope, "")
            if reason:
                untapped[key(view, value.id)] = reason
            elif view.constant(value.id) is not None:
                constants.append(value.id)
            elif (source := _copied(view, value.id)) is not None:
                copies[value.id] = copies.get(source, source)
            else:
                taps.append(value.id)
        return cls(tuple(taps), copies, tuple(constants), untapped)

    def only(self, values: Iterable[ValueId]) -> Taps:
        """Return the taps restricted to these values; the source of a copy may lie outside."""
        kept = frozenset(values)
        copies = {copy: of for copy, of in self.copies.items() if copy in kept}
        taps, constants = (tuple(v for v in part if v in kept) for part in (self.taps, self.constants))
        return Taps(taps, copies, constants, {})


def _unfit(type_: ValueType | None) -> str:
    """Return the reason why a value of this type is not measured, or ""."""
    if type_ is None or (type_.dtype is None and type_.container == TENSOR):
        return "its element type is not known"
    return "" if type_.container == TENSOR else f"it is not a tensor but {type_}; tensors taken out of it are measured"


def _closed(view: View) -> dict[ScopeId, str]:
    """Return the graphs that cannot return rows, each with the reason."""
    closed: dict[ScopeId, str] = {}
    for scope in view.scopes:
        owner = view.ops[scope.owner] if scope.owner is not None else None
        if scope.parent in closed:
            closed[scope.id] = closed[scope.parent]
        elif owner is not None and _carrier(owner) is None:
            since = f"-{owner.signature.since}" if owner.signature else ""
            closed[scope.id] = f"it is in a body of {owner.name!r}, and nothing is carried out of {owner.kind}{since}"
    return closed


def _copied(view: View, value: ValueId) -> ValueId | None:
    """Return the value of the same graph and type with the same magnitudes, or None."""
    op = view.producer(value)
    if op is None or op.domain or op.op_type not in _COPIES or op.inputs[0] is None:
        return None
    source = view.values[op.inputs[0]]
    same = source.scope == op.scope and view.types[source.id] == view.types[value]
    return source.id if same else None


class Tapped(NamedTuple):
    """A model with taps: a run gives the rows of `values`, in that order, as the output named `rows`."""

    model: Model
    values: tuple[ValueId, ...]
    rows: str


def tapped(view: View, taps: Sequence[ValueId], to: DType) -> Tapped:
    """Return the model of a view with taps on these values, and their rows as an additional last output.

    All other outputs are unchanged. `to`: the type whose bounds are counted. The taps follow the model's nodes in
    reverse order of their values: onnxruntime walks back from the end, so it runs each tap right after its value, and
    only the reductions of one value need additional memory. Raise ModelError for a model before ai.onnx opset 9,
    which lacks Where. O(nodes + taps).
    """
    assert taps, "nothing to measure"
    opset = view.opsets.get("", FIRST_WHERE)
    if opset < FIRST_WHERE:
        raise ModelError(
            f"the model imports ai.onnx opset {opset}, and ranges are measured from opset {FIRST_WHERE} on; raise it"
            " with onnx.version_converter"
        )
    proto = clone(view.model.proto)
    proto.ClearField("training_info")
    if not any(o.domain in ("", "ai.onnx") for o in proto.opset_import):
        proto.opset_import.add(domain="", version=FIRST_WHERE)
    builder = _TapBuilder(view, taps, to)
    rows = builder.graph(proto.graph, view.scopes[MAIN])
    constants = [node for nodes in builder.range_nodes.values() for node in nodes.constants]
    refill(proto.graph, "node", [*constants, *builder.starts.nodes, *proto.graph.node])
    proto.graph.output.append(declared(rows.name, DType.DOUBLE, [WIDTH * len(rows.values)]))
    return Tapped(replace(view.model, proto=proto), rows.values, rows.name)


class _Rows(NamedTuple):
    """The name of a vector with the rows of these values."""

    name: str
    values: tuple[ValueId, ...]


class _TapBuilder:
    """One walk over a copy of the model. All new names begin with a prefix that is unused in the model."""

    def __init__(self, view: View, taps: Sequence[ValueId], to: DType) -> None:
        self.view = view
        self._stem = unused_prefix("tap_", view.names)
        self._numbers = count(1)
        used = dict.fromkeys(map(self._measured_in, taps))
        self.range_nodes = {dtype: RangeNodes(f"{self._stem}{dtype.spelling}", dtype, to) for dtype in used}
        self.starts = self.nodes()
        self.taps: dict[ScopeId, list[ValueId]] = {}
        for value in taps:
            self.taps.setdefault(view.values[value].scope, []).append(value)

    def _measured_in(self, value: ValueId) -> DType:
        """Return the type of the measuring nodes; float32 holds all numbers of the other types."""
        return DType.DOUBLE if self.view.dtype(value) is DType.DOUBLE else DType.FLOAT

    def fresh(self) -> str:
        return f"{self._stem}{next(self._numbers)}"

    def nodes(self) -> NodeBuilder:
        """Return a builder of nodes for one place in one graph."""
        return NodeBuilder(set(), opset=self.view.opsets.get("", FIRST_WHERE), region=self.fresh())

    def graph(self, graph: GraphProto, scope: Scope) -> _Rows:
        """Add taps to a copied graph and its bodies, in place."""
        parts: list[_Rows] = []
        after: list[NodeProto] = []
        for op_id, node in zip(scope.ops, list(graph.node), strict=True):
            op = self.view.ops[op_id]
            pairs = zip(op.bodies, bodies(node), strict=True)
            inner = [self.graph(body, self.view.scopes[s]) for s, (_, body) in pairs]
            carry = _carrier(op)
            if carry is not None and any(rows.values for rows in inner):
                carried, nodes = carry(self, node, inner)
                parts.append(carried)
                after += nodes
        graph.node.extend(after)
        own = [self._measured(graph, value) for value in reversed(self.taps.get(scope.id, ()))]
        parts += reversed(own)
        return _Rows(self.joined(graph, [part.name for part in parts]) if parts else "", _values(parts))

    def joined(self, graph: GraphProto, rows: Sequence[str]) -> str:
        """Append a Concat of rows to a graph; return its name."""
        name = self.fresh()
        graph.node.append(new_node("Concat", rows, name, axis=0))
        return name

    def _measured(self, graph: GraphProto, value: ValueId) -> _Rows:
        """Append the nodes that measure one value to a graph."""
        nodes, dtype = self.nodes(), self._measured_in(value)
        name = self.view.value_name(value)
        if self.view.dtype(value) is not dtype:
            name = nodes.cast(name, dtype)
        row = self.range_nodes[dtype].row(nodes, name)
        graph.node.extend(nodes.nodes)
        return _Rows(row, (value,))


def _values(parts: Sequence[_Rows]) -> tuple[ValueId, ...]:
    return tuple(value for part in parts for value in part.values)


_Carrier = Callable[[_TapBuilder, NodeProto, list[_Rows]], tuple[_Rows, list[NodeProto]]]


def _carrier(op: Op) -> _Carrier | None:
    """Return the function that extends an op to return the rows of its bodies; None for other ops.

    The function changes a copy of the node; it returns the rows, and nodes to insert after the op.
    """
    if op.domain or op.signature is None:
        return None
    if op.op_type == "Scan" and op.signature.since < FIRST_UNBATCHED_SCAN:
        return None  # its states have a batch axis
    return _CARRIERS.get(op.op_type)


def _out_of_if(builder: _TapBuilder, node: NodeProto, inner: list[_Rows]) -> tuple[_Rows, list[NodeProto]]:
    """Add one output: the rows of the branch taken, and neutral rows for the other."""
    out = builder.fresh()
    graphs = [body for _, body in bodies(node)]
    for taken, graph in enumerate(graphs):
        parts = []
        for i, rows in enumerate(inner):
            if i == taken:
                parts += [rows.name] if rows.values else []
            elif rows.values:
                parts.append(builder.fresh())
                graph.node.append(new_constant(parts[-1], neutral(len(rows.values))))
        graph.output.append(declared(builder.joined(graph, parts), DType.DOUBLE, None))
    node.output.append(out)
    return _Rows(out, _values(inner)), []


def _out_of_iterations(builder: _TapBuilder, node: NodeProto, inner: list[_Rows]) -> tuple[_Rows, list[NodeProto]]:
    """Add a last state, before scanned inputs: the rows so far, passed from iteration to iteration."""
    (rows,), ((_, body),) = inner, bodies(node)
    at = len(node.input) - int_attribute(node, "num_scan_inputs", 0)
    ahead = 1 if node.op_type == "Loop" else 0  # a body's condition comes before its states, and so do two inputs
    before, out, nodes = builder.fresh(), builder.fresh(), builder.nodes()
    after = merging(nodes, before, rows.name, len(rows.values))
    size = [WIDTH * len(rows.values)]
    body.node.extend(nodes.nodes)
    body.input.insert(at, declared(before, DType.DOUBLE, size))
    body.output.insert(at - ahead, declared(after, DType.DOUBLE, size))
    node.output.extend([""] * (at - 2 * ahead - len(node.output)))
    node.output.insert(at - 2 * ahead, out)
    node.input.insert(at, builder.starts.constant(neutral(len(rows.values))))
    return _Rows(out, rows.values), []


def _out_of_sequence_map(builder: _TapBuilder, node: NodeProto, inner: list[_Rows]) -> tuple[_Rows, list[NodeProto]]:
    """Add a sequence of the rows of each element; a neutral element keeps it nonempty."""
    (rows,), ((_, body),) = inner, bodies(node)
    each, nodes, number = builder.fresh(), builder.nodes(), len(rows.values)
    body.output.append(declared(rows.name, DType.DOUBLE, [WIDTH * number]))
    node.output.append(each)
    some = nodes.op("SequenceInsert", each, nodes.constant(neutral(number)))
    stacked = nodes.op("ConcatFromSequence", some, axis=0, new_axis=1)
    added, most = (nodes.reduce(op_type, stacked, [0], keepdims=False) for op_type in ("ReduceSum", "ReduceMax"))
    return _Rows(chosen(nodes, added, most, number), rows.values), nodes.nodes


_CARRIERS: Mapping[str, _Carrier] = {
    "If": _out_of_if,
    "Loop": _out_of_iterations,
    "Scan": _out_of_iterations,
    "SequenceMap": _out_of_sequence_map,
}
