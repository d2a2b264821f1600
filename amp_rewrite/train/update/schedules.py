"""Learning rate schedules: functions of the number of steps made, with a configuration.

A schedule has no state. The step count, which checkpoints hold, decides the rate, so that a resumed run goes on with
the rate that it would have had. Names and arguments are those of Keras, where it has the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.settings.loss_scale import class_of, configured, serialize
from amp_rewrite.train.door import door


def whole_number(name: str, value: object, least: int) -> int:
    """Return a count of Python or numpy as an int. TrainingError unless it is whole and at least so much."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise TrainingError(f"{name} is {value!r}; use a whole number ≥ {least}")
    return int(value)


def settle(record: Any) -> None:
    """Turn numpy's numbers among the fields of a frozen dataclass into Python's, which JSON can hold."""
    for part in fields(record):
        value = getattr(record, part.name)
        if isinstance(value, np.generic):
            object.__setattr__(record, part.name, value.item())


@dataclass(frozen=True)
class Schedule:
    """Base class of schedules: a frozen dataclass whose fields are the arguments of `from_config`.

    A subclass of your own gives `__call__`, and works wherever a learning rate does.

    Example:
        >>> from dataclasses import dataclass
        >>> from amp_rewrite.train import SGD, Schedule
        >>> @dataclass(frozen=True)
        ... class Halving(Schedule):
        ...     initial_learning_rate: float
        ...
        ...     def __call__(self, step):
        ...         return self.initial_learning_rate / 2**step
        >>> SGD(Halving(0.5)).learning_rate(2)
        0.125
    """

    STEPS: ClassVar[tuple[str, ...]] = ("decay_steps", "warmup_steps")

    def __post_init__(self) -> None:
        settle(self)
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, (bool, Schedule)):
                continue
            least = 1 if part.name in self.STEPS else 0
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise TrainingError(
                    f"{part.name} of {type(self).__name__} must be a finite number of at least {least}, not {value!r}"
                )

    def __call__(self, step: int) -> float:
        """Return the learning rate of the next step, after so many steps."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the settings as arguments for `from_config`."""
        return {part.name: serialized_rate(getattr(self, part.name)) for part in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Schedule:
        """Return the schedule of a `get_config` result.

        Raises:
            TrainingError: a setting is unknown or missing.
        """
        rates = {name: rate_of_config(value, custom_objects) for name, value in config.items()}
        made: Schedule = configured(cls, rates, config)
        return made


@door()
@dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from the initial rate to `alpha` times it, which stays (Loshchilov and Hutter, 2017).

    Args:
        initial_learning_rate: the rate of the first step.
        decay_steps: steps until the end of the cosine.
        alpha: share of the initial rate at the end.

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


@door()
@dataclass(frozen=True)
class ExponentialDecay(Schedule):
    """Multiply the rate by `decay_rate` over `decay_steps` steps, a little in each one.

    Args:
        initial_learning_rate: the rate of the first step.
        decay_steps: steps for the whole factor.
        decay_rate: the factor.
        staircase: multiply after every `decay_steps` steps instead.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        periods = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.initial_learning_rate * self.decay_rate**periods)


@door()
@dataclass(frozen=True)
class WarmUp(Schedule):
    """Rise on a line from `initial_learning_rate` to the first rate of another schedule, then follow that one.

    Args:
        after: a schedule, whose first step is the one after the warm-up, or a rate.
        warmup_steps: steps of the warm-up.
        initial_learning_rate: the rate of the first step.

    Example:
        >>> from amp_rewrite.train import CosineDecay, WarmUp
        >>> schedule = WarmUp(CosineDecay(0.1, 100), 4)
        >>> [round(schedule(step), 4) for step in (0, 2, 4, 54, 104)]
        [0.0, 0.05, 0.1, 0.05, 0.0]
    """

    after: Schedule | float
    warmup_steps: int
    initial_learning_rate: float = 0.0

    def __call__(self, step: int) -> float:
        if step >= self.warmup_steps:
            return rate_after(self.after, step - self.warmup_steps)
        low = self.initial_learning_rate
        return low + (rate_after(self.after) - low) * step / self.warmup_steps


SCHEDULES: Mapping[str, type[Schedule]] = {c.__name__: c for c in (CosineDecay, ExponentialDecay, WarmUp)}
"""Schedule classes by name."""


def rate_after(rate: Schedule | float, step: int = 0) -> float:
    """Return a learning rate as a number: that of a schedule after so many steps."""
    return rate(step) if isinstance(rate, Schedule) else rate


def serialized_rate(rate: Any) -> Any:
    """Return a rate in a plain form: a schedule as its class name and configuration."""
    return serialize(rate) if isinstance(rate, Schedule) else rate


def rate_of_config(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the rate of a `serialized_rate` result. TrainingError for an unknown schedule.

    `custom_objects`: schedule classes by name, besides those of the package.
    """
    if not isinstance(config, Mapping):
        return config
    schedule_class, inner = class_of(config, "schedule", SCHEDULES, custom_objects)
    return schedule_class.from_config(inner, custom_objects)
