"""`amp-rewrite emulate`: the float32 twin of a mixed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import beside
from amp_rewrite.cli.parameters import choice

_KEPT = "Inputs and outputs that keep their low type: those numpy knows, all, or none."
_TWIN = (
    parameters.output("MODEL-stem.emulated.onnx, or .widened.onnx"),
    choice("--io", ("numpy", "same", "float32"), _KEPT, default="numpy", show_default=True),
    parameters.flag("--no-rounding", "Round nothing: write the float32 reference of a half model."),
    parameters.ROWS["overwrite"],
    parameters.quiet("errors"),
    parameters.config,
    parameters.keys("external_data", "shard_size"),
)


@parameters.command(parameters.model, *_TWIN)
def emulate(model: Path, output: Path | None, no_rounding: bool, io: str, quiet: bool, **given: Any) -> None:
    """Write MODEL as float32 ops that round as half precision does.

    The result shows on any machine what half precision does to the numbers. onnxruntime's CPU provider hides that: it
    computes most float16 ops in float32, where hardly anything overflows.
    """
    from amp_rewrite.files.model import Model
    from amp_rewrite.files.targets import check_target
    from amp_rewrite.rewrite.emulate import emulate

    settings = parameters.in_force(given)
    saving = {name: getattr(settings, name) for name in ("overwrite", "external_data", "shard_size")}
    output = output or beside(model, "widened.onnx" if no_rounding else "emulated.onnx")
    check_target(output, settings.overwrite, read=model)  # before the work, not after it
    with terminal.progress(model.name, quiet=quiet) as progress:
        source = Model.load(model)
        twin = emulate(source, rounding=not no_rounding, io=io)
        twin.save(output, **saving, progress=progress)
    if twin.proto.graph == source.proto.graph:
        terminal.talk(f"nothing to emulate: {model.name} holds no float16 and no bfloat16", quiet=quiet)
    terminal.talk(f"wrote {output}", quiet=quiet)
