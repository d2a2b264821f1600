"""The command that writes the float32 twin of a mixed model."""

from __future__ import annotations

from pathlib import Path

import click

from amp_rewrite.cli import options, terminal

_TWIN = (
    click.option(
        "-o", "--output", type=options.FILE, metavar="OUT", help="[default: MODEL-stem.emulated.onnx, or .widened.onnx]"
    ),
    click.option(
        "--io",
        type=click.Choice(["numpy", "same", "float32"]),
        default="numpy",
        show_default=True,
        help="Which inputs and outputs keep their low type: those numpy knows, all, or none.",
    ),
    click.option("--no-rounding", is_flag=True, help="Round nothing: the float32 reference of a model that is half."),
    *options.WRITING[:2],
    click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
)


@click.command()
@options.take(options.model, *_TWIN)
def emulate(
    model: Path,
    output: Path | None,
    io: str,
    no_rounding: bool,
    external_data: bool | None,
    overwrite: bool | None,
    quiet: bool,
) -> None:
    """Write MODEL in float32, rounded as half precision would be.

    It shows on any machine what half precision does to the numbers: onnxruntime's CPU provider computes most of
    float16 in float32, so that what overflows looks fine there.
    """
    from amp_rewrite.files.model import Model
    from amp_rewrite.files.store import check_target
    from amp_rewrite.rewrite.emulate import emulate

    output = output or model.parent / f"{model.stem}.{'widened' if no_rounding else 'emulated'}.onnx"
    check_target(output, bool(overwrite), read=model)  # before the work, not after it
    with terminal.progress(model.name, quiet=quiet) as progress:
        source = Model.load(model)
        twin = emulate(source, io=io, rounding=not no_rounding)
        twin.save(output, overwrite=bool(overwrite), external_data=external_data, progress=progress)
    if twin.proto.graph == source.proto.graph:
        terminal.talk(f"nothing to emulate: {model.name} holds no float16 and no bfloat16", quiet=quiet)
    terminal.talk(f"wrote {output}", quiet=quiet)
