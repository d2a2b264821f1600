"""Variables, and losses that compute their gradients with respect to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.update.loss_scale import Array, Gradient


class Variable:
    """A named, mutable float32 array, the counterpart of tf.Variable.

    Args:
        value: the first value.
        name: the name.
    """

    def __init__(self, value: object, name: str = "Variable") -> None:
        self.name = name
        self._value = np.array(value, np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._value.shape

    def numpy(self) -> Array:
        """Return a copy of the value."""
        return self._value.copy()

    def assign(self, value: object) -> None:
        """Set the value.

        Args:
            value: the next value.

        Raises:
            TrainingError: the shape is another.
        """
        array = np.array(value, np.float32)
        if array.shape != self.shape:
            raise TrainingError(f"variable {self.name!r} has shape {self.shape}, not {array.shape}; assign that shape")
        self._value = array

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} shape={self.shape}>"


@runtime_checkable
class Differentiable(Protocol):
    """A loss that computes its own gradients, such as `ModelLoss` of an ONNX model."""

    def __call__(self) -> Any:
        """Return the value of the loss."""

    def gradients(self, variables: Sequence[Variable], seed: Array) -> list[Gradient]:
        """Return the gradients of `seed` times the loss; None for a variable that does not affect it."""


GradsAndVars = Iterable[tuple[Gradient, Variable]]


def differentiable(loss: object) -> Differentiable:
    """Return the loss if it is `Differentiable`, else raise TrainingError."""
    if isinstance(loss, Differentiable):
        return loss
    raise TrainingError(
        f"{loss!r} has no gradients; use a ModelLoss, or compute the gradients of get_scaled_loss(loss) yourself and"
        " pass them through get_unscaled_gradients to apply_gradients"
    )


def pairs_of(grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Variable]]:
    """Return the pairs as a list. TrainingError if no variable has a gradient."""
    pairs = list(grads_and_vars)
    if all(gradient is None for gradient, _ in pairs):
        names = ", ".join(repr(variable.name) for _, variable in pairs) or "no variables"
        raise TrainingError(f"no gradient for any variable: {names}; pass variables that the loss depends on")
    return pairs
