"""Data in commands: input batches, and what `convert` does with them: guard by ranges, repair to a tolerance."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_rewrite.cli import terminal
from amp_rewrite.errors import option_of
from amp_rewrite.settings.request import CRITERION

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.guidance import Guidance
    from amp_rewrite.pipeline.repaired import Repaired
    from amp_rewrite.settings.request import Request


_DRAWN = ("int_range", "batches", "seed")
"""Keys that describe random data."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Values of the options `FEEDING` and of their keys, and of `FEEDBACK`: None for a command without these."""

    data: str | None
    shape: tuple[str, ...]
    int_range: tuple[str, ...]
    batches: int | None
    seed: int | None
    allow_nonfinite: bool | None
    random: bool = False
    feedback: tuple[str, ...] | None = None
    steps: int | None = None

    @classmethod
    def taken(cls, given: dict[str, Any]) -> DataOptions:
        """Take the options out of all that were given. UsageError for options that contradict each other."""
        checks = "random" not in given
        feeding = cls(**{name: given.pop(name) for name in cls.__slots__ if name in given})
        if feeding.data is not None and feeding.random:
            raise click.UsageError("--data and --random exclude each other; leave one out")
        described = next((name for name in ("shape", *_DRAWN) if getattr(feeding, name) not in (None, ())), None)
        if described and not (feeding.random or (checks and feeding.data is None)):
            remedy = "leave it out, or the data" if checks else "add --random"
            raise click.UsageError(f"{option_of(described)} describes random input; {remedy}")
        return feeding

    def __bool__(self) -> bool:
        return self.data is not None or self.random

    def completed(self, settings: Request) -> DataOptions:
        """Return the same, with the data and keys of the settings where the command line states none."""
        names = ("allow_nonfinite", *(() if self.data else _DRAWN), *(() if self else ("data",)))
        names = names if self.feedback is None else (*names, "feedback", "steps")
        silent = [name for name in names if getattr(self, name) in (None, ())]
        return replace(self, **{name: getattr(settings, name) for name in silent})

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

        back: dict[str, Any] = {"feedback": self.feedback, "steps": self.steps} if self.feedback is not None else {}
        if self.data is not None:
            with warnings.catch_warnings(record=True, category=UserWarning) as remarks:
                warnings.simplefilter("always", UserWarning)
                feed = Feed.of(self.data, model, allow_nonfinite=bool(self.allow_nonfinite), **back)
            for remark in remarks:
                terminal.talk(str(remark.message), quiet=quiet)
            return feed
        return Feed.randomly(model, **self.drawn(), **back)

    def drawn(self) -> dict[str, Any]:
        """Return the keywords of `Feed.randomly`."""
        from amp_rewrite.evidence.data.random_batches import parse_int_ranges, parse_shapes

        return {
            "batches": 1 if self.batches is None else self.batches,
            "shapes": parse_shapes(self.shape),
            "int_ranges": parse_int_ranges(self.int_range),
            "seed": self.seed or 0,
        }

    def compared(
        self, function: Callable[..., R], a: Path, b: Path, *, quiet: bool, verbose: bool = False, **words: Any
    ) -> R:
        """Return the result of `verify` or `locate` for two models on the batches, with a progress bar."""
        from amp_rewrite.files.model import Model

        reference = Model.load(a)
        feed = self.feed(reference, quiet=True)  # its notes are those of the result
        words |= {"allow_nonfinite": bool(self.allow_nonfinite), "names": (str(a), str(b))}
        with terminal.progress(function.__name__, quiet=quiet, verbose=verbose) as progress:
            return function(reference, Model.load(b), feed, progress=progress, **words)


def stated_criterion(given: dict[str, Any]) -> dict[str, Any]:
    """Take the keywords of a criterion out of all that were given; return those that are stated."""
    values = {word: given.pop(word) for word in CRITERION if word in given}
    return {word: value for word, value in values.items() if value is not None}


R = TypeVar("R")
Tell = Callable[[str, int, int], None]


def without_drawing(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line, without options and keys of random data."""
    rest = iter(words)
    for word in rest:
        name, assigned, value = word.partition("=")
        if name == "--shape" or (name == "--set" and assigned and _draws(value)):
            if not assigned:
                next(rest, None)
        elif name == "--set" and not assigned:
            value = next(rest, "")
            yield from () if _draws(value) else (word, value)
        else:
            yield word


def _draws(setting: str) -> bool:
    return setting.partition("=")[0].strip().replace("-", "_") in _DRAWN


@dataclass(frozen=True, slots=True)
class MeasuringOptions:
    """Values of the options `MEASURING` and of their keys. `criterion`: those of its keywords that were given."""

    ranges: Path | None
    headroom: float | None
    feeding: DataOptions
    criterion: dict[str, Any]
    budget: int | None
    check: bool | None

    @classmethod
    def taken(cls, given: dict[str, Any]) -> MeasuringOptions:
        """Take the options out of all that were given. UsageError for options that contradict each other."""
        criterion = stated_criterion(given)
        ranges, headroom, budget, check = (given.pop(word) for word in ("ranges", "headroom", "budget", "check"))
        folder = None if ranges is None else Path(ranges)
        return cls(folder, headroom, DataOptions.taken(given), criterion, budget, check)

    def completed(self, settings: Request) -> MeasuringOptions:
        """Return the same, completed by settings where the command line is silent.

        A criterion of a file judges where there is data. If a file names ranges and data, the ranges guard, and only a
        repair uses the data. UsageError for options of the command line that contradict or lack each other.
        """
        ranges, feeding = self.ranges, self.feeding
        criterion = self.criterion
        if not criterion and (feeding or settings.data):
            criterion = stated_criterion(dict(vars(settings)))
        if ranges is None and settings.ranges and (criterion or not feeding):
            ranges = Path(settings.ranges)
        if criterion or ranges is None or feeding:
            feeding = feeding.completed(settings)
        self._check(criterion, feeding, ranges)
        check = settings.check if self.check is None else self.check
        headroom = settings.headroom if self.headroom is None else self.headroom
        budget = settings.budget if self.budget is None and criterion else self.budget
        return MeasuringOptions(ranges, headroom, feeding, criterion, budget, check)

    def _check(self, criterion: dict[str, Any], feeding: DataOptions, ranges: Path | None) -> None:
        if criterion and not feeding:
            word = option_of(next(iter(criterion)))
            raise click.UsageError(f"{word} compares outputs and needs input data; add --data FILE")
        if self.budget is not None and not criterion:
            raise click.UsageError(f"{option_of('budget')} bounds the trials of a repair; add --tolerance X to repair")
        if self.headroom is not None and not feeding and ranges is None:
            raise click.UsageError(
                f"{option_of('headroom')} applies to measured ranges, and there are none; add --data FILE, or --ranges"
                " FILE"
            )
        if (feeding.feedback or feeding.steps) and not feeding:
            raise click.UsageError(f"{option_of('feedback')} is about runs on data; add --data FILE")
        if ranges is not None and feeding and not criterion:
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
            check=feeding.drawn() if self.check else None,
            ranges=os.fspath(self.ranges or ""),
            headroom=self.headroom,
            criterion=self.criterion,
            budget=self.budget,
            allow_nonfinite=bool(feeding.allow_nonfinite),
            feedback=feeding.feedback or (),
            steps=feeding.steps,
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
