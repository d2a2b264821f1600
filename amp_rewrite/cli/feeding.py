"""What a command feeds to a model: the options that say so, and the Feed that they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from amp_rewrite.evidence.data.feed import Feed
    from amp_rewrite.files.model import Model
    from amp_rewrite.settings.config_file import Settings

# What a model is fed.
FEEDING = (
    click.option(
        "--data", metavar="FILE|FOLDER", help="What the model is fed: a .npz file, a .npy file, or a folder of them."
    ),
    click.option("--random", is_flag=True, help="Feed random numbers instead of data; the report says so."),
    click.option("--shape", multiple=True, metavar="NAME=1,128", help="With --random: the shape of an input."),
    click.option("--int-range", multiple=True, metavar="NAME=0,100", help="With --random: integers from 0 to 99."),
    click.option("--batches", type=int, metavar="N", help="With --random: how many batches.  [default: 1]"),
    click.option("--seed", type=int, metavar="N", help="With --random: another seed, other numbers.  [default: 0]"),
    click.option("--allow-nonfinite", is_flag=True, help="Data may hold NaN and infinity."),
)


@dataclass(frozen=True, slots=True)
class Feeding:
    """What the options of FEEDING say."""

    data: str | None
    random: bool
    shape: tuple[str, ...]
    int_range: tuple[str, ...]
    batches: int | None
    seed: int | None
    allow_nonfinite: bool

    @classmethod
    def taken(cls, given: dict[str, Any]) -> Feeding:
        """Takes the options out of all that were given. UsageError for options that contradict each other."""
        found = cls(**{name: given.pop(name) for name in cls.__slots__})
        if found.data is not None and found.random:
            raise click.UsageError("--data and --random both say what to feed; leave one out")
        drawn = {"shape": found.shape, "int-range": found.int_range, "batches": found.batches, "seed": found.seed}
        for name, value in drawn.items():
            if value not in (None, ()) and not found.random:
                raise click.UsageError(f"--{name} says what random numbers are like, and --random is missing; add it")
        return found

    def __bool__(self) -> bool:
        return self.data is not None or self.random

    def completed(self, settings: Settings) -> Feeding:
        """The same; where the command line says nothing, with the data of the settings."""
        return self if self else replace(self, data=settings.data)

    def needed(self) -> Feeding:
        """The same; UsageError where nothing says what to feed."""
        if not self:
            raise click.UsageError("nothing says what to feed; add --data FILE, or --random")
        return self

    def feed(self, model: Model) -> Feed:
        """The batches for a model. FeedError as `Feed.of` and `Feed.randomly` raise it."""
        from amp_rewrite.evidence.data.feed import Feed, parse_int_ranges, parse_shapes

        if self.data is not None:
            return Feed.of(self.data, model, allow_nonfinite=self.allow_nonfinite)
        return Feed.randomly(
            model,
            batches=1 if self.batches is None else self.batches,
            shapes=parse_shapes(self.shape),
            int_ranges=parse_int_ranges(self.int_range),
            seed=self.seed or 0,
        )
