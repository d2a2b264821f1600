"""The result of painting: the color of each type variable, and its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.ir.op_classes import LOW_ONLY
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.settings.list_entry import Entry


@dataclass(frozen=True, slots=True)
class Paint:
    """The color of a type variable.

    Attributes:
        dtype: its element type.
        rule: the rule behind it.
        because: the op that caused it.
        note: details.
    """

    dtype: DType
    rule: str
    because: OpId | None
    note: str = ""

    @classmethod
    def float32(cls, rule: str, because: OpId | None, note: str = "") -> Paint:
        """Return the paint of a float32 variable."""
        return cls(DType.FLOAT, rule, because, note)


@dataclass(frozen=True, repr=False)
class Coloring:
    """The paint of every float32 type variable, by op and name; ops without a variable (If, Loop, custom ops …) use "".

    Type variables that are low in the model are included only if they are raised.

    Attributes:
        to: the low type.
        paints: the paint of each variable.
        entries: the list entry of each op.
        unraised: ops that keep their low type against a wish for float32, with the reason.
        findings: findings about the coloring as a whole.
    """

    to: DType
    paints: Mapping[tuple[OpId, str], Paint]
    entries: tuple[Entry, ...]
    unraised: Mapping[OpId, Paint] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __repr__(self) -> str:
        return f"<Coloring: {len(self.low)} of {len(self.paints)} type variables in {self.to.spelling}>"

    def of(self, op: OpId) -> Paint | None:
        """Return the paint of a lowered variable of an op, else of its first; None for an undecided op."""
        paints = self._by_op.get(op, ())
        return next((p for p in paints if p.dtype is self.to), paints[0] if paints else self.unraised.get(op))

    @cached_property
    def _by_op(self) -> Mapping[OpId, Sequence[Paint]]:
        known: dict[OpId, list[Paint]] = {}
        for (op, _), paint in self.paints.items():
            known.setdefault(op, []).append(paint)
        return known

    def dtype(self, op: OpId, variable: str | None) -> DType | None:
        """Return the new type of an op's variable; None if it keeps its own."""
        paint = self.paints.get((op, variable)) if variable is not None else None
        return paint.dtype if paint is not None else None

    def lowered(self, op: OpId, variable: str | None) -> bool:
        """True if a variable of an op becomes the low type."""
        return self.dtype(op, variable) is self.to

    @property
    def low(self) -> frozenset[tuple[OpId, str]]:
        """Lowered variables, by op and name."""
        return frozenset(variable for variable, paint in self.paints.items() if paint.dtype is self.to)

    def opens(self, view: View) -> bool:
        """True if every op with kernels for low types alone is low."""
        return {op.id for op in view.of_kinds(LOW_ONLY)} <= {op for op, _ in self.low}

    @property
    def float32_ops(self) -> int:
        """Number of ops with float32 variables and no lowered one."""
        return len({op for op, _ in self.paints} - {op for op, _ in self.low})

    @property
    def changes(self) -> bool:
        """True if any variable is lowered or raised."""
        return any(p.dtype is self.to or p.rule == reasons.RAISED for p in self.paints.values())
