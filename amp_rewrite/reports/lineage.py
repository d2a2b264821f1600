"""Ways of values: the row or weight behind each, past Casts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.ir.dataflow import casts_floats, keeps_type
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View
from amp_rewrite.reports.rows import NO_ROW


@dataclass(frozen=True)
class Lineage:
    """Lineage of the values of a view, by id. `identities` are Casts that a plan makes copies. O(nodes) each."""

    view: View
    identities: Collection[OpId] = frozenset()

    @cached_property
    def casts(self) -> frozenset[OpId]:
        """Casts of the model between floats."""
        return frozenset(op.id for op in self.casting if casts_floats(self.view, op))

    @cached_property
    def source(self) -> Sequence[ValueId]:
        """Value behind each value, through copies and Casts between floats; mostly the value itself."""
        source = [value.id for value in self.view.values]
        for op in self.casting:
            read, result = op.inputs[0], op.outputs[0]
            if (op.id in self.casts or keeps_type(self.view, op)) and read is not None and result is not None:
                source[result] = source[read]
        return source

    @cached_property
    def rows(self) -> Sequence[int]:
        """Row of each value's op; NO_ROW for inputs and weights."""
        constants = {op.id for op in self.view.ops if op.kind == "Constant"}
        producers = [self.view.values[source].producer for source in self.source]
        return [NO_ROW if producer is None or producer in constants else producer for producer in producers]

    @cached_property
    def inputs(self) -> Sequence[ValueId]:
        """Inputs of the model, without those with an initializer as default."""
        return [v for v in self.view.scopes[MAIN].inputs if self.view.values[v].tensor is None]

    def reads_of(self, sources: Collection[ValueId]) -> Mapping[ValueId, Sequence[int]]:
        """Return the readers of these values, also behind Casts: op and position in its reads, in turn, in order."""
        behind = [op.outputs[0] for op in self.casting if op.outputs[0] is not None]
        reads: dict[ValueId, list[tuple[OpId, int]]] = {source: [] for source in sources}
        for value in dict.fromkeys((*sources, *behind)):
            if (source := self.source[value]) in reads:
                reads[source] += [(use.op, use.slot) for use in self.view.uses[value]]
                reads[source] += self._handed_out.get(value, ()) if value in self.view.yielded else ()
        return {source: [number for place in sorted(places) for number in place] for source, places in reads.items()}

    @cached_property
    def _handed_out(self) -> Mapping[ValueId, Sequence[tuple[OpId, int]]]:
        """Positions of values among the reads of an op whose bodies hand them out."""
        places: dict[ValueId, list[tuple[OpId, int]]] = {}
        for op in self.view.ops:
            given = (value for body in op.bodies for value in self.view.scopes[body].outputs)
            for place, value in enumerate(given, len(op.inputs)):
                places.setdefault(value, []).append((op.id, place))
        return places

    @cached_property
    def dead(self) -> frozenset[OpId]:
        """Ops without effect on the model's outputs. O(values)."""
        unread = (self.view.producer(ValueId(v)) for v, uses in enumerate(self.view.uses) if not uses)
        waiting = [op for op in unread if op is not None]
        dead: set[OpId] = set()
        while waiting:
            op = waiting.pop()
            if op.id not in dead and all(v is None or self._unread(v, dead) for v in op.outputs):
                dead.add(op.id)
                reads = [*op.inputs, *(v for body in op.bodies for v in self.view.scopes[body].outputs)]
                waiting += [producer for v in reads if (producer := self.view.producer(v)) is not None]
        return frozenset(dead)

    def _unread(self, value: ValueId, dead: Collection[OpId]) -> bool:
        """True if dead ops alone read a value, and only outputs of their bodies hand it out."""
        if any(use.op not in dead for use in self.view.uses[value]):
            return False
        if value not in self.view.yielded:
            return True
        public = value in self.view.scopes[MAIN].outputs
        return not public and all(owner in dead for owner, _ in self._handed_out.get(value, ()))

    @cached_property
    def casting(self) -> Sequence[Op]:
        """Casts of the model, without those made copies by the plan."""
        return [op for op in self.view.ops if op.kind in CASTS and op.id not in self.identities]
