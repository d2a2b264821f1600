"""Gradient checkpointing: the backward pass computes activations of the forward pass again, region by region.

The forward pass is cut into regions where few values cross. Values that cross are kept; the others are computed again
just before the backward pass of their region, from those kept. Two properties keep onnxruntime from undoing this:

- A recomputed region reads its inputs through `Where(c, x, x)`, so that it shares no subexpression with the forward
  pass. The result is x to the bit, whatever c is.
- c is computed from all gradients of the next region. So no schedule begins a region before the activations of the
  next one can be freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.graphs import in_order, names_read
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.ir.view import MAIN, View

REGION = "amp.recompute"


def recomputed(model: Model, forward: Collection[str], batch: Collection[str], regions: int) -> Model:
    """Return a step whose backward pass computes the activations of all regions but the last one again.

    `forward`: names of the loss and the metrics; `batch`: the inputs that are fed. The results are the same to the
    bit. TrainingError for a number of regions that is not whole or below 2, or above the number of nodes.
    """
    if not isinstance(regions, int) or isinstance(regions, bool) or regions < 2:
        raise TrainingError(f"recompute is {regions!r}; use a whole number of regions ≥ 2, such as that of the layers")
    step = _StepNodes.of(model, forward, batch)
    if regions > len(step.forward):
        raise TrainingError(f"recompute is {regions}, but the forward pass has {len(step.forward)} nodes; use fewer")
    return step.rewritten(regions)


@dataclass(eq=False)
class _StepNodes:
    """The nodes of a step by position. `forward`: positions of nodes that compute activations for the loss.

    `flags`: names of bool values.
    """

    model: Model
    nodes: Sequence[NodeProto]
    forward: Mapping[int, None]
    reads: list[list[str]]
    producer: Mapping[str, int]
    batch: frozenset[str]
    taken: set[str]
    flags: frozenset[str]
    added: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, roots: Collection[str], batch: Collection[str]) -> _StepNodes:
        nodes = list(clone(model.proto).graph.node)
        reads = [list(dict.fromkeys(names_read([node]))) for node in nodes]
        producer = {name: at for at, node in enumerate(nodes) for name in node.output if name}
        varying, needed = set(batch), set(roots)
        for at, node in enumerate(nodes):
            if varying.intersection(reads[at]):
                varying.update(node.output)
        for at in reversed(range(len(nodes))):
            if needed.intersection(nodes[at].output):
                needed.update(reads[at])
        forward = dict.fromkeys(
            at for at, n in enumerate(nodes) if needed.intersection(n.output) and varying.intersection(n.output)
        )
        view = View.of(model)
        flags = frozenset(v.name for v in view.values if v.scope == MAIN and view.dtype(v.id) is DType.BOOL)
        return cls(model, nodes, forward, reads, producer, frozenset(batch), set(view.names), flags)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Positions of the readers of each value."""
        readers: dict[str, list[int]] = {}
        for at, names in enumerate(self.reads):
            for name in names:
                readers.setdefault(name, []).append(at)
        return readers

    def rewritten(self, regions: int) -> Model:
        """Return the model with all regions but the last computed again."""
        place = self._regions(regions)
        kept = self._kept(place)
        for region in range(regions - 1):
            self._settle(region, place, kept)
        late: list[list[int]] = [[] for _ in range(regions)]
        for at, region in place.items():
            passing = [name for name in self.nodes[at].output if name not in kept]
            late[region] += [reader for name in passing for reader in self.readers.get(name, []) if reader not in place]
        reached: list[set[int]] = []  # what depends on activations of a region or of one before it, so cannot signal it
        for own in late:
            reached.append(self._descendants(own).union(*reached[-1:]))
        above: set[int] = set()
        renamed: dict[int, dict[str, str]] = {}
        for region in reversed(range(regions)):
            signals = self._last(above - reached[region])
            if region < regions - 1 and late[region] and signals:
                again = self._again(region, place, kept, self._condition(self.nodes[at].output[0] for at in signals))
                for at in late[region]:
                    renamed.setdefault(at, {}).update(again)
            above = reached[region] if late[region] else above
        return self._finished(renamed)

    def _regions(self, regions: int) -> dict[int, int]:
        """Return the region of each forward node: borders are evenly spaced where the fewest values cross."""
        order = {at: number for number, at in enumerate(self.forward)}
        change = np.zeros(len(order) + 1, int)
        for at, number in order.items():
            for name in self.nodes[at].output:
                last = max((order[r] for r in self.readers.get(name, []) if r in order), default=number)
                change[number + 1] += last > number
                change[last + 1] -= last > number
        crossing, size = np.cumsum(change), len(order) / regions
        borders = []
        for number in range(1, regions):
            low, high = round(size * (number - 0.5)) + 1, round(size * (number + 0.5))
            near = range(max(low, 1), max(min(high, len(order) - 1), max(low, 1)) + 1)
            borders.append(min(near, key=lambda p: (crossing[p], abs(p - size * number))))
        return {at: int(np.searchsorted(borders, number, side="right")) for at, number in order.items()}

    def _kept(self, place: Mapping[int, int]) -> set[str]:
        """Return values that are not computed again: those that cross a border, and those of nodes with bodies."""
        kept = set()
        for at, region in place.items():
            node = self.nodes[at]
            fixed = node.op_type in UNREPEATABLE or any(
                a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute
            )
            for name in node.output:
                if fixed or any(place.get(reader, region) != region for reader in self.readers.get(name, [])):
                    kept.add(name)
        return kept

    def _descendants(self, starts: Iterable[int]) -> set[int]:
        found, pending = set(), list(starts)
        while pending:
            at = pending.pop()
            if at not in found:
                found.add(at)
                pending += [r for name in self.nodes[at].output for r in self.readers.get(name, [])]
        return found

    def _last(self, nodes: set[int]) -> list[int]:
        """Return those of some nodes whose results none of the others reads: when they have run, all have."""
        return sorted(
            at for at in nodes if not any(nodes.intersection(self.readers.get(n, [])) for n in self.nodes[at].output)
        )

    def _condition(self, values: Iterable[str]) -> str:
        """Append a bool that is known when all these values are."""
        numbers = []
        for name in values:
            flat = self._node("Reshape", name, self._constant("flat", [-1]))
            first = self._node("Gather", flat, self._constant("first", 0))
            numbers.append(self._node("Cast", first, to=TensorProto.FLOAT))
        return self._node("IsNaN", self._node("Sum", *numbers))

    def _after(self, condition: str, name: str) -> str:
        """Append a copy of a value that is known when a condition is; onnxruntime's Where takes no bool on a CPU."""
        if name not in self.flags:
            return self._node("Where", condition, name, name)
        return self._node("And", name, self._node("Or", condition, self._node("Not", condition)))

    def _settle(self, region: int, place: Mapping[int, int], kept: set[str]) -> None:
        """Let later regions read the last value of a region through a Where that waits for its activations.

        Activations that only gradients read lose that reader. Without another one onnxruntime could fuse their ops to
        some that round otherwise; and a reader that is not waited for would run late, and hold their memory.
        """
        given = [name for at in self.forward if place[at] == region for name in self.nodes[at].output]
        read = [n for n in given if n not in kept and any(at not in place for at in self.readers.get(n, []))]
        crossing = [n for n in given if any(place.get(at, region) != region for at in self.readers.get(n, []))]
        if not read or not crossing:
            return
        last = crossing[-1]
        settled = self._after(self._condition(read), last)
        kept.add(settled)
        for at in self.readers[last]:
            if place.get(at) != region:
                _rename(self.nodes[at], {last: settled})
                self.reads[at] = list(dict.fromkeys(names_read([self.nodes[at]])))
        vars(self).pop("readers")

    def _again(self, region: int, place: Mapping[int, int], kept: set[str], condition: str) -> dict[str, str]:
        """Append the nodes of a region once more, those that gradients need; return the new names of its values."""
        needed: set[int] = set()
        pending = [
            at
            for at, own in place.items()
            if own == region
            and any(n not in kept and set(self.readers.get(n, [])) - place.keys() for n in self.nodes[at].output)
        ]
        while pending:
            at = pending.pop()
            if at not in needed:
                needed.add(at)
                pending += [
                    self.producer[name]
                    for name in self.reads[at]
                    if name not in kept and place.get(self.producer.get(name, -1)) == region
                ]
        names: dict[str, str] = {}
        for at in sorted(needed):
            node = NodeProto()
            node.CopyFrom(self.nodes[at])
            for slot, name in enumerate(node.input):
                if name and name not in names and (name in kept or name in self.batch):
                    names[name] = self._after(condition, name)
                node.input[slot] = names.get(name, name)
            for slot, name in enumerate(self.nodes[at].output):
                if name:
                    node.output[slot] = claimed(f"{name}/again", self.taken)
                    if name not in kept:
                        names[name] = node.output[slot]
            node.name = claimed(f"{REGION}/{node.name or node.op_type}", self.taken)
            self.added.append(node)
        return {name: new for name, new in names.items() if name not in kept and name not in self.batch}

    def _node(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = claimed(f"{REGION}/{op_type}", self.taken)
        self.added.append(make_node(op_type, list(inputs), [name], name=name, **attributes))
        return name

    def _constant(self, what: str, value: int | list[int]) -> str:
        if what not in self.constants:
            self.constants[what] = from_array(np.array(value, np.int64), claimed(f"{REGION}/{what}", self.taken))
        return self.constants[what].name

    def _finished(self, renamed: Mapping[int, Mapping[str, str]]) -> Model:
        """Return the model with the added nodes, in an order in which each value is computed before it is read."""
        proto = clone(self.model.proto)
        for at, names in renamed.items():
            _rename(self.nodes[at], names)
        proto.graph.initializer.extend(self.constants.values())
        refill(proto.graph, "node", [*self.nodes, *self.added])
        ordered = in_order(proto)
        assert ordered is not None, "a region waits for itself"
        return replace(self.model, proto=ordered)


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Read other values; bodies keep theirs."""
    for slot, name in enumerate(node.input):
        node.input[slot] = names.get(name, name)
