"""Adafactor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from amp_rewrite.train.update.optimizers.arithmetic import Arithmetic, Result, Values, number
from amp_rewrite.train.update.optimizers.optimizer import Optimizer
from amp_rewrite.train.update.schedules import Schedule


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor of Shazeer and Stern (Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018).

    The second moment of a matrix is kept as the means of its rows and columns: n + m numbers in place of n * m. A
    step is relative to the size of the variable, and its own root mean square is clipped. Names are those of Keras;
    the formula and its defaults are those of PyTorch, with decoupled weight decay.

    Args:
        learning_rate: largest rate; the rate of step t is at most 1 / sqrt(t).
        beta_2_decay: the decay of the second moment in step t is 1 - t ** beta_2_decay; from -1 to 0.
        epsilon_1: least root of the second moment.
        epsilon_2: least size of a variable, to which steps are relative.
        clip_threshold: largest root mean square of a step before its rate.

    Example:
        >>> from amp_rewrite.train import Adafactor
        >>> Adafactor().slot_shape("row", (512, 64)), Adafactor().slot_shape("row", (64,))
        ((512, 1), None)
    """

    learning_rate: float | Schedule = 0.01
    beta_2_decay: float = -0.8
    epsilon_1: float = 2.0**-23
    epsilon_2: float = 1e-3
    clip_threshold: float = 1.0
    SLOTS: ClassVar[Mapping[str, float]] = {"row": 0.0, "column": 0.0, "variance": 0.0}

    def slot_shape(self, slot: str, shape: Sequence[int]) -> tuple[int, ...] | None:
        matrix = len(shape) > 1
        if matrix == (slot == "variance"):
            return None
        return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, *shape[-1:])}.get(slot, tuple(shape))

    def updated(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        size = by.sqrt(by.mean(variable * variable, None))
        if self.weight_decay:
            variable = variable - (rate * number(self.weight_decay)) * variable
        share = by.step_power(self.beta_2_decay, step)
        square, after = gradient * gradient, {}
        if "row" in slots:
            row = after["row"] = slots["row"] + share * (by.mean(square, -1) - slots["row"])
            column = after["column"] = slots["column"] + share * (by.mean(square, -2) - slots["column"])
            estimate = row * column / by.maximum(by.mean(row, -2), number(self.epsilon_1))
        else:
            estimate = after["variance"] = slots["variance"] + share * (square - slots["variance"])
        change = gradient / by.sqrt(by.maximum(estimate, number(self.epsilon_1) * number(self.epsilon_1)))
        excess = by.sqrt(by.mean(change * change, None)) / number(self.clip_threshold)
        relative = by.maximum(size, number(self.epsilon_2)) * by.minimum(rate, by.step_power(-0.5, step))
        return variable - relative / by.maximum(excess, number(1)) * change, after
