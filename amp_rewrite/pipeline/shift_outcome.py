"""The outcome of a shift: a draft, shifted or left as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.pipeline.draft import Draft

if TYPE_CHECKING:
    from amp_rewrite.rewrite.shift.emit import Shift


@dataclass(frozen=True)
class ShiftOutcome:
    """A draft that was shifted, or left as it is with notes about why.

    `plain`: the draft without the shift, with the notes. `ranges`: those of the shifted values, where there are ranges.
    `shift`: None if nothing is shifted.
    """

    draft: Draft
    plain: Draft
    ranges: Ranges | None = None
    shift: Shift | None = None
