"""A step of an optimizer on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.settings.loss_scale import Gradient, IndexedSlices
from amp_rewrite.train.update.optimizers.arithmetic import NUMPY
from amp_rewrite.train.update.optimizers.optimizer import Optimizer


def initial_slots(optimizer: Optimizer, variables: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return the slots of all variables before the first step; frozen ones have none."""
    return {
        name: {} if optimizer.group_of(name).frozen else _slots(optimizer, array) for name, array in variables.items()
    }


def _slots(optimizer: Optimizer, variable: Array) -> dict[str, Array]:
    slots = {}
    for slot, value in optimizer.slots().items():
        slots[slot] = np.zeros(variable.shape, np.float32)  # takes no memory until it is written
        if value:
            slots[slot].fill(value)
    return slots


def applied(
    optimizer: Optimizer,
    variables: Mapping[str, Array],
    gradients: Mapping[str, Gradient],
    slots: Mapping[str, Mapping[str, Array]],
    *,
    step: int,
    learning_rate: float | np.float32 | None = None,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return variables and slots after step number `step`, counted from 1; the arguments are not changed.

    All arrays are float32; `slots` has them by variable and slot. A frozen variable, or one with gradient None, keeps
    its value and slots. A sparse gradient is zero in absent rows, so slots decay there too (as in Keras's Adam, unlike
    its momentum).
    """
    rate = np.array(optimizer.rate_at(step - 1) if learning_rate is None else learning_rate, np.float32)
    names = [name for name in variables if gradients.get(name) is not None and not optimizer.group_of(name).frozen]
    dense = [_dense(gradients[name], variables[name]) for name in names]
    new_variables = {name: np.array(array) for name, array in variables.items()}
    new_slots = {name: {slot: np.array(a) for slot, a in slots.get(name, {}).items()} for name in variables}
    with np.errstate(all="ignore"):  # a fixed loss scale lets nonfinite gradients through on purpose
        for name, gradient in zip(names, optimizer.clipped(NUMPY, dense), strict=True):
            variable, count = variables[name], np.array(step, np.int64)
            own, own_rate = optimizer.for_parameter(name, variable.shape), optimizer.rate_of(name, rate)
            new_variables[name], after = own.updated(NUMPY, variable, gradient, slots[name], own_rate, count)
            new_slots[name] = {slot: np.asarray(array) for slot, array in after.items()}
    return new_variables, new_slots


def _dense(gradient: Gradient, variable: Array) -> Array:
    """Return a gradient as a float32 array of the variable's shape. TrainingError if it does not fit."""
    assert gradient is not None
    if isinstance(gradient, IndexedSlices):
        rows = np.asarray(gradient.indices)
        wrong = rows[(rows < 0) | (rows >= (len(variable) if variable.ndim else 0))]
        if wrong.size:
            raise TrainingError(
                f"a sparse gradient has row {wrong[0]}, out of range for a variable of shape {variable.shape};"
                " correct its indices"
            )
        dense = np.zeros(variable.shape, np.float32)
        np.add.at(dense, np.asarray(gradient.indices), np.asarray(gradient.values, np.float32))
        return dense
    array = np.asarray(gradient, np.float32)
    if array.shape != variable.shape:
        raise TrainingError(
            f"a gradient has shape {array.shape}, but its variable has shape {variable.shape}; pass one gradient per"
            " variable, in order"
        )
    return array
