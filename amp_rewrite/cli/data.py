"""Data of commands: input batches, and what `convert` does with them: guard by ranges, repair to a tolerance."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from amp_rewrite.cli import terminal
from amp_rewrite.errors import option_of
from amp_rewrite.settings.request import CRITERION, KEYWORDS, Progress

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model
    from amp_rewrite.pipeline.conversion import Converted
    from amp_rewrite.pipeline.guidance import Guidance
    from amp_rewrite.pipeline.repaired import Repaired
    from amp_rewrite.settings.request import Request

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of a command that runs models: data, or random numbers."""

    settings: Request
    shapes: tuple[str, ...]
    random: bool
    back: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Request, given: dict[str, Any], *, feedback: bool = True) -> Batches:
        """Take the options of batches out of all that were given. UsageError without data, and for too many options.

        `feedback`: the command runs models more than once.
        """
        random, shapes = given.pop("random"), given.pop("shape")
        if shapes and not random:
            raise click.UsageError("--shape describes random input; add --random")
        if not (random or settings.data):
            raise click.UsageError("no input data; add --data FILE, or --random")
        back = {"feedback": settings.feedback, "steps": settings.steps} if feedback else {}
        return cls(settings, shapes, random, back)

    def feed(self, model: Model, *, quiet: bool) -> Feed:
        """Return the batches for a model, and name ignored arrays unless `quiet`.

        FeedError as `Feed.of` and `Feed.randomly` raise it.
        """
        from amp_rewrite.evidence.data.feed import Feed

        if self.random:
            return Feed.randomly(model, **drawn(self.settings, self.shapes), **self.back)
        with _remarked(quiet):
            nonfinite = bool(self.settings.allow_nonfinite)
            return Feed.of(self.settings.data or "", model, allow_nonfinite=nonfinite, **self.back)

    def compared(self, function: Callable[..., R], a: Path, b: Path, *, quiet: bool, **words: Any) -> R:
        """Return the result of `verify` or `locate` for two models on the batches, with a progress bar."""
        from amp_rewrite.files.model import Model

        reference = Model.load(a)
        feed = self.feed(reference, quiet=True)  # its notes are those of the result
        words |= {"allow_nonfinite": bool(self.settings.allow_nonfinite), "names": (str(a), str(b))}
        with terminal.progress(function.__name__, quiet=quiet) as progress:
            return function(reference, Model.load(b), feed, progress=progress, **words)


@contextmanager
def _remarked(quiet: bool) -> Iterator[None]:
    with warnings.catch_warnings(record=True, category=UserWarning) as remarks:
        warnings.simplefilter("always", UserWarning)
        yield
    for remark in remarks:
        terminal.talk(str(remark.message), quiet=quiet)


def drawn(settings: Request, shapes: Collection[str]) -> dict[str, Any]:
    """Return the keywords of `Feed.randomly`."""
    from amp_rewrite.evidence.data.random_batches import parse_int_ranges, parse_shapes

    return {"shapes": parse_shapes(shapes), "int_ranges": parse_int_ranges(settings.int_range)}


def criterion(settings: Request) -> dict[str, Any]:
    """Return the keywords of a criterion that are stated."""
    return {word: value for word in CRITERION if (value := getattr(settings, word)) is not None}


def guidance(settings: Request, shapes: Collection[str], stated: Collection[str]) -> Guidance:
    """Return the data that guide a conversion.

    A criterion of a settings file judges where there is data; if a file names ranges and data, the ranges guard, and
    only a repair uses the data. UsageError for options of the command line, `stated`, that lack or contradict others.
    """
    from amp_rewrite.pipeline.guidance import Guidance

    judged = criterion(settings) if settings.data else {}
    ranges, data = settings.ranges or "", settings.data or ""
    for word in stated:
        if word in CRITERION and not data:
            raise click.UsageError(f"{option_of(word)} compares outputs and needs input data; add --data FILE")
        if word == "budget" and not judged:
            raise click.UsageError(f"{option_of(word)} bounds the trials of a repair; add --tolerance X to repair")
        if word == "headroom" and not (data or ranges):
            fact = "applies to measured ranges, and there are none"
            raise click.UsageError(f"{option_of(word)} {fact}; add --data FILE, or --ranges FILE")
        if word in ("feedback", "steps") and not data:
            raise click.UsageError(f"{option_of(word)} is about runs on data; add --data FILE")
    if data and shapes:
        raise click.UsageError("--shape describes random input; leave it out, or the data")
    if ranges and data and not judged:
        if {"data", "ranges"} <= {*stated}:
            ways = "leave one out, or add --tolerance X to repair"
            raise click.UsageError(f"--ranges and input data both give ranges; {ways}")
        data = ""
    return Guidance(
        data=data,
        check=drawn(settings, shapes) if settings.check else None,
        ranges=ranges,
        headroom=settings.headroom,
        criterion=judged,
        budget=settings.budget if judged else None,
        allow_nonfinite=bool(settings.allow_nonfinite),
        feedback=settings.feedback,
        steps=settings.steps,
    )


def convert_guided(
    model: Path, settings: Request, guided: Guidance, tell: Progress | None, *, quiet: bool
) -> tuple[Converted, Repaired | None]:
    """Convert a model by the settings, guarded or repaired by data where these ask for that."""
    from amp_rewrite.files.model import Model

    options = {name: getattr(settings, name) for name in KEYWORDS}
    if not guided.data:
        return guided.convert(model, options, None, tell)
    source = Model.load(model)
    with _remarked(quiet or bool(guided.criterion)):  # a verdict has the remarks as notes
        feed = guided.feed(source)
    return guided.convert(source, options, feed, tell)
