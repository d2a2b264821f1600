"""A training step in one .onnx file: the initial state as defaults of its inputs, the rest in the metadata.

Any runtime can run it: what it is not fed it takes from the defaults, and its outputs `new/<name>` are what to feed
as `<name>` next.
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
from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train import optimizers
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.losses import Target
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.step.update import StateVariable

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
    """Write a step with its initial state, whole or not at all; see `Model.save`.

    TrainingError for a model of an IR version below 4, which has no defaults.
    """
    if step.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        raise TrainingError(
            f"the model is of IR version {step.model.proto.ir_version}, whose inputs have no defaults; raise it to"
            f" {FIRST_IR_WITH_FREE_INITIALIZERS}"
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
    """The step in a file that `save_step` wrote. `forward`: the model that it trains, needed to export the result.

    TrainingError for a file that holds no step, or one of another version, and for another `forward`.
    """
    model = Model.load(path)
    entry = next((p for p in model.proto.metadata_props if p.key == KEY), None)
    if entry is None:
        raise TrainingError(f"{path} is a model, but no training step; write one with `amp-rewrite train-step`")
    told = _told(entry.value, path)
    trained = None if forward is None else Model.load(forward) if not isinstance(forward, Model) else forward
    if trained is not None and fingerprint(trained).graph != told.get("fingerprint"):
        raise TrainingError(f"{path} trains another model than the one given: their graphs differ")
    try:
        made = _step(model, told, trained, path)
        _check_told(model, told)
        return made
    except AmpRewriteError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged; write the step again") from cause


def _check_told(model: Model, told: Mapping[str, Any]) -> None:
    """ValueError, TypeError or KeyError for metadata that is not about this model, or of other types."""
    reads, gives = {v.name for v in model.proto.graph.input}, {v.name for v in model.proto.graph.output}
    read, given = [told["learning_rate"], *told["batch"]], [told[name] for name in _OUTPUTS] + [*told["metrics"]]
    read += [one for _, one, _ in told["state"]] + ([] if told["target"] is None else [told["target"]["name"]])
    given += [one for _, _, one in told["state"]]
    if not (reads.issuperset(read) and gives.issuperset(given)):
        raise ValueError("a name is not one of the model's")
    paths = {path for path, _, _ in told["state"]}
    needed = {"step"} | ({"micro_batch"} if told["micro_batches"] != 1 else set())
    if not paths >= needed or any(type(told[name]) is not kind for name, kind in _KINDS.items()):
        raise ValueError("state is missing, or something is of another type")
    if told["micro_batches"] < 1:
        raise ValueError("no run makes a step")


def _step(model: Model, told: Mapping[str, Any], trained: Model | None, path: str | Path) -> TrainingStep:
    proto = clone(model.proto)
    values = {t.name: t for t in proto.graph.initializer}
    state = tuple(
        StateVariable(name, read, given, _default(model, values, read, path)) for name, read, given in told["state"]
    )
    _without_defaults(proto, {s.input for s in state} | {told["learning_rate"]})
    return TrainingStep(
        model=replace(model, proto=proto),
        batch=tuple(told["batch"]),
        state=state,
        loss=told["loss"],
        metrics=tuple(told["metrics"]),
        finite=told["finite"],
        applied=told["applied"],
        learning_rate=told["learning_rate"],
        target=None if told["target"] is None else Target(**told["target"]),
        optimizer=optimizers.deserialize(told["optimizer"]),
        loss_scale=scales.get(told["loss_scale"]),
        policy=Policy(told["policy"]),
        micro_batches=told["micro_batches"],
        training_mode=told["training_mode"],
        objective=told["objective"],
        fingerprint=told["fingerprint"],
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


def _told(text: str, path: str | Path) -> dict[str, Any]:
    """The metadata of a step. TrainingError where it is damaged or of another version."""
    try:
        told = json.loads(text)
    except ValueError as cause:
        raise TrainingError(f"{path}: the metadata {KEY!r} is damaged: {cause}; write the step again") from cause
    if not isinstance(told, dict) or told.get("version") != VERSION:
        version = told.get("version") if isinstance(told, dict) else None
        raise TrainingError(f"{path} holds a training step of version {version}; this package reads version {VERSION}")
    return told


def _default(model: Model, values: Mapping[str, TensorProto], name: str, path: str | Path) -> Array:
    if name not in values:
        raise TrainingError(f"{path} lacks the initial value of {name!r}; write the step again")
    array: Array = model.array(values[name]).copy()
    return array


def _without_defaults(proto: ModelProto, names: set[str]) -> None:
    refill(proto.graph, "initializer", [t for t in proto.graph.initializer if t.name not in names])
