"""Adam, also with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba's Adam, algorithm 1: epsilon is added to the root of the corrected second moment.

    Keras adds it before the correction ("epsilon hat"), so its first steps are smaller for gradients of the order
    of epsilon.

    Args:
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the root.
    """

    learning_rate: float | Schedule = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    SLOTS: ClassVar[Mapping[str, float]] = {"m": 0.0, "v": 0.0}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        m = number(self.beta_1) * slots["m"] + number(1 - self.beta_1) * gradient
        v = number(self.beta_2) * slots["v"] + number(1 - self.beta_2) * (gradient * gradient)
        correction = by.sqrt(by.bias_correction(self.beta_2, step))  # of a number, not of each root
        root = by.sqrt(v) + number(self.epsilon) * correction
        pace = rate * correction / by.bias_correction(self.beta_1, step)
        return variable - pace * (m / root), {"m": m, "v": v}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): it subtracts rate * weight_decay * variable.

    Args:
        weight_decay: factor of the variable.
    """

    weight_decay: float = field(default=0.01, kw_only=True)
    DECOUPLED: ClassVar[bool] = True
