"""Shifts of a draft: its regions that overflow by ranges, or the residual streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.guard import is_low, overflowing, seen_ranges
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.fit import Fit
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift_outcome import ShiftOutcome
from amp_rewrite.pipeline.shift_rows import (
    ASKED,
    DATA,
    UNSHIFTED,
    refused_findings,
    refused_rows,
    region_rows,
    shift_findings,
)
from amp_rewrite.rewrite.shift.emit import Shift, refusal, shift_view, shifted_by
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import ShiftRequest, residual_plan
from amp_rewrite.settings.choices import Target


def shifted_by_ranges(draft: Draft, ranges: Ranges, headroom: float) -> ShiftOutcome:
    """Return the draft with regions shifted that overflow by ranges."""
    want = _want(draft, headroom)
    beyond = overflowing(draft.view, draft.paint(), ranges, want.to, headroom, draft.hazards.saturate)
    if not beyond or refusal(draft.view):
        plain = _refused(draft, beyond)
        return ShiftOutcome(plain, plain, ranges)
    wide = draft
    if draft.view.low_types:
        wide = Draft.of(draft.source, draft.request, widen=True)
        beyond = overflowing(wide.view, wide.paint(), ranges, want.to, headroom, wide.hazards.saturate)
    seen, coloring = seen_ranges(wide.view, ranges), wide.paint()
    low = {value: known for value, known in seen.items() if is_low(wide.view, coloring, value)}
    shift = shift_view(wide.view, beyond, low, want)
    tried = _tried(draft, wide, shift, seen, DATA)
    if tried.shift is None:
        return replace(tried, ranges=ranges)
    return replace(tried, ranges=_ranges(wide.view, shift, ranges, seen))


def shifted_residuals(draft: Draft, headroom: float) -> ShiftOutcome:
    """Return the draft with its residual streams shifted by the requested exponent, without any data."""
    if refusal(draft.view):
        return ShiftOutcome(draft, draft)
    want = _want(draft, headroom)
    equations = Equations.of(draft.view)
    shift = shifted_by(equations, residual_plan(equations, want), {}, want)
    return _tried(draft, draft, shift, {}, ASKED)


def _want(draft: Draft, headroom: float) -> ShiftRequest:
    request = draft.request
    asked = request.shift if isinstance(request.shift, int) else None
    return ShiftRequest(request.to, headroom, asked, flush=request.target is Target.ONNX)


def _refused(draft: Draft, beyond: Mapping[ValueId, Fit]) -> Draft:
    """Return the draft, with a note if values overflow and no part of the model may be shifted."""
    why = refusal(draft.view) if beyond else None
    if why is None:
        return draft
    finding = Finding(UNSHIFTED, "model", f"{why}, so what overflows stays float32")
    return replace(draft, notes=(*draft.notes, finding))


def _tried(draft: Draft, wide: Draft, shift: Shift, seen: Mapping[ValueId, Fit], evidence: str) -> ShiftOutcome:
    """Return the outcome of a shift, with its rows and findings."""
    refused = tuple(refused_findings(wide.view, shift.plan))
    rows = tuple(refused_rows(wide.view, shift.plan, evidence))
    plain = replace(draft, notes=(*draft.notes, *refused), shifts=rows)
    if shift.view is wide.view:
        return ShiftOutcome(plain, plain)
    regions = tuple(region_rows(wide.view, shift, evidence))
    wide = replace(wide, notes=(*wide.notes, *refused), shifts=(*regions, *rows))
    findings = tuple(shift_findings(wide.view, shift, seen, regions))
    return ShiftOutcome(wide.on(shift.view, shift.results, findings), plain, shift=shift)


# -- ranges of shifted values -----------------------------------------------------------------------------


def _ranges(before: View, shift: Shift, ranges: Ranges, seen: Mapping[ValueId, Range]) -> Ranges:
    """Return the ranges with those of the shifted view's new values."""
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
