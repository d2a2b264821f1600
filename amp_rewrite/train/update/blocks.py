"""The update of large parameters block by block, so that on a CPU the cache holds what one op hands to the next.

An update is a chain of elementwise ops, and each op on a large tensor streams it from memory. A Scan runs the whole
chain on one block after the other; the numbers are the same to the bit. On a GPU it would launch more kernels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import Builder, declared, new_node
from amp_rewrite.ir.graphs import in_order
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.ir.op_classes import CORRECTLY_ROUNDED, SELECTIONS
from amp_rewrite.rewrite.autodiff.facts import Facts, known_dims
from amp_rewrite.train.update.graph import REGION

BLOCK = 1 << 15
"""Elements of a block for one thread: a core's cache holds the tensors of an update of that size."""
_ELEMENTWISE = CORRECTLY_ROUNDED | SELECTIONS.keys() | {"Sign"}


def in_blocks(model: Model, block: int) -> Model:
    """Return a step's model with the update of each large parameter as a Scan over blocks of this many elements.

    New state has the shape of the blocks, (number, elements), which is the same memory.
    """
    update = _Update(model, block)
    return update.rewritten() if update.chains else model


class _Update:
    """The update region of a step. `chains`: its elementwise nodes on large tensors, by the Scan that takes them."""

    def __init__(self, model: Model, block: int) -> None:
        self.model = model
        self.block = block
        facts = Facts.of(model)
        self.dims = {
            name: dims
            for name, value in facts.ids[MAIN].items()
            if (dims := known_dims(facts.shapes.get(value))) == () or facts.view.dtype(value) is DType.FLOAT
        }
        self.outputs = {v.name for v in model.proto.graph.output}
        self.readers: dict[str, list[NodeProto]] = defaultdict(list)
        for node in model.proto.graph.node:
            for name in node.input:
                self.readers[name].append(node)
        self.blocks: dict[str, tuple[int, int]] = {}
        self.b = Builder(set(facts.view.names), opset=facts.view.opsets[""], region=REGION)
        self.chains = self._chains()

    def _chains(self) -> list[list[NodeProto]]:
        """Group the nodes that share large values, so that no group waits for a number computed from itself."""
        region = [n for n in self.model.proto.graph.node if n.name.startswith(f"{REGION}/")]
        large = {id(n) for n in region if self._large(n)}
        behind: dict[int, int] = {}
        """For each node the number of groups that wait for it, one after the other."""
        for node in reversed(region):
            later = [r for name in node.output for r in self.readers[name] if id(r) in behind]
            starts = {id(r) for r in later if id(node) not in large and id(r) in large}
            behind[id(node)] = max((behind[id(r)] + (id(r) in starts) for r in later), default=0)
        chain_of: dict[tuple[int, str], list[NodeProto]] = {}
        for node in (n for n in region if id(n) in large):
            chains = {id(c): c for name in self._values([node]) if (c := chain_of.get((behind[id(node)], name)))}
            joined = [*(n for chain in chains.values() for n in chain), node]
            chain_of.update({(behind[id(node)], name): joined for name in self._values(joined)})
        return [c for c in {id(c): c for c in chain_of.values()}.values() if len(c) > 1]

    def _large(self, node: NodeProto) -> bool:
        """True if the node is elementwise, on numbers and on tensors of one shape that fills four blocks or more."""
        dims = self.dims.get(node.output[0])
        if node.op_type not in _ELEMENTWISE or dims is None or math.prod(dims) < 4 * self.block:
            return False
        return self._number(dims) > 0 and all(not name or self.dims.get(name) in (dims, ()) for name in node.input)

    def _number(self, dims: Sequence[int]) -> int:
        """Return the smallest number of equal blocks, none too large; 0 if they would be far too small."""
        size = math.prod(dims)
        least = -(-size // self.block)
        return next((n for n in range(least, 4 * least) if size % n == 0), 0)

    def _values(self, nodes: Sequence[NodeProto]) -> dict[str, None]:
        """Return the large values that nodes read and compute."""
        names = (name for node in nodes for name in (*node.input, *node.output))
        return dict.fromkeys(name for name in names if self.dims.get(name) not in ((), None))

    def rewritten(self) -> Model:
        """Return the model with a Scan in place of each chain."""
        graph = self.model.proto.graph
        place = {id(n): at for at, n in enumerate(graph.node)}
        replaced = {id(n) for chain in self.chains for n in self._scanned(sorted(chain, key=lambda n: place[id(n)]))}
        proto = clone(self.model.proto)
        refill(proto.graph, "node", [*(n for n in graph.node if id(n) not in replaced), *self.b.nodes])
        for output in proto.graph.output:
            if output.name in self.blocks:
                output.CopyFrom(declared(output.name, DType.FLOAT, self.blocks[output.name]))
        return replace(self.model, proto=in_order(proto) or proto)

    def _scanned(self, chain: Sequence[NodeProto]) -> list[NodeProto]:
        """Append a Scan over a chain; return the nodes that it replaces: the chain, and the sums of its x − x."""
        b, own = self.b, {name: node for node in chain for name in node.output}
        sums = {r.output[0]: r for name, node in own.items() for r in self.readers[name] if _sums_nothing(node, r)}
        replaced = [*chain, *sums.values()]
        inside = {id(node) for node in replaced}
        read = [name for name in self._values(chain) if name not in own]
        shared = [name for name in own if any(id(r) not in inside for r in self.readers[name])]
        ends = [name for name in own if name in self.outputs and name not in shared]
        dims = self.dims[chain[0].output[0]] or ()
        blocks = (self._number(dims), math.prod(dims) // self._number(dims))
        self.blocks.update(dict.fromkeys(ends, blocks))
        local = {name: b.fresh(f"{name}/block") for name in (*read, *own, *sums)}
        body = onnx.helper.make_graph(
            [_renamed(node, local) for node in replaced],
            b.fresh(f"{REGION}/block"),
            [declared(local[name], DType.FLOAT, blocks[1:]) for name in read],
            [
                declared(local[name], DType.FLOAT, () if name in sums else blocks[1:])
                for name in (*ends, *shared, *sums)
            ],
        )
        parts = {name: b.fresh(f"{name}/blocks") for name in (*shared, *sums)}
        scan = new_node("Scan", [b.reshape(name, blocks) for name in read], "", b.fresh(f"{REGION}/Scan"), body=body)
        scan.output[:] = [*ends, *parts.values()]
        scan.attribute.append(onnx.helper.make_attribute("num_scan_inputs", len(read)))
        b.append(scan)
        for name in shared:
            b.append(new_node("Reshape", [parts[name], b.ints(dims)], name, b.fresh(f"{name}/whole")))
        for name, node in sums.items():
            b.append(_renamed(node, {node.input[0]: parts[name]}))
        return replaced


def _sums_nothing(node: NodeProto, reader: NodeProto) -> bool:
    """True if the reader adds up x − x: in any order that gives 0, or NaN."""
    return node.op_type == "Sub" and node.input[0] == node.input[1] and reader.op_type == "ReduceSum"


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    copy = clone(node)
    for own in (copy.input, copy.output):
        own[:] = [names.get(name, name) for name in own]
    return copy
