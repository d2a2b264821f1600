"""The measured ranges of a draft's values, and their consequences: shifts of overflowing regions, and pins of ops.

A shift, which scales a region by 2⁻ᵏ, is applied before the guard decides on pins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.needs.find import pins_by_data
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, PolicyError, spelled
from amp_rewrite.evidence.calibrate import calibrate
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.guard import is_low, is_low_op, misfits, seen_ranges
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.conversion import Costs, Draft
from amp_rewrite.reports.evidence import GUARDED, Evidence
from amp_rewrite.reports.render import count
from amp_rewrite.reports.rows import ShiftRow
from amp_rewrite.rewrite.shift.emit import Shift, apply_shift, refusal
from amp_rewrite.rewrite.shift.plan import Equations, ShiftRequest, plan_shift
from amp_rewrite.settings.choices import AUTO_SHIFT, HEADROOM, NO_SHIFT, Target, check_headroom
from amp_rewrite.settings.option import Data


def ranges_of(draft: Draft, data: Data | None, ranges: Ranges | str | Path | None) -> Ranges:
    """Return the given ranges of a draft, possibly from a file, or measure them on data.

    Raises EvidenceError for ranges of another model, and PolicyError for ranges for another type.
    """
    if ranges is None:
        return calibrated(draft, Feed.of(data, draft.source), partial(draft.request.tell, "calibrate"))
    ranges = ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)
    ranges.check(draft.source)
    to = draft.request.to.spelling
    if ranges.to != to:
        raise PolicyError(f"the ranges are for {ranges.to}, not for {to}; calibrate with {spelled('to', to)}")
    view, values = draft.view, dict(ranges.values)
    for op in view.of_kinds(("com.microsoft::RotaryEmbedding",)):  # a fusion created it; it grows values by at most √2
        source, (result, *_) = op.inputs[0], op.results
        if source is not None and (measured := ranges.of(view, source)) is not None:
            values.setdefault(key(view, result), replace(measured, absmax=measured.absmax * 2**0.5))
    return replace(ranges, values=values)


def calibrated(draft: Draft, feed: Feed, progress: Callable[[int, int], None] | None = None) -> Ranges:
    """Measure the ranges of all values of a draft, under the fingerprint of its source."""
    ranges = calibrate(draft.view.model, feed, to=draft.request.to, progress=progress)
    of = fingerprint(draft.source)
    return replace(ranges, model=model_name(draft), graph=of.graph, weights=of.weights)


def model_name(draft: Draft) -> str:
    return draft.source.path.name if draft.source.path is not None else "the model"


def guarded(draft: Draft, ranges: Ranges, headroom: float = HEADROOM) -> Draft:
    """Return the draft with pins, findings and evidence from ranges.

    There is a finding for each value that would be low and does not fit, and one of kind "calibrated" about the data.
    Pins only make more of the model float32, so values that fit without them also fit with them.
    """
    view, coloring = draft.view, draft.paint()
    unfit = misfits(view, coloring, ranges, headroom, draft.needs.saturate)
    pins = {pin.op: pin for pin in pins_by_data(view, unfit) if is_low_op(view, coloring, view.ops[pin.op])}
    batches = f"{count(ranges.batches, 'batch', 'batches')}, headroom {headroom:g}"
    doubt = "; the data is random: calibrate with real data before you rely on these ranges" if ranges.random else ""
    findings = [Finding("calibrated", ranges.origin, batches + doubt)]
    findings += [Finding(fact.reason, view.value_name(value), fact.note) for value, fact in unfit.items()]
    evidence = Evidence(GUARDED, ranges.origin, ranges.batches, ranges.random)
    return replace(
        draft, pins=tuple(pins[op] for op in sorted(pins)), notes=(*draft.notes, *findings), evidence=evidence
    )


def shifted_and_guarded(draft: Draft, ranges: Ranges, headroom: float) -> Draft:
    """Return the draft, shifted as requested, with pins, findings and evidence from ranges.

    `auto` shifts it only if that lowers more products, or lowers the same number with the same fused norms and fewer
    ops and Casts.
    """
    check_headroom(headroom)
    request = draft.request
    if request.shift == NO_SHIFT or request.to is not DType.FLOAT16:
        return guarded(draft, ranges, headroom)
    outcome = shift_draft(draft, ranges, headroom)
    moved = guarded(outcome.draft, outcome.ranges, headroom)
    if outcome.draft is outcome.plain or request.shift != AUTO_SHIFT or draft.view.low_types:
        return moved
    plain = guarded(outcome.plain, ranges, headroom)
    colorings = moved.paint(), plain.paint()
    after, before = (Costs.of(*painted) for painted in zip((moved, plain), colorings, strict=True))
    gained = after.compute - before.compute
    norms = _fused_norms(moved.view, colorings[0]) - _fused_norms(plain.view, colorings[1])
    if gained > 0 or (gained == norms == 0 and after.ops + after.casts < before.ops + before.casts):
        return moved
    reason = "a shift would neither lower more products nor save ops and Casts"
    rows = [_unshifted(row.value, row.absmax, row.values, reason) for row in moved.shifts if row.exponent]
    return _noted(plain, rows)


def _fused_norms(view: View, coloring: Coloring) -> int:
    """Return the number of low fused norms of sums: their mean magnifies the rounding of large values."""
    return sum(view.ops[op].op_type.startswith("Skip") for op in {op for op, _ in coloring.low})


# -- shifts ------------------------------------------------------------------------------------------------

SHIFTED, UNSHIFTED = "shifted", "not_shifted"
"""Kinds of findings: a shifted region, and an overflowing value that is not shifted."""
_MAX_SHOWN = 3


class ShiftOutcome(NamedTuple):
    """A shifted draft with the ranges of its values, and `plain`, the draft without the shift.

    Without a shift, both are the same. The notes of both name the values that are not shifted.
    """

    draft: Draft
    plain: Draft
    ranges: Ranges


def shift_draft(draft: Draft, ranges: Ranges, headroom: float) -> ShiftOutcome:
    """Return the draft with overflowing regions shifted, and the ranges of its values."""
    request = draft.request
    exponent = request.shift if isinstance(request.shift, int) else None
    want = ShiftRequest(request.to, headroom, exponent, flush=request.target == Target.ONNX)
    overflowing = _overflowing(draft, ranges, headroom)
    if not overflowing:
        return ShiftOutcome(draft, draft, ranges)
    reason = refusal(draft.view)
    if reason is not None:
        finding = Finding(UNSHIFTED, "model", f"{reason}, so values that overflow stay float32")
        plain = replace(draft, notes=(*draft.notes, finding))
        return ShiftOutcome(plain, plain, ranges)
    wide = Draft.of(draft.source, request, widen=True) if draft.view.low_types else draft
    overflowing = overflowing if wide is draft else _overflowing(wide, ranges, headroom)
    seen, coloring, equations = seen_ranges(wide.view, ranges), wide.paint(), Equations.of(wide.view)
    low = {value: measured for value, measured in seen.items() if is_low(wide.view, coloring, value)}
    beyond = {value: low[value] for value in overflowing}
    shift = apply_shift(equations, plan_shift(equations, beyond, low, want), low, want)
    causes = shift.plan.refused.items()
    refused = [_unshifted(wide.view.value_name(v), beyond[v].absmax, 1, cause) for v, cause in causes]
    plain = _noted(draft, refused)
    if shift.view is wide.view:
        return ShiftOutcome(plain, plain, ranges)
    regions = tuple(region_rows(wide.view, shift))
    wide = replace(_noted(wide, refused), shifts=(*regions, *refused))
    findings = [Finding(SHIFTED, row.value, _shift_note(row)) for row in regions]
    shifted = wide.with_view(shift.view, shift.results, findings)
    return ShiftOutcome(shifted, plain, _ranges(wide.view, shift, ranges, seen))


def _overflowing(draft: Draft, ranges: Ranges, headroom: float) -> list[ValueId]:
    unfit = misfits(draft.view, draft.paint(), ranges, headroom, draft.needs.saturate)
    return [value for value, fact in unfit.items() if fact.reason == reasons.OVERFLOW]


def _unshifted(value: str, absmax: float, values: int, reason: str) -> ShiftRow:
    room = DType.FLOAT16.max / absmax
    return ShiftRow(value, 0, values, absmax, room, room, why=reason)


def _noted(draft: Draft, rows: Sequence[ShiftRow]) -> Draft:
    notes = (
        Finding(UNSHIFTED, row.value, f"reaches {row.absmax:g}; {row.why}: it stays float32, as without a shift")
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
        name, measured = key(shift.view, value.id), seen.get(origin.value)
        if measured is not None:
            values[name] = _scaled(measured, origin.exponent)
        else:
            untapped[name] = ranges.untapped.get(key(before, origin.value), "it was not measured")
    return replace(ranges, values=values, untapped=untapped)


def _scaled(measured: Range, exponent: int) -> Range:
    """Return the range of a value times 2⁻ᵉ. Counts of small values assume an even spread near zero."""
    absmax, absmin = (math.ldexp(size, -exponent) for size in (measured.absmax, measured.absmin))
    to = DType.FLOAT16
    return replace(
        measured,
        absmax=absmax,
        absmin=absmin,
        overflow=measured.overflow if absmax > to.max else 0,
        flushed=min(measured.count, int(math.ldexp(measured.flushed, exponent))),
        subnormal=min(measured.count, int(math.ldexp(measured.subnormal, exponent))),
    )


def region_rows(view: View, shift: Shift) -> Iterator[ShiftRow]:
    """Yield a row for each region. `view`: the view before the shift."""
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


def _shift_note(row: ShiftRow) -> str:
    after = math.ldexp(row.absmax, -row.exponent)
    rooms = f"headroom {row.headroom:.2g}, then {row.headroom_after:.2g}"
    words = [
        f"{count(row.values, 'value')} times 2^-{row.exponent}, chosen from data",
        f"the largest goes from {row.absmax:g} to {after:g} ({rooms})",
    ]
    if row.kept:
        words.append(f"{count(len(row.kept), 'value')} too small for the shift: {_some(row.kept)}")
    words.append(f"undone at {_some(row.ends)}" if row.ends else "nothing needs to undo it")
    return "; ".join(words)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN])
    return shown + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
