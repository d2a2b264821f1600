"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer's Adagrad; epsilon is added to the root.

    Args:
        learning_rate: a number, or a `Schedule`.
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
