"""A change: one op, port or Cast that differs between two models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One op that differs, or one input or output of the model, whose `op` is "graph input" or "graph output".

    `name` is the one in B, or the one in A of an op that was removed; `was` is the name in A if that differs. `before`
    and `after` are element types, empty where the op is absent, or the values of an attribute: "float32 via float16" is
    a value rounded to float16 on its way. `variable` says of what: a type variable, "input 0", "output 1" or an
    attribute; empty for the op as a whole. `why` is the rule behind the type in B.
    """

    kind: str
    name: str
    op: str
    scope: str = ""
    before: str = ""
    after: str = ""
    variable: str = ""
    was: str = ""
    why: str = ""

    @property
    def types(self) -> str:
        """ "float32 → float16", or the one type that there is."""
        return " → ".join(filter(None, (self.before, self.after)))

    @property
    def title(self) -> str:
        """Name, with the former one."""
        return f"{self.name} (was {self.was})" if self.was else self.name


@dataclass(frozen=True, slots=True)
class CastChange:
    """A cast that only one of the two has: `sign` is "+" for B, "-" for A."""

    sign: str
    value: str
    before: str
    after: str
    scope: str = ""
    why: str = ""
