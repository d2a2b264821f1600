"""The outcome of a shift: a draft, shifted or left as it is, and the bounds of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_rewrite.decide.bounds.bound import Bound, BoundOptions, classified, scaled
from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Ranges, key
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.pipeline.draft import Draft

if TYPE_CHECKING:
    from amp_rewrite.rewrite.shift.shift import Shift


@dataclass(frozen=True)
class ShiftOutcome:
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
        return {v: scaled(known[o], e, DType.FLOAT16) for v, (o, e) in self.origins().items() if o in known}

    def origins(self) -> Mapping[ValueId, tuple[ValueId, int]]:
        """Return, for each value of the shifted view, the one that it was before, and its exponent."""
        assert self.shift is not None
        view, before = self.shift.view, self.before
        held = {key(before, value.id): value.id for value in before.values}
        found: dict[ValueId, tuple[ValueId, int]] = {}
        for value in view.values:
            origin = self.shift.origins.get(value.name)
            if origin is not None:
                found[value.id] = origin.value, origin.exponent
            elif (same := held.get(key(view, value.id))) is not None:
                found[value.id] = same, 0
        return found

    @property
    def exponent(self) -> int:
        """Largest exponent of the shift."""
        origins = self.shift.origins.values() if self.shift is not None else ()
        return max((origin.exponent for origin in origins), default=0)


def unshifted_draft(draft: Draft, ranges: Ranges | None = None) -> ShiftOutcome:
    """Return the draft as it is."""
    return ShiftOutcome(draft, draft, draft.view, ranges)


def bounds_before(tried: ShiftOutcome) -> Mapping[ValueId, Bound]:
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
