"""Options shared by commands, and the settings of a run from the command line, the environment and a file.

The options themselves are fields of `Request` in `settings/request.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from amp_rewrite.cli import files
from amp_rewrite.cli.group import write_examples
from amp_rewrite.errors import ConfigError, ModelError, advice, as_option, option_spelling
from amp_rewrite.files.disk import read_text
from amp_rewrite.settings.option import DATA, OUTPUT, PRECISION, Kind, Option
from amp_rewrite.settings.request import CRITERION, OPTIONS, Request, from_environment

F = TypeVar("F", bound=Callable[..., Any])

FILE, FILE_OUT, MODEL = files.FILE, files.FILE_OUT, files.MODEL
_HEADINGS = (PRECISION, DATA, OUTPUT)
_MAX_UNGROUPED = 9  # options; a command with more of them has headings
_MAX_METAVAR = 14  # characters; a longer metavar leaves no room for the help
_MAX_COLUMN = 31  # characters in the first column of the help


class _Grouped(click.Option):
    """An option under a heading in the help of its command."""

    def __init__(self, *names: Any, heading: str = OUTPUT, **more: Any) -> None:
        super().__init__(*names, **more)
        self.heading = heading

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two cells of the help, with NAME in place of a long metavar."""
        record, kind = super().get_help_record(ctx), self.metavar or ""
        if record is None or "|" not in kind or len(kind) <= _MAX_METAVAR:
            return record
        return record[0].replace(kind, "NAME"), record[1]

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        if str(value).startswith("-") and any(value in param.opts for param in ctx.command.params):
            raise click.UsageError(f"{self.opts[0]} needs a value, but {value} is an option", ctx)
        return super().process_value(ctx, value)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return completions for the value: the words of the metavar, or files."""
        kind = self.metavar or ""
        items = [CompletionItem(word) for word in _literals(kind) if word.startswith(incomplete)]
        files = [CompletionItem(incomplete, type="file")] if "FILE" in kind else []
        return items or files or super().shell_complete(ctx, incomplete)


def _literals(metavar: str) -> tuple[str, ...]:
    words = (word.partition("[")[0] for word in metavar.split("|"))
    return tuple(word for word in words if word.islower()) if "|" in metavar else ()


class Command(click.Command):
    """A command with examples in its help, and with headings if it has many options."""

    def invoke(self, ctx: click.Context) -> Any:
        names = frozenset(name.lstrip("-") for param in self.params for name in param.opts)
        with option_spelling(names):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)
        every = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        options = [param for param in every if not getattr(param, "borrowed", False)]
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in options:
            heading = getattr(option, "heading", OUTPUT) if len(options) > _MAX_UNGROUPED else "Options"
            record = option.get_help_record(ctx)
            if record is not None:
                rows.setdefault(heading, []).append(record)
        for heading in sorted(rows, key=lambda heading: heading in _HEADINGS and _HEADINGS.index(heading) + 1):
            with formatter.section(heading):
                formatter.write_dl(rows[heading], col_max=_MAX_COLUMN)


def option(names: str, metavar: str | None, text: str, heading: str = OUTPUT, **more: Any) -> Callable[[F], F]:
    """Return a decorator for an option under a heading. `names`: click's names, separated by spaces."""
    return click.option(*names.split(), cls=_Grouped, heading=heading, metavar=metavar, help=text, **more)


def choice(names: str, words: Sequence[str], text: str, heading: str = OUTPUT, **more: Any) -> Callable[[F], F]:
    return option(names, "|".join(words), text, heading, type=click.Choice(words), **more)


def form(*words: str, text: str) -> Callable[[F], F]:
    """Return a decorator for the output format, by default text."""
    return choice("--format form", words, text, OUTPUT, default="text", show_default=True)


def flag(names: str, text: str, heading: str = OUTPUT) -> Callable[[F], F]:
    return option(names, None, text, heading, is_flag=True)


def command(*options: Callable[[F], F], borrowed: Sequence[Callable[[Any], Any]] = ()) -> Callable[[F], click.Command]:
    """Return a decorator for a command with options, in the order of its help.

    `borrowed`: options that the help of another command describes; the text of this command must name that command.
    """

    def decorate(function: Any) -> click.Command:
        for decorator in reversed(borrowed):
            function = decorator(function)
            function.__click_params__[-1].borrowed = True
        for decorator in reversed(options):
            function = decorator(function)
        return click.command(cls=Command)(function)

    return decorate


def _of(row: Option) -> Callable[[Any], Any]:
    names = f"--{row.key}/--no-{row.key}" if row.kind is Kind.SWITCH and row.default else f"--{row.key}"
    more: dict[Kind, dict[str, Any]] = {Kind.LIST: {"multiple": True}, Kind.SWITCH: {"is_flag": True, "default": None}}
    return option(names, row.metavar or None, row.help, row.group, **more.get(row.kind, {}))


ROWS = {row.name: _of(row) for row in OPTIONS.values() if row.help}
"""A decorator for each option in `OPTIONS` with a command-line option, by name."""


class _Keys(_Grouped):
    """The `--set KEY=VALUE` option, for settings without a command-line option of their own."""

    def __init__(self, *names: Any, keys: Sequence[str], **more: Any) -> None:
        super().__init__(*names, **more)
        self.keys = keys

    def process_value(self, ctx: click.Context, value: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for word in super().process_value(ctx, value):
            key, equals, text = word.partition("=")
            if not equals:
                raise click.UsageError(f"--set takes KEY=VALUE, but {word!r} has no value; write --set {key}=…", ctx)
            try:
                row = self._row(key.strip(), text, ctx)
                value = row.check(text.strip(), f"--set {key}")
            except ConfigError as error:
                raise click.UsageError(str(error), ctx) from error
            values[row.name] = (*values.get(row.name, ()), value) if row.kind is Kind.LIST else value
        return values

    def _row(self, key: str, text: str, ctx: click.Context) -> Option:
        row = setting_of(key, "--set")
        if row.name in self.keys:
            return row
        if any(f"--{row.key}" in param.opts for param in ctx.command.params):
            value = f" {text}" if row.kind is not Kind.SWITCH else ""
            raise ConfigError(f"--set {key}: this setting has its own option; write --{row.key}{value}")
        legal = ", ".join(OPTIONS[name].key for name in self.keys)
        raise ConfigError(f"--set {key}: {ctx.info_name} does not read this setting; it reads {legal}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        keys = [f"{OPTIONS[name].key}=" for name in self.keys]
        return [CompletionItem(key) for key in keys if key.startswith(incomplete)]


model = click.argument("model", type=MODEL)
PAIR = (click.argument("a", type=MODEL), click.argument("b", type=MODEL))
"""Two models or reports to compare."""
config = option("--config", "FILE", "TOML file with settings.  [default: ./amp.toml]", type=FILE)
as_json = flag("--json as_json", "Print JSON.")
verbose = flag("-v --verbose", "Print every op.")

report_file = option("--report report_file", "FILE", "Also write the report: .json or .html.", type=FILE_OUT)
REPORT = (report_file, flag("--overwrite", "Replace an existing report."))
"""Options of a command whose only output file is a report."""


def output(default: str, what: str = "model") -> Callable[[F], F]:
    return option("-o --output", "FILE", f"The {what} to write.  [default: {default}]", type=FILE_OUT)


def quiet(output: str = "errors and --json output") -> Callable[[F], F]:
    """Return the option to silence a command, except for some output."""
    return flag("-q --quiet", f"Print only {output}.")


def reads(*names: str, keys: Sequence[str] = ()) -> tuple[Callable[[Any], Any], ...]:
    """Return decorators for the settings of a command: options, `--config`, and `--set` for settings without an option.

    `keys`: settings that are options of other commands, but keys of `--set` for this one.
    """
    decorators = [ROWS[name] for name in names if name in ROWS]
    keyed = [*(name for name in names if name not in ROWS), *keys]
    text = "Another setting, by its key in amp.toml; repeatable."
    others = click.option("--set", "settings", cls=_Keys, keys=keyed, metavar="KEY=VALUE", help=text, multiple=True)
    return (*decorators, config, *([others] if keyed else []))


FEED = ("data", "int_range", "allow_nonfinite")
"""Settings for the input data of a model."""
FEEDBACK = ("feedback", "steps")
"""Settings for states fed back between runs."""
MEASURED = ("data", *CRITERION, "ranges", "check", "headroom", "budget", "int_range", "allow_nonfinite")
"""Settings for a conversion with data."""
RANDOM = (
    flag("--random", "Use random inputs instead of data.", DATA),
    option("--shape", "NAME=1,128", "With --random: the shape of an input.", DATA, multiple=True),
)
SHAPE = option("--shape", "NAME=1,128", "The shape of an input in the random batch.", DATA, multiple=True)

# -- settings of a run ---------------------------------------------------------------------------------------


NAME = "amp.toml"
_ALTERNATIVES = ({"data", "ranges"}, CRITERION.keys())
"""Groups of options: an option on the command line replaces all options of its group in a settings file."""
_MAX_BYTES = 1 << 16


def explicit(options: dict[str, Any]) -> Collection[str]:
    """Return the names of the settings on the command line."""
    names = [name for name, value in options.items() if name in OPTIONS and value not in (None, ())]
    return [*names, *options["settings"]]


def take_settings(options: dict[str, Any]) -> Request:
    """Extract the settings from all options, and merge them with those from the environment and the file."""
    typed = {name: options.pop(name) for name in OPTIONS if name in options} | options.pop("settings", {})
    if options.get("random") and typed.get("data"):
        raise click.UsageError("--data and --random cannot be combined; leave one out")
    return settings(typed, os.environ, config=options.pop("config", None))


def check_target(output: Path, model: Path, settings: Request, *, explicit: bool, lost: str) -> None:
    """Raise ModelError if a model made from `model` cannot be written to `output`.

    `explicit`: True if --overwrite is on the command line; a settings file cannot permit replacing the input itself.
    `lost`: the data that replacing it would discard, for the message.
    """
    from amp_rewrite.files.store import check_target, replaces

    if not explicit and replaces(output, model):
        raise ModelError(
            f"{output} is the input: overwriting it discards {lost}; name another output, or add --overwrite to this"
            " command"
        )
    check_target(output, settings.overwrite, loaded_from=model)


def settings(
    options: Mapping[str, object], environ: Mapping[str, str], *, config: Path | None = None, folder: Path = Path()
) -> Request:
    """Return the merged options: the command line takes precedence over the environment, and both over the file.

    `options`: the values from the command line; None and () stand for missing options. The file is `config`, or
    `amp.toml` in `folder` if it exists. ConfigError for an unknown key, a wrong type or an unknown choice; it names the
    file, the variable or the option.
    """
    default = folder / NAME
    file = config or (default if default.is_file() else None)
    in_file = from_file(file) if file else {}
    typed = {key for key, value in options.items() if value not in (None, ())}
    merged: dict[str, Any] = {
        key: value
        for key, value in in_file.items()
        if not any(key in group and typed & group for group in _ALTERNATIVES)
    }
    merged.update(from_environment(environ))
    merged.update((key, OPTIONS[key].check(options[key], as_option(key))) for key in typed)
    changed = {name: value for name, value in in_file.items() if merged.get(name) is value}
    return Request(**merged, config=_described(changed, file) if file else "")


def _described(changed: Mapping[str, object], file: Path) -> str:
    """Return the settings changed by a file, and its name, as text; "" without changes."""
    parts = []
    for name, value in changed.items():
        if value != OPTIONS[name].default:
            words = value if isinstance(value, (list, tuple)) else (value,)
            text = " ".join(str(word).removeprefix(f"{file.parent}{os.sep}") for word in words)
            parts.append(f"{OPTIONS[name].key} = {text.lower() if isinstance(value, bool) else text}")
    shown = f"./{file.as_posix()}" if not file.is_absolute() and ".." not in file.parts else file.name
    return f"{', '.join(parts)}, from {shown}" if parts else ""


def setting_of(key: str, where: str) -> Option:
    """Return the option with a key, spelled with "-" or "_"; ConfigError for an unknown key."""
    option = OPTIONS.get(key.replace("-", "_"))
    if option is None:
        legal = [option.key for option in OPTIONS.values()]
        raise ConfigError(f"{where}: unknown key {key!r}; {advice(key.replace('_', '-'), legal)}")
    return option


def from_file(file: Path) -> Mapping[str, object]:
    """Return the settings in a file, with relative paths resolved from its folder."""
    import tomllib  # late: most runs do not read a file

    try:
        table = tomllib.loads(read_text(file, _MAX_BYTES, "a TOML file", ConfigError))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or int() with thousands of digits
        raise ConfigError(f"{file}: not valid TOML: {error}; correct it (strings need quotes)") from error
    values: dict[str, object] = {}
    for key, value in table.items():
        option = setting_of(key, str(file))
        listed = isinstance(value, list) and all(isinstance(part, str) for part in value)
        if not (listed or isinstance(value, str if option.kind is Kind.LIST else (str, int, float))):
            form = "a list of strings" if option.kind is Kind.LIST else "a string, a number, true or false"
            raise ConfigError(f"{file}: {key} must be {form}, not {value!r}")
        values[option.name] = _beside(file, option, option.check(value, str(file)))
    return values


def _beside(file: Path, option: Option, value: Any) -> object:
    if option.kind is Kind.PATH:
        return str(file.parent / value)
    if option.name != "lists":
        return value
    places = [(entry, file.parent / entry) for entry in ([value] if isinstance(value, str) else value)]
    return tuple(str(place) if place.suffix or place.exists() else entry for entry, place in places)
