"""Range shifting of a draft: overflowing regions are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import plan_casts
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.guard import is_low, overflowing, seen_ranges
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.reports.evidence import Guarded
from amp_rewrite.reports.render import count
from amp_rewrite.reports.rows import ShiftRow
from amp_rewrite.rewrite.shift.emit import Shift, refusal, shifted_by
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import ShiftRequest, plan_shift
from amp_rewrite.settings.choices import AUTO_SHIFT, Target, check_headroom
from amp_rewrite.settings.list_entry import Color


@dataclass(frozen=True)
class ShiftOutcome:
    """A shifted draft, with the ranges of its values, or the unshifted one twice.

    `plain`: the draft without the shift. Notes of both say what is left alone.
    """

    draft: Draft
    plain: Draft
    ranges: Ranges


Guard = Callable[[Draft, Ranges], Guarded]
"""What ranges imply for a draft."""


def chosen(draft: Draft, ranges: Ranges, headroom: float, guarded: Guard) -> tuple[Draft, Guarded]:
    """Return the draft, shifted by the requested exponent, with its guard.

    `auto` shifts it only if that lowers more products, or as many, and no other fused norms, with fewer ops and Casts.
    """
    tried = shift_draft(draft, ranges, headroom)
    moved, plain = tried.draft, tried.plain
    pinned = guarded(moved, tried.ranges)
    if moved is plain or moved.request.shift != AUTO_SHIFT or draft.view.low_types:
        return moved, pinned
    unmoved = guarded(plain, ranges)
    colorings = moved.paint(pinned.pins), plain.paint(unmoved.pins)
    gained = _compute_lowered(colorings[0]) - _compute_lowered(colorings[1])
    norms = _fused_norms(moved.view, colorings[0]) - _fused_norms(plain.view, colorings[1])
    if gained > 0 or (gained == norms == 0 and _nodes(moved, colorings[0]) < _nodes(plain, colorings[1])):
        return moved, pinned
    why = "a shift would neither lower more products nor save ops and Casts"
    rows = [_unshifted(row.value, row.absmax, row.values, why) for row in moved.shifts if row.exponent]
    return _noted(plain, rows), unmoved


def _compute_lowered(coloring: Coloring) -> int:
    return sum(coloring.entries[op].color is Color.ALLOW for op in {op for op, _ in coloring.low})


def _fused_norms(view: View, coloring: Coloring) -> int:
    """Return the number of low norms with a sum first: a mean magnifies the rounding of large values."""
    return sum(view.ops[op].op_type.startswith("Skip") for op in {op for op, _ in coloring.low})


def _nodes(draft: Draft, coloring: Coloring) -> int:
    return len(draft.view.ops) + len(plan_casts(draft.view, coloring, draft.io, draft.needs.saturate).casts)


def shift_draft(draft: Draft, ranges: Ranges, headroom: float) -> ShiftOutcome:
    """Return the draft with overflowing regions shifted, and ranges of its values. Raise what `guard` raises."""
    check_headroom(headroom)
    request = draft.request
    asked = request.shift if isinstance(request.shift, int) else None
    want = ShiftRequest(request.to, headroom, asked, flush=request.target == Target.ONNX)
    if ranges.to != request.to.spelling or not _beyond(draft, ranges, want):  # the guard objects to other ranges
        return ShiftOutcome(draft, draft, ranges)
    why = refusal(draft.view)
    if why is not None:
        finding = Finding(UNSHIFTED, "model", f"{why}, so what overflows stays float32")
        plain = replace(draft, notes=(*draft.notes, finding))
        return ShiftOutcome(plain, plain, ranges)
    wide = Draft.of(draft.source, request, widen=True) if draft.view.low_types else draft
    seen, coloring, equations = seen_ranges(wide.view, ranges), wide.paint(), Equations.of(wide.view)
    low = {value: known for value, known in seen.items() if is_low(wide.view, coloring, value)}
    shift = shifted_by(equations, plan_shift(equations, _beyond(wide, ranges, want), low, want), low, want)
    refused = [_unshifted(wide.view.value_name(r.value), r.absmax, 1, r.why) for r in shift.plan.refused]
    plain = _noted(draft, refused)
    if shift.view is wide.view:
        return ShiftOutcome(plain, plain, ranges)
    regions = tuple(region_rows(wide.view, shift))
    wide = replace(_noted(wide, refused), shifts=(*regions, *refused))
    findings = [Finding(SHIFTED, row.value, _words(row)) for row in regions]
    return ShiftOutcome(wide.on(shift.view, shift.results, findings), plain, _ranges(wide.view, shift, ranges, seen))


def _beyond(draft: Draft, ranges: Ranges, want: ShiftRequest) -> Mapping[ValueId, Range]:
    return overflowing(draft.view, draft.paint(), ranges, want.to, want.headroom, draft.needs.saturate)


def _unshifted(value: str, absmax: float, values: int, why: str) -> ShiftRow:
    room = DType.FLOAT16.max / absmax
    return ShiftRow(value, 0, values, absmax, room, room, why=why)


def _noted(draft: Draft, rows: Sequence[ShiftRow]) -> Draft:
    notes = (
        Finding(UNSHIFTED, row.value, f"goes up to {row.absmax:g}; {row.why}: float32 as without a shift")
        for row in rows
    )
    return replace(draft, notes=(*draft.notes, *notes), shifts=(*draft.shifts, *rows))


# -- ranges of shifted values -----------------------------------------------------------------------------


def _ranges(before: View, shift: Shift, ranges: Ranges, seen: Mapping[ValueId, Range]) -> Ranges:
    values, untapped = dict(ranges.values), dict(ranges.untapped)
    for value in shift.view.values:
        origin = shift.origins.get(value.name)
        if origin is None:
            continue
        name, known = key(shift.view, value.id), seen.get(origin.value)
        if known is not None:
            values[name] = _scaled(known, origin.exponent)
        else:
            untapped[name] = ranges.untapped.get(key(before, origin.value), "it was not measured")
    return replace(ranges, values=values, untapped=untapped)


def _scaled(known: Range, exponent: int) -> Range:
    """Return the range of a value times 2⁻ᵉ. Subnormal numbers are estimated: sizes are spread evenly near zero."""
    absmax, absmin = (math.ldexp(size, -exponent) for size in (known.absmax, known.absmin))
    to = DType.FLOAT16
    return replace(
        known,
        absmax=absmax,
        absmin=absmin,
        overflow=known.overflow if absmax > to.max else 0,
        flushed=min(known.count, int(math.ldexp(known.flushed, exponent))),
        subnormal=min(known.count, int(math.ldexp(known.subnormal, exponent))),
    )


SHIFTED, UNSHIFTED = "shifted", "not_shifted"
"""Kinds of findings: a region that is shifted, and a value beyond the type that is not."""
_SHOWN = 3


def region_rows(view: View, shift: Shift) -> Iterator[ShiftRow]:
    """Yield the row of each region. `view`: as it was before the shift."""
    for region in shift.plan.regions:
        own = set(region.values)
        kept = tuple(view.value_name(v) for v in region.values if v not in shift.plan.exponents)
        ends = (
            view.ops[op].name
            for op, muls in shift.muls.items()
            if any(mul.value in own and not mul.exponent for mul in muls)
        )
        before = DType.FLOAT16.max / region.absmax
        yield ShiftRow(
            view.value_name(region.largest),
            region.exponent,
            len(own) - len(kept),
            region.absmax,
            before,
            math.ldexp(before, region.exponent),
            kept,
            tuple(ends),
        )


def _words(row: ShiftRow) -> str:
    after = math.ldexp(row.absmax, -row.exponent)
    rooms = f"headroom {row.headroom:.2g}, then {row.headroom_after:.2g}"
    words = [
        f"{count(row.values, 'value')} times 2^-{row.exponent}, by data",
        f"the largest goes from {row.absmax:g} to {after:g} ({rooms})",
    ]
    if row.kept:
        words.append(f"{count(len(row.kept), 'value')} too small for it, {_some(row.kept)}")
    words.append(f"ends at {_some(row.ends)}" if row.ends else "no op needs it undone")
    return "; ".join(words)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
