"""Optimizers with state in the style of Keras."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.door import door, stated, whole_number
from amp_rewrite.train.keras.variables import (
    GradsAndVars,
    Variable,
    Variables,
    checked,
    differentiable,
    listed,
    pairs_of,
    times,
)
from amp_rewrite.train.loss_scale import Gradient, serialize
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.update.optimizer import Optimizer, applied, initial_slots
from amp_rewrite.train.update.optimizers import deserialize


@dataclass(eq=False)
class OptimizerState:
    """The mutable part of an optimizer; a `LossScaleOptimizer` shares it with the optimizer inside.

    `slots`: by variable and slot. `added`: names of slots of `add_slot`. `variables`: by name, to tell two of one name
    apart; a copy has variables of its own.
    """

    rule: Optimizer
    count: int = 0
    slots: dict[str, dict[str, Array]] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    variables: dict[str, Variable] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"variables": {}}


@door()
class StatefulOptimizer:
    """An optimizer with its slots and step count, as in Keras.

    Variables are identified by name. Hyperparameters are settable attributes (`lr` is `learning_rate`). An optimizer
    given to `training_step` brings its step count and slots to each `fit`, and has those of the `Trainer` afterwards; a
    learning rate that is set holds from the next step on.

    Args:
        rule: the optimizer's arithmetic and hyperparameters.
    """

    _state: OptimizerState

    def __init__(self, rule: Optimizer) -> None:
        if not isinstance(rule, Optimizer):
            raise TrainingError(f"not an optimizer: {stated(rule)}; pass an Optimizer such as SGD(0.1)")
        vars(self)["_state"] = OptimizerState(rule)

    @property
    def rule(self) -> Optimizer:
        """Arithmetic and hyperparameters."""
        return self._state.rule

    @property
    def iterations(self) -> int:
        """Number of steps."""
        return self._state.count

    def slots(self) -> dict[str, dict[str, Array]]:
        """Return the slots by variable; do not modify them."""
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
            known = ", ".join(part.name for part in fields(self.rule))
            raise AttributeError(f"{type(self.rule).__name__} has no hyperparameter {name!r}; it has {known}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ALIASES, *(part.name for part in fields(self.rule))})

    def get_gradients(self, loss: Callable[[], Any], params: Variables) -> list[Gradient]:
        """Return the gradients of a `Differentiable` loss.

        Raises:
            TrainingError: the loss is another callable.
        """
        return differentiable(loss).gradients(listed(params), np.array(1, np.float32))

    def compute_gradients(
        self, loss: Callable[[], Any], var_list: Variables | None = None, grad_loss: object = None
    ) -> list[tuple[Gradient, Variable]]:
        """Return pairs of a gradient and its variable, for `apply_gradients`; the first half of `minimize`.

        Args:
            loss: a `Differentiable` loss.
            var_list: variables, one or several; None: those of the loss.
            grad_loss: gradient with respect to the loss, by which the gradients are multiplied; None is 1.
        """
        variables = listed(var_list, loss)
        return list(zip(self.get_gradients(times(loss, grad_loss), variables), variables, strict=True))

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Variables | None = None,
        grad_loss: object = None,
        name: str | None = None,
        global_step: Variable | None = None,
    ) -> None:
        """Make one step down a `Differentiable` loss.

        Args:
            loss: the loss.
            var_list: variables to change, one or several; None: those of the loss.
            grad_loss: gradient with respect to the loss; None is 1.
            name: accepted as in Keras, and not used: there are no graph ops to name.
            global_step: a variable that counts steps; a skipped step does not count.
        """
        pairs = self.compute_gradients(loss, var_list, grad_loss)
        self.apply_gradients(pairs, name, global_step=global_step)

    def get_updates(self, loss: Callable[[], Any], params: Variables) -> list[Callable[[], None]]:
        """Return a list with the update of one step down a `Differentiable` loss, as a function without arguments."""
        return [lambda: self.minimize(loss, params)]

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        global_step: Variable | None = None,
    ) -> None:
        """Make one step with these gradients; a variable with gradient None keeps its value.

        Args:
            grads_and_vars: pairs of a gradient and its variable.
            name: accepted as in Keras, and not used: there are no graph ops to name.
            experimental_aggregate_gradients: accepted as in Keras, and not used: `averaged` adds up replicas.
            global_step: a variable that counts steps.

        Raises:
            TrainingError: no variable has a gradient, or two share a name.
        """
        pairs, slots = pairs_of(grads_and_vars), self.slots()
        for _, variable in pairs:
            if self._state.variables.setdefault(variable.name, variable) is not variable:
                raise TrainingError(f"two variables are named {variable.name!r}; give each a unique name")
        values = {variable.name: variable.numpy() for _, variable in pairs}
        for variable_name, fresh in initial_slots(self.rule, values).items():
            known = slots.get(variable_name, {})
            own = {slot: array for slot, array in known.items() if slot in fresh or slot in self._state.added}
            for slot, array in fresh.items():  # setting a hyperparameter during training can add a slot
                if own.setdefault(slot, array).shape != array.shape:
                    raise TrainingError(
                        f"slot {slot!r} of variable {variable_name!r} has shape {own[slot].shape}, but the variable has"
                        f" {array.shape}; restore a checkpoint of this variable"
                    )
            slots[variable_name] = own
        grads = {variable.name: gradient for gradient, variable in pairs}
        after, slots_after = applied(self.rule, values, grads, slots, step=self.iterations + 1)
        for _, variable in pairs:
            variable.assign(after[variable.name])
            slots[variable.name] |= slots_after[variable.name]
        self._state.count += 1
        if global_step is not None:
            checked(global_step).assign_add(1)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of each variable."""
        return sorted({*self.rule.slots(), *self._state.added})

    def add_slot(self, var: Variable, slot_name: str, initializer: object = "zeros") -> Array:
        """Add a slot to a variable, for an optimizer of your own; return a copy of it. An existing one stays.

        Args:
            var: the variable.
            slot_name: name of the slot.
            initializer: "zeros", "ones", a number, an array, or a function from the shape to an array.

        Raises:
            TrainingError: the first value does not fit the variable.
        """
        own = self.slots().setdefault(checked(var).name, {})
        if slot_name not in own:
            own[slot_name] = _first(initializer, var, slot_name)
            self._state.added.add(slot_name)
        return own[slot_name].copy()

    def set_slot(self, var: Variable, slot_name: str, value: object) -> None:
        """Set an existing slot.

        Raises:
            TrainingError: the slot is unknown, or the value does not fit.
        """
        self.get_slot(var, slot_name)
        self.slots()[var.name][slot_name] = _first(value, var, slot_name)

    def get_slot(self, var: Variable, slot_name: str) -> Array:
        """Return a copy of a slot.

        Raises:
            TrainingError: the slot is unknown, or no step was made yet.
        """
        try:
            slot: Array = self.slots()[var.name][slot_name]
        except KeyError:
            legal = ", ".join(self.get_slot_names()) or "none"
            raise TrainingError(
                f"no slot {slot_name!r} of variable {var.name!r}; after its first step the optimizer has {legal}"
            ) from None
        return slot.copy()

    @property
    def weights(self) -> list[Array]:
        """The step count, then all slots, in the order of `checkpoint`."""
        return list(StatefulOptimizer.checkpoint(self).values())

    def get_weights(self) -> list[Array]:
        """Return `weights`."""
        return self.weights

    variables = get_weights

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set the result of `get_weights`.

        Raises:
            TrainingError: the number of arrays is another.
        """
        keys = list(StatefulOptimizer.checkpoint(self))
        if len(keys) != len(weights):
            raise TrainingError(f"{len(weights)} arrays for {len(keys)} weights; pass the result of get_weights()")
        StatefulOptimizer.restore(self, dict(zip(keys, weights, strict=True)))

    def checkpoint(self) -> dict[str, Array]:
        """Return all state by its paths in files of `Trainer.save`: "step", "slot/<variable>/<slot>"."""
        return {path: np.array(array) for path, array in checkpoint.by_path(self.iterations, self.slots()).items()}

    def restore(self, saved: Mapping[str, Array] | str | os.PathLike[str]) -> None:
        """Restore a checkpoint of this optimizer, of a `LossScaleOptimizer` around an equal one, or of a `Trainer`.

        Args:
            saved: the result of `checkpoint`, or a file of `Trainer.save`.

        Raises:
            TrainingError: the step count is missing, or a slot is unknown to this optimizer.
        """
        saved = checkpoint.saved_state(saved)
        count = np.asarray(saved.get("step"))
        if count.shape != () or count.dtype.kind not in "iu":
            raise TrainingError("the checkpoint lacks the step count 'step'; pass the result of checkpoint()")
        strange = next((path for path in saved if not path.startswith(checkpoint.PATHS)), None)
        if strange is not None:
            raise TrainingError(
                f"the checkpoint has {strange!r}, which is of another tool; pass what checkpoint() gives"
            )
        slots: dict[str, dict[str, Array]] = {}
        for path in (path for path in saved if path.startswith(checkpoint.SLOT)):
            name, _, slot = path.removeprefix(checkpoint.SLOT).rpartition("/")
            if slot not in self.get_slot_names():
                raise TrainingError(
                    f"the checkpoint has slot {slot!r} of {name!r}, but {type(self.rule).__name__} has no such slot;"
                    " restore it with the optimizer that saved it"
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
        """Return the optimizer of a `get_config` result."""
        made = deserialize(config, custom_objects)
        return made if isinstance(made, StatefulOptimizer) else cls(made)


def _first(value: object, var: Variable, slot: str) -> Array:
    if isinstance(value, str):
        value = {"zeros": 0.0, "ones": 1.0}.get(value, value)
    made = value(var.shape) if callable(value) else value
    try:
        return np.array(np.broadcast_to(np.asarray(made, np.float32), var.shape))
    except (TypeError, ValueError) as cause:
        raise TrainingError(
            f"{value!r} is not a value of slot {slot!r} of {var.name!r}, whose shape is {var.shape}; use 'zeros',"
            " 'ones', a number, an array or a function of the shape"
        ) from cause


_ALIASES = {"lr": "learning_rate"}
