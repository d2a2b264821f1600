"""Training steps in .onnx files: the initial state as default values of inputs, the rest in the metadata.

Any runtime can run such a file: inputs that are not fed take their defaults, and each output `new/<name>` is the
next input `<name>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.errors import AmpRewriteError, TrainingError
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.files.store import Progress
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.settings.policy import Policy
from amp_rewrite.train.objective.losses import Target
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.update import loss_scale as scales
from amp_rewrite.train.update import optimizers
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.loss_scale import Array

KEY = "amp_rewrite.training_step"
VERSION = 1
_OUTPUTS = ("loss", "finite", "applied")
_KINDS = {"micro_batches": int, "training_mode": bool, "objective": str, "fingerprint": str, "policy": str}


def save_step(
    step: TrainingStep,
    path: str | Path,
    *,
    overwrite: bool = False,
    external_data: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step with its initial state, atomically; see `Model.save`.

    TrainingError for a model of an IR version below 4, which has no default values.
    """
    if step.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        raise TrainingError(
            f"the model has IR version {step.model.proto.ir_version}, in which inputs cannot have default values; raise"
            f" it to {FIRST_IR_WITH_FREE_INITIALIZERS}"
        )
    proto = clone(step.model.proto)
    rate = np.array(step.optimizer.learning_rate, np.float32)
    defaults = {**step.initial_state(), step.learning_rate: rate}
    proto.graph.initializer.extend(from_array(array, name) for name, array in defaults.items())
    others = [p for p in proto.metadata_props if p.key != KEY]  # the model may have been a step itself
    del proto.metadata_props[:]
    proto.metadata_props.extend(others)
    proto.metadata_props.add(key=KEY, value=json.dumps(_described(step)))
    replace(step.model, proto=proto).save(path, overwrite=overwrite, external_data=external_data, progress=progress)


def load_step(path: str | Path, *, forward: object = None) -> TrainingStep:
    """Read a step written by `save_step`. `forward`: the model that it trains, needed to export the result.

    TrainingError for a file without a step or of another version, and for another `forward`.
    """
    model = Model.load(path)
    entry = next((p for p in model.proto.metadata_props if p.key == KEY), None)
    if entry is None:
        raise TrainingError(f"{path} is not a training step; write one with `amp-rewrite train-step`")
    metadata = _metadata(entry.value, path)
    trained = None if forward is None else Model.load(forward) if not isinstance(forward, Model) else forward
    if trained is not None and fingerprint(trained).graph != metadata.get("fingerprint"):
        raise TrainingError(f"{path} trains another model: its graph differs from that of `forward`; pass its model")
    try:
        step = _step(model, metadata, trained, path)
        _check_metadata(model, metadata)
        return step
    except AmpRewriteError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged; write the step again") from cause


def _check_metadata(model: Model, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError for metadata that does not fit the model, or of other types."""
    inputs = [metadata["learning_rate"], *metadata["batch"], *[name for _, name, _ in metadata["state"]]]
    inputs += [] if metadata["target"] is None else [metadata["target"]["name"]]
    outputs = [*[metadata[name] for name in _OUTPUTS], *metadata["metrics"]]
    outputs += [name for _, _, name in metadata["state"]]
    graph = model.proto.graph
    if {*inputs} - {v.name for v in graph.input} or {*outputs} - {v.name for v in graph.output}:
        raise ValueError("a name is not one of the model's")
    paths = {path for path, _, _ in metadata["state"]}
    needed = {"step"} | ({"micro_batch"} if metadata["micro_batches"] != 1 else set())
    if not paths >= needed or any(type(metadata[name]) is not kind for name, kind in _KINDS.items()):
        raise ValueError("state is missing, or an entry has another type")
    if metadata["micro_batches"] < 1:
        raise ValueError("micro_batches is below 1")


def _step(model: Model, metadata: Mapping[str, Any], trained: Model | None, path: str | Path) -> TrainingStep:
    proto = clone(model.proto)
    values = {t.name: t for t in proto.graph.initializer}
    state = tuple(
        StateVariable(name, before, after, _default(model, values, before, path))
        for name, before, after in metadata["state"]
    )
    _without_defaults(proto, {s.input for s in state} | {metadata["learning_rate"]})
    return TrainingStep(
        model=replace(model, proto=proto),
        batch=tuple(metadata["batch"]),
        state=state,
        loss=metadata["loss"],
        metrics=tuple(metadata["metrics"]),
        finite=metadata["finite"],
        applied=metadata["applied"],
        learning_rate=metadata["learning_rate"],
        target=None if metadata["target"] is None else Target(**metadata["target"]),
        optimizer=optimizers.deserialize(metadata["optimizer"]),
        loss_scale=scales.get(metadata["loss_scale"]),
        policy=Policy(metadata["policy"]),
        micro_batches=metadata["micro_batches"],
        training_mode=metadata["training_mode"],
        objective=metadata["objective"],
        fingerprint=metadata["fingerprint"],
        forward=trained,
        report=None,
    )


def _described(step: TrainingStep) -> dict[str, Any]:
    target = step.target
    return {
        "version": VERSION,
        "batch": step.batch,
        "state": [[s.name, s.input, s.output] for s in step.state],
        "loss": step.loss,
        "metrics": step.metrics,
        "finite": step.finite,
        "applied": step.applied,
        "learning_rate": step.learning_rate,
        "target": None if target is None else {"name": target.name, "classes": target.classes},
        "optimizer": optimizers.serialize(step.optimizer),
        "loss_scale": None if step.loss_scale is None else scales.serialize(step.loss_scale),
        "policy": step.policy.name,
        "micro_batches": step.micro_batches,
        "training_mode": step.training_mode,
        "objective": step.objective,
        "fingerprint": step.fingerprint,
    }


def _metadata(text: str, path: str | Path) -> dict[str, Any]:
    """Parse the metadata of a step. TrainingError if they are damaged or of another version."""
    try:
        metadata = json.loads(text)
    except ValueError as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged: {cause}; write the step again") from cause
    if not isinstance(metadata, dict) or metadata.get("version") != VERSION:
        version = metadata.get("version") if isinstance(metadata, dict) else None
        raise TrainingError(
            f"{path} has a training step of version {version}, but this package reads version {VERSION}; write the step"
            " again"
        )
    return metadata


def _default(model: Model, values: Mapping[str, TensorProto], name: str, path: str | Path) -> Array:
    if name not in values:
        raise TrainingError(f"{path} lacks the initial value of {name!r}; write the step again")
    array: Array = model.array(values[name]).copy()
    return array


def _without_defaults(proto: ModelProto, names: set[str]) -> None:
    refill(proto.graph, "initializer", [t for t in proto.graph.initializer if t.name not in names])
