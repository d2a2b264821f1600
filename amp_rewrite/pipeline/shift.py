"""Range shifting of a draft: regions that overflow are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift_outcome import ShiftOutcome
from amp_rewrite.settings.choices import NO_SHIFT, check_headroom


def shift_draft(draft: Draft, ranges: Ranges | None, headroom: float) -> ShiftOutcome:
    """Return the draft with regions that overflow shifted, and ranges of its values; both as they are without any.

    Without ranges, only an exponent shifts: residual streams. Raise what `guard` raises.
    """
    request = draft.request
    asked = isinstance(request.shift, int) if ranges is None else request.shift != NO_SHIFT
    if request.to is not DType.FLOAT16 or not asked:
        return ShiftOutcome(draft, draft, ranges)
    from amp_rewrite.pipeline import shift_regions  # late: few conversions without data pay for it

    if ranges is None:
        return shift_regions.shifted_residuals(draft, headroom)
    check_headroom(headroom)
    if ranges.to != request.to.spelling:
        return ShiftOutcome(draft, draft, ranges)  # the guard objects
    return shift_regions.shifted_by_ranges(draft, ranges, headroom)
