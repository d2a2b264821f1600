"""The state that an optimizer object and a training step share: step count, slots, and a dynamic loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.settings.loss_scale import DynamicLossScale, LossScale, ScaleState
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.update.graph import StateVariable
from amp_rewrite.train.update.optimizers import Optimizer


def brought(
    owner: StatefulOptimizer, scale: LossScale | None, state: Sequence[StateVariable]
) -> tuple[StateVariable, ...]:
    """Return the state of a step with the step count, the slots and the current loss scale of an optimizer object.

    TrainingError for a slot of another shape than its parameter.
    """
    values = by_path(owner.iterations, owner.slots(), scale)
    return tuple(replace(v, initial=_fitting(v, values[v.name])) if v.name in values else v for v in state)


def by_path(
    iterations: int, slots: Mapping[str, Mapping[str, Array]], scale: LossScale | None = None
) -> dict[str, Array]:
    """Return a step count, slots and the state of a dynamic loss scale by their paths in checkpoints."""
    values = {f"slot/{name}/{slot}": array for name, own in slots.items() for slot, array in own.items()}
    if isinstance(scale, DynamicLossScale):
        values |= scale_state(scale)
    return {"step": np.array(iterations, np.int64), **values}


def scale_state(scale: DynamicLossScale) -> dict[str, Array]:
    """Return the state of a loss scale by its paths in checkpoints."""
    state = scale.state
    return {"loss_scale": np.array(state.scale, np.float32), "good_steps": np.array(state.good_steps, np.int64)}


def slots_of(saved: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return copies of the slots among values by path, by parameter and slot."""
    slots: dict[str, dict[str, Array]] = {}
    for path, array in saved.items():
        if path.startswith("slot/"):
            parameter, _, slot = path.removeprefix("slot/").rpartition("/")
            slots.setdefault(parameter, {})[slot] = np.array(array)
    return slots


def shown(owner: StatefulOptimizer, values: Mapping[str, Array]) -> None:
    """Show a dynamic loss scale of a step, by path, in the scale of its optimizer object."""
    scale = vars(owner).get("loss_scale")
    if isinstance(scale, DynamicLossScale) and "loss_scale" in values:
        scale.state = ScaleState(np.float32(values["loss_scale"]), int(values["good_steps"]))


def check_unchanged(owner: StatefulOptimizer, rule: Optimizer) -> None:
    """Raise TrainingError if a hyperparameter other than the learning rate was set after the step was made."""
    for part in fields(rule):
        now, then = getattr(owner.rule, part.name, None), getattr(rule, part.name)
        if now != then and part.name != "learning_rate":
            raise TrainingError(
                f"{part.name} of the optimizer was set to {now!r} after the step was made with {then!r}, which is a"
                " constant of the step; make the step again"
            )


def _fitting(variable: StateVariable, array: Array) -> Array:
    if array.shape != variable.initial.shape:
        raise TrainingError(
            f"the optimizer's {variable.name!r} has shape {list(array.shape)}, but the step needs"
            f" {list(variable.initial.shape)}; pass an optimizer that trained this model, or a new one"
        )
    return np.array(array, variable.initial.dtype)
