"""Taps: the measured values of a model, and the model with measuring nodes inside.

Each measured tensor gives one row of numbers (`range_nodes`). The rows of a graph form one vector. The op that owns a
body returns the body's vector, merged over iterations; the vector of the main graph is one small output.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from onnx import GraphProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.instrument.range_nodes import WIDTH, RangeNodes, merging, neutral
from amp_rewrite.evidence.ranges import key
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import bodies, clone, refill
from amp_rewrite.ir.builder import NodeBuilder, declared, new_node
from amp_rewrite.ir.names import unused_prefix
from amp_rewrite.ir.schema import TENSOR, ValueType
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN, FIRST_WHERE
from amp_rewrite.ir.view import MAIN, Op, Scope, ScopeId, ValueId, View


@dataclass(frozen=True, slots=True)
class Taps:
    """Values of a model by how they are measured.

    `taps`: measured values, in topological order. `constants`: known values. `untapped`: by key, the reason why a
    floating value is not measured.
    """

    taps: tuple[ValueId, ...]
    constants: tuple[ValueId, ...]
    untapped: Mapping[str, str]

    @classmethod
    def of(cls, view: View, known: Container[str] = ()) -> Taps:
        """Return the taps of a model: every floating tensor of its open graphs.

        `known`: keys of values to leave out.
        """
        closed = _closed(view)
        taps: list[ValueId] = []
        constants: list[ValueId] = []
        untapped: dict[str, str] = {}
        for value in view.values:
            type_ = view.types[value.id]
            floating = type_ is None or type_.dtype is None or type_.dtype.floating
            if not floating or key(view, value.id) in known:
                continue
            reason = _unfit(type_) or closed.get(value.scope, "")
            if reason:
                untapped[key(view, value.id)] = reason
            elif view.constant(value.id) is not None:
                constants.append(value.id)
            else:
                taps.append(value.id)
        return cls(tuple(taps), tuple(constants), untapped)


def _unfit(type_: ValueType | None) -> str:
    if type_ is None or (type_.dtype is None and type_.container == TENSOR):
        return "its element type is not known"
    return "" if type_.container == TENSOR else f"it is not a tensor but {type_}; tensors taken out of it are measured"


def _closed(view: View) -> dict[ScopeId, str]:
    closed: dict[ScopeId, str] = {}
    for scope in view.scopes:
        owner = view.ops[scope.owner] if scope.owner is not None else None
        if scope.parent in closed:
            closed[scope.id] = closed[scope.parent]
        elif owner is not None and not _carries(owner):
            since = f"-{owner.signature.since}" if owner.signature else ""
            closed[scope.id] = f"it is in a body of {owner.name!r}, and nothing is carried out of {owner.kind}{since}"
    return closed


class Tapped(NamedTuple):
    """A model with taps: a run gives the rows of `values`, in order, as the output named `rows`."""

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
    rows, values = builder.graph(proto.graph, view.scopes[MAIN])
    refill(proto.graph, "node", [*builder.head.nodes, *proto.graph.node])
    proto.graph.output.append(declared(rows, DType.DOUBLE, [WIDTH * len(values)]))
    return Tapped(replace(view.model, proto=proto), values, rows)


class _Rows(NamedTuple):
    name: str
    values: tuple[ValueId, ...]


class _TapBuilder:
    """One walk over a copy of the model. All new names begin with an unused prefix.

    `head`: constants of the measuring nodes, ahead of all others.
    """

    def __init__(self, view: View, taps: Sequence[ValueId], to: DType) -> None:
        self.view = view
        self._stem = unused_prefix("tap_", view.names)
        self._numbers = count(1)
        self.head = self.nodes()
        used = dict.fromkeys(map(self._measured_in, taps))
        self.range_nodes = {dtype: RangeNodes(self.head, dtype, to) for dtype in used}
        self.taps: dict[ScopeId, list[ValueId]] = {}
        for value in taps:
            self.taps.setdefault(view.values[value].scope, []).append(value)

    def _measured_in(self, value: ValueId) -> DType:
        """Return the type of the measuring nodes; float32 holds all numbers of the other types."""
        return DType.DOUBLE if self.view.dtype(value) is DType.DOUBLE else DType.FLOAT

    def fresh(self) -> str:
        return f"{self._stem}{next(self._numbers)}"

    def nodes(self) -> NodeBuilder:
        return NodeBuilder(set(), opset=self.view.opsets.get("", FIRST_WHERE), region=self.fresh())

    def graph(self, graph: GraphProto, scope: Scope) -> _Rows:
        """Add taps to a copied graph and its bodies, in place."""
        parts: list[_Rows] = []
        after: list[NodeProto] = []
        for op_id, node in zip(scope.ops, list(graph.node), strict=True):
            op = self.view.ops[op_id]
            pairs = zip(op.bodies, bodies(node), strict=True)
            inner = [self.graph(body, self.view.scopes[s]) for s, (_, body) in pairs]
            if values := tuple(value for rows in inner for value in rows.values):
                nodes = self.nodes()
                carried = self._out_of_if(node, inner) if op.op_type == "If" else self._stacked(nodes, node, *inner)
                parts.append(_Rows(carried, values))
                after += nodes.nodes
        graph.node.extend(after)
        own = [_Rows(self._measured(graph, value), (value,)) for value in reversed(self.taps.get(scope.id, ()))]
        parts += reversed(own)
        values = tuple(value for part in parts for value in part.values)
        return _Rows(self._joined(graph, [part.name for part in parts]) if parts else "", values)

    def _joined(self, graph: GraphProto, rows: Sequence[str]) -> str:
        name = self.fresh()
        graph.node.append(new_node("Concat", rows, name, axis=0))
        return name

    def _measured(self, graph: GraphProto, value: ValueId) -> str:
        nodes, dtype, name = self.nodes(), self._measured_in(value), self.view.value_name(value)
        row = self.range_nodes[dtype].row(nodes, nodes.cast(name, dtype, of=self.view.dtype(value)))
        graph.node.extend(nodes.nodes)
        return row

    def _neutral(self, rows: _Rows) -> str:
        return self.head.constant(neutral(len(rows.values)))

    def _out_of_if(self, node: NodeProto, inner: list[_Rows]) -> str:
        """Add one output: the rows of the branch taken, and neutral rows for the other."""
        out = self.fresh()
        node.output.append(out)
        for taken, (_, graph) in enumerate(bodies(node)):
            parts = [rows.name if i == taken else self._neutral(rows) for i, rows in enumerate(inner) if rows.values]
            graph.output.append(declared(self._joined(graph, parts), DType.DOUBLE, None))
        return out

    def _stacked(self, nodes: NodeBuilder, node: NodeProto, rows: _Rows) -> str:
        """Add a last output: the rows of each iteration, stacked. Merge them behind the op."""
        each, ((_, body),) = self.fresh(), bodies(node)
        states = len(body.output) - (node.op_type == "Loop")  # behind the condition
        body.output.append(declared(rows.name, DType.DOUBLE, [WIDTH * len(rows.values)]))
        node.output.extend(["" for _ in range(len(node.output), states)] + [each])
        for attribute in node.attribute:
            if attribute.name in ("scan_output_axes", "scan_output_directions"):
                attribute.ints.append(0)
        if node.op_type == "SequenceMap":
            some = nodes.op("SequenceInsert", each, self._neutral(rows))  # it may be empty
            each = nodes.op("ConcatFromSequence", some, axis=0, new_axis=1)
        return merging(nodes, each, len(rows.values))


def _carries(op: Op) -> bool:
    """True if an op can return the rows of its bodies; the states of old Scans have a batch axis."""
    old = op.op_type == "Scan" and op.signature is not None and op.signature.since < FIRST_UNBATCHED_SCAN
    return op.signature is not None and not old and op.kind in ("If", "Loop", "Scan", "SequenceMap")
