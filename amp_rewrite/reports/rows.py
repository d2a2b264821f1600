"""Rows of a report: plain data about the model, its ops, casts and weights, and about changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, PatternError
from amp_rewrite.reports.evidence import UNCHECKED, Evidence
from amp_rewrite.settings.request import RECORDED

SCHEMA = 1
"""Version of the format."""
DTYPES = {dtype.spelling: dtype for dtype in DType}
LOW = frozenset(name for name, dtype in DTYPES.items() if dtype.low)
FLOATING = frozenset(name for name, dtype in DTYPES.items() if dtype.floating)
"""Spellings of element types in rows."""
NO_ROW = -1
"""Source of weights, formal inputs of bodies, and omitted inputs."""
FIRST_INPUT = -2
"""Source of the model's first input; -3 is the second, and so on."""


@dataclass(frozen=True, slots=True)
class Header:
    """The model, and the type, settings and lists of its conversion; an inventory contains only the model.

    `settings` maps names of options to formatted values. Each is also an attribute; None for an option at its default,
    if only other values are recorded. `config`: settings from a file, and the file's name.
    """

    name: str
    ir_version: int
    opsets: Mapping[str, int]
    tool: str = ""
    to: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    lists: str | None = None
    fingerprint: str | None = None
    config: str = ""

    def __getattr__(self, name: str) -> str | None:
        if name in RECORDED:
            return self.settings.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Row(NamedTuple):
    """One op after the conversion.

    `dtype`: the type of the op's main floating-point type variable or, if there is none, of its first output.
    `variables`: the types of all floating-point variables. `because`: the name of the op behind the decision;
    `because_row`: its row. `source` and `reason`: the list entry's file and reason. `reads`: the source of each input,
    past copies and casts between floats, followed by the outputs of the bodies of an If, Loop or Scan. `attributes`:
    the non-default attributes with an effect on results. `constants`: a digest of the names of the op's constants.
    """

    name: str
    op: str
    dtype: str
    scope: str = ""
    named: bool = True
    """True if the model names the op; otherwise, the name consists of scope, type and position."""
    variables: Mapping[str, str] = {}
    color: str | None = None
    rule: str | None = None
    because: str | None = None
    because_row: int = NO_ROW
    note: str = ""
    source: str = ""
    reason: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()
    attributes: Mapping[str, str] = {}
    constants: str = ""

    @property
    def path(self) -> str:
        """Name with its scope as a prefix: "loop_1/body/MatMul_3"."""
        return self.name if self.name.startswith(self.scope) else self.scope + self.name

    @property
    def why(self) -> str:
        """Rule and its cause: "deny_forward because of Exp_3"; empty in an inventory."""
        cause = f" because of {self.because}" if self.because else ""
        return f"{self.rule}{cause}" if self.rule else ""


class CastRow(NamedTuple):
    """A conversion of one value between floating types.

    `origin`: "inserted" by the conversion, "existing" (a Cast of the model) or "folded" (a removed Cast of the model).
    `after`: the source of the value, as in `Row.reads`; `slot`: the output of that row. `readers`: the number of
    readers with an effect on an output of the model. `size`: the bytes written, with free dimensions as 128; None for
    an unknown type.
    """

    value: str
    from_: str
    to: str
    origin: str = "inserted"
    reason: str = ""
    scope: str = ""
    readers: int = 0
    size: int | None = None
    after: int = NO_ROW
    slot: int = 0


class PortRow(NamedTuple):
    """An input or output of the model. `dtype` is its type in full: "float16", "seq(map(int64, float32))".

    For an output, `after` is its source, as in `Row.reads`, and `slot` is the output of that row.
    """

    name: str
    dtype: str
    after: int = NO_ROW
    slot: int = 0


@dataclass(frozen=True, slots=True)
class BakeRow:
    """A weight stored in another type. `keeps_original`: a float32 copy is kept for its other readers."""

    value: str
    to: str
    before: int
    after: int
    scope: str = ""
    keeps_original: bool = False


@dataclass(frozen=True, slots=True)
class ShiftRow:
    """A region of values scaled by 2⁻ᵏ, or an unscaled value beyond the low type's range.

    `value`: the region's largest value. `exponent`: k, or 0 for an unscaled value; then `why` gives the reason.
    `values`: the number of scaled values. `kept`: names of values in the region too small to scale. `absmax`: the
    largest magnitude before scaling. `headroom` and `headroom_after`: the type's largest number divided by it, before
    and after scaling. `ends`: names of the ops before or after which a Mul undoes the scaling.
    """

    value: str
    exponent: int = 0
    values: int = 1
    absmax: float = 0.0
    headroom: float = 0.0
    headroom_after: float = 0.0
    kept: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole report; weights are the bytes of dense initializers and Constants.

    Compute ops are the ops on the allow list or, in an inventory, matrix products, convolutions and recurrent ops.
    Raised ops had a low type in the model and are float32 now. Integer ops compute on integers, or are between
    quantizers, where runtimes replace them with integer ops; they are not compute ops. `flops` counts the operations
    of compute ops, with free dimensions as 128; `flops_low` counts those in a low type.
    """

    ops: int = 0
    float_ops: int = 0
    compute_ops: int = 0
    compute_lowered: int = 0
    raised: int = 0
    compute_raised: int = 0
    casts_to_low: int = 0
    casts_to_float32: int = 0
    casts_existing: int = 0
    casts_folded: int = 0
    baked: int = 0
    saturated: int = 0
    flushed: int = 0
    refused: int = 0
    weights_before: int = 0
    weights_after: int = 0
    integer_ops: int = 0
    flops: int = 0
    flops_low: int = 0


@dataclass(frozen=True, slots=True)
class ReportData:
    """Fields of a report."""

    model: Header
    totals: Totals
    rows: tuple[Row, ...]
    casts: tuple[CastRow, ...] = ()
    baked: tuple[BakeRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    inputs: tuple[PortRow, ...] = ()
    outputs: tuple[PortRow, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict)
    evidence: Evidence = UNCHECKED
    shifts: tuple[ShiftRow, ...] = ()
    schema: int = SCHEMA

    @property
    def inventory(self) -> bool:
        """True if this describes a model as it is, not a conversion."""
        return self.model.to is None

    @property
    def raised(self) -> tuple[Row, ...]:
        """Ops raised from a low type in the model to float32; `note` names the pattern or rule."""
        return tuple(row for row in self.rows if row.rule == reasons.RAISED)

    def positions(self, name: str) -> tuple[int, ...]:
        """Return the positions of the ops selected by "#12", a path, a name, a type or a pattern; () for none.

        These forms are tried in order. A pattern is one of `convert`'s, with the keys name, op and scope.
        """
        numbers = {f"#{i}": i for i in range(len(self.rows))} if name.startswith("#") else {}
        if name in numbers:
            return (numbers[name],)
        for form in ("path", "name", "op"):
            if rows := tuple(i for i, row in enumerate(self.rows) if getattr(row, form) == name):
                return rows
        if not re.search(r"[=*?\[]|^re:", name):
            return ()
        from amp_rewrite.settings.selectors import parse_pattern  # late: reading reports does not need onnx

        terms = parse_pattern(name)
        for term in terms:
            if term.key not in ("name", "op", "scope"):
                raise PatternError(
                    f"pattern {name!r}: a report does not have the key {term.key!r}; use name, op or scope"
                )
        return tuple(
            i
            for i, row in enumerate(self.rows)
            if all(any(map(term.expression.search, _texts(row, term.key))) for term in terms)
        )


def _texts(row: Row, key: str) -> tuple[str, ...]:
    return {"name": (row.name, row.path), "op": (row.op,), "scope": (row.path.replace(".", "/").lstrip("/"),)}[key]


# -- differences ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A changed op, or a changed model input or output with the `op` "graph input" or "graph output".

    `name`: the name in B or, for a removed op, in A. `was`: the name in A, if different. `before` and `after`: element
    types, empty on the side without the op, or attribute values. `variable`: the changed part: a type variable,
    "input 0", "output 1" or an attribute; empty for the whole op. `why`: the rule behind the type in B. `vertex`: the
    position in B, counting rows, then inputs, then outputs; None for a removed op.
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
    vertex: int | None = field(default=None, compare=False)

    @property
    def types(self) -> str:
        """ "float32 → float16", or the only type."""
        return " → ".join(filter(None, (self.before, self.after)))

    @property
    def title(self) -> str:
        """Name, followed by the former name."""
        return f"{self.name} (was {self.was})" if self.was else self.name


@dataclass(frozen=True, slots=True)
class CastChange:
    """A cast in only one model: `sign` is "+" for B and "-" for A. `place`: the position among the casts of B."""

    sign: str
    value: str
    before: str
    after: str
    scope: str = ""
    why: str = ""
    place: int | None = field(default=None, compare=False)
