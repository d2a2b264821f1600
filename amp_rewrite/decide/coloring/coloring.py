"""What painting gives: for each type variable that it decides about its color, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.view import OpId
from amp_rewrite.settings.list_entry import Entry


@dataclass(frozen=True, slots=True)
class Paint:
    """The color of a type variable: the element type it gets, the rule that gave it, the op it is due to."""

    dtype: DType
    rule: str
    because: OpId | None
    note: str = ""


@dataclass(frozen=True)
class Coloring:
    """The paint of every float32 type variable; ops without one (If, Loop, custom ops …) stand under "".

    Type variables that have a low type in the model stand here only if they are raised. `unraised` are ops that
    were to be raised and keep their low type, with the reason. `findings`: what there is to say of it as a whole.
    """

    to: DType
    paints: Mapping[tuple[OpId, str], Paint]
    entries: tuple[Entry, ...]
    _by_op: Mapping[OpId, tuple[str, ...]] = field(repr=False)
    unraised: Mapping[OpId, Paint] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def of(self, op: OpId) -> Paint | None:
        """The paint that speaks for an op: a lowered variable's, else a raised one's; None if nothing was decided."""
        names = self._by_op.get(op, ())
        if not names:
            return self.unraised.get(op)
        if len(names) == 1:  # as of nearly all
            return self.paints[op, names[0]]
        paints = [self.paints[op, name] for name in names]
        return next((p for p in paints if p.dtype is self.to), paints[0])

    def dtype(self, op: OpId, variable: str | None) -> DType | None:
        """The type that a variable of an op gets; None where it keeps the one that it has."""
        found = self.paints.get((op, variable)) if variable is not None else None
        return found.dtype if found is not None else None

    def lowered(self, op: OpId, variable: str | None) -> bool:
        """Whether a variable of an op becomes the low type."""
        return self.dtype(op, variable) is self.to

    @property
    def lowers(self) -> bool:
        """Whether anything is lowered at all."""
        return any(p.dtype is self.to for p in self.paints.values())

    @property
    def raises(self) -> bool:
        """Whether anything is raised at all."""
        return any(p.rule == reasons.RAISED for p in self.paints.values())
