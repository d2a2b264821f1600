"""`amp-rewrite train-step`: one model that makes a training step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_rewrite.cli import parameters, terminal
from amp_rewrite.cli.files import beside
from amp_rewrite.cli.parameters import option
from amp_rewrite.reports.render import plain
from amp_rewrite.settings.policy import Policy
from amp_rewrite.settings.request import Request

if TYPE_CHECKING:
    from amp_rewrite.settings.loss_scale import LossScale
    from amp_rewrite.train.step.step import TrainingStep

_HEAD = "Training"
_STEP = (
    parameters.output("MODEL-stem.step.onnx"),
    option(
        "--loss",
        "VALUE|LOSS(A,B)",
        "A value of the model, or cross_entropy, mean_squared_error … of one, as in cross_entropy(logits,label).",
        _HEAD,
        required=True,
    ),
    option(
        "--optimizer",
        "NAME,KEY=NUMBER,…",
        "sgd, rmsprop, adam, adamw or adagrad, as in adam,lr=0.001,clipnorm=1.",
        _HEAD,
        default="sgd",
        show_default=True,
    ),
    option(
        "--loss-scale",
        "dynamic|none|NUMBER",
        "Loss scale of the gradients.  [default: dynamic for mixed_float16, else none]",
        _HEAD,
    ),
    option(
        "--policy",
        "mixed_float16|mixed_bfloat16|float32",
        "Type of the arithmetic; parameters stay float32.  [default: mixed_float16]",
        _HEAD,
    ),
    option("--parameters", "GLOB", "Initializers to train; repeatable.", _HEAD, multiple=True),
    option("--freeze", "GLOB", "Initializers not to train; repeatable.", _HEAD, multiple=True),
    option(
        "--micro-batches", "N", "Runs whose gradients make one step.", _HEAD, type=int, default=1, show_default=True
    ),
    parameters.flag("--training-mode", "Normalize by statistics of the batch, and apply dropout.", _HEAD),
    *parameters.STEP,
    parameters.ROWS["overwrite"],
    parameters.config,
    parameters.keys(*parameters.STEP_KEYS, "external_data"),
    parameters.quiet("errors"),
    parameters.verbose,
)


@parameters.command(parameters.model, *_STEP)
def train_step(model: Path, output: Path | None, quiet: bool, verbose: bool, **given: Any) -> None:
    """Write one ONNX model that makes a training step of MODEL.

    It takes a batch, the state and a learning rate, and gives loss, metrics and the new state: forward and backward
    pass, unscaling, finite test, update and loss scale in one graph. The state's initial values are in the file.

    Settings in amp.toml apply as for `convert`; `to` selects the policy. Settings for inputs, outputs and fusions have
    no effect on a step.
    """
    from amp_rewrite.train.step.step import training_step
    from amp_rewrite.train.step.step_file import save_step

    output = output or beside(model, "step.onnx")
    asked, settings = _asked(given)
    lost = "the model that the step was made from"
    parameters.check_target(output, model, settings, asked=bool(given["overwrite"]), lost=lost)  # before the work
    with terminal.progress(model.name, quiet=quiet) as progress:
        step = training_step(model, **asked)
        save_step(step, output, overwrite=settings.overwrite, external_data=settings.external_data, progress=progress)
    if not quiet:
        terminal.show(_summary(model.name, step))
        if step.report is not None:
            terminal.show(step.report.table())
            if step.report.conversion is not None:
                terminal.show(step.report.conversion.text(verbose=verbose, command=""))
    terminal.talk(f"wrote {output}", quiet=quiet)


def _asked(given: dict[str, Any]) -> tuple[dict[str, Any], Request]:
    """Return the arguments of `training_step` that are not usual, and the settings in force."""
    from amp_rewrite.settings.request import PAINTING

    own = {name: given.pop(name) for name in _OWN}
    said = {name: value for name, value in given.items() if value not in (None, ())}
    settings = parameters.in_force(given)
    asked = {name: value for name, value in own.items() if value not in (None, ())}
    asked.setdefault("policy", f"mixed_{settings.to.spelling}")
    if "loss_scale" in asked:
        asked["loss_scale"] = _loss_scale(asked["loss_scale"])
    lowers = Policy(asked["policy"]).lowers is not None
    painting = {name: getattr(settings, name) for name in PAINTING if lowers or name in said}
    return asked | {name: value for name, value in painting.items() if value != getattr(Request(), name)}, settings


_OWN = (
    "loss",
    "optimizer",
    "loss_scale",
    "policy",
    "parameters",
    "freeze",
    "micro_batches",
    "training_mode",
)
"""Options of a training step alone."""


def _loss_scale(text: str) -> float | str | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _summary(name: str, step: TrainingStep) -> str:
    numbers = sum(s.initial.size for s in step.state if s.name.startswith("parameter/"))
    more = f" and {len(step.shared) - 3} more" if len(step.shared) > 3 else ""
    shared = {"shared": f"{', '.join(step.shared[:3])}{more}: several ops read each"} if step.shared else {}
    rows = {
        "trains": f"{len(step.parameters)} parameters of {numbers} numbers",
        **shared,
        "batch": ", ".join(step.batch),
        "gives": ", ".join((step.loss, *step.metrics, step.finite, step.applied, "new state")),
        "optimizer": step.optimizer.spelling,
        "loss scale": _scale_in_words(step.loss_scale),
        "policy": step.policy.name,
    }
    lines = (f"  {key:<13}{plain(value)}" for key, value in rows.items())
    return "\n".join([f"training step of {plain(name)}", *lines])


def _scale_in_words(scale: LossScale | None) -> str:
    from amp_rewrite.settings.loss_scale import DynamicLossScale

    if isinstance(scale, DynamicLossScale):
        return f"dynamic, {scale.initial_loss_scale:g} at first"
    return "none" if scale is None else f"{float(scale()):g}"
