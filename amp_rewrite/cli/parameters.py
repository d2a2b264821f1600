"""The options that commands share, and the settings that they come to together with file and environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from amp_rewrite.errors import ModelError, advice
from amp_rewrite.settings.config_file import Settings, settings
from amp_rewrite.settings.options import DATA, KEYWORDS, OPS, OPTIONS, OUTPUT, PAINTING, TARGET, Kind, Option

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
TOLERANCE, GENERAL = "Tolerance", "General"
_HEADINGS = (OPS, TARGET, DATA, TOLERANCE, OUTPUT, GENERAL)


class Choice(click.Choice[str]):
    """One of a few words; an error suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            hint = advice(str(value), self.choices, f"use one of {', '.join(self.choices)}")
            self.fail(f"unknown word {value!r}; {hint}", param, ctx)
        return str(value)


class _Grouped(click.Option):
    """An option that stands below a heading of its command's help."""

    def __init__(self, *names: Any, heading: str = GENERAL, **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading


class Command(click.Command):
    """A command whose help shows options below headings where it has more than one."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(param, "heading", GENERAL), []).append(record)
        for heading in sorted(rows, key=_HEADINGS.index):
            with formatter.section(heading if len(rows) > 1 else "Options"):
                formatter.write_dl(rows[heading])


def option(names: str, metavar: str | None, words: str, heading: str = GENERAL, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an option below a heading. `names`: as click takes them, separated by spaces."""
    return click.option(*names.split(), cls=_Grouped, heading=heading, metavar=metavar, help=words, **more)


def flag(names: str, words: str, heading: str = GENERAL) -> Callable[[F], F]:
    """Return the decorator of an option without a value."""
    return option(names, None, words, heading, is_flag=True)


def command(*options: Callable[[F], F], group: click.Group | None = None) -> Callable[[F], click.Command]:
    """Return a decorator that makes a command with options, in the order of its help."""

    def decorate(function: F) -> click.Command:
        for decorator in reversed(options):
            function = decorator(function)
        return (group or click).command(cls=Command)(function)

    return decorate


def _of(row: Option) -> Callable[[Any], Any]:
    names = f"--{row.key}"
    more: dict[str, Any] = {"type": float if row.kind is Kind.NUMBER else None}
    if row.separator:
        more = {"callback": _split(row.separator)}
    elif row.kind is Kind.LIST:
        more = {"multiple": True}
    elif row.kind is Kind.SWITCH:
        names += "" if row.flag else f"/--no-{row.key}"
        more = {"is_flag": True, "default": None}
    return option(names, row.metavar or None, row.help, row.group, **more)


def _split(separator: str) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    return lambda _context, _option, text: tuple(filter(None, text.split(separator))) if text else ()


ROWS = {row.name: _of(row) for row in OPTIONS if row.help}
"""The option of each row of the table, by name."""

model = click.argument("model", type=FILE)
PAIR = (click.argument("a", type=FILE), click.argument("b", type=FILE))
"""Two models or reports to compare."""
config = option("--config", "FILE", "Settings in TOML.  [default: ./amp.toml]", type=FILE)
as_json = flag("--json as_json", "Print JSON.")
verbose = flag("-v --verbose", "Print every op.")


def output(default: str, metavar: str = "OUT", words: str = "") -> Callable[[F], F]:
    """Return the option for the file that a command writes."""
    return option("-o --output", metavar, f"{words}[default: {default}]", OUTPUT, type=FILE)


def quiet(but: str = "errors and what --json asks for") -> Callable[[F], F]:
    """Return the option that silences a command, `but` for some output."""
    return flag("-q --quiet", f"Print nothing but {but}.")


STEP = tuple(ROWS[name] for name in PAINTING)
"""Options of a conversion that a training step takes, too."""

LISTING = (ROWS["to"], ROWS["lists"], ROWS["level"], config)
"""Options that decide which op lists are in force."""

CONVERSION = (*(ROWS[name] for name in KEYWORDS), config)
"""Options of a conversion."""

SAVING = (ROWS["external_data"], ROWS["overwrite"])
"""Options of a command that writes a model."""


FEEDING = (
    ROWS["data"],
    flag("--random", "Feed random numbers instead of data; the report says so.", DATA),
    option("--shape", "NAME=1,128", "With --random: the shape of an input.", DATA, multiple=True),
    option("--int-range", "NAME=0,100", "With --random: integers from 0 to 99.", DATA, multiple=True),
    option("--batches", "N", "With --random: how many batches.  [default: 1]", DATA, type=int),
    option("--seed", "N", "With --random: another seed, other numbers.  [default: 0]", DATA, type=int),
    flag("--allow-nonfinite", "Data may hold NaN and infinity.", DATA),
)
"""Options for the input data of a model."""

CRITERION = (
    option("--rtol", "X", "How near: |a - b| <= atol + rtol |a| in every element.", TOLERANCE, type=float),
    option("--atol", "X", "See --rtol.", TOLERANCE, type=float),
    option("--metric", "NAME", "How near: cosine, psnr, snr, top1 or scaled, with its bound.", TOLERANCE),
    option("--at-least", "X", "The bound of a metric of which more is better.", TOLERANCE, type=float),
    option("--at-most", "X", "The bound of a metric of which less is better.", TOLERANCE, type=float),
)
"""Options that say how near outputs must be."""

MEASURING = (
    ROWS["ranges"],
    ROWS["headroom"],
    *FEEDING,
    *CRITERION,
    option("--budget", "N", "With --rtol or --metric: trials at most.  [default: 100]", TOLERANCE, type=int),
)
"""Options of a conversion that data guides."""


def keywords(settings: Settings) -> dict[str, Any]:
    """Return the keywords of `convert` that settings state."""
    return {name: getattr(settings, name) for name in KEYWORDS}


def in_force(given: dict[str, Any]) -> Settings:
    """Return the settings of one run, from the options given, the environment and a file."""
    return settings(given, os.environ, config=given.pop("config", None))


def check_target(output: Path, model: Path, settings: Settings, *, asked: bool, lost: str) -> None:
    """Raise ModelError if a model made of `model` cannot be written to `output`, and say why.

    `asked`: --overwrite stands on the command line. A settings file cannot permit replacing the model that is read,
    which loses what `lost` says.
    """
    from amp_rewrite.files.store import check_target, replaces

    if not asked and replaces(output, model):
        raise ModelError(
            f"{output} is the model that is read: replacing it loses {lost}; name another output, or add --overwrite"
            " to this command"
        )
    check_target(output, settings.overwrite, read=model)
