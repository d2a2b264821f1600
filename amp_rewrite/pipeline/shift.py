"""Range shifting of a draft: regions that overflow are computed times 2⁻ᵏ before the guard looks."""

from __future__ import annotations

from amp_rewrite.decide.bounds.influence import influence
from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift_outcome import ShiftOutcome, unshifted_draft
from amp_rewrite.settings.choices import NO_SHIFT, check_headroom


def shift_draft(draft: Draft, ranges: Ranges | None, headroom: float) -> ShiftOutcome:
    """Return the draft with regions that overflow shifted, and ranges of its values; both as they are without any.

    Without ranges, a region overflows if that is proved. Raise what `guard` raises.
    """
    request = draft.request
    if request.to is not DType.FLOAT16 or (ranges is not None and request.shift == NO_SHIFT):
        return unshifted_draft(draft, ranges)
    if ranges is not None:
        check_headroom(headroom)
        if ranges.to != request.to.spelling:
            return unshifted_draft(draft, ranges)  # the guard objects
    elif not isinstance(request.shift, int) and not _may_overflow(draft):
        return unshifted_draft(draft)
    from amp_rewrite.pipeline import shift_regions  # late: few conversions without data pay for it

    if ranges is not None:
        return shift_regions.shifted_by_ranges(draft, ranges, headroom)
    if isinstance(request.shift, int):
        return shift_regions.shifted_residuals(draft, headroom)
    return shift_regions.shifted_by_proof(draft, headroom)


def _may_overflow(draft: Draft) -> bool:
    """True if constants may drive values beyond the type that the draft makes low; False spares the proof."""
    to = draft.request.to
    sizes = influence(draft.view) if draft.request.safe else {}
    if max(sizes.values(), default=0.0) <= to.max:
        return False
    from amp_rewrite.evidence.guard import proved_overflowing

    return bool(proved_overflowing(draft.view, draft.paint(), sizes, to, draft.hazards.saturate))
