"""The program: a table of commands, each imported when it is called; errors become exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem, shell_complete

from amp_rewrite.cli import terminal
from amp_rewrite.errors import AmpRewriteError, advice, nearest
from amp_rewrite.reports.render import WIDTH, plain
from amp_rewrite.version import VERSION

NAME = "amp-rewrite"
COMPLETE = "_AMP_REWRITE_COMPLETE"
"""The environment variable with which shells request completions; click derives it from the program's name."""
SHELLS = ("bash", "zsh", "fish")
FINDING = 1
ERROR = 2
INTERRUPTED = 130  # the exit code that shells report for SIGINT
_MAX_MESSAGE = 1000  # characters; names in messages come from files and may have any length
PIPE_CLOSED = 141  # the exit code that shells report for SIGPIPE


GROUPS = {
    "Convert": {
        "convert": "Convert MODEL, a file or folder.",
        "calibrate": "Run MODEL on data and write the ranges of its values.",
        "emulate": "Write MODEL as float32 ops that round like half precision.",
        "train-step": "Write a training step of MODEL as one ONNX model.",
    },
    "Check and compare": {
        "verify": "Compare the outputs of B with those of A on the same data.",
        "locate": "Show where B diverges from A and which ops add the most error.",
        "diff": "Print how B differs from A; exit with 1 if it does.",
        "gate": "Compare each FILE with a commit; exit with 1 if one differs.",
        "bench": "Measure the latency and memory use of models side by side.",
    },
    "Understand": {
        "report": "Print the inventory of MODEL: ops, types, casts and bytes.",
        "explain": "Print why NODE gets its type, or what WORD means.",
        "doctor": "Find obstacles to fast half precision, here or in MODEL.",
    },
    "Shell": {
        "completion": "Print the completion script for a shell.",
    },
}
"""The headings of the help, each with its commands and the first sentence of their help."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_MODULES = {
    "compare": ("diff", "verify", "locate", "bench"),
    "explain": ("explain", "report", "doctor"),
    "make": ("calibrate", "emulate", "train-step", "completion"),
}
"""The modules in `cli/commands/` with several commands; any other command has a module with its name."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("model.onnx", "model.onnx --data batches.npz --tolerance 1e-2", "explain model.onnx NODE"),
    "bench": ("bench model.onnx model.float16.onnx --random",),
    "calibrate": ("calibrate model.onnx --data batches.npz",),
    "completion": ("completion zsh > ~/.zfunc/_amp-rewrite",),
    "convert": (
        "model.onnx",
        "model.onnx out.onnx --to bfloat16 --keep op=Softmax",
        "model.onnx --data batches.npz --tolerance 1e-2",
    ),
    "diff": ("diff model.onnx model.float16.onnx",),
    "doctor": ("doctor model.onnx --to bfloat16",),
    "emulate": ("emulate model.float16.onnx",),
    "explain": ("explain model.onnx /encoder/layer.0/MatMul", "explain Softmax mask_fill", "explain rules"),
    "gate": ("gate model.onnx --base origin/main --fail-on raised,casts",),
    "locate": ("locate model.onnx model.float16.onnx --data batches.npz",),
    "report": ("report model.onnx --expect 'compute >= 95%'",),
    "train-step": ("train-step model.onnx --loss 'cross_entropy(logits,labels)'",),
    "verify": ("verify model.onnx model.float16.onnx --data d.npz --tolerance 1e-2",),
}
"""Example command lines by command; "" is the program itself."""


def write_examples(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    if examples := _examples(ctx):
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            formatter.write("".join(f"  amp-rewrite {example}\n" for example in examples))


def _examples(ctx: click.Context) -> tuple[str, ...]:
    return EXAMPLES.get(ctx.command_path.partition(" ")[2], ())


class Program(click.Group):
    """The group of all commands; `amp-rewrite MODEL …` is short for `amp-rewrite convert MODEL …`."""

    default = "convert"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = next((module for module, names in _MODULES.items() if cmd_name in names), cmd_name)
        imported = import_module(f"amp_rewrite.cli.commands.{module}")
        command: click.Command = getattr(imported, cmd_name.replace("-", "_"))
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return candidates for the first word: commands, models, and options of `convert`."""
        default = self.get_command(ctx, self.default)
        assert default is not None
        if incomplete.startswith("-"):
            options = default.shell_complete(click.Context(default, parent=ctx), incomplete)
            names = {item.value for item in options}
            return [*options, *(item for item in super().shell_complete(ctx, incomplete) if item.value not in names)]
        commands = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return commands or [CompletionItem(incomplete, type="file")]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(ctx, formatter)
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(n, click.Command(n, help=h).get_short_help_str(limit)) for n, h in commands.items()]
                )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(ERROR)
        return super().parse_args(ctx, self._with_default(ctx, args) if args else args)

    def _with_default(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments, with `convert` in front if the first is a file or one of its options."""
        from glob import has_magic  # late: commands do not need it

        first = args[0]
        options = {name for option in self.get_params(ctx) for name in option.opts}
        if first in COMMANDS or first in options:
            return args
        is_model = Path(first).exists() or has_magic(first) or "://" in first
        if first.startswith("-") or ctx.resilient_parsing or is_model:
            return [self.default, *args]
        if Path(first).suffix or os.sep in first:
            raise click.UsageError(f"no such file: {first}", ctx)
        hint = advice(first, COMMANDS, "name a model or a command")
        raise click.UsageError(f"no command or file {first!r}; {hint}", ctx)

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run the program, print any error on one line, and exit."""
        if COMPLETE in os.environ:
            try:
                sys.exit(shell_complete(self, extra, NAME, COMPLETE, os.environ[COMPLETE]))
            except (AmpRewriteError, click.ClickException, ImportError, OSError, ValueError):
                sys.exit(ERROR)
        sys.exit(self._run(list(sys.argv[1:] if args is None else args), extra))

    def _run(self, args: list[str], extra: dict[str, Any]) -> int:
        for word in ("standalone_mode", "prog_name"):
            extra.pop(word, None)
        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        WIDTH.set(terminal.columns(sys.stdout))
        try:
            with self.make_context(NAME, args, **{"obj": tuple(args), **extra}) as ctx:
                code = self.invoke(ctx)
            sys.stdout.flush()
            return code or 0
        except click.exceptions.Exit as stop:
            return stop.exit_code
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else NAME
            message = _usage_message(error)
            if not message.endswith("`"):  # an example is enough
                message += f"{' See' if message.endswith('?') else '; see'} '{path} --help'"
            return _fail(message)
        except click.ClickException as error:
            return _fail(error.format_message())
        except AmpRewriteError as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            terminal.silence(sys.stdout)
            return PIPE_CLOSED
        except RecursionError:
            return _fail("an expression, a file or a model is nested too deeply; flatten it")
        except MemoryError:
            return _fail("out of memory; give the process more memory, or use a smaller model")
        except OSError as error:
            if not error.filename:
                terminal.silence(sys.stdout)  # on a full disk, the last flush would fail again
            where = error.filename or "output"
            return _fail(f"{where}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 the end of the process; Python would exit with 1, the code for a difference
            files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
            name = str(error.name) if isinstance(error, ImportError) else None
            if name and (name.partition(".")[0] == "onnxruntime" or any("onnxruntime" in f.parts for f in files)):
                return _fail(f"onnxruntime cannot be imported: {error}; `amp-rewrite doctor` says what to install")
            traceback.print_exc()
            return _fail("internal error in amp-rewrite; please report the lines above")


def _fail(message: str) -> int:
    line = plain(" ".join(message[:_MAX_MESSAGE].split()))
    terminal.talk(f"error: {line}{' …' if len(message) > _MAX_MESSAGE else ''}", quiet=False)
    return ERROR


def _usage_message(error: click.UsageError) -> str:
    """Return the message of an error, partly reworded, because click's messages differ between versions."""
    if not isinstance(error, click.NoSuchOption):
        message = error.format_message().rstrip(".")
        missing = error.ctx if isinstance(error, click.MissingParameter) else None
        return f"{message}, as in `amp-rewrite {_examples(missing)[0]}`" if missing else message
    options = [param for param in error.ctx.command.params if isinstance(param, click.Option)] if error.ctx else []
    spellings = {name: name for option in options for name in (*option.opts, *option.secondary_opts)}
    keys = {f"--{key.replace('_', '-')}": key for option in options for key in getattr(option, "keys", ())}
    spellings |= {name: f"--set {name[2:]}=…" for name in keys}
    values = ((option, word.partition("[")[0]) for option in options for word in (option.metavar or "").split("|"))
    spellings = {f"--{word}": f"{option.opts[-1]} {word}" for option, word in values if word.islower()} | spellings
    spellings |= {name: ours for name, ours in _OPTIONS_ELSEWHERE.items() if ours in spellings}
    near = nearest(error.option_name.replace("_", "-"), [name for name in spellings if name.startswith("--")])
    return f"no such option {error.option_name}{f'; did you mean {spellings[near[0]]}?' if near else ''}"


_OPTIONS_ELSEWHERE = {"--dtype": "--to", "--precision": "--to", "--exclude": "--keep", "--include": "--lower"}
"""Options of other tools, each with the equivalent here."""


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device; otherwise, output would go to the next opened file.

    Output to a closed stdout fails as on a full disk; output to a closed stderr is lost.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free descriptor
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name=NAME, message="%(prog)s %(version)s")
def program() -> None:
    """Convert float32 ONNX models to float16 or bfloat16 where that is safe, and explain why.

    `amp-rewrite MODEL` is short for `amp-rewrite convert MODEL`.
    """
