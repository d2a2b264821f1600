"""What each value is behind the casts that it comes through: the row that computes it, the weight that it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.reports.rows import NO_ROW


@dataclass(frozen=True)
class Lineage:
    """The values of a view by their ids. `identities` are Casts that a plan makes copies. O(nodes) for each table."""

    view: View
    identities: Collection[OpId] = frozenset()

    @cached_property
    def casts(self) -> frozenset[OpId]:
        """The casts of the model between floats."""
        return frozenset(op.id for op in self._casting if self._between_floats(op))

    @cached_property
    def source(self) -> Sequence[ValueId]:
        """What a value is a cast of, through casts between floats and those that copy; mostly itself."""
        source = [value.id for value in self.view.values]
        for op in self._casting:
            if (op.id in self.casts or self._copies(op)) and op.inputs[0] is not None and op.outputs[0] is not None:
                source[op.outputs[0]] = source[op.inputs[0]]
        return source

    @cached_property
    def rows(self) -> Sequence[int]:
        """The row that computes a value; NO_ROW for what no op computes."""
        constants = {op.id for op in self.view.ops if op.kind == "Constant"}
        producers = [self.view.values[source].producer for source in self.source]
        return [NO_ROW if made_by is None or made_by in constants else made_by for made_by in producers]

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...] | None]:
        """The shape of the weight that a value is; None for what is none."""
        tensors = (self.view.values[source].tensor for source in self.source)
        return [tuple(tensor.dims) if tensor is not None else None for tensor in tensors]

    @cached_property
    def _casting(self) -> Sequence[Op]:
        return [op for op in self.view.ops if op.kind in CASTS and op.id not in self.identities]

    def _between_floats(self, op: Op) -> bool:
        types = [self.view.dtype(v) if v is not None else None for v in (op.inputs[0], op.outputs[0])]
        return all(t is not None and t.floating for t in types)

    def _copies(self, op: Op) -> bool:
        """Whether a cast does nothing in the model as it is given."""
        types = {self.view.dtype(v) if v is not None else None for v in (op.inputs[0], op.outputs[0])}
        return len(types) == 1 and None not in types
