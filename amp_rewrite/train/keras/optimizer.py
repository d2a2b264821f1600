"""Optimizers with state in the style of Keras: objects that change variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.keras.saved_state import SCALE_KEYS, saved_state
from amp_rewrite.train.keras.variables import GradsAndVars, Variable, differentiable, pairs_of
from amp_rewrite.train.update import optimizers
from amp_rewrite.train.update.loss_scale import Array, Gradient, serialize


class Followed(Protocol):
    """A training whose optimizer this is: a `Trainer` that runs the optimizer as part of its step."""

    def optimizer_slots(self) -> dict[str, dict[str, Array]]:
        """Return copies of the slots by variable."""

    def set_optimizer_state(self, iterations: int, slots: Mapping[str, Mapping[str, Array]]) -> None:
        """Continue from another step count and other slots."""


class StatefulOptimizer:
    """An optimizer with its slots and step count, as in Keras: one object that changes variables.

    Variables are identified by name. Hyperparameters are settable attributes (`lr` is `learning_rate`). An optimizer
    given to `training_step` brings its step count and slots, and shows those of the `Trainer` afterwards; a learning
    rate that is set holds from the next step on.

    Args:
        rule: the optimizer's arithmetic and hyperparameters.
    """

    rule: optimizers.Optimizer
    iterations: int

    def __init__(self, rule: optimizers.Optimizer) -> None:
        vars(self).update(rule=rule, iterations=0, _slots={}, _variables={}, _followed=None, _stale=False)

    def follow(self, training: Followed, iterations: int) -> None:
        """Show the state of a training, which is now after so many steps; slots are read when they are asked for.

        Args:
            training: the training.
            iterations: its steps.
        """
        vars(self).update(_followed=training, _stale=True, iterations=iterations)

    def slots(self) -> dict[str, dict[str, Array]]:
        """Return the slots by variable; do not modify them."""
        state = vars(self)
        if state["_stale"]:
            state.update(_slots=state["_followed"].optimizer_slots(), _stale=False)
        slots: dict[str, dict[str, Array]] = state["_slots"]
        return slots

    def set_state(self, iterations: int, slots: dict[str, dict[str, Array]]) -> None:
        """Set step count and slots, also of a training that is followed.

        Args:
            iterations: the step count.
            slots: arrays by variable and slot.
        """
        vars(self).update(_slots=slots, _stale=False)
        self.iterations = iterations

    def _tell(self) -> None:
        """Let a followed training continue from the state that was set here."""
        followed = vars(self)["_followed"]
        if followed is not None:
            followed.set_optimizer_state(self.iterations, self.slots())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "rule" not in vars(self):
            raise AttributeError(name)
        return getattr(self.rule, _ALIASES.get(name, name))

    def __setattr__(self, name: str, value: Any) -> None:
        name = _ALIASES.get(name, name)
        if name in {field.name for field in fields(self.rule)}:
            vars(self)["rule"] = replace(self.rule, **{name: value})
        elif name == "iterations":
            vars(self)["iterations"] = int(value)
            self._tell()
        else:
            known = ", ".join(field.name for field in fields(self.rule))
            raise AttributeError(f"{type(self.rule).__name__} has no hyperparameter {name!r}; it has {known}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ALIASES, *(field.name for field in fields(self.rule))})

    def get_gradients(self, loss: Callable[[], Any], params: Sequence[Variable]) -> list[Gradient]:
        """Return the gradients of a `Differentiable` loss.

        Args:
            loss: the loss.
            params: variables.

        Raises:
            TrainingError: the loss is another callable.
        """
        return differentiable(loss).gradients(params, np.array(1, np.float32))

    def minimize(self, loss: Callable[[], Any], var_list: Sequence[Variable]) -> None:
        """Make one step down a `Differentiable` loss.

        Args:
            loss: the loss.
            var_list: variables to change.
        """
        self.apply_gradients(zip(self.get_gradients(loss, var_list), var_list, strict=True))

    def apply_gradients(self, grads_and_vars: GradsAndVars) -> None:
        """Make one step with these gradients; a variable with gradient None keeps its value.

        Args:
            grads_and_vars: pairs of a gradient and its variable.

        Raises:
            TrainingError: no variable has a gradient, or two share a name.
        """
        pairs = pairs_of(grads_and_vars)
        values = {variable.name: variable.numpy() for _, variable in pairs}
        self._create_slots([variable for _, variable in pairs])
        grads = {variable.name: gradient for gradient, variable in pairs}
        own = self.slots()
        after, slots = optimizers.applied(self.rule, values, grads, own, step=self.iterations + 1)
        for _, variable in pairs:
            variable.assign(after[variable.name])
        own.update(slots)
        self.iterations += 1

    def _create_slots(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            if self._variables.setdefault(variable.name, variable) is not variable:
                raise TrainingError(f"two variables are named {variable.name!r}; give each a unique name")
        for name, fresh in optimizers.initial_slots(self.rule, {v.name: v.numpy() for v in variables}).items():
            own = {slot: array for slot, array in self.slots().get(name, {}).items() if slot in fresh}
            for slot, array in own.items():
                if array.shape != fresh[slot].shape:
                    raise TrainingError(
                        f"slot {slot!r} of variable {name!r} has shape {array.shape}, but the variable has"
                        f" {fresh[slot].shape}; restore a checkpoint of this variable"
                    )
            self.slots()[name] = {**fresh, **own}  # setting a hyperparameter during training can add a slot

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of each variable."""
        return sorted(self.rule.slots())

    def get_slot(self, var: Variable, slot_name: str) -> Array:
        """Return a copy of a slot.

        Args:
            var: the variable.
            slot_name: name of the slot.

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

        Args:
            weights: the step count and all slots.

        Raises:
            TrainingError: the number of arrays is another.
        """
        keys = list(StatefulOptimizer.checkpoint(self))
        if len(keys) != len(weights):
            raise TrainingError(f"{len(weights)} arrays for {len(keys)} weights; pass the result of get_weights()")
        StatefulOptimizer.restore(self, dict(zip(keys, weights, strict=True)))

    def checkpoint(self) -> dict[str, Array]:
        """Return all state by path: "iter", "<variable>/<slot>"."""
        slots = {f"{name}/{slot}": array.copy() for name, own in self.slots().items() for slot, array in own.items()}
        return {"iter": np.array(self.iterations, np.int64), **slots}

    def restore(self, saved: Mapping[str, Array] | str | os.PathLike[str]) -> None:
        """Restore a checkpoint of this optimizer, of a `LossScaleOptimizer` around an equal one, or of a `Trainer`.

        Args:
            saved: the result of `checkpoint`, or a file of `Trainer.save`.

        Raises:
            TrainingError: the step count is missing, or a slot is unknown to this optimizer.
        """
        saved = saved_state(saved)
        count = np.asarray(saved.get("iter"))
        if count.shape != () or count.dtype.kind not in "iu":
            raise TrainingError("the checkpoint lacks the step count 'iter'; pass the result of checkpoint()")
        slots: dict[str, dict[str, Array]] = {}
        for key in (key for key in saved if key not in ("iter", *SCALE_KEYS)):
            name, _, slot = key.rpartition("/")
            if slot not in self.rule.slots():
                raise TrainingError(
                    f"the checkpoint has {key!r}, but {type(self.rule).__name__} has no such slot; restore it with the"
                    " optimizer that saved it"
                )
            slots.setdefault(name, {})[slot] = np.array(saved[key], np.float32)
        self.set_state(int(count), slots)

    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`."""
        return serialize(self.rule)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StatefulOptimizer:
        """Return the optimizer of a `get_config` result.

        Args:
            config: the result.
        """
        return cls(optimizers.deserialize(config))


_ALIASES = {"lr": "learning_rate"}
