"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion of Chen et al. (Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2), with decoupled decay.

    A step is the sign of a momentum, times the rate. Take a rate 3 to 10 times smaller than that of AdamW, and a weight
    decay as many times larger. Defaults are the paper's.

    Args:
        learning_rate: a number, or a `Schedule`.
        beta_1: share of the momentum in the direction of a step.
        beta_2: decay of the momentum.

    Example:
        >>> from amp_rewrite.train import Lion
        >>> Lion(1e-4, weight_decay=0.1).spelling
        'lion,weight_decay=0.1,learning_rate=0.0001'
    """

    learning_rate: float | Schedule = 0.0001
    beta_1: float = 0.9
    beta_2: float = 0.99
    SLOTS: ClassVar[Mapping[str, float]] = {"m": 0.0}
    DECOUPLED: ClassVar[bool] = True

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        direction = number(self.beta_1) * slots["m"] + number(1 - self.beta_1) * gradient
        m = number(self.beta_2) * slots["m"] + number(1 - self.beta_2) * gradient
        return variable - rate * by.sign(direction), {"m": m}
