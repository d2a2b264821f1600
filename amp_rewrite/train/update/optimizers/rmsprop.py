"""RMSprop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Tieleman and Hinton's RMSprop; epsilon is added to the root, as in Keras without momentum and in PyTorch.

    Args:
        learning_rate: a number, or a `Schedule`.
        rho: decay of the mean square.
        momentum: factor of the velocity; 0 for none.
        epsilon: added to the root.
    """

    learning_rate: float | Schedule = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7

    def slots(self) -> Mapping[str, float]:
        return {"rms": 0.0, "momentum": 0.0} if self.momentum else {"rms": 0.0}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        rms = number(self.rho) * slots["rms"] + number(1 - self.rho) * (gradient * gradient)
        move = rate * gradient / (by.sqrt(rms) + number(self.epsilon))
        if not self.momentum:
            return variable - move, {"rms": rms}
        velocity = number(self.momentum) * slots["momentum"] + move
        return variable - velocity, {"rms": rms, "momentum": velocity}
