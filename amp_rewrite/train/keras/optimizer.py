"""Optimizers with state, as in Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import checked_arguments, quoted, whole_number
from amp_rewrite.train.keras.variables import (
    GradsAndVars,
    Variable,
    Variables,
    as_variable,
    differentiable,
    gradient_pairs,
    times,
    variable_list,
)
from amp_rewrite.train.loss_scale import Gradient, serialize
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.update.optimizer import Optimizer, applied, initial_slots
from amp_rewrite.train.update.optimizers import deserialize


@dataclass(eq=False)
class OptimizerState:
    """The mutable state of an optimizer; a `LossScaleOptimizer` shares it with its inner optimizer.

    `count`: number of steps. `slots`: by variable and slot name. `added`: names of the slots from `add_slot`.
    `variables`: by name, to detect duplicate names; copies of the optimizer start with none.
    """

    rule: Optimizer
    count: int = 0
    slots: dict[str, dict[str, Array]] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    variables: dict[str, Variable] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"variables": {}}


@checked_arguments()
class StatefulOptimizer:
    """An optimizer with its slots and step count, as in Keras.

    Variables are identified by name. Hyperparameters are settable attributes (`lr` is `learning_rate`). If an optimizer
    is passed to `training_step`, each `fit` starts from its step count and slots and updates them at the end. A new
    learning rate applies from the next step.

    Args:
        rule: the arithmetic and hyperparameters, such as `SGD(0.1)`.
    """

    _state: OptimizerState

    def __init__(self, rule: Optimizer) -> None:
        if not isinstance(rule, Optimizer):
            raise TrainingError(f"{quoted(rule)} is not an optimizer; pass an Optimizer such as SGD(0.1)")
        vars(self)["_state"] = OptimizerState(rule)

    @property
    def rule(self) -> Optimizer:
        """The arithmetic and hyperparameters."""
        return self._state.rule

    @property
    def iterations(self) -> int:
        """Number of completed steps."""
        return self._state.count

    def slots(self) -> dict[str, dict[str, Array]]:
        """Return the slots by variable and slot name; do not modify them."""
        return self._state.slots

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_state" not in vars(self):
            raise AttributeError(name)
        return getattr(self.rule, _ALIASES.get(name, name))

    def __setattr__(self, name: str, value: Any) -> None:
        name = _ALIASES.get(name, name)
        if name in {part.name for part in fields(self.rule)}:
            self._state.rule = replace(self.rule, **{name: value})
        elif name == "iterations":
            self._state.count = whole_number(name, value.item() if isinstance(value, np.ndarray) else value, 0)
        else:
            names = ", ".join(part.name for part in fields(self.rule))
            raise AttributeError(f"{type(self.rule).__name__} has no hyperparameter {name!r}; it has {names}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ALIASES, *(part.name for part in fields(self.rule))})

    def get_gradients(self, loss: Callable[[], Any], params: Variables) -> list[Gradient]:
        """Return the gradients of a `Differentiable` loss.

        Raises:
            TrainingError: the loss is not `Differentiable`.
        """
        return differentiable(loss).gradients(variable_list(params), np.array(1, np.float32))

    def compute_gradients(
        self, loss: Callable[[], Any], var_list: Variables | None = None, grad_loss: object = None
    ) -> list[tuple[Gradient, Variable]]:
        """Return pairs of a gradient and its variable for `apply_gradients`; the first half of `minimize`.

        Args:
            loss: a `Differentiable` loss.
            var_list: one variable or several; None means all variables of the loss.
            grad_loss: gradient with respect to the loss; None means 1.
        """
        variables = variable_list(var_list, loss)
        return list(zip(self.get_gradients(times(loss, grad_loss), variables), variables, strict=True))

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Variables | None = None,
        grad_loss: object = None,
        name: str | None = None,
        global_step: Variable | None = None,
    ) -> None:
        """Take one optimization step on a `Differentiable` loss.

        Args:
            loss: the loss.
            var_list: one variable or several to change; None means all variables of the loss.
            grad_loss: gradient with respect to the loss; None means 1.
            name: accepted as in Keras, and ignored: there are no graph ops to name.
            global_step: a variable that counts steps; skipped steps do not count.
        """
        pairs = self.compute_gradients(loss, var_list, grad_loss)
        self.apply_gradients(pairs, name, global_step=global_step)

    def get_updates(self, loss: Callable[[], Any], params: Variables) -> list[Callable[[], None]]:
        """Return a list of one function, for a step on a `Differentiable` loss."""
        return [lambda: self.minimize(loss, params)]

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        global_step: Variable | None = None,
    ) -> None:
        """Take one step with these gradients; a variable with the gradient None keeps its value.

        Args:
            grads_and_vars: pairs of a gradient and its variable.
            name: accepted as in Keras, and ignored: there are no graph ops to name.
            experimental_aggregate_gradients: accepted as in Keras, and ignored: `averaged` combines replicas.
            global_step: a variable that counts steps.

        Raises:
            TrainingError: no variable has a gradient, or two share a name.
        """
        pairs, slots = gradient_pairs(grads_and_vars), self.slots()
        for _, variable in pairs:
            if self._state.variables.setdefault(variable.name, variable) is not variable:
                raise TrainingError(f"two variables are named {variable.name!r}; give each a unique name")
        values = {variable.name: variable.numpy() for _, variable in pairs}
        for variable_name, fresh in initial_slots(self.rule, values).items():
            current = slots.get(variable_name, {})
            current = {slot: array for slot, array in current.items() if slot in fresh or slot in self._state.added}
            for slot, array in fresh.items():  # setting a hyperparameter during training can add a slot
                if current.setdefault(slot, array).shape != array.shape:
                    raise TrainingError(
                        f"slot {slot!r} of variable {variable_name!r} has shape {current[slot].shape}, but the variable"
                        f" has {array.shape}; restore a checkpoint of this variable"
                    )
            slots[variable_name] = current
        grads = {variable.name: gradient for gradient, variable in pairs}
        after, slots_after = applied(self.rule, values, grads, slots, step=self.iterations + 1)
        for _, variable in pairs:
            variable.assign(after[variable.name])
            slots[variable.name] |= slots_after[variable.name]
        self._state.count += 1
        if global_step is not None:
            as_variable(global_step).assign_add(1)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of each variable."""
        return sorted({*self.rule.slots(), *self._state.added})

    def add_slot(self, var: Variable, slot_name: str, initializer: object = "zeros") -> Array:
        """Add a slot to a variable, for custom optimizers, and return a copy of it. An existing slot is kept.

        Args:
            var: the variable.
            slot_name: name of the slot.
            initializer: "zeros", "ones", a number, an array, or a function from the shape to an array.

        Raises:
            TrainingError: the initial value does not have the variable's shape.
        """
        slots = self.slots().setdefault(as_variable(var).name, {})
        if slot_name not in slots:
            slots[slot_name] = _initial_value(initializer, var, slot_name)
            self._state.added.add(slot_name)
        return slots[slot_name].copy()

    def set_slot(self, var: Variable, slot_name: str, value: object) -> None:
        """Set the value of an existing slot.

        Raises:
            TrainingError: the slot is unknown, or the value does not have the variable's shape.
        """
        self.get_slot(var, slot_name)
        self.slots()[var.name][slot_name] = _initial_value(value, var, slot_name)

    def get_slot(self, var: Variable, slot_name: str) -> Array:
        """Return a copy of a slot.

        Raises:
            TrainingError: the slot is unknown, or no step has been taken.
        """
        try:
            slot: Array = self.slots()[var.name][slot_name]
        except KeyError:
            legal = ", ".join(self.get_slot_names()) or "none"
            raise TrainingError(
                f"variable {var.name!r} has no slot {slot_name!r}; after the first step, the optimizer has {legal}"
            ) from None
        return slot.copy()

    @property
    def weights(self) -> list[Array]:
        """The step count, followed by all slots, in the order of `checkpoint`."""
        return list(StatefulOptimizer.checkpoint(self).values())

    def get_weights(self) -> list[Array]:
        """Return `weights`, as in Keras."""
        return self.weights

    variables = get_weights

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Restore the result of `get_weights`.

        Raises:
            TrainingError: the number of arrays differs.
        """
        keys = list(StatefulOptimizer.checkpoint(self))
        if len(keys) != len(weights):
            raise TrainingError(
                f"weights must have length {len(keys)}, not {len(weights)}; pass the result of get_weights()"
            )
        StatefulOptimizer.restore(self, dict(zip(keys, weights, strict=True)))

    def checkpoint(self) -> dict[str, Array]:
        """Return all state by its path in files of `Trainer.save`: "step", "slot/<variable>/<slot>"."""
        return {path: np.array(array) for path, array in checkpoint.by_path(self.iterations, self.slots()).items()}

    def restore(self, saved: Mapping[str, Array] | str | os.PathLike[str]) -> None:
        """Restore a checkpoint of a `StatefulOptimizer`, a `LossScaleOptimizer` or a `Trainer`.

        Args:
            saved: the result of `checkpoint`, or a file of `Trainer.save`.

        Raises:
            TrainingError: the step count is missing, or a slot is unknown to this optimizer.
        """
        saved = checkpoint.saved_state(saved)
        count = np.asarray(saved.get("step"))
        if count.shape != () or count.dtype.kind not in "iu":
            raise TrainingError("the checkpoint is missing the step count 'step'; pass the result of checkpoint()")
        unexpected = next((path for path in saved if not path.startswith(checkpoint.PATHS)), None)
        if unexpected is not None:
            raise TrainingError(f"the checkpoint has an unknown path {unexpected!r}; pass the result of checkpoint()")
        slots: dict[str, dict[str, Array]] = {}
        for path in (path for path in saved if path.startswith(checkpoint.SLOT)):
            name, _, slot = path.removeprefix(checkpoint.SLOT).rpartition("/")
            if slot not in self.get_slot_names():
                raise TrainingError(
                    f"the checkpoint has slot {slot!r} of {name!r}, but {type(self.rule).__name__} does not use"
                    " it; restore it with the optimizer that saved it"
                )
            slots.setdefault(name, {})[slot] = np.array(saved[path], np.float32)
        self._state.count, self._state.slots = int(count), slots

    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`."""
        return serialize(self.rule)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> StatefulOptimizer:
        """Return a new optimizer from a `get_config` result."""
        optimizer = deserialize(config, custom_objects)
        return optimizer if isinstance(optimizer, StatefulOptimizer) else cls(optimizer)


def _initial_value(value: object, var: Variable, slot: str) -> Array:
    if isinstance(value, str):
        value = {"zeros": 0.0, "ones": 1.0}.get(value, value)
    array = value(var.shape) if callable(value) else value
    try:
        return np.array(np.broadcast_to(np.asarray(array, np.float32), var.shape))
    except (TypeError, ValueError) as cause:
        raise TrainingError(
            f"{value!r} does not fit slot {slot!r} of {var.name!r}, which has shape {var.shape}; use 'zeros', 'ones',"
            " a number, an array or a function of the shape"
        ) from cause


_ALIASES = {"lr": "learning_rate"}
