"""An optimizer as an object that changes variables, in the shape of Keras's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.train import optimizers
from amp_rewrite.train.loss_scale import Array, Gradient

SCALE_KEYS = ("loss_scale/current_loss_scale", "loss_scale/good_steps")
"""Where a checkpoint has the state of a dynamic loss scale."""


class Variable:
    """A named float32 array that training changes in place of a tf.Variable."""

    def __init__(self, value: object, name: str = "Variable") -> None:
        self.name = name
        self._value = np.array(value, np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    def numpy(self) -> Array:
        """A copy of the value."""
        return self._value.copy()

    def assign(self, value: object) -> None:
        """Take another value. TrainingError for one of another shape."""
        array = np.array(value, np.float32)
        if array.shape != self.shape:
            raise TrainingError(f"variable {self.name!r} has shape {self.shape}; a value has {array.shape}")
        self._value = array

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} shape={self.shape}>"


@runtime_checkable
class Differentiable(Protocol):
    """A loss that knows its gradients. `ModelLoss` makes one of an ONNX model."""

    def __call__(self) -> Any:
        """The value of the loss."""
        ...

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """The gradients of `seed` times the loss; None for a variable that it does not depend on."""
        ...


GradsAndVars = Iterable[tuple[Gradient, Variable]]


class StatefulOptimizer:
    """An optimizer with its slots and its step count, as Keras has them: one object that changes variables.

    Variables are told apart by name. Hyperparameters are attributes that can be set (`lr` is `learning_rate`).
    """

    rule: optimizers.Optimizer
    iterations: int

    def __init__(self, rule: optimizers.Optimizer) -> None:
        vars(self).update(rule=rule, iterations=0, _slots={}, _variables={})

    # -- hyperparameters -------------------------------------------------------------------------------

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
        else:
            raise AttributeError(f"{type(self.rule).__name__} has no hyperparameter {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ALIASES, *(field.name for field in fields(self.rule))})

    # -- steps -----------------------------------------------------------------------------------------

    def get_gradients(self, loss: Callable[[], Any], params: Sequence[Variable]) -> list[Gradient]:
        """The gradients of a `Differentiable` loss. TrainingError for a callable that has none."""
        return differentiable(loss).gradients(params, np.array(1, np.float32))

    def minimize(self, loss: Callable[[], Any], var_list: Sequence[Variable]) -> None:
        """One step down a `Differentiable` loss."""
        self.apply_gradients(zip(self.get_gradients(loss, var_list), var_list, strict=True))

    def apply_gradients(self, grads_and_vars: GradsAndVars) -> None:
        """One step by given gradients; a variable whose gradient is None stays.

        TrainingError if there is no gradient at all, or two variables share a name.
        """
        pairs = pairs_of(grads_and_vars)
        values = {variable.name: variable.numpy() for _, variable in pairs}
        self._create_slots([variable for _, variable in pairs])
        known = {name: self._slots[name] for name in values}
        grads = {variable.name: gradient for gradient, variable in pairs}
        after, slots = optimizers.applied(self.rule, values, grads, known, step=self.iterations + 1)
        for _, variable in pairs:
            variable.assign(after[variable.name])
        self._slots.update(slots)
        self.iterations += 1

    def _create_slots(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            if self._variables.setdefault(variable.name, variable) is not variable:
                raise TrainingError(f"two variables are named {variable.name!r}; give each a name of its own")
        for name, fresh in optimizers.initial_slots(self.rule, {v.name: v.numpy() for v in variables}).items():
            own = {slot: array for slot, array in self._slots.get(name, {}).items() if slot in fresh}
            for slot, array in own.items():
                if array.shape != fresh[slot].shape:
                    raise TrainingError(
                        f"slot {slot!r} of variable {name!r} has shape {array.shape}, and the variable has"
                        f" {fresh[slot].shape}; restore a checkpoint of this variable"
                    )
            self._slots[name] = {**fresh, **own}  # a slot is new when its hyperparameter was set on the way

    # -- state -----------------------------------------------------------------------------------------

    def get_slot_names(self) -> list[str]:
        return sorted(self.rule.slots())

    def get_slot(self, var: Variable, slot_name: str) -> Array:
        """A copy of a slot. TrainingError for one that is not there (yet)."""
        try:
            found: Array = self._slots[var.name][slot_name]
        except KeyError:
            legal = ", ".join(self.get_slot_names()) or "none"
            raise TrainingError(
                f"no slot {slot_name!r} of variable {var.name!r}; the optimizer has {legal}, from its first step on"
            ) from None
        return found.copy()

    @property
    def weights(self) -> list[Array]:
        """The step count, then every slot, in the order of `checkpoint`."""
        return list(StatefulOptimizer.checkpoint(self).values())

    def variables(self) -> list[Array]:
        """Keras's other word for `weights`."""
        return self.weights

    def get_weights(self) -> list[Array]:
        return self.weights

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Take over what `get_weights` gave. TrainingError for another number of arrays."""
        keys = list(StatefulOptimizer.checkpoint(self))
        if len(keys) != len(weights):
            raise TrainingError(f"{len(weights)} arrays were given for {len(keys)} weights; give what get_weights gave")
        StatefulOptimizer.restore(self, dict(zip(keys, weights, strict=True)))

    def checkpoint(self) -> dict[str, Array]:
        """All state by path: "iter", "<variable>/<slot>"."""
        slots = {f"{name}/{slot}": array.copy() for name, own in self._slots.items() for slot, array in own.items()}
        return {"iter": np.array(self.iterations, np.int64), **slots}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Take over a checkpoint, of this optimizer or of a `LossScaleOptimizer` around an equal one.

        TrainingError if it lacks the step count or has slots that this optimizer has not.
        """
        count = np.asarray(saved.get("iter"))
        if count.shape != () or count.dtype.kind not in "iu":
            raise TrainingError("the checkpoint has no step count as 'iter'; give what checkpoint() gave")
        slots: dict[str, dict[str, Array]] = {}
        for key in (key for key in saved if key not in ("iter", *SCALE_KEYS)):
            name, _, slot = key.rpartition("/")
            if slot not in self.rule.slots():
                raise TrainingError(f"the checkpoint has {key!r}, and {type(self.rule).__name__} has no such slot")
            slots.setdefault(name, {})[slot] = np.array(saved[key], np.float32)
        vars(self)["_slots"] = slots
        self.iterations = int(count)

    def get_config(self) -> dict[str, Any]:
        return optimizers.serialize(self.rule)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StatefulOptimizer:
        return cls(optimizers.deserialize(config))


_ALIASES = {"lr": "learning_rate"}


def differentiable(loss: object) -> Differentiable:
    """The loss, if it has gradients; else TrainingError."""
    if isinstance(loss, Differentiable):
        return loss
    raise TrainingError(
        f"{loss!r} has no gradients; give a ModelLoss, or compute gradients of get_scaled_loss(loss) yourself and"
        " use get_unscaled_gradients and apply_gradients"
    )


def pairs_of(grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Variable]]:
    """The pairs as a list. TrainingError if no variable has a gradient."""
    pairs = list(grads_and_vars)
    if all(gradient is None for gradient, _ in pairs):
        names = ", ".join(repr(variable.name) for _, variable in pairs) or "none was given"
        raise TrainingError(f"no gradient for any variable: {names}")
    return pairs
