"""`amp-rewrite doctor`: obstacles to fast half precision, here or in a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.group import FINDING
from amp_rewrite.cli.parameters import option
from amp_rewrite.runtime.roofline import ROOFS
from amp_rewrite.settings.choices import Target
from amp_rewrite.settings.policy import low_type

if TYPE_CHECKING:
    from amp_rewrite.deploy.doctor.check import Checkup

_DIGITS = 19  # digits of the largest int64
_ASKED = (
    click.argument("model", type=parameters.MODEL, required=False),
    option("--to", "float16|bfloat16|POLICY", "The low type.  [default: that of a half MODEL, else float16]"),
    option("--target", "NAME", "Check the WebGPU provider instead of CUDA.", choices=("webgpu",)),
    option(
        "--gpu", "NAME", "Estimate speed for this GPU, such as H200.  [default: the one here]", choices=tuple(ROOFS)
    ),
    option("--dimension", "NAME=N", "Size of a free dimension, for the estimate; repeatable.", multiple=True),
    parameters.flag("--open opens", "Only open MODEL, in a process of its own, and report the outcome."),
    option("--dump-kernels", "FILE", "Only write the kernel registry of onnxruntime.", type=parameters.FILE),
)


@parameters.command(*_ASKED, parameters.as_json)
def doctor(
    model: Path | None,
    to: str | None,
    target: str | None,
    gpu: str | None,
    dimension: tuple[str, ...],
    opens: bool,
    dump_kernels: Path | None,
    as_json: bool,
) -> int:
    """Find obstacles to fast half precision, here or in MODEL.

    Check GPU, driver, libraries and onnxruntime; exit with 1 if half precision cannot be fast. For a MODEL, list the
    ops that would run on the CPU, the dimensions that do not suit tensor cores, and the speed-up to expect; if it is
    half already, also the ops that a conversion keeps in float32. Its values are not seen: `verify` compares them. On a
    machine without a GPU, MODEL alone decides the exit code.
    """
    sizes = _sizes(dimension)
    if model is None and (sizes or gpu):
        raise click.UsageError("--gpu and --dimension are about a model; name one")
    if dump_kernels is not None and (model is not None or as_json):
        raise click.UsageError("--dump-kernels only writes a file; leave out MODEL and --json")
    if opens and (model is None or sizes or gpu):
        raise click.UsageError("--open only opens a model; name one, and leave out other options but --json")
    from amp_rewrite.deploy.doctor.checkup import opening
    from amp_rewrite.deploy.doctor.isolated import write_kernels

    if dump_kernels is not None:
        kernels = write_kernels(dump_kernels)
        terminal.talk(f"wrote {kernels} kernels to {dump_kernels}", quiet=False)
        return 0
    checkup = opening(model) if opens and model else _checked(model, to, target, gpu, sizes)
    terminal.show(checkup.to_json() if as_json else checkup.text())
    return 0 if checkup.well else FINDING


def _checked(model: Path | None, to: str | None, target: str | None, gpu: str | None, sizes: dict[str, int]) -> Checkup:
    from amp_rewrite.deploy.doctor.checkup import doctor

    if target is not None and (gpu or sizes):
        raise click.UsageError("--gpu and --dimension are about CUDA; leave them out, or --target")
    device = None if target is None else Target.parse(target)
    return doctor(model, to=low_type(to) if to else None, target=device, gpu=gpu, dimensions=sizes)


def _sizes(words: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in words:
        name, _, digits = word.partition("=")
        number = int(digits) if digits.isdecimal() and len(digits) <= _DIGITS else 0
        if not name or number < 1:
            raise click.UsageError(f"--dimension {word!r} is not NAME=N with a positive number; write batch=8")
        if sizes.setdefault(name, number) != number:
            raise click.UsageError(f"--dimension gives {name!r} twice, as {sizes[name]} and as {number}; leave one out")
    return sizes
