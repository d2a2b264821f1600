"""Weight gradients of convolutions over some rows of a batch at a time, so that on a CPU the cache holds what is cut.

Products by tap (`Window.weight` in `rewrite/autodiff/vjp/window.py`) lay both tensors out anew and slice one of them
for each tap. A Scan does that for one chunk of rows after the other and adds up the products, in another order than one
product does. On a GPU it would launch more kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.attributes import ints_attribute
from amp_rewrite.ir.builder import NodeBuilder, declared
from amp_rewrite.ir.graphs import needed, renamed
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.rewrite.autodiff.facts import ModelFacts, known_dims
from amp_rewrite.train.update.channel_blocks import CONVOLUTIONS

_REGION = "amp.chunks"
_BLOCKS = 4
"""Blocks in a chunk of the largest value; rows of less than a quarter of a block are not worth a Scan."""


def in_row_chunks(model: Model, block: int) -> Model:
    """Return a model with its sums of products over rows as Scans, which read chunks of some blocks of elements."""
    graph = model.proto.graph
    if not any(node.op_type in CONVOLUTIONS for node in graph.node):
        return model
    step = _Step(model)
    sums: dict[str, _Sums] = {}
    inside: set[str] = set()
    for node in reversed(graph.node):
        found = _Sums(step)
        if node.op_type in _ENDS and node.output[0] not in inside and found.rows(node.output[0]) == _SUM:
            sums[node.output[0]] = found
            inside.update(found.nodes)
    b = NodeBuilder(set(step.facts.view.names), opset=step.facts.view.opsets[""], region=_REGION)
    for node in graph.node:
        if node.output[0] not in sums or not sums[node.output[0]].append(b, block):
            b.append(node)
    if len(b.nodes) == len(graph.node):
        return model
    proto = clone(model.proto)
    refill(proto.graph, "node", needed(b.nodes, [v.name for v in graph.output]))
    return replace(model, proto=proto)


def worth(row: int, block: int) -> bool:
    """True if a row of so many elements is not too small for a Scan over rows."""
    return 4 * row >= block


def rows_at_once(b: NodeBuilder, name: str, row: int, block: int) -> str:
    """Append the largest number of rows of `row` elements that a block holds and that divides those of a value."""
    number = b.op("Gather", b.op("Shape", name), b.ints([0]), axis=0)
    sizes = b.ints(range(1, max(block // row, 1) + 1))
    even = b.op("Equal", b.op("Mod", number, sizes), b.ints([0]))
    return b.reduce("ReduceMax", b.op("Where", even, sizes, b.ints([1])), [0], keepdims=True)


def in_chunks(b: NodeBuilder, name: str, size: str, row: Sequence[int]) -> str:
    """Append a value as chunks of `size` rows."""
    return b.reshape(name, b.op("Concat", b.ints([-1]), size, b.ints(row), axis=0))


class _Step:
    """Facts of a step's main graph, by name."""

    def __init__(self, model: Model) -> None:
        self.facts = ModelFacts.of(model)
        self.makers = {name: node for node in model.proto.graph.node for name in node.output}

    def dims(self, name: str) -> tuple[int | None, ...]:
        """Return the dims of a value, None for those that are not known; () for an unknown rank."""
        shape = self.facts.shapes.get(self.facts.ids[MAIN][name], ())
        return tuple(dim if isinstance(dim, int) else None for dim in shape)


@dataclass(frozen=True, slots=True)
class _Rows:
    """An axis that holds the rows, `each` positions after one another for each of them."""

    axis: int
    each: int = 1


_SUM = _Rows(-1)
"""A sum over all rows."""


@dataclass(slots=True)
class _Sums:
    """Values whose first axis are rows, `read`, and the nodes that sum products of them, by result and in order."""

    step: _Step
    read: dict[str, None] = field(default_factory=dict)
    nodes: dict[str, NodeProto] = field(default_factory=dict)

    def rows(self, name: str) -> _Rows | None:
        """Return where a value holds the rows, or _SUM; None for a value computed otherwise.

        Each rule of `_RULES` holds for any part of the rows as for all of them.
        """
        node = self.step.makers.get(name)
        rule = _RULES.get(node.op_type) if node is not None and not node.domain else None
        rows = rule(self, node) if rule is not None and node is not None else None
        if node is not None and rows is not None:
            self.nodes[name] = node
        return rows

    def _transposed(self, node: NodeProto) -> _Rows | None:
        self.read[node.input[0]] = None
        perm = ints_attribute(node, "perm")
        return _Rows(perm.index(0)) if perm else None

    def _padded(self, node: NodeProto) -> _Rows | None:
        """Along other axes."""
        rows, pads = self.rows(node.input[0]), self.step.facts.ints(node, 1)
        inside = rows in (None, _SUM) or not pads or len(node.input) > 3 or any(pads[rows.axis :: len(pads) // 2])
        return None if inside else rows

    def _sliced(self, node: NodeProto) -> _Rows | None:
        """Along other axes."""
        rows, axes = self.rows(node.input[0]), self.step.facts.ints(node, 3)
        return None if rows is None or min(axes, default=-1) < 0 or rows.axis in axes else rows

    def _reshaped(self, node: NodeProto) -> _Rows | None:
        """To the axes in front of the rows, −1, and known dims: −1 takes in the rows and positions of each."""
        rows, dims, shape = self.rows(node.input[0]), self.step.facts.ints(node, 1), self.step.dims(node.input[0])
        if rows is None or dims[: rows.axis + 1] != [*shape[: rows.axis], -1] or rows.axis >= len(shape):
            return None
        size = rows.each * math.prod(known_dims(shape[rows.axis + 1 :]) or (0,))
        kept = math.prod(dims[rows.axis + 1 :])
        return _Rows(rows.axis, size // kept) if size and kept and size % kept == 0 else None

    def _multiplied(self, node: NodeProto) -> _Rows | None:
        """Two matrices, along the rows."""
        left, right = map(self.rows, node.input)
        matrices = all(len(self.step.dims(name)) == 2 for name in node.input)
        return _SUM if matrices and left and right == replace(left, axis=0) and left.axis == 1 else None

    def _joined(self, node: NodeProto) -> _Rows | None:
        return _SUM if all(self.rows(name) == _SUM for name in node.input) else None

    def append(self, b: NodeBuilder, block: int) -> bool:
        """Append a Scan that computes the last result; False if rows are short or of unknown size."""
        result = next(reversed(self.nodes))
        rows = {name: known_dims(self.step.dims(name)[1:]) for name in self.read}
        shape, dtype = known_dims(self.step.dims(result)), self.step.facts.view.dtype(self.step.facts.ids[MAIN][result])
        largest = max(math.prod(dims or ()) for dims in rows.values())
        if not shape or dtype is None or not all(rows.values()) or not worth(largest, block):
            return False
        size = rows_at_once(b, next(iter(rows)), largest, _BLOCKS * block)
        chunks = [in_chunks(b, name, size, dims or ()) for name, dims in rows.items()]
        local = {name: b.fresh(f"{name}/chunk") for name in (*rows, *self.nodes)}
        before, after = (b.fresh(f"{result}/{end}") for end in ("before", "after"))
        sums = [renamed(node, local) for node in self.nodes.values()]
        sums.append(onnx.helper.make_node("Add", [before, local[result]], [after], b.fresh(f"{_REGION}/Add")))
        parts = [declared(local[name], dtype, (None, *(dims or ()))) for name, dims in rows.items()]
        body = onnx.helper.make_graph(
            sums, b.fresh(f"{_REGION}/chunk"), [declared(before, dtype, shape), *parts], [declared(after, dtype, shape)]
        )
        zeros = b.full(b.ints(shape), 0.0, dtype)
        scan = onnx.helper.make_node(
            "Scan", [zeros, *chunks], [result], b.fresh(f"{_REGION}/Scan"), body=body, num_scan_inputs=len(chunks)
        )
        b.append(scan)
        return True


_ENDS = ("Concat", "MatMul")
_RULES: Mapping[str, Callable[[_Sums, NodeProto], _Rows | None]] = {
    "Concat": _Sums._joined,
    "MatMul": _Sums._multiplied,
    "Pad": _Sums._padded,
    "Reshape": _Sums._reshaped,
    "Slice": _Sums._sliced,
    "Transpose": _Sums._transposed,
}
