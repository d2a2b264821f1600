"""A conversion with data as plain words, for the command line and for batches: paths instead of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.option import Progress

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.pipeline.repaired import Repaired


@dataclass(frozen=True, slots=True)
class Guidance:
    """Data for a conversion, as plain words.

    `check`: without data or ranges, the keywords of `Feed.randomly` for a check; None: no check. `criterion`: without
    one the ranges of the data guard.
    """

    data: str = ""
    check: Mapping[str, Any] | None = None
    ranges: str = ""
    headroom: float | None = None
    criterion: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    allow_nonfinite: bool = False
    feedback: tuple[str, ...] = ()
    steps: int | None = None

    def feed(self, source: Model) -> Feed | None:
        """Return the batches for a model; None without data."""
        from amp_rewrite.evidence.data.feed import Feed  # late: most conversions have no data

        if not self.data:
            return None
        nonfinite, feedback, steps = self.allow_nonfinite, self.feedback, self.steps
        return Feed.of(self.data, source, allow_nonfinite=nonfinite, feedback=feedback, steps=steps)

    def convert(
        self,
        source: ModelSource,
        options: Mapping[str, Any],
        feed: Feed | None,
        progress: Progress | None = None,
    ) -> tuple[Converted, Repaired | None]:
        """Convert a model, guarded by the ranges or a feed; repair it by a feed and a criterion."""
        headroom = HEADROOM if self.headroom is None else self.headroom
        if feed is None or not self.criterion:
            check = False if self.check is None else self.check
            measured: dict[str, Any] = {"data": feed, "ranges": self.ranges or None, "headroom": headroom}
            return convert(source, **measured, **options, check=check, progress=progress), None
        from amp_rewrite.pipeline.repair import BUDGET, repair

        budget = BUDGET if self.budget is None else self.budget
        repaired = repair(
            source, feed, headroom=headroom, budget=budget, progress=progress, **options, **self.criterion
        )
        return repaired.converted, repaired
