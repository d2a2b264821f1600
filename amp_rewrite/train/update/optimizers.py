"""Optimizers and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.arguments import checked_arguments
from amp_rewrite.train.loss_scale import serialized_class
from amp_rewrite.train.update.optimizer import SCHEDULES, Optimizer, Result, Schedule, Values, rate_from_config


@checked_arguments()
@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with Keras's momentum: velocity = momentum * velocity - rate * gradient.

    PyTorch omits the rate from the velocity and multiplies each step by it. The two differ if the rate changes.

    Args:
        momentum: factor of the velocity; 0 for none.
        nesterov: True adds momentum * velocity - rate * gradient (Sutskever et al., 2013).
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        if not self.momentum:
            return variable - rate * gradient, {}
        factor = np.float32(self.momentum)
        velocity = factor * slots["momentum"] - rate * gradient
        move = factor * velocity - rate * gradient if self.nesterov else velocity
        return variable + move, {"momentum": velocity}


@checked_arguments()
@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Tieleman and Hinton's RMSprop, by PyTorch's formula; without momentum, it is also TensorFlow 2's.

    It divides by sqrt(mean square) + epsilon. Keras 3 divides by sqrt(mean square + epsilon), so its first steps are
    smaller where gradients are small.

    Args:
        rho: decay rate of the mean square.
        momentum: factor of the velocity; 0 for none.
        epsilon: added to the root.
        epsilon_in_root: True for the formula of Keras 3.
    """

    learning_rate: float | Schedule = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    epsilon_in_root: bool = False

    def slots(self) -> Mapping[str, float]:
        return {"rms": 0.0, "momentum": 0.0} if self.momentum else {"rms": 0.0}

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        rms = np.float32(self.rho) * slots["rms"] + np.float32(1 - self.rho) * (gradient * gradient)
        epsilon = np.float32(self.epsilon)
        change = gradient / (by.sqrt(rms + epsilon) if self.epsilon_in_root else by.sqrt(rms) + epsilon)
        if not self.momentum:
            return variable - rate * change, {"rms": rms}
        velocity = np.float32(self.momentum) * slots["momentum"] + rate * change
        return variable - velocity, {"rms": rms, "momentum": velocity}


@checked_arguments()
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011); epsilon is added to the root.

    Args:
        initial_accumulator_value: initial value of the sum of squares.
        epsilon: added to the root.
    """

    learning_rate: float | Schedule = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        accumulator = slots["accumulator"] + gradient * gradient
        return variable - rate * gradient / (by.sqrt(accumulator) + np.float32(self.epsilon)), {
            "accumulator": accumulator
        }


def _bias_correction(beta: float, step: Any) -> Any:
    """Return 1 - beta**step, computed in float64 and rounded once; `step` starts at 1."""
    return (np.float64(1) - np.power(np.float64(beta), step.astype(np.float64))).astype(np.float32)


@checked_arguments()
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, algorithm 1): epsilon is added to the root of the bias-corrected second moment.

    Keras adds epsilon before the correction ("epsilon hat"), so its first steps are smaller if gradients are of the
    order of epsilon.

    Args:
        beta_1: decay rate of the first moment.
        beta_2: decay rate of the second moment.
        epsilon: added to the root.
    """

    learning_rate: float | Schedule = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def slots(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0}

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        m = np.float32(self.beta_1) * slots["m"] + np.float32(1 - self.beta_1) * gradient
        v = np.float32(self.beta_2) * slots["v"] + np.float32(1 - self.beta_2) * (gradient * gradient)
        correction = by.sqrt(_bias_correction(self.beta_2, step))  # a scalar: cheaper than correcting each root
        root = by.sqrt(v) + np.float32(self.epsilon) * correction
        step_size = rate * correction / _bias_correction(self.beta_1, step)
        return variable - step_size * (m / root), {"m": m, "v": v}


@checked_arguments()
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): it subtracts rate * weight_decay * variable.

    Args:
        weight_decay: the decay rate.
    """

    weight_decay: float = field(default=0.01, kw_only=True)
    DECOUPLED: ClassVar[bool] = True


# -- learning rate schedules, with the names and arguments of Keras ------------------------------------------


@checked_arguments()
@dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from the initial rate to `alpha` times that rate, then constant (Loshchilov and Hutter, 2017).

    Args:
        initial_learning_rate: the rate of the first step.
        decay_steps: number of steps until the end of the cosine.
        alpha: final rate as a fraction of the initial rate.

    Example:
        >>> from amp_rewrite.train import CosineDecay
        >>> [round(CosineDecay(0.1, 4)(step), 4) for step in range(6)]
        [0.1, 0.0854, 0.05, 0.0146, 0.0, 0.0]
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0

    def __call__(self, step: int) -> float:
        cosine = (1 + math.cos(math.pi * min(step / self.decay_steps, 1.0))) / 2
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


@checked_arguments()
@dataclass(frozen=True)
class ExponentialDecay(Schedule):
    """Exponential decay: the rate is multiplied by `decay_rate` every `decay_steps` steps.

    Args:
        initial_learning_rate: the rate of the first step.
        decay_steps: number of steps per decay.
        decay_rate: factor by which each decay multiplies the rate.
        staircase: True multiplies once after every `decay_steps` steps instead of gradually.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        periods = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.initial_learning_rate * self.decay_rate**periods)


SCHEDULES.update({c.__name__: c for c in (CosineDecay, ExponentialDecay)})


OPTIMIZERS: Mapping[str, type[Optimizer]] = {c.__name__.lower(): c for c in (SGD, RMSprop, Adam, AdamW, Adagrad)}
"""Optimizer classes by lowercase name."""


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return a new optimizer from a `serialize` result. TrainingError for anything else.

    `custom_objects`: additional subclasses of Optimizer, StatefulOptimizer or Schedule by name.
    """
    optimizer_class, inner = serialized_class(config, "optimizer", OPTIMIZERS, custom_objects)
    if "learning_rate" in inner:
        inner = {**inner, "learning_rate": rate_from_config(inner["learning_rate"], custom_objects)}
    return optimizer_class.from_config(inner)


def parse_optimizer(text: str) -> Optimizer:
    """Parse an optimizer such as "adam" or "sgd,learning_rate=0.1,momentum=0.9,nesterov=true".

    `lr` is short for learning_rate. Schedules have no text form. TrainingError for an unknown name, hyperparameter
    or value.
    """
    name, *settings = [part.strip() for part in text.split(",")]
    optimizer_class = OPTIMIZERS.get(name.lower())
    if optimizer_class is None:
        raise TrainingError(f"unknown optimizer {name!r}; use one of {', '.join(OPTIMIZERS)}")
    config: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        key = "learning_rate" if key == "lr" else key
        if key in config:
            raise TrainingError(f"optimizer {name!r} sets {key} twice; set it once")
        try:
            config[key] = value.lower() == "true" if value.lower() in ("true", "false") else float(value)
        except ValueError:
            raise TrainingError(
                f"optimizer {name!r}: {setting!r} is not a setting; write NAME=NUMBER, or =true"
            ) from None
    return optimizer_class.from_config(config)
