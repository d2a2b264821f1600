"""Gradient descent and its relatives: SGD, RMSprop, Adagrad."""

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

    PyTorch's is velocity = momentum * velocity + gradient, which each step multiplies by its own rate. The two differ
    if the rate changes.

    Args:
        momentum: factor of the velocity; 0 for none.
        nesterov: change by momentum * velocity - rate * gradient (Sutskever et al., 2013).
        rate_in_momentum: False for the momentum of PyTorch.

    Example:
        >>> from amp_rewrite.train import SGD
        >>> SGD(0.1, momentum=0.9).spelling
        'sgd,learning_rate=0.1,momentum=0.9'
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    rate_in_momentum: bool = True

    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        if not self.momentum:
            return variable - rate * gradient, {}
        factor = number(self.momentum)
        if not self.rate_in_momentum:
            velocity = factor * slots["momentum"] + gradient
            move = factor * velocity + gradient if self.nesterov else velocity
            return variable - rate * move, {"momentum": velocity}
        velocity = factor * slots["momentum"] - rate * gradient
        move = factor * velocity - rate * gradient if self.nesterov else velocity
        return variable + move, {"momentum": velocity}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Tieleman and Hinton's RMSprop, by the formula of PyTorch and of TensorFlow 2 without momentum.

    It divides by sqrt(mean square) + epsilon. Keras 3 divides by sqrt(mean square + epsilon), which makes first steps
    smaller where gradients are small.

    Args:
        rho: decay of the mean square.
        momentum: factor of the velocity; 0 for none.
        epsilon: added to the root.
        rate_in_momentum: as in `SGD`.
        epsilon_in_root: True for the formula of Keras 3.
    """

    learning_rate: float | Schedule = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    rate_in_momentum: bool = True
    epsilon_in_root: bool = False

    def slots(self) -> Mapping[str, float]:
        return {"rms": 0.0, "momentum": 0.0} if self.momentum else {"rms": 0.0}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        rms = number(self.rho) * slots["rms"] + number(1 - self.rho) * (gradient * gradient)
        epsilon = number(self.epsilon)
        change = gradient / (by.sqrt(rms + epsilon) if self.epsilon_in_root else by.sqrt(rms) + epsilon)
        if not self.momentum:
            return variable - rate * change, {"rms": rms}
        before = number(self.momentum) * slots["momentum"]
        if not self.rate_in_momentum:
            velocity = before + change
            return variable - rate * velocity, {"rms": rms, "momentum": velocity}
        velocity = before + rate * change
        return variable - velocity, {"rms": rms, "momentum": velocity}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer's Adagrad; epsilon is added to the root.

    Args:
        initial_accumulator_value: first value of the sum of squares.
        epsilon: added to the root.
    """

    learning_rate: float | Schedule = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        accumulator = slots["accumulator"] + gradient * gradient
        return variable - rate * gradient / (by.sqrt(accumulator) + number(self.epsilon)), {"accumulator": accumulator}
