"""Data in commands: input batches, and what `convert` does with them: guard by ranges, repair to a tolerance."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_rewrite.cli import terminal
from amp_rewrite.settings.criterion import CRITERION

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.convert import Converted
    from amp_rewrite.pipeline.guidance import Guidance
    from amp_rewrite.pipeline.repaired import Repaired
    from amp_rewrite.settings.config_file import Settings


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Values of the options `FEEDING`."""

    data: str | None
    random: bool
    shape: tuple[str, ...]
    int_range: tuple[str, ...]
    batches: int | None
    seed: int | None
    allow_nonfinite: bool
    smoke: bool

    @classmethod
    def taken(cls, given: dict[str, Any]) -> DataOptions:
        """Take the options out of all that were given. UsageError for options that contradict each other."""
        smoke = given.pop("smoke", False)
        feeding = cls(smoke=smoke, **{name: given.pop(name) for name in cls.__slots__ if name != "smoke"})
        if feeding.data is not None and (feeding.random or smoke):
            word = "random" if feeding.random else "smoke"
            raise click.UsageError(f"--data and --{word} exclude each other; leave one out")
        if smoke and feeding.batches is not None:
            raise click.UsageError("--smoke feeds one batch; leave out --batches, or write --random for --smoke")
        feeding = replace(feeding, random=feeding.random or smoke)
        for name in ("shape", "int-range", "batches", "seed"):
            if getattr(feeding, name.replace("-", "_")) not in (None, ()) and not feeding.random:
                raise click.UsageError(f"--{name} describes random input; add --random")
        return feeding

    def __bool__(self) -> bool:
        return self.data is not None or self.random

    def completed(self, settings: Settings) -> DataOptions:
        """Return the same, with the data of the settings where the command line names none."""
        return self if self else replace(self, data=settings.data)

    def needed(self) -> DataOptions:
        """Return the same. UsageError if no option says what to feed."""
        if not self:
            raise click.UsageError("no input data; add --data FILE, or --random")
        return self

    def feed(self, model: Model, *, quiet: bool) -> Feed:
        """Return the batches for a model, and name ignored arrays unless `quiet`.

        FeedError as `Feed.of` and `Feed.randomly` raise it.
        """
        from amp_rewrite.evidence.data.feed import Feed

        if self.data is not None:
            with warnings.catch_warnings(record=True, category=UserWarning) as remarks:
                warnings.simplefilter("always", UserWarning)
                feed = Feed.of(self.data, model, allow_nonfinite=self.allow_nonfinite)
            for remark in remarks:
                terminal.talk(str(remark.message), quiet=quiet)
            return feed
        return Feed.randomly(model, **self.drawn())

    def drawn(self) -> dict[str, Any]:
        """Return the keywords of `Feed.randomly`."""
        from amp_rewrite.evidence.data.random_batches import parse_int_ranges, parse_shapes

        return {
            "batches": 1 if self.batches is None else self.batches,
            "shapes": parse_shapes(self.shape),
            "int_ranges": parse_int_ranges(self.int_range),
            "seed": self.seed or 0,
            "assume": self.smoke,
        }

    def compared(self, function: Callable[..., R], a: Path, b: Path, *, quiet: bool, **words: Any) -> R:
        """Return the result of `verify` or `locate` for two models on the batches, with a progress bar."""
        from amp_rewrite.files.model import Model

        reference = Model.load(a)
        feed = self.feed(reference, quiet=True)  # its notes are those of the result
        words |= {"allow_nonfinite": self.allow_nonfinite, "names": (str(a), str(b))}
        with terminal.progress(function.__name__, quiet=quiet) as progress:
            return function(reference, Model.load(b), feed, progress=progress, **words)


R = TypeVar("R")
Tell = Callable[[str, int, int], None]
DRAWING = {"--random": False, "--smoke": False, "--batches": True, "--seed": True, "--shape": True, "--int-range": True}
"""Options of random data; True for those with a value."""


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """Values of the options `MEASURING`. `criterion`: the keywords in `CRITERION` that were given."""

    ranges: Path | None
    headroom: float | None
    feeding: DataOptions
    criterion: dict[str, Any]
    budget: int | None

    @classmethod
    def taken(cls, given: dict[str, Any]) -> MeasuringOptions:
        """Take the options out of all that were given. UsageError for options that contradict each other."""
        criterion = {word: value for word in CRITERION if (value := given.pop(word)) is not None}
        ranges, headroom, budget = (given.pop(word) for word in ("ranges", "headroom", "budget"))
        return cls(None if ranges is None else Path(ranges), headroom, DataOptions.taken(given), criterion, budget)

    def completed(self, settings: Settings) -> MeasuringOptions:
        """Return the same, completed by settings where the command line is silent.

        If a file names ranges and data, the ranges guard, and only a repair uses the data. UsageError for options of
        the command line that contradict or lack each other.
        """
        ranges, feeding = self.ranges, self.feeding
        if ranges is None and settings.ranges and (self.criterion or not feeding):
            ranges = Path(settings.ranges)
        if self.criterion or ranges is None:
            feeding = feeding.completed(settings)
        measuring = replace(self, ranges=ranges, feeding=feeding)
        measuring._check()
        return measuring if self.headroom is not None else replace(measuring, headroom=settings.headroom)

    def _check(self) -> None:
        if self.criterion and not self.feeding:
            word = next(iter(self.criterion)).replace("_", "-")
            raise click.UsageError(f"--{word} compares outputs and needs input data; add --data FILE, or --random")
        if self.budget is not None and not self.criterion:
            raise click.UsageError("--budget bounds the trials of a repair; add --tolerance X to repair")
        if self.headroom is not None and not self.feeding and self.ranges is None:
            raise click.UsageError(
                "--headroom applies to measured ranges, and there are none; add --data FILE, or --ranges FILE"
            )
        if self.ranges is not None and self.feeding and not self.criterion:
            raise click.UsageError(
                "--ranges and input data both give ranges; leave one out, or add --tolerance X to repair"
            )

    @property
    def guidance(self) -> Guidance:
        """The same as plain data."""
        from amp_rewrite.pipeline.guidance import Guidance

        feeding = self.feeding
        return Guidance(
            data=feeding.data or "",
            random=feeding.drawn() if feeding.random and feeding.data is None else None,
            ranges=os.fspath(self.ranges or ""),
            headroom=self.headroom,
            criterion=self.criterion,
            budget=self.budget,
            allow_nonfinite=feeding.allow_nonfinite,
        )

    def converted(
        self, model: Path, wanted: dict[str, Any], tell: Tell | None, *, quiet: bool = False
    ) -> tuple[Converted, Repaired | None]:
        """Convert `model` with the arguments `wanted`; guard or repair it if options ask for that."""
        if not self.feeding:
            return self.guidance.convert(model, wanted, None, tell)
        from amp_rewrite.files.model import Model

        source = Model.load(model)
        feed = self.feeding.feed(source, quiet=quiet or bool(self.criterion))  # a verdict has the remarks as notes
        return self.guidance.convert(source, wanted, feed, tell)
