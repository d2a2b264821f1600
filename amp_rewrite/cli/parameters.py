"""Options shared by commands, and the settings of one run from options, file and environment.

The options themselves are fields of `settings/request.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from amp_rewrite.cli import files
from amp_rewrite.cli.completion import patterns
from amp_rewrite.cli.group import write_examples
from amp_rewrite.errors import ConfigError, ModelError, advice, options_spelled
from amp_rewrite.settings import request
from amp_rewrite.settings.config_file import setting_of, settings
from amp_rewrite.settings.option import ADVANCED, DATA, MANY, OUTPUT, PRECISION, Kind, Option
from amp_rewrite.settings.request import KEYWORDS, OPTIONS, PAINTING, SETTINGS, Request

F = TypeVar("F", bound=Callable[..., Any])

FILE, FILE_OUT, MODEL, MODEL_OUT = files.FILE, files.FILE_OUT, files.MODEL, files.MODEL_OUT
MODELS_OUT = files.MODELS_OUT
_HEADINGS = (PRECISION, DATA, OUTPUT, MANY, ADVANCED)
_FEW = 9  # options that need no headings
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
    """An option below a heading of its command's help."""

    def __init__(self, *names: Any, heading: str = ADVANCED, choices: Any = (), **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading
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
        """Return candidates for the value: choices, those in the metavar, patterns, or files."""
        kind = self.metavar or ""
        if kind == "PATTERN":
            return patterns(incomplete)
        items = _chosen(self.choices, ctx, incomplete)
        if "FILE" in kind:
            items.append(CompletionItem(incomplete, type="file"))
        return items or super().shell_complete(ctx, incomplete)


def _spelled_out(metavar: str) -> tuple[str, ...]:
    """Return the values in a metavar such as "ort-cuda[:RELEASE]|onnx|FILE"."""
    words = (word.partition("[")[0] for word in metavar.split("|"))
    return tuple(word for word in words if word.islower()) if "|" in metavar else ()


def _chosen(choices: Any, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Return the choices with this start; `choices` is a collection, or a function of the context for one."""
    known = choices(ctx) if callable(choices) else choices
    return [CompletionItem(word) for word in known if word.startswith(incomplete)]


def argument(name: str, *, choices: Any, **more: Any) -> Callable[[F], F]:
    return click.argument(name, shell_complete=lambda ctx, _param, text: _chosen(choices, ctx, text), **more)


class Command(click.Command):
    """A command with examples in its help, and many options below headings."""

    def invoke(self, ctx: click.Context) -> Any:
        own = frozenset(name.lstrip("-") for param in self.params for name in param.opts)
        with options_spelled(own):
            if any(files.is_stdout(path) for path in (ctx.params.get("output"), *ctx.params.get("out", ()))):
                alone = "it has no file beside it"
                reasons = {"as_json": "--json prints there, too", "external_data": alone, "shard_size": alone}
                for name, words in reasons.items():
                    if ctx.params.get(name):
                        raise click.UsageError(f"the model goes to stdout, and {words}; name a file with -o", ctx)
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)
        known = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        options = [param for param in known if not getattr(param, "borrowed", False)]
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in options:
            heading = getattr(option, "heading", ADVANCED) if len(options) > _FEW else "Options"
            record = option.get_help_record(ctx)
            if record is not None:
                rows.setdefault(heading, []).append(record)
        for heading in sorted(rows, key=lambda heading: heading in _HEADINGS and _HEADINGS.index(heading) + 1):
            with formatter.section(heading):
                formatter.write_dl(rows[heading], col_max=_COLUMN)


def option(names: str, metavar: str | None, words: str, heading: str = ADVANCED, **more: Any) -> Callable[[F], F]:
    """Return the decorator of an option below a heading. `names`: as click takes them, separated by spaces."""
    return click.option(*names.split(), cls=_Grouped, heading=heading, metavar=metavar, help=words, **more)


def choice(names: str, words: Sequence[str], says: str, heading: str = ADVANCED, **more: Any) -> Callable[[F], F]:
    return option(names, "|".join(words), says, heading, type=WordChoice(words), **more)


def form(*words: str, says: str) -> Callable[[F], F]:
    """Return the decorator of the option for the form of the output, by default text."""
    return choice("--format form", words, f"Output format; {says}", OUTPUT, default="text", show_default=True)


def flag(names: str, words: str, heading: str = ADVANCED) -> Callable[[F], F]:
    return option(names, None, words, heading, is_flag=True)


def command(*options: Callable[[F], F]) -> Callable[[F], click.Command]:
    """Return the decorator of a command with options, in the order of its help."""

    def decorate(function: F) -> click.Command:
        for decorator in reversed(options):
            function = decorator(function)
        return click.command(cls=Command)(function)

    return decorate


def borrowed(*options: Callable[[F], F]) -> tuple[Callable[[F], F], ...]:
    """Return decorators of options described in the help of another command; the command's own text must name it."""

    def marked(decorator: Callable[[F], F]) -> Callable[[F], F]:
        def decorate(function: F) -> F:
            made = decorator(function)
            made.__click_params__[-1].borrowed = True  # type: ignore[attr-defined]
            return made

        return decorate

    return tuple(map(marked, options))


def _of(row: Option) -> Callable[[Any], Any]:
    names = f"--{row.key}"
    more: dict[str, Any] = {"type": {Kind.NUMBER: _Fraction(), Kind.WHOLE: click.INT}.get(row.kind)}
    if row.kind is Kind.LIST:
        more = {"multiple": True}
    elif row.kind is Kind.SWITCH:
        names = f"{names}/--no-{row.key}" if row.default else names
        more = {"is_flag": True, "default": None}
    return option(names, row.metavar or None, row.help, row.group, **more)


ROWS = {row.name: _of(row) for row in OPTIONS.values() if row.help}
"""The option of each row of the table that has one, by name."""


class _Keys(_Grouped):
    """The option `--set KEY=VALUE`: it states the settings of `keys` as if each were an option."""

    def __init__(self, *names: Any, keys: Sequence[str], **more: Any) -> None:
        super().__init__(*names, **more)
        self.keys = {name: SETTINGS[name] for name in keys}

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Put the settings into the parameters of the command."""
        stated: dict[str, Any] = {name: () if row.kind is Kind.LIST else None for name, row in self.keys.items()}
        for word in super().process_value(ctx, value):
            key, equals, text = word.partition("=")
            if not equals:
                raise click.UsageError(f"--set takes KEY=VALUE, and {word!r} has no value; write --set {key}=…", ctx)
            try:
                row = self._row(key.strip(), text, ctx)
                typed = row.check(row.of_word(text.strip(), f"--set {key}"), f"--set {key}")
            except ConfigError as error:
                raise click.UsageError(str(error), ctx) from error
            stated[row.name] = stated[row.name] + typed if row.kind is Kind.LIST else typed
        ctx.params.update(stated)
        return value

    def _row(self, key: str, text: str, ctx: click.Context) -> Option:
        row = setting_of(key, "--set")
        if row.name in self.keys:
            return row
        if any(f"--{row.key}" in param.opts for param in ctx.command.params):
            value = f" {text}" if row.kind is not Kind.SWITCH else ""
            raise ConfigError(f"--set {key}: this setting has an option of its own; write --{row.key}{value}")
        legal = ", ".join(known.key for known in self.keys.values())
        raise ConfigError(f"--set {key}: {ctx.info_name} does not read this setting; it reads {legal}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return candidates: keys, and the values in a metavar."""
        known = {row.key: row for row in self.keys.values()}
        key, equals, _ = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{name}=", type="open") for name in known if name.startswith(key)]
        row = known.get(key)
        switch = row is not None and row.kind is Kind.SWITCH
        words = ("true", "false") if switch else _spelled_out(row.metavar if row else "")
        return _chosen([f"{key}={word}" for word in words], ctx, incomplete)


def keys(*names: str) -> Callable[[F], F]:
    """Return the decorator of `--set` for settings by name."""
    shown = ", ".join(SETTINGS[name].key for name in names)
    return click.option(
        "--set",
        cls=_Keys,
        keys=names,
        metavar="KEY=VALUE",
        help=f"A setting, as in amp.toml; repeatable. Keys: {shown}.",
        heading=ADVANCED,
        multiple=True,
        expose_value=False,
    )


model = click.argument("model", type=MODEL)
PAIR = (click.argument("a", type=MODEL), click.argument("b", type=MODEL))
"""Two models or reports to compare."""
config = option("--config", "FILE", "Settings in TOML.  [default: ./amp.toml]", type=FILE)
as_json = flag("--json as_json", "Print JSON.", OUTPUT)
verbose = flag("-v --verbose", "Print every op.", OUTPUT)

report_file = option(
    "--report report_file", "FILE", "Also write the report, as a .json file or an .html page.", OUTPUT, type=FILE_OUT
)
REPORT = (report_file, flag("--overwrite", "Replace an existing report.", OUTPUT))
"""Options of a command that writes nothing but a report."""


def output(default: str, what: str = "model") -> Callable[[F], F]:
    """Return the option for the output of a command, a model or another file."""
    metavar, kind = ("OUT", MODEL_OUT) if what == "model" else ("FILE", FILE_OUT)
    words = f"The {what} to write; - is stdout.  [default: {default}]"
    return option("-o --output", metavar, words, OUTPUT, type=kind)


def quiet(but: str = "errors and what --json asks for") -> Callable[[F], F]:
    """Return the option to silence a command, `but` for some output."""
    return flag("-q --quiet", f"Print only {but}.", OUTPUT)


def _own(names: Iterable[str]) -> tuple[Callable[[Any], Any], ...]:
    return tuple(ROWS[name] for name in names if name in ROWS)


def _keyed(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in ROWS)


STEP, STEP_KEYS = _own(PAINTING), _keyed(PAINTING)
"""Options and keys of a conversion that a training step takes, too."""

CONVERSION, CONVERSION_KEYS = _own(KEYWORDS), _keyed(KEYWORDS)
"""Options and keys of a conversion that decide its types."""

BATCH = (
    option(
        "-j --jobs",
        "N|HOST:PORT",
        "Convert N at a time, in processes, or on the workers of a scheduler of Dask.  [default: 1]",
        MANY,
    ),
    flag("--resume", "Keep finished results of an earlier run.", MANY),
)
BATCH_KEYS = tuple(name for name, row in SETTINGS.items() if row.group == MANY)
"""Options and keys of a command that converts several models."""


FEEDING = (
    ROWS["data"],
    flag("--random", "Feed random numbers instead of data; the report says so.", DATA),
    option("--shape", "NAME=1,128", "With --random: the shape of an input.", DATA, multiple=True),
)
FEEDING_KEYS = ("batches", "seed", "int_range", "allow_nonfinite")
"""Options and keys for the input data of a model."""

FEEDBACK = (ROWS["feedback"], ROWS["steps"])
"""Options for states between runs."""

CRITERION = _own(request.CRITERION)
CRITERION_KEYS = tuple(name for name in _keyed(request.CRITERION) if name in SETTINGS)
"""Options and keys that say how near outputs must be."""

MEASURING = (
    ROWS["data"],
    ROWS["check"],
    option("--shape", "NAME=1,128", "The shape of an input in the random batch.", DATA, multiple=True),
    ROWS["ranges"],
    *CRITERION,
)
MEASURING_KEYS = ("headroom", *CRITERION_KEYS, "budget", *FEEDING_KEYS, "feedback", "steps")
"""Options and keys of a conversion that data guides."""


def keywords(settings: Request) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in KEYWORDS}


def in_force(given: dict[str, Any]) -> Request:
    """Return the settings of one run, from the options given, the environment and a file."""
    return settings(given, os.environ, config=given.pop("config", None))


def check_target(output: Path, model: Path, settings: Request, *, asked: bool, lost: str) -> None:
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
