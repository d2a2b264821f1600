"""The options that commands share, and the settings that they come to together with file and environment.

The options of a conversion themselves stand in `settings/options.py`, those of a criterion in `settings/criterion.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from amp_rewrite.cli import files, terminal
from amp_rewrite.cli.completion import patterns
from amp_rewrite.cli.examples import write_examples
from amp_rewrite.errors import ModelError, advice
from amp_rewrite.settings import criterion
from amp_rewrite.settings.config_file import Settings, settings
from amp_rewrite.settings.option import ADVANCED, DATA, OUTPUT, PRECISION, Kind, Option
from amp_rewrite.settings.options import KEYWORDS, OPTIONS
from amp_rewrite.settings.signatures import PAINTING

MANY = "Several models"
"""Heading of options for folders, globs and several files."""

F = TypeVar("F", bound=Callable[..., Any])

FILE, FILE_OUT, MODEL, MODEL_OUT = files.FILE, files.FILE_OUT, files.MODEL, files.MODEL_OUT
MODELS_OUT = files.MODELS_OUT
_HEADINGS = (PRECISION, DATA, OUTPUT, MANY, ADVANCED)
_FEW = 9  # options that need no headings
_MANY = 14  # options from which the short help leaves out the rare ones
_LONG = 30  # characters of an option with its words that leave no room for its help
_COLUMN = 31  # characters of an option, at most, beside its words


class WordChoice(click.Choice[str]):
    """One of a few words; an error suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            hint = advice(value, self.choices, f"use one of {', '.join(self.choices)}")
            self.fail(f"unknown word {value!r}; {hint}", param, ctx)
        return str(value)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"use one of {', '.join(self.choices)}"


class _Fraction(click.types.FloatParamType):
    """A number; an error for a percentage says how it is written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(ValueError):
            if str(value).endswith("%"):
                self.fail(f"{value!r} is not a number; write it as {float(str(value)[:-1]) / 100:g}", param, ctx)
        return super().convert(value, param, ctx)


class _Grouped(click.Option):
    """An option that stands below a heading of its command's help; a `rare` one only in the long help."""

    def __init__(
        self, *names: Any, heading: str = ADVANCED, rare: bool = False, choices: Any = (), **more: Any
    ) -> None:
        super().__init__(*names, **more)
        self.heading, self.rare = heading, rare
        self.choices = choices or _spelled_out(self.metavar or "")

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two cells of the help; a long metavar gives way to NAME, and its words stand in the second."""
        record = super().get_help_record(ctx)
        kind = self.metavar or ""
        if record is None or "|" not in kind or len(record[0]) < _LONG:
            return record
        words, default, rest = record[1].partition("  [default")
        return record[0].replace(kind, "NAME"), f"{words} One of {kind.replace('|', ', ')}.{default}{rest}"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return candidates for the value: choices, those that the metavar spells out, patterns, or files."""
        kind = self.metavar or ""
        if kind == "PATTERN":
            return patterns(incomplete)
        items = _chosen(self.choices, ctx, incomplete)
        if "FILE" in kind:
            items.append(CompletionItem(incomplete, type="file"))
        return items or super().shell_complete(ctx, incomplete)


def _spelled_out(metavar: str) -> tuple[str, ...]:
    """Return the values that a metavar such as "auto|mincut[:GPU]|N" spells out."""
    words = (word.partition("[")[0] for word in metavar.split("|"))
    return tuple(word for word in words if word.islower()) if "|" in metavar else ()


def _chosen(choices: Any, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Return the choices that start so; `choices` is a collection, or a function of the context that returns one."""
    known = choices(ctx) if callable(choices) else choices
    return [CompletionItem(word) for word in known if word.startswith(incomplete)]


def argument(name: str, *, choices: Any, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an argument whose words shells complete."""
    return click.argument(name, shell_complete=lambda ctx, _param, text: _chosen(choices, ctx, text), **more)


def _show_whole(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[__name__] = True
        click.echo(ctx.get_help())
        ctx.exit()


class Command(click.Command):
    """A command whose help shows examples, and many options below headings."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if len(params) > _MANY and any(getattr(param, "rare", False) for param in params):
            more: dict[str, Any] = {"is_eager": True, "expose_value": False, "callback": _show_whole}
            switch = click.Option(["--help-all"], is_flag=True, help="Show all options, and exit.", **more)
            params.insert(len(params) - 1, switch)
        return params

    def invoke(self, ctx: click.Context) -> Any:
        if any(files.is_stdout(path) for path in (ctx.params.get("output"), *ctx.params.get("out", ()))):
            alone = "it has no file beside it"
            reasons = {"as_json": "--json prints there, too", "external_data": alone, "shard_size": alone}
            for name, words in reasons.items():
                if ctx.params.get(name):
                    raise click.UsageError(f"the model goes to stdout, and {words}; name a file with -o", ctx)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        whole = ctx.meta.get(__name__) or not any("--help-all" in option.opts for option in options)
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in options:
            heading = getattr(option, "heading", ADVANCED) if len(options) > _FEW else "Options"
            record = option.get_help_record(ctx) if whole or not getattr(option, "rare", False) else None
            if record is not None:
                rows.setdefault(heading, []).append(record)
        for heading in sorted(rows, key=lambda heading: heading in _HEADINGS and _HEADINGS.index(heading) + 1):
            with formatter.section(heading):
                formatter.write_dl(rows[heading], col_max=_COLUMN)


def option(names: str, metavar: str | None, words: str, heading: str = ADVANCED, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an option below a heading. `names`: as click takes them, separated by spaces."""
    return click.option(*names.split(), cls=_Grouped, heading=heading, metavar=metavar, help=words, **more)


def choice(names: str, words: Sequence[str], says: str, heading: str = ADVANCED, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an option that takes one of a few words."""
    return option(names, "|".join(words), says, heading, type=WordChoice(words), **more)


def form(*words: str, says: str) -> Callable[[F], F]:
    """Return the decorator of the option for the form of the output, which by default is text."""
    return choice("--format form", words, f"Output format; {says}", OUTPUT, default="text", show_default=True)


def flag(names: str, words: str, heading: str = ADVANCED, *, rare: bool = False) -> Callable[[F], F]:
    """Return the decorator of an option without a value."""
    return option(names, None, words, heading, is_flag=True, rare=rare)


def _color(_context: click.Context, _option: click.Parameter, when: str | None) -> None:
    if when:
        terminal.choose(when)


color = option(
    "--color",
    "|".join(terminal.COLORS),
    "Print in color.  [default: auto]",
    type=click.Choice(terminal.COLORS),
    is_eager=True,
    expose_value=False,
    callback=_color,
)


def command(*options: Callable[[F], F]) -> Callable[[F], click.Command]:
    """Return a decorator that makes a command with options, in the order of its help."""

    def decorate(function: F) -> click.Command:
        decorators: tuple[Callable[[Any], Any], ...] = (*options, color)
        for decorator in reversed(decorators):
            function = decorator(function)
        return click.command(cls=Command)(function)

    return decorate


def _of(row: Option) -> Callable[[Any], Any]:
    names = f"--{row.key}"
    more: dict[str, Any] = {"type": _Fraction() if row.kind is Kind.NUMBER else None}
    if row.separator:
        more = {"callback": lambda _context, _option, text: tuple(filter(None, (text or "").split(row.separator)))}
    elif row.kind is Kind.LIST:
        more = {"multiple": True}
    elif row.kind is Kind.SWITCH:
        names += "" if row.flag else f"/--no-{row.key}"
        more = {"is_flag": True, "default": None}
    return option(names, row.metavar or None, row.help, row.group, rare=row.rare, **more)


ROWS = {row.name: _of(row) for row in (*OPTIONS, *criterion.CRITERION.values()) if row.help}
"""The option of each row of the tables, by name."""

model = click.argument("model", type=MODEL)
PAIR = (click.argument("a", type=MODEL), click.argument("b", type=MODEL))
"""Two models or reports to compare."""
config = option("--config", "FILE", "Settings in TOML.  [default: ./amp.toml]", type=FILE)
as_json = flag("--json as_json", "Print JSON.", OUTPUT)
verbose = flag("-v --verbose", "Print every op.", OUTPUT)

html = option("--html", "FILE", "Also draw the result on an .html page.", OUTPUT, type=FILE_OUT)
PAGE = (html, flag("--overwrite", "Replace an existing page.", OUTPUT))
"""Options of a command that writes nothing but a page."""


def output(default: str, what: str = "model") -> Callable[[F], F]:
    """Return the option for the model, or the file, that a command writes."""
    metavar, kind = ("OUT", MODEL_OUT) if what == "model" else ("FILE", FILE_OUT)
    words = f"The {what} to write; - is stdout.  [default: {default}]"
    return option("-o --output", metavar, words, OUTPUT, type=kind)


def quiet(but: str = "errors and what --json asks for") -> Callable[[F], F]:
    """Return the option that silences a command, `but` for some output."""
    return flag("-q --quiet", f"Print only {but}.", OUTPUT)


STEP = tuple(ROWS[name] for name in PAINTING)
"""Options of a conversion that a training step takes, too."""

CONVERSION = (*(ROWS[name] for name, row in KEYWORDS.items() if row.group != OUTPUT), config)
"""Options of a conversion that decide its types."""

SAVING = (ROWS["external_data"], ROWS["overwrite"])
"""Options of a command that writes a model."""


_globs = partial(option, metavar="GLOB", heading=MANY, multiple=True, rare=True)
BATCH = (
    option("-j --jobs", "N", "Convert N at a time, in processes.  [default: 1]", MANY, type=int, rare=True),
    option("--scheduler", "HOST:PORT", "Convert on the workers of a scheduler of Dask.", MANY, rare=True),
    option("--name", "RULE", "Names of results, as in '{stem}_fp16.onnx'.  [default: {stem}.onnx]", MANY, rare=True),
    _globs("--include", words="Take only files that match, by name or, with a /, by path."),
    _globs("--exclude", words="Leave out files and folders that match."),
    option("--summary", "FILE", "Write a line of JSON for each model to a .jsonl file.", MANY, type=FILE, rare=True),
    flag("--resume", "Keep finished results of an earlier run.", MANY, rare=True),
)
"""Options of a command that converts several models."""


FEEDING = (
    ROWS["data"],
    flag("--random", "Feed random numbers instead of data; the report says so.", DATA),
    flag("--smoke", "Feed one random batch; shows gross faults only.", DATA),
    option("--shape", "NAME=1,128", "With --random: the shape of an input.", DATA, multiple=True),
    option("--int-range", "NAME=0,100", "With --random: integers from 0 to 99.", DATA, multiple=True, rare=True),
    option("--batches", "N", "With --random: how many batches.  [default: 1]", DATA, type=int, rare=True),
    option("--seed", "N", "With --random: the seed of the numbers.  [default: 0]", DATA, type=int, rare=True),
    flag("--allow-nonfinite", "Data may hold NaN and infinity.", DATA, rare=True),
)
"""Options for the input data of a model."""


CRITERION = tuple(ROWS[name] for name in criterion.CRITERION)
"""Options that say how near outputs must be."""

MEASURING = (
    *FEEDING,
    ROWS["ranges"],
    ROWS["headroom"],
    *CRITERION,
    option(
        "--budget",
        "N",
        "With --tolerance or another criterion: the most trials.  [default: 100]",
        DATA,
        type=int,
        rare=True,
    ),
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
    from amp_rewrite.files.targets import check_target, replaces

    if not asked and replaces(output, model):
        raise ModelError(
            f"{output} is the input: overwriting it discards {lost}; name another output, or add --overwrite to this"
            " command"
        )
    check_target(output, settings.overwrite, read=model)
