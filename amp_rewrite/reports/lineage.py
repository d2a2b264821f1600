"""Lineage: the row or weight behind each value, looking through casts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.ir.dataflow import casts_floats, keeps_type
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.reports.rows import NO_ROW


@dataclass(frozen=True)
class Lineage:
    """Lineage of the values of a view, by id. `identities` are Casts that a plan makes copies. O(nodes) each."""

    view: View
    identities: Collection[OpId] = frozenset()

    @cached_property
    def casts(self) -> frozenset[OpId]:
        """Casts of the model between floats."""
        return frozenset(op.id for op in self._casting if casts_floats(self.view, op))

    @cached_property
    def source(self) -> Sequence[ValueId]:
        """Value behind each value, through casts between floats and those that copy; mostly the value itself."""
        source = [value.id for value in self.view.values]
        for op in self._casting:
            read, made = op.inputs[0], op.outputs[0]
            if (op.id in self.casts or keeps_type(self.view, op)) and read is not None and made is not None:
                source[made] = source[read]
        return source

    @cached_property
    def rows(self) -> Sequence[int]:
        """Row that computes each value; NO_ROW for one that no op computes."""
        constants = {op.id for op in self.view.ops if op.kind == "Constant"}
        producers = [self.view.values[source].producer for source in self.source]
        return [NO_ROW if made_by is None or made_by in constants else made_by for made_by in producers]

    @cached_property
    def shapes(self) -> Sequence[tuple[int, ...] | None]:
        """Shape of the weight behind each value; None for other values."""
        tensors = (self.view.values[source].tensor for source in self.source)
        return [tuple(tensor.dims) if tensor is not None else None for tensor in tensors]

    @cached_property
    def _casting(self) -> Sequence[Op]:
        return [op for op in self.view.ops if op.kind in CASTS and op.id not in self.identities]
