"""The options that commands share, and the settings that they come to together with file and environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from amp_rewrite.errors import ModelError
from amp_rewrite.settings.config_file import Settings, settings

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)

# The choices are written out because reading them from their modules would make `--help` slow.
KINDS = "lowered|raised|retyped|added|removed|casts"
LEVELS = "default|tensor-cores-only|treat-gray-as-deny|unsafe-force-all|lower-all"

model = click.argument("model", type=FILE)
output = click.option("-o", "--output", type=FILE, metavar="OUT", help="[default: MODEL-stem.float16.onnx]")
config = click.option("--config", type=FILE, metavar="FILE", help="Settings in TOML.  [default: ./amp.toml]")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
verbose = click.option("-v", "--verbose", is_flag=True, help="Print every op.")
fail_on = click.option(
    "--fail-on",
    metavar="KIND,…",
    callback=lambda _context, _option, text: tuple(filter(None, text.split(","))) if text else (),
    help=f"Exit with 1 for these alone: {KINDS.replace('|', ', ')}.  [default: all]",
)
form = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown", "github"]),
    default="text",
    show_default=True,
    help="How to print it; github: annotations of a workflow.",
)

_to = click.option(
    "--to", metavar="float16|bfloat16|POLICY", help="The type to lower to, or a policy.  [default: float16]"
)
_lists = click.option(
    "--lists", multiple=True, metavar="FILE|NAME", help="Op lists on top of the default ones; repeatable."
)
_level = click.option("--level", metavar=LEVELS, help="How far to go.  [default: default]")

_target = click.option(
    "--target", metavar="ort-cuda|onnx|tensorrt", help="What will run the model.  [default: ort-cuda]"
)
_safety = click.option(
    "--safety",
    metavar="default|none",
    help="Rules that protect numbers besides the lists, or none.  [default: default]",
)
_keep = click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Ops that stay float32, as in op=Softmax; repeatable."
)
_lower = click.option(
    "--lower", multiple=True, metavar="PATTERN", help="Ops to lower, whatever the lists say; repeatable."
)
_gray_follows_allow = click.option(
    "--gray-follows-allow/--no-gray-follows-allow",
    default=None,
    help="Lower gray ops after allow ops too.  [default: for bfloat16 only]",
)

# What painting depends on, whoever asks for it.
PAINTING = (_lists, _level, _target, _safety, _keep, _lower, _gray_follows_allow)

# What the op lists in force depend on.
LISTING = (_to, _lists, _level, config)

# What a conversion depends on.
CONVERSION = (
    _to,
    _lists,
    _level,
    _target,
    _safety,
    _keep,
    _lower,
    click.option("--io", multiple=True, metavar="keep|low|GLOB=TYPE", help="Types of inputs and outputs; repeatable."),
    _gray_follows_allow,
    click.option(
        "--fuse",
        metavar="basic|none|contrib",
        help="Bring into standard operators first, or not; contrib: onnxruntime's own too.  [default: basic]",
    ),
    click.option("--opset", metavar="auto|N", help="Move the model to this opset.  [default: its own]"),
    click.option(
        "--placement",
        metavar="auto|propagate|mincut[:GPU]",
        help="Where the types meet: by TensorFlow's rules, or where it costs least.  [default: auto]",
    ),
    config,
)

# What convert does with the outcome.
WRITING = (
    click.option(
        "--external-data/--no-external-data",
        default=None,
        help="Weights in a file of their own.  [default: above 1.5 GB]",
    ),
    click.option("--overwrite", is_flag=True, default=None, help="Replace an output that is there already."),
    click.option("--dry-run", is_flag=True, help="Print what would happen; write no model."),
    click.option("--report", "report_file", type=FILE, metavar="FILE", help="Write the report to a .json file too."),
    click.option("--check-weights", is_flag=True, help="Print what each weight that is stored low loses, worst first."),
)
TALKING = (
    as_json,
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors and what --json or --dry-run asks for."),
    verbose,
)


def take(*options: Callable[[F], F]) -> Callable[[F], F]:
    """A decorator that adds options to a command, in the order of its help."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def in_force(given: dict[str, Any]) -> Settings:
    """The settings of one run, from the options given, the environment and a file."""
    return settings(given, os.environ, config=given.pop("config", None))


def check_target(output: Path, model: Path, settings: Settings, *, asked: bool, lost: str) -> None:
    """Nothing, where what is made of a model may be written; ModelError elsewhere.

    `asked`: --overwrite stands on the command line; a file of settings cannot give away the model that is read, with
    which is `lost` what these words say.
    """
    from amp_rewrite.files.store import check_target, replaces

    if not asked and replaces(output, model):
        raise ModelError(
            f"{output} is the model that is read: replacing it loses {lost}; name another output, or add --overwrite"
            " to this command"
        )
    check_target(output, settings.overwrite, read=model)
