"""What convert takes from data: ranges to guard by, a tolerance to repair to. Its options, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amp_rewrite.cli.feeding import FEEDING, Feeding

if TYPE_CHECKING:
    from amp_rewrite.pipeline.convert import Converted
    from amp_rewrite.pipeline.repair import Repaired
    from amp_rewrite.settings.config_file import Settings

_FILE = click.Path(path_type=Path)

# How near the outputs must be.
CRITERION = (
    click.option("--rtol", type=float, metavar="X", help="How near: |a - b| <= atol + rtol |a| in every element."),
    click.option("--atol", type=float, metavar="X", help="See --rtol."),
    click.option("--metric", metavar="NAME", help="How near: cosine, psnr, snr, top1 or scaled, with its bound."),
    click.option("--at-least", type=float, metavar="X", help="The bound of a metric of which more is better."),
    click.option("--at-most", type=float, metavar="X", help="The bound of a metric of which less is better."),
)

# What convert takes from data.
MEASURING = (
    click.option("--ranges", type=_FILE, metavar="FILE", help="Keep in float32 what did not fit, as calibrate saw it."),
    click.option(
        "--headroom", type=float, metavar="X", help="The factor by which values must fit the type.  [default: 2]"
    ),
    *FEEDING,
    *CRITERION,
    click.option("--budget", type=int, metavar="N", help="With --rtol or --metric: trials at most.  [default: 100]"),
)

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Measuring:
    """What the options of MEASURING say. `criterion`: what was given of CRITERION."""

    ranges: Path | None
    headroom: float | None
    feeding: Feeding
    criterion: dict[str, Any]
    budget: int | None

    @classmethod
    def taken(cls, given: dict[str, Any]) -> Measuring:
        """Takes the options out of all that were given. UsageError where those of FEEDING contradict each other."""
        words = ("rtol", "atol", "metric", "at_least", "at_most")
        criterion = {word: value for word in words if (value := given.pop(word)) is not None}
        rest = {word: given.pop(word) for word in ("ranges", "headroom", "budget")}
        return cls(feeding=Feeding.taken(given), criterion=criterion, **rest)

    def completed(self, settings: Settings) -> Measuring:
        """The same with what settings say of what the command line leaves open.

        Of a file that names ranges and data, the ranges guard, and the data are for a repair alone. UsageError for
        options of the command line that contradict or lack each other.
        """
        ranges, feeding = self.ranges, self.feeding
        if ranges is None and settings.ranges and (self.criterion or not feeding):
            ranges = Path(settings.ranges)
        if self.criterion or ranges is None:
            feeding = feeding.completed(settings)
        found = replace(self, ranges=ranges, feeding=feeding)
        found._check()
        return replace(found, headroom=settings.headroom) if found.headroom is None else found

    def _check(self) -> None:
        if self.criterion and not self.feeding:
            word = next(iter(self.criterion)).replace("_", "-")
            raise click.UsageError(
                f"--{word} says how near the outputs must be, and nothing is fed; add --data FILE, or --random"
            )
        if self.budget is not None and not self.criterion:
            raise click.UsageError("--budget bounds the trials of a repair, and none is asked for; add --rtol X")
        if self.headroom is not None and not self.feeding and self.ranges is None:
            raise click.UsageError(
                "--headroom is for what was measured, and nothing was; add --data FILE, or --ranges FILE"
            )
        if self.ranges is not None and self.feeding and not self.criterion:
            raise click.UsageError(
                "--ranges and what is fed both say which values there are; leave one out, or add --rtol X to repair"
            )

    def converted(self, model: Path, wanted: dict[str, Any], tell: Tell | None) -> tuple[Converted, Repaired | None]:
        """The conversion, guarded or repaired where that is asked for; `wanted` are arguments of `convert`."""
        from amp_rewrite.files.model import Model
        from amp_rewrite.pipeline.convert import convert

        said = {"ranges": self.ranges, "headroom": self.headroom}
        wanted |= {word: value for word, value in said.items() if value is not None}
        if not self.feeding:
            return convert(model, **wanted), None
        from amp_rewrite.pipeline.repair import repair

        loaded = Model.load(model)
        more = dict(wanted) if self.budget is None else {**wanted, "budget": self.budget}
        feed, nonfinite = self.feeding.feed(loaded), self.feeding.allow_nonfinite
        repaired = repair(loaded, feed, **self.criterion, **more, allow_nonfinite=nonfinite, progress=tell)
        return repaired.converted, repaired
