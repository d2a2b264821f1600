"""Guidance: the data for a conversion, as plain data, and the guided conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model, ModelSource
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.repaired import Repaired


@dataclass(frozen=True, slots=True)
class Guidance:
    """Data for a conversion: as `convert` and `repair` take them, but as paths instead of loaded data.

    `check`: without data or ranges, the keywords of `Feed.randomly` for a check; None: no check. `criterion`: without
    one ranges guard.
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

    def __bool__(self) -> bool:
        return bool(self.data or self.ranges)

    def feed(self, source: Model) -> Feed | None:
        """Return the batches for a model; None without data."""
        from amp_rewrite.evidence.data.feed import Feed  # late: most conversions have no data

        back: dict[str, Any] = {"feedback": self.feedback, "steps": self.steps}
        return Feed.of(self.data, source, allow_nonfinite=self.allow_nonfinite, **back) if self.data else None

    def convert(
        self,
        source: ModelSource,
        options: Mapping[str, Any],
        feed: Feed | None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> tuple[Converted, Repaired | None]:
        """Convert a model, guarded by the ranges; guard or repair it by a feed."""
        from amp_rewrite.pipeline.convert import convert

        stated = {"ranges": self.ranges or None, "headroom": self.headroom}
        words = {**options, **{word: value for word, value in stated.items() if value is not None}}
        if feed is None:
            check = False if self.check is None else self.check
            return convert(source, **words, check=check, progress=progress), None
        from amp_rewrite.pipeline.repair import repair

        words |= {} if self.budget is None else {"budget": self.budget}
        words |= {"allow_nonfinite": self.allow_nonfinite, "progress": progress, **self.criterion}
        repaired = repair(source, feed, **words)
        return repaired.converted, repaired
