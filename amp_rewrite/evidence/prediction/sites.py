"""Sites: the places where values of a float32 model are rounded if certain ops become low."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.instrument.vertices import TypeChoice, Vertex, maker_of, reader_of
from amp_rewrite.ir.view import MAIN, OpId, ValueId, View


@dataclass(frozen=True, slots=True)
class RoundingSite:
    """A rounding of one value of the main graph.

    `maker`: the vertex that produces the value, None if it cannot be low. `reader`: the vertex that reads the rounded
    value; None for the rounding of a result where it is made, for all of its readers. `op` owns the site: the reader,
    or the maker.
    """

    value: ValueId
    op: OpId
    maker: Vertex | None
    reader: Vertex | None

    def on(self, coloring: TypeChoice) -> bool:
        """True if the value is rounded here under a choice of low ops."""
        made_low = self.maker is not None and coloring.lowered(*self.maker)
        return made_low if self.reader is None else not made_low and coloring.lowered(*self.reader)


@dataclass(frozen=True)
class RoundingSites:
    """The sites of a view for vertices that may be low, and the ops whose roundings lie elsewhere, with the reason.

    Sites are in the main graph; a rounding inside a body has none. O(nodes + uses).
    """

    view: View
    may: Collection[Vertex]
    all: tuple[RoundingSite, ...] = ()
    hidden: dict[OpId, str] = field(default_factory=dict)

    @classmethod
    def of(cls, view: View, may: Collection[Vertex], to: DType) -> RoundingSites:
        """Return the sites of float32 tensors. Constants that the low type holds exactly have none."""
        found = cls(view, may)
        sites = tuple(site for value in view.values for site in found._at(value.id, to))
        for op, _ in may:
            if view.ops[op].scope != MAIN:
                owner = next(o for o in view.ops if view.ops[op].scope in o.bodies)
                found.hidden[op] = f"it is in a body of {owner.name!r}"
        return cls(view, may, sites, found.hidden)

    def _at(self, value: ValueId, to: DType) -> Iterator[RoundingSite]:
        view = self.view
        if view.values[value].scope != MAIN or view.tensor_dtype(value) is not DType.FLOAT:
            return
        constant = view.constant(value) is not None
        if constant and _holds(view, value, to):
            return
        maker, is_exact = maker_of(view, value, self.may)
        if constant:
            maker = None
        if maker is not None and not is_exact:  # an exact op gives low values of low ones
            yield RoundingSite(value, maker[0], maker, None)
        uses = (use for use in view.uses[value] if view.ops[use.op].scope == MAIN)
        readers = dict.fromkeys(reader for use in uses if (reader := reader_of(view, use, self.may)) is not None)
        yield from (RoundingSite(value, reader[0], maker, reader) for reader in readers)


def _holds(view: View, value: ValueId, to: DType) -> bool:
    """True if a constant has no digits to lose; only small ones are read."""
    tensor = view.constant(value)
    if tensor is None or len(tensor.dims) > 1:
        return False
    array = view.model.array(tensor)
    with np.errstate(over="ignore"):
        return bool(array.size < _READ and (array.astype(to.numpy).astype(array.dtype) == array).all())


_READ = 1 << 12
"""Elements of a constant that are read to see whether rounding changes them."""
