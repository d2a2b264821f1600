"""Elementwise chains of a step block by block, so that on a CPU the cache holds what one op hands to the next.

Each op on a large tensor streams it from memory. A Scan runs a whole chain, such as an update or the gradient of a
GELU, on one block after the other. The numbers are the same to the bit, but for sums over rows, which are added up
block by block. On a GPU it would launch more kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.attributes import ints_attribute
from amp_rewrite.ir.builder import NodeBuilder, declared, new_node
from amp_rewrite.ir.graphs import in_order, names_read, renamed
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.ir.op_classes import ARITHMETIC, CASTS, COMPARISONS, SELECTIONS
from amp_rewrite.rewrite.autodiff.facts import ModelFacts, Shape, known_dims
from amp_rewrite.train.update.graph import REGION
from amp_rewrite.train.update.row_chunks import in_chunks, rows_at_once, worth

BLOCK = 1 << 15
"""Elements of a block for one thread: a core's cache holds the tensors of a chain of that size."""
_LEAST = 4  # ops: fewer are not worth a Scan
_REGION = "amp.blocks"
_OTHERS = {"And", "Erf", "Identity", "Not", "Or", "Relu"}
Dim = int | str | None
_ELEMENTWISE = (ARITHMETIC.keys() | SELECTIONS.keys() | COMPARISONS | CASTS | _OTHERS) - {"Mean"}


def in_blocks(model: Model, block: int) -> Model:
    """Return a step's model with its elementwise chains on large tensors as Scans; a block has about `block` elements.

    New state has the shape of the blocks, (number, elements), which is the same memory.
    """
    step = _Step(model, block)
    return step.rewritten() if step.chains else model


@dataclass(frozen=True, slots=True)
class _Cut:
    """The blocks of a tensor of a shape: `number` equal parts of its flat elements, or some rows each if that is None.

    `region`: of the nodes; the update can be taken off the rest of a step.
    """

    shape: Shape
    number: int | None
    region: str

    def sliced(self, shape: Shape) -> bool:
        """True for an operand of which each block reads a part; the others are read whole."""
        return shape == self.shape if self.number else len(shape) == len(self.shape) and shape[0] == self.shape[0] != 1

    def part(self, shape: Shape) -> Shape:
        """Return the shape of a part of an operand."""
        return (math.prod(known_dims(shape) or ()) // self.number,) if self.number else (None, *shape[1:])


class _Step:
    """A step's main graph. `chains`: elementwise nodes on large tensors, by the Scan that takes them."""

    def __init__(self, model: Model, block: int) -> None:
        self.model = model
        self.block = block
        self.facts = facts = ModelFacts.of(model)
        main = facts.ids[MAIN]
        shapes = {name: facts.shapes[value] for name, value in main.items() if value in facts.shapes}
        self.shapes = _with_equal_dims(model.proto.graph.node, shapes)
        self.dtypes = {name: dtype for name, value in main.items() if (dtype := facts.view.dtype(value)) is not None}
        self.outputs = {v.name for v in model.proto.graph.output}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in model.proto.graph.node:
            for name in dict.fromkeys(names_read([node])):
                self.readers[name].append(node)
        self.blocks: dict[str, Shape] = {}
        """New shapes of outputs."""
        self.b = NodeBuilder(set(facts.view.names), opset=facts.view.opsets[""], region=REGION)
        self.cuts: dict[int, _Cut | None] = {id(n): self._cut(n) for n in model.proto.graph.node}
        self.chains = self._chains()

    def _chains(self) -> list[list[NodeProto]]:
        """Group the nodes that share large values, so that no group waits for a number computed from itself."""
        nodes, cuts = self.model.proto.graph.node, self.cuts
        behind: dict[int, int] = {}
        """For each node the number of groups that wait for it, one after the other."""
        for node in reversed(nodes):
            later = [r for name in node.output for r in self.readers[name]]
            starts = {id(r) for r in later if cuts[id(r)] not in (None, cuts[id(node)])}
            behind[id(node)] = max((behind[id(r)] + (id(r) in starts) for r in later), default=0)
        chain_of: dict[tuple[int, _Cut | None, str], list[NodeProto]] = {}
        for node in (n for n in nodes if cuts[id(n)] is not None):
            key = behind[id(node)], cuts[id(node)]
            chains = {id(c): c for name in self._large([node]) if (c := chain_of.get((*key, name)))}
            joined = [*(n for chain in chains.values() for n in chain), node]
            chain_of.update({(*key, name): joined for name in self._large(joined)})
        return [c for c in {id(c): c for c in chain_of.values()}.values() if len(c) + len(self._sums(c)) >= _LEAST]

    def _cut(self, node: NodeProto) -> _Cut | None:
        """Return how the tensors of an elementwise node are cut; None for other nodes and small tensors."""
        shape = self.shapes.get(node.output[0]) if len(node.output) == 1 else None
        operands = [self.shapes.get(name) for name in node.input if name]
        if node.op_type not in _ELEMENTWISE or node.domain or not shape or None in operands:
            return None
        region = REGION if node.name.startswith(f"{REGION}/") else _REGION
        dims, row = known_dims(shape), known_dims(shape[1:])
        if dims is not None and all(operand in (shape, ()) for operand in operands):
            least = -(-math.prod(dims) // self.block)
            number = next((n for n in range(least, 4 * least) if math.prod(dims) % n == 0), 0) if least >= 4 else 0
            return _Cut(shape, number, region) if number else None
        suitable = row is not None and worth(math.prod(row), self.block) and math.prod(row) <= 4 * self.block
        fit = all(len(o) < len(shape) or o[0] in (shape[0], 1) for o in operands if o is not None)
        return _Cut(shape, None, region) if suitable and fit and shape[0] is not None else None

    def _large(self, nodes: Sequence[NodeProto]) -> dict[str, None]:
        """Return the values of the largest shape that nodes read and compute."""
        shape = self.shapes[nodes[0].output[0]]
        names = (name for node in nodes for name in (*node.input, *node.output))
        return dict.fromkeys(name for name in names if self.shapes.get(name) == shape)

    def rewritten(self) -> Model:
        """Return the model with a Scan in place of each chain."""
        graph = self.model.proto.graph
        place = {id(n): at for at, n in enumerate(graph.node)}
        replaced = {id(n) for chain in self.chains for n in self._scanned(sorted(chain, key=lambda n: place[id(n)]))}
        proto = clone(self.model.proto)
        refill(proto.graph, "node", [*(n for n in graph.node if id(n) not in replaced), *self.b.nodes])
        for output in proto.graph.output:
            if output.name in self.blocks:
                output.CopyFrom(declared(output.name, self.dtypes[output.name], self.blocks[output.name]))
        return replace(self.model, proto=in_order(proto) or proto)

    def _scanned(self, chain: Sequence[NodeProto]) -> list[NodeProto]:
        """Append a Scan over a chain; return the nodes that it replaces: the chain and its sums."""
        cut = self.cuts[id(chain[0])]
        assert cut is not None
        with self.b.region(cut.region):
            return self._scan(chain, cut)

    def _scan(self, chain: Sequence[NodeProto], cut: _Cut) -> list[NodeProto]:
        b, own = self.b, {node.output[0]: node for node in chain}
        sums = self._sums(chain)
        replaced = [*chain, *sums.values()]
        inside = {id(node) for node in replaced}
        read = dict.fromkeys(name for node in chain for name in node.input if name and name not in own)
        sliced = [name for name in read if cut.sliced(self.shapes[name])]
        shared = [name for name in own if any(id(r) not in inside for r in self.readers[name])]
        ends = [name for name in own if name in self.outputs and name not in shared]
        local = {name: b.fresh(f"{name}/block") for name in (*sliced, *own, *sums)}
        body = onnx.helper.make_graph(
            [renamed(node, local) for node in replaced],
            b.fresh(f"{cut.region}/block"),
            [declared(local[name], self.dtypes[name], cut.part(self.shapes[name])) for name in sliced],
            [
                declared(local[name], self.dtypes[name], self.shapes.get(name) if name in sums else cut.part(cut.shape))
                for name in (*ends, *shared, *sums)
            ],
        )
        results = {name: b.fresh(f"{name}/blocks") for name in (*ends, *shared, *sums)}
        if cut.number is None:
            row = known_dims(cut.shape[1:]) or ()
            size = rows_at_once(b, sliced[0], math.prod(row), self.block)
            given = [in_chunks(b, name, size, known_dims(self.shapes[name][1:]) or ()) for name in sliced]
        else:
            given = [b.reshape(name, (cut.number, -1)) for name in sliced]
            self.blocks.update(dict.fromkeys(ends, (cut.number, *cut.part(cut.shape))))
            results |= {name: name for name in ends}
        scan = new_node("Scan", given, "", b.fresh(f"{cut.region}/Scan"), body=body, num_scan_inputs=len(given))
        scan.output[:] = results.values()
        b.append(scan)
        whole = b.ints(known_dims(cut.shape) or (-1, *row))
        for name in (*ends, *shared):
            if results[name] != name:
                b.append(new_node("Reshape", [results[name], whole], name, b.fresh(f"{cut.region}/Reshape")))
        for name in sums:
            b.name(b.reduce("ReduceSum", results[name], [0], keepdims=False), name)
        return replaced

    def _sums(self, chain: Sequence[NodeProto]) -> dict[str, NodeProto]:
        """Return the nodes that add up results over all blocks: over rows; or x − x, in any order 0, or NaN."""
        cut, found = self.cuts[id(chain[0])], dict[str, NodeProto]()
        flat = cut is not None and cut.number is not None
        for node in chain:
            nothing = node.op_type == "Sub" and node.input[0] == node.input[1]
            for reader in self.readers[node.output[0]]:
                if reader.op_type == "ReduceSum" and (nothing if flat else 0 in self._axes(reader)):
                    found[reader.output[0]] = reader
        return found

    def _axes(self, node: NodeProto) -> Sequence[int]:
        """Return the axes of a reduction that are stated; none for others."""
        return self.facts.ints(node, 1) or ints_attribute(node, "axes")


def _with_equal_dims(nodes: Iterable[NodeProto], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return shapes with one name for dims that are equal: those that a Reshape or a broadcast leaves as they are."""
    same: dict[str, int | str] = {}

    def dims(name: str) -> Shape:
        return tuple(dim if dim is None else _last(same, dim) for dim in shapes[name])

    for node in nodes:
        names = [name for name in (node.output[0], *node.input) if name]
        if not all(name in shapes for name in names):
            continue
        result, *operands = map(dims, names)
        equal: list[tuple[Dim, Dim]] = []
        if node.op_type == "Reshape":
            (unknown, size), (given, number) = map(_unknown, (result, operands[0]))
            if len(unknown) == len(given) == 1 and size == number != 0:
                equal = [(unknown[0], given[0])]
        elif node.op_type in _ELEMENTWISE:
            aligned = [(1,) * (len(result) - len(shape)) + tuple(shape) for shape in operands]
            sets = [{*axis} - {1} for axis in zip(*aligned, strict=True)]
            equal = [(dim, *axis) for dim, axis in zip(result, sets, strict=True) if len(axis) == 1]
        for dim, other in equal:
            if isinstance(dim, str) and other is not None and (last := _last(same, dim)) != _last(same, other):
                same[str(last)] = _last(same, other)
    return {name: dims(name) for name in shapes}


def _last(same: Mapping[str, int | str], dim: int | str) -> int | str:
    """Follow the names of a dim."""
    while isinstance(dim, str) and dim in same:
        dim = same[dim]
    return dim


def _unknown(shape: Shape) -> tuple[list[Dim], int]:
    """Return the dims that are not known, and the product of the others."""
    return [d for d in shape if not isinstance(d, int)], math.prod(d for d in shape if isinstance(d, int))
