"""Rows and findings of the report about a shift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.fit import Fit
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.reports.render import count
from amp_rewrite.reports.rows import ShiftRow

if TYPE_CHECKING:
    from amp_rewrite.rewrite.shift.emit import Shift
    from amp_rewrite.rewrite.shift.plan import ShiftPlan

SHIFTED, UNSHIFTED = "shifted", "not_shifted"
"""Kinds of findings: a region that is shifted, and a value beyond the type that is not."""
DATA, ASKED = "data", "option"
"""Evidence for a shift: measured ranges, or a requested exponent."""
_EVIDENCE = {DATA: "by data", ASKED: "as asked for"}
_SHOWN = 3


def region_rows(view: View, shift: Shift, evidence: str) -> Iterator[ShiftRow]:
    """Yield the row of each region. `view`: as it was before the shift."""
    for region in shift.plan.regions:
        own = set(region.values)
        kept = tuple(view.value_name(v) for v in region.values if v not in shift.plan.exponents)
        ends = (
            view.ops[op].name
            for op, muls in shift.emitted.muls.items()
            if any(mul.value in own and not mul.exponent for mul in muls)
        )
        before = DType.FLOAT16.max / region.absmax if region.absmax else 0.0
        yield ShiftRow(
            view.value_name(region.largest),
            region.exponent,
            evidence,
            len(own) - len(kept),
            region.absmax,
            before,
            math.ldexp(before, region.exponent),
            kept,
            tuple(ends),
        )


def refused_rows(view: View, plan: ShiftPlan, evidence: str) -> Iterator[ShiftRow]:
    """Yield the row of each value beyond the type that is not shifted."""
    for refused in plan.refused:
        room = DType.FLOAT16.max / refused.absmax
        name = view.value_name(refused.value)
        yield ShiftRow(name, 0, evidence, 1, refused.absmax, room, room, why=refused.why)


def unshifted(rows: Sequence[ShiftRow], why: str) -> tuple[ShiftRow, ...]:
    """Return the rows of regions as those of values that are not shifted after all."""
    return tuple(
        ShiftRow(r.value, 0, r.evidence, r.values, r.absmax, r.headroom, r.headroom, why=why)
        for r in rows
        if r.exponent
    )


def refused_findings(view: View, plan: ShiftPlan) -> Iterator[Finding]:
    """Yield a finding for each value beyond the type that is not shifted."""
    for refused in plan.refused:
        yield refusing(view.value_name(refused.value), refused.absmax, refused.why)


def refusing(name: str, absmax: float, why: str) -> Finding:
    """Return the finding about a value beyond the type that is not shifted."""
    return Finding(UNSHIFTED, name, f"goes up to {absmax:g}; {why}: float32 as without a shift")


def shift_findings(
    view: View, shift: Shift, seen: Mapping[ValueId, Fit], rows: Sequence[ShiftRow]
) -> Iterator[Finding]:
    """Yield a finding for each region, for constants that are not copied, and for numbers that float32 loses."""
    for row in rows:
        yield Finding(SHIFTED, row.value, _words(row))
    for constant in shift.emitted.copied:
        note = "ops read it shifted in different ways: it is stored once, and a Mul follows where needed"
        yield Finding(SHIFTED, view.value_name(constant), note)
    small = [
        view.value_name(value)
        for value, exponent in shift.plan.exponents.items()
        if (fit := seen.get(value)) is not None and fit.absmin and math.ldexp(fit.absmin, -exponent) < DType.FLOAT.tiny
    ]
    if small:
        note = f"{count(len(small), 'value')} with elements below {DType.FLOAT.tiny:g} then, {_some(small)}"
        yield Finding(SHIFTED, "float32", f"{note}: they may lose digits in float32 as well")


def _words(row: ShiftRow) -> str:
    """Return the words about a region: exponent, headroom before and after, where it ends."""
    words = [f"{count(row.values, 'value')} times 2^-{row.exponent}, {_EVIDENCE[row.evidence]}"]
    if row.absmax:
        after = math.ldexp(row.absmax, -row.exponent)
        rooms = f"headroom {row.headroom:.2g}, then {row.headroom_after:.2g}"
        words.append(f"the largest goes from {row.absmax:g} to {after:g} ({rooms})")
    if row.kept:
        words.append(f"{count(len(row.kept), 'value')} too small for it, {_some(row.kept)}")
    words.append(f"ends at {_some(row.ends)}" if row.ends else "no op needs it undone")
    return "; ".join(words)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
