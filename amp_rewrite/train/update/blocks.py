"""Elementwise chains of a step block by block, so that on a CPU the cache holds what one op hands to the next.

Each op on a large tensor streams it from memory. A Scan runs a whole chain, such as an update or the gradient of a
GELU, on one block after the other; the numbers are the same to the bit. On a GPU it would launch more kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx.helper
from onnx import NodeProto

from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import NodeBuilder, declared, new_node
from amp_rewrite.ir.graphs import in_order, names_read, renamed
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.ir.op_classes import ARITHMETIC, CASTS, COMPARISONS, SELECTIONS
from amp_rewrite.rewrite.autodiff.facts import Facts, Shape, known_dims
from amp_rewrite.train.update.graph import REGION

BLOCK = 1 << 15
"""Elements of a block for one thread: a core's cache holds the tensors of a chain of that size."""
_LEAST = 4  # ops: fewer are not worth a Scan
_REGION = "amp.blocks"
_ELEMENTWISE = (ARITHMETIC.keys() | SELECTIONS.keys() | COMPARISONS | CASTS | {"And", "Erf", "Not", "Or"}) - {"Mean"}


def in_blocks(model: Model, block: int) -> Model:
    """Return a step's model with its elementwise chains on large tensors as Scans; a block has about `block` elements.

    New state has the shape of the blocks, (number, elements), which is the same memory.
    """
    step = _Step(model, block)
    return step.rewritten() if step.chains else model


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor of a shape is cut: flat, into `number` equal parts, or by its first axis if that is None.

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
        return (math.prod(known_dims(shape) or ()) // self.number,) if self.number else shape[1:]


class _Step:
    """A step's main graph. `chains`: elementwise nodes on large tensors, by the Scan that takes them."""

    def __init__(self, model: Model, block: int) -> None:
        self.model = model
        self.block = block
        facts = Facts.of(model)
        main = facts.ids[MAIN]
        self.shapes = {name: facts.shapes[value] for name, value in main.items() if value in facts.shapes}
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
        return [c for c in {id(c): c for c in chain_of.values()}.values() if len(c) >= _LEAST]

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
        suitable = row is not None and self.block < 2 * math.prod(row) <= 8 * self.block
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
        """Append a Scan over a chain; return the nodes that it replaces: the chain, and the sums of its x − x."""
        cut = self.cuts[id(chain[0])]
        assert cut is not None
        with self.b.region(cut.region):
            return self._scan(chain, cut)

    def _scan(self, chain: Sequence[NodeProto], cut: _Cut) -> list[NodeProto]:
        b, own = self.b, {node.output[0]: node for node in chain}
        sums = {r.output[0]: r for name, node in own.items() for r in self.readers[name] if _sums_nothing(node, r)}
        replaced = [*chain, *sums.values()]
        inside = {id(node) for node in replaced}
        read = dict.fromkeys(name for node in chain for name in node.input if name and name not in own)
        sliced = [name for name in read if cut.sliced(self.shapes[name])]
        whole = {name: self._in_part(name, cut) for name in read if name not in sliced}
        shared = [name for name in own if any(id(r) not in inside for r in self.readers[name])]
        ends = [name for name in own if name in self.outputs and name not in shared]
        local = {name: b.fresh(f"{name}/block") for name in (*sliced, *own, *sums)}
        body = onnx.helper.make_graph(
            [renamed(node, {**whole, **local}) for node in replaced],
            b.fresh(f"{cut.region}/block"),
            [declared(local[name], self.dtypes[name], cut.part(self.shapes[name])) for name in sliced],
            [
                declared(local[name], self.dtypes[name], () if name in sums else cut.part(cut.shape))
                for name in (*ends, *shared, *sums)
            ],
        )
        results = {name: name for name in (*ends, *shared)} | {name: b.fresh(f"{name}/blocks") for name in sums}
        given = sliced
        if cut.number is not None:
            given = [b.reshape(name, (cut.number, -1)) for name in sliced]
            self.blocks.update(dict.fromkeys(ends, (cut.number, *cut.part(cut.shape))))
            results |= {name: b.fresh(f"{name}/blocks") for name in shared}
        scan = new_node("Scan", given, "", b.fresh(f"{cut.region}/Scan"), body=body, num_scan_inputs=len(given))
        scan.output[:] = results.values()
        b.append(scan)
        for name in shared:
            if results[name] != name:
                dims = b.ints(known_dims(cut.shape) or ())
                b.append(new_node("Reshape", [results[name], dims], name, b.fresh(f"{cut.region}/Reshape")))
        for name, node in sums.items():
            b.append(renamed(node, {node.input[0]: results[name]}))
        return replaced

    def _in_part(self, name: str, cut: _Cut) -> str:
        """Return an operand that each block reads whole, without the axis that blocks lack."""
        shape = self.shapes[name]
        return self.b.squeeze(name, [0]) if shape and len(shape) == len(cut.shape) else name


def _sums_nothing(node: NodeProto, reader: NodeProto) -> bool:
    """True if the reader adds up x − x: in any order that gives 0, or NaN."""
    return node.op_type == "Sub" and node.input[0] == node.input[1] and reader.op_type == "ReduceSum"
