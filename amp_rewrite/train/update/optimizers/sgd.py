"""Gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with Keras's momentum: velocity = momentum * velocity - rate * gradient.

    Args:
        learning_rate: a number, or a `Schedule`.
        momentum: factor of the velocity; 0 for none.
        nesterov: change by momentum * velocity - rate * gradient (Sutskever et al., 2013).

    Example:
        >>> from amp_rewrite.train import SGD
        >>> SGD(0.1, momentum=0.9).spelling
        'sgd,learning_rate=0.1,momentum=0.9'
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        if not self.momentum:
            return variable - rate * gradient, {}
        factor = number(self.momentum)
        velocity = factor * slots["momentum"] - rate * gradient
        move = factor * velocity - rate * gradient if self.nesterov else velocity
        return variable + move, {"momentum": velocity}
