"""What painting gives: for each float32 type variable its colour, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_rewrite.dtypes import DType
from amp_rewrite.entry import Entry
from amp_rewrite.view import OpId


@dataclass(frozen=True, slots=True)
class Paint:
    """The colour of a type variable: the element type it gets, the rule that gave it, the op it is due to."""

    dtype: DType
    rule: str
    because: OpId | None
    note: str = ""


@dataclass(frozen=True)
class Coloring:
    """The paint of every float32 type variable; ops without one (If, Loop, custom ops …) stand under ""."""

    to: DType
    paints: Mapping[tuple[OpId, str], Paint]
    entries: tuple[Entry, ...]
    _by_op: Mapping[OpId, tuple[str, ...]] = field(repr=False)

    def of(self, op: OpId) -> Paint | None:
        """The paint that speaks for an op: a lowered variable's if it has one; None if it has no float32."""
        paints = [self.paints[op, name] for name in self._by_op.get(op, ())]
        return next((p for p in paints if p.dtype is self.to), paints[0] if paints else None)

    def lowered(self, op: OpId, variable: str | None) -> bool:
        """Whether a variable of an op has the low type."""
        found = self.paints.get((op, variable)) if variable is not None else None
        return found is not None and found.dtype is self.to

    @property
    def lowers(self) -> bool:
        """Whether anything is lowered at all."""
        return any(p.dtype is self.to for p in self.paints.values())
