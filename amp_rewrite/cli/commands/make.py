"""`amp-rewrite calibrate`, `emulate`, `train-step` and `completion`: outputs other than conversions."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import Batches, check_report, path_beside, write_report
from amp_rewrite.cli.group import COMPLETE, NAME, SHELLS
from amp_rewrite.cli.parameters import choice, option
from amp_rewrite.settings.option import PRECISION
from amp_rewrite.settings.request import OPTIONS, PAINTING, Request

# -- calibrate -----------------------------------------------------------------------------------------------


_MAX_ROWS = 20  # printed rows; the file contains all rows


@parameters.command(
    parameters.model,
    option("--to", "float16|bfloat16|POLICY", "Type that values must fit.  [default: float16]", PRECISION),
    option("--threads", "N", "Threads per op on a CPU.  [default: number of cores]", type=int),
    parameters.output("MODEL-stem.ranges.json", "file"),
    parameters.report_file,
    parameters.ROWS["overwrite"],
    parameters.quiet("errors"),
    *parameters.reads(*parameters.FEED, *parameters.FEEDBACK),
    *parameters.RANDOM,
)
def calibrate(model: Path, output: Path | None, report_file: Path | None, **options: Any) -> None:
    """Run MODEL on data and write the ranges of its values.

    The file contains the largest and smallest magnitude of each value, and the number of elements that do not fit the
    type. `amp-rewrite convert --ranges` reads it.
    """
    settings, quiet = parameters.take_settings(options), options.pop("quiet")
    batches, overwrite = Batches.of(settings, options), settings.overwrite
    output = output or path_beside(model, "ranges.json")
    from amp_rewrite.evidence.calibrate import calibrate
    from amp_rewrite.evidence.ranges import check_writable
    from amp_rewrite.files.model import Model

    check_writable(output, overwrite)  # fail early
    check_report(report_file, overwrite=overwrite, inputs=(model,))
    with terminal.progress(model.name, model, quiet=quiet) as progress:
        loaded = Model.load(model)
        feed = batches.feed(loaded, quiet=quiet)
        ranges = calibrate(loaded, feed, to=settings.to, progress=progress, **options)
    ranges.save(output, overwrite=overwrite)
    if not quiet:
        terminal.show(ranges.text(top=_MAX_ROWS))
    terminal.talk(f"wrote {output}", quiet=quiet)
    write_report(ranges, report_file, quiet=quiet)


# -- emulate -------------------------------------------------------------------------------------------------


_IO = "Low types to keep at inputs and outputs: those supported by numpy, all, or none."


@parameters.command(
    parameters.model,
    parameters.output("MODEL-stem.emulated.onnx, or .widened.onnx"),
    choice("--io", ("numpy", "same", "float32"), _IO, default="numpy", show_default=True),
    parameters.flag("--no-rounding", "Do not round: write the float32 reference of a half-precision model."),
    parameters.ROWS["overwrite"],
    parameters.quiet("errors"),
    *parameters.reads("external_data"),
)
def emulate(model: Path, output: Path | None, no_rounding: bool, io: str, quiet: bool, **options: Any) -> None:
    """Write MODEL as float32 ops that round like half precision.

    The result shows the effect of half precision on any machine. onnxruntime's CPU provider hides it: it computes most
    float16 ops in float32, where almost nothing overflows.
    """
    from amp_rewrite.files.model import Model
    from amp_rewrite.files.store import check_target
    from amp_rewrite.rewrite.emulate import emulate

    settings = parameters.take_settings(options)
    saving = {name: getattr(settings, name) for name in ("overwrite", "external_data")}
    output = output or path_beside(model, "widened.onnx" if no_rounding else "emulated.onnx")
    check_target(output, settings.overwrite, loaded_from=model)  # fail early
    with terminal.progress(model.name, model, quiet=quiet) as progress:
        source = Model.load(model)
        twin = emulate(source, rounding=not no_rounding, io=io)
        twin.save(output, **saving, progress=progress)
    if twin.proto.graph == source.proto.graph:
        terminal.talk(f"nothing to emulate: {model.name} has neither float16 nor bfloat16", quiet=quiet)
    terminal.talk(f"wrote {output}", quiet=quiet)


# -- train-step ----------------------------------------------------------------------------------------------


_TRAINING = "Training"


@parameters.command(
    parameters.model,
    parameters.output("MODEL-stem.step.onnx"),
    option(
        "--loss",
        "VALUE|LOSS(A,B)",
        "A value of the model, or a loss such as cross_entropy(logits,label).",
        _TRAINING,
        required=True,
    ),
    option(
        "--optimizer",
        "NAME,KEY=NUMBER,…",
        "sgd, rmsprop, adam, adamw or adagrad, as in adam,lr=0.001.",
        _TRAINING,
        default="sgd",
        show_default=True,
    ),
    option("--loss-scale", "dynamic|none|NUMBER", "Loss scale.  [default: set by the policy]", _TRAINING),
    option(
        "--policy", "mixed_float16|mixed_bfloat16|float32", "Precision policy.  [default: mixed_float16]", _TRAINING
    ),
    option("--parameters", "GLOB", "Initializers to train; repeatable.", _TRAINING, multiple=True),
    option("--freeze", "GLOB", "Initializers not to train; repeatable.", _TRAINING, multiple=True),
    option(
        "--micro-batches", "N", "Batches to accumulate per step.", _TRAINING, type=int, default=1, show_default=True
    ),
    parameters.flag("--training-mode", "Use batch statistics and dropout.", _TRAINING),
    parameters.ROWS["overwrite"],
    parameters.quiet("errors"),
    parameters.verbose,
    borrowed=parameters.reads(*PAINTING, "external_data"),
)
def train_step(model: Path, output: Path | None, quiet: bool, verbose: bool, **options: Any) -> None:
    """Write a training step of MODEL as one ONNX model.

    The step takes a batch, the state and a learning rate, and returns the loss, the metrics and the new state. One
    graph contains the forward and backward passes, the unscaling, the test for finite gradients, the update and the
    loss scale. The file contains the state's initial values.

    --keep, --lower, --lists, --target, --set and amp.toml work as in `convert`; `to` selects the policy. Settings for
    inputs, outputs and fusions have no effect on a step.
    """
    from amp_rewrite.train.policy import Policy
    from amp_rewrite.train.step.step import save_step, training_step

    output, overwrite = output or path_beside(model, "step.onnx"), bool(options["overwrite"])
    others = {name: options.pop(name) for name in [*options] if name not in (*OPTIONS, "settings", "config")}
    explicit = parameters.explicit(options)
    settings = parameters.take_settings(options)
    keywords = {name: value for name, value in others.items() if value not in (None, ())}
    keywords.setdefault("policy", f"mixed_{settings.to.spelling}")
    if (scale := keywords.get("loss_scale", "")).lower() == "none":
        keywords["loss_scale"] = None
    elif scale:
        with suppress(ValueError):
            keywords["loss_scale"] = float(scale)
    lowers = Policy(keywords["policy"]).lowers is not None
    painting = {name: getattr(settings, name) for name in PAINTING if lowers or name in explicit}
    keywords |= {name: value for name, value in painting.items() if value != getattr(Request(), name)}
    lost = "the model that the step was made from"
    parameters.check_target(output, model, settings, explicit=overwrite, lost=lost)  # fail early
    with terminal.progress(model.name, model, quiet=quiet) as progress:
        step = training_step(model, **keywords)
        save_step(step, output, overwrite=settings.overwrite, external_data=settings.external_data, progress=progress)
    if not quiet and step.report is not None:
        terminal.show(step.report.text(verbose=verbose))
    terminal.talk(f"wrote {output}", quiet=quiet)


# -- completion ----------------------------------------------------------------------------------------------


@parameters.command(click.argument("shell", metavar="|".join(SHELLS), type=click.Choice(SHELLS)))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    Bash and zsh: eval "$(amp-rewrite completion bash)" in ~/.bashrc or ~/.zshrc. Fish: write it to
    ~/.config/fish/completions/amp-rewrite.fish. It completes commands, options, values and models.
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    terminal.show(completer(click.Command(NAME), {}, NAME, COMPLETE).source())
