"""Range shifting of a draft: regions that overflow are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from amp_rewrite.decide.bounds.bound import Bound, BoundOptions, classified, scaled
from amp_rewrite.decide.bounds.weights import notable
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.evidence.ranges import Range, Ranges, key
from amp_rewrite.files.rounding import Fit
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift_rows import (
    ASKED,
    DATA,
    PROOF,
    UNSHIFTED,
    refused_findings,
    refused_rows,
    region_rows,
    shift_findings,
)
from amp_rewrite.rewrite.shift.equations import Equations
from amp_rewrite.rewrite.shift.plan import Want, residual_plan
from amp_rewrite.rewrite.shift.shift import Shift, refusal, shift_view, shifted_by
from amp_rewrite.settings.choices import AUTO_SHIFT, NO_SHIFT, Target, check_headroom


@dataclass(frozen=True)
class Shifting:
    """A draft that was shifted, or left as it is with notes about why.

    `before`: the view that the shift starts from; `shift`: None if nothing is shifted. `plain`: the draft without the
    shift, with the notes. `ranges`: those of the shifted values, where there are ranges; `least`: what is proved about
    sizes from below, by value of the draft's view, where there are none.
    """

    draft: Draft
    plain: Draft
    before: View
    ranges: Ranges | None = None
    shift: Shift | None = None
    least: Mapping[ValueId, float] | None = None
    plain_least: Mapping[ValueId, float] | None = None

    def carried(self, known: Mapping[ValueId, Bound]) -> Mapping[ValueId, Bound]:
        """Return the bounds of the draft's values, from those of `before` with `exponent` to spare."""
        if self.shift is None:
            return known
        return {v: scaled(known[o], e, DType.FLOAT16) for v, (o, e) in _origins(self).items() if o in known}

    @property
    def exponent(self) -> int:
        """Largest exponent of the shift."""
        origins = self.shift.origins.values() if self.shift is not None else ()
        return max((origin.exponent for origin in origins), default=0)


def shifted(draft: Draft, ranges: Ranges | None, headroom: float) -> Shifting:
    """Return the draft with regions that overflow shifted, and ranges of its values; both as they are without any.

    Without ranges, a region overflows if that is proved. Raise what `guard` raises.
    """
    request = draft.request
    if request.to is not DType.FLOAT16:
        return Shifting(draft, draft, draft.view, ranges)
    want = Want(
        request.to,
        headroom,
        request.shift if isinstance(request.shift, int) else None,
        flush=request.target is Target.ONNX,
    )
    if ranges is None:
        return _residuals(draft, want) if want.exponent else _proved(draft, want)
    if request.shift == NO_SHIFT:
        return Shifting(draft, draft, draft.view, ranges)
    from amp_rewrite.evidence.guard import (  # late: only conversions with ranges pay for it
        is_low,
        overflowing,
        seen_ranges,
    )

    check_headroom(headroom)
    if ranges.to != request.to.spelling:
        return Shifting(draft, draft, draft.view, ranges)  # the guard objects
    beyond = overflowing(draft.view, draft.paint(), ranges, want.to, headroom, draft.hazards.saturate)
    if not beyond or refusal(draft.view):
        plain = _refused(draft, beyond)
        return Shifting(plain, plain, draft.view, ranges)
    wide = draft
    if draft.view.low_types:
        wide = Draft.of(draft.source, request, widen=True)
        beyond = overflowing(wide.view, wide.paint(), ranges, want.to, headroom, wide.hazards.saturate)
    seen, coloring = seen_ranges(wide.view, ranges), wide.paint()
    low = {value: known for value, known in seen.items() if is_low(wide.view, coloring, value)}
    shift = shift_view(wide.view, beyond, low, want)
    tried = _tried(draft, wide, shift, seen, DATA)
    if tried.shift is None:
        return replace(tried, ranges=ranges)
    return replace(tried, ranges=_ranges(wide.view, shift, ranges, seen))


def _proved(draft: Draft, want: Want) -> Shifting:
    """Return the draft with regions shifted that are proved to overflow, without any data."""
    if not draft.request.safe or not notable(draft.view):
        return Shifting(draft, draft, draft.view)
    from amp_rewrite.decide.bounds.analysis import sure_magnitudes  # late: few models need it
    from amp_rewrite.evidence.guard import proved_overflowing

    least = sure_magnitudes(draft.view)
    beyond = proved_overflowing(draft.view, draft.paint(), least, want.to, draft.hazards.saturate)
    if not beyond:
        return Shifting(draft, draft, draft.view)
    if draft.request.shift != AUTO_SHIFT or refusal(draft.view):
        plain = _refused(draft, beyond) if draft.request.shift == AUTO_SHIFT else draft
        return Shifting(plain, plain, draft.view, least=least, plain_least=least)
    wide, sure = draft, least
    if draft.view.low_types:
        wide = Draft.of(draft.source, draft.request, widen=True)
        sure = sure_magnitudes(wide.view)
        beyond = proved_overflowing(wide.view, wide.paint(), sure, want.to, wide.hazards.saturate)
    tried = _tried(draft, wide, shift_view(wide.view, beyond, beyond, want), beyond, PROOF)
    if tried.shift is None:
        return replace(tried, least=least, plain_least=least)
    moved = {v: math.ldexp(sure[o], -e) for v, (o, e) in _origins(tried).items() if o in sure}
    return replace(tried, least=moved, plain_least=least)


def _refused(draft: Draft, beyond: Mapping[ValueId, Fit]) -> Draft:
    """Return the draft with a note, if values overflow but nothing of the model may be shifted."""
    why = refusal(draft.view) if beyond else None
    if why is None:
        return draft
    finding = Finding(UNSHIFTED, "model", f"{why}, so what overflows stays float32")
    return replace(draft, notes=(*draft.notes, finding))


def _tried(draft: Draft, wide: Draft, shift: Shift, seen: Mapping[ValueId, Fit], evidence: str) -> Shifting:
    """Return what became of a shift, with its rows and findings."""
    refused = tuple(refused_findings(wide.view, shift.plan))
    rows = tuple(refused_rows(wide.view, shift.plan, evidence))
    plain = replace(draft, notes=(*draft.notes, *refused), shifts=rows)
    if shift.view is wide.view:
        return Shifting(plain, plain, draft.view)
    regions = tuple(region_rows(wide.view, shift, evidence))
    wide = replace(wide, notes=(*wide.notes, *refused), shifts=(*regions, *rows))
    findings = tuple(shift_findings(wide.view, shift, seen, regions))
    return Shifting(wide.on(shift.view, shift.results, findings), plain, wide.view, shift=shift)


def _residuals(draft: Draft, want: Want) -> Shifting:
    """Return the draft with its residual streams shifted by the exponent that is asked for, without any data."""
    if refusal(draft.view):
        return Shifting(draft, draft, draft.view)
    equations = Equations.of(draft.view)
    shift = shifted_by(equations, residual_plan(equations, want), {}, want)
    return _tried(draft, draft, shift, {}, ASKED)


def _origins(tried: Shifting) -> Mapping[ValueId, tuple[ValueId, int]]:
    """Return, for each value of a shifted view, the one that it was before, and its exponent."""
    assert tried.shift is not None
    view, before = tried.shift.view, tried.before
    held = {key(before, value.id): value.id for value in before.values}
    found: dict[ValueId, tuple[ValueId, int]] = {}
    for value in view.values:
        origin = tried.shift.origins.get(value.name)
        if origin is not None:
            found[value.id] = origin.value, origin.exponent
        elif (same := held.get(key(view, value.id))) is not None:
            found[value.id] = same, 0
    return found


# -- ranges and bounds ---------------------------------------------------------------------------------


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
    """Return the range of a value times 2⁻ᵉ. What becomes subnormal is estimated: sizes spread evenly near zero."""
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


def bounds_before(tried: Shifting) -> Mapping[ValueId, Bound]:
    """Return bounds of the values before the shift that also hold, times 2⁻ᵏ, for those after it."""
    from amp_rewrite.decide.bounds.analysis import bounds  # late: only conversions with ranges pay for it

    to = tried.draft.request.to
    return bounds(tried.before, BoundOptions(to, exponent=tried.exponent))


def measured_bounds(
    view: View, known: Mapping[ValueId, Bound], ranges: Ranges, headroom: float
) -> Mapping[ValueId, Bound]:
    """Return bounds with the classes that follow from them and from ranges."""
    from amp_rewrite.evidence.bounds import magnitudes

    to, seen = DType.parse(ranges.to), magnitudes(view, ranges)
    return {value: classified(bound, to, seen.get(value), headroom) for value, bound in known.items()}
