"""LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amp_rewrite.train.update.optimizers.adam import Adam
from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number


@dataclass(frozen=True)
class LAMB(Adam):
    """LAMB of You et al. (Large Batch Optimization for Deep Learning, 2020, algorithm 2), for large batches.

    Adam's step, with decoupled weight decay added to it, is scaled to the norm of the variable; it is taken as it is
    if one of the two norms is 0.

    Args:
        epsilon: added to the root; 1e-6 is the paper's.
    """

    epsilon: float = 1e-6

    def updated(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        return self.rule(by, variable, gradient, slots, rate, step)

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        m = number(self.beta_1) * slots["m"] + number(1 - self.beta_1) * gradient
        v = number(self.beta_2) * slots["v"] + number(1 - self.beta_2) * (gradient * gradient)
        root = by.sqrt(v / by.bias_correction(self.beta_2, step)) + number(self.epsilon)
        change = m / by.bias_correction(self.beta_1, step) / root
        if self.weight_decay:
            change = change + number(self.weight_decay) * variable
        trust = by.ratio(by.sqrt(by.square_sum(variable)), by.sqrt(by.square_sum(change)))
        return variable - rate * trust * change, {"m": m, "v": v}
