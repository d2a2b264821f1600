"""Training steps in .onnx files: the initial state as default values of inputs, the rest in the metadata.

Any runtime can run such a file: inputs that are not fed take their defaults, and each output `new/<name>` is the
next input `<name>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.errors import AmpRewriteError, TrainingError
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.store import Progress
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.settings import loss_scale as scales
from amp_rewrite.settings.loss_scale import serialize
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.objective.prediction import TargetInput
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.optimizers import deserialize

KEY = "amp_rewrite.training_step"
VERSION = 1
_OUTPUTS = ("loss", "finite", "applied")
_NAMES = (*_OUTPUTS, "learning_rate", "micro_batches", "training_mode", "objective", "fingerprint")
"""Fields of a step that are text or numbers in the metadata, too."""
_LEFT_OUT = ("model", "forward", "report", "owner")
"""Fields of a step that the metadata lack, or spell in another way."""


def save_step(
    step: TrainingStep,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step with its initial state, atomically; see `Model.save`.

    Args:
        step: the step.
        path: the file to write.
        overwrite: replace an existing file.
        external_data: as `Model.save` takes it.
        progress: called as `progress(done, total)` with bytes.

    Raises:
        TrainingError: the model has an IR version below 4, which has no default values.

    Example:
        >>> from amp_rewrite.train import save_step, training_step
        >>> save_step(training_step("model.onnx", loss="cross_entropy(probability, label)"), "step.onnx")
    """
    if step.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        raise TrainingError(
            f"the model has IR version {step.model.proto.ir_version}, in which inputs cannot have default values; raise"
            f" it to {FIRST_IR_WITH_FREE_INITIALIZERS}"
        )
    proto = clone(step.model.proto)
    rate = np.array(step.optimizer.rate_at(next(int(v.initial) for v in step.state if v.name == "step")), np.float32)
    defaults = {**step.initial_state(), step.learning_rate: rate}
    proto.graph.initializer.extend(from_array(array, name) for name, array in defaults.items())
    # the model may have been a step itself
    refill(proto, "metadata_props", [p for p in proto.metadata_props if p.key != KEY])
    proto.metadata_props.add(key=KEY, value=json.dumps(_described(step)))
    replace(step.model, proto=proto).save(path, overwrite=overwrite, external_data=external_data, progress=progress)


def load_step(
    path: str | Path, *, forward: object = None, custom_objects: Mapping[str, Any] | None = None
) -> TrainingStep:
    """Return a step written by `save_step`.

    Args:
        path: the file.
        forward: the model that it trains, needed to export the result.
        custom_objects: optimizer and schedule classes of your own by name.

    Returns:
        The step, for a `Trainer`.

    Raises:
        TrainingError: the file has no step or is of another version, or `forward` is another model.

    Example:
        >>> from amp_rewrite.train import load_step, save_step, training_step
        >>> save_step(training_step("model.onnx", loss="cross_entropy(probability, label)"), "step.onnx")
        >>> load_step("step.onnx", forward="model.onnx").objective
        'cross_entropy(probability, label)'
    """
    model = Model.load(path)
    entry = next((p for p in model.proto.metadata_props if p.key == KEY), None)
    if entry is None:
        raise TrainingError(f"{path} is not a training step; write one with `amp-rewrite train-step`")
    metadata = _metadata(entry.value, path)
    trained = None if forward is None else Model.load(forward)
    if trained is not None and fingerprint(trained).graph != metadata.get("fingerprint"):
        raise TrainingError(f"{path} trains another model: its graph differs from that of `forward`; pass its model")
    try:
        return _step(model, metadata, trained, path, custom_objects)
    except AmpRewriteError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged; write the step again") from cause


def _step(
    model: Model,
    metadata: Mapping[str, Any],
    trained: Model | None,
    path: str | Path,
    custom_objects: Mapping[str, Any] | None,
) -> TrainingStep:
    proto = clone(model.proto)
    values = {t.name: t for t in proto.graph.initializer}
    lost = next((name for _, name, _ in metadata["state"] if name not in values), None)
    if lost is not None:
        raise TrainingError(f"{path} lacks the initial value of {lost!r}; write the step again")
    state = tuple(
        StateVariable(name, before, after, model.array(values[before]).copy())
        for name, before, after in metadata["state"]
    )
    names = {*(metadata[name] for name in (*_OUTPUTS, "learning_rate")), *metadata["batch"], *metadata["metrics"]}
    if names - {v.name for v in (*proto.graph.input, *proto.graph.output)} or "step" not in {v.name for v in state}:
        raise ValueError("a name is not one of the model's")
    target = metadata["target"]
    weights = None if target is None else target["class_weights"]
    defaults = {metadata["learning_rate"], *(s.input for s in state)}
    refill(proto.graph, "initializer", [t for t in proto.graph.initializer if t.name not in defaults])
    return TrainingStep(
        **{name: metadata[name] for name in _NAMES},
        model=replace(model, proto=proto),
        batch=tuple(metadata["batch"]),
        state=state,
        metrics=tuple(metadata["metrics"]),
        target=None if target is None else TargetInput(**{**target, "class_weights": weights and tuple(weights)}),
        optimizer=deserialize(metadata["optimizer"], custom_objects),
        owner=None,
        loss_scale=scales.get(metadata["loss_scale"]),
        policy=Policy(metadata["policy"]),
        forward=trained,
        report=None,
    )


def _described(step: TrainingStep) -> dict[str, Any]:
    described = {name: value for name, value in vars(step).items() if name not in _LEFT_OUT}
    return {
        "version": VERSION,
        **described,
        "state": [[s.name, s.input, s.output] for s in step.state],
        "target": None if step.target is None else asdict(step.target),
        "optimizer": serialize(step.optimizer),
        "loss_scale": None if step.loss_scale is None else serialize(step.loss_scale),
        "policy": step.policy.name,
    }


def _metadata(text: str, path: str | Path) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads(text)
    except ValueError as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged: {cause}; write the step again") from cause
    version = metadata.get("version") if isinstance(metadata, dict) else None
    if version != VERSION:
        raise TrainingError(
            f"{path} has a training step of version {version}, but this package reads version {VERSION}; write the step"
            " again"
        )
    return metadata
