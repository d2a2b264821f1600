"""Learning rate schedules: functions of the number of steps made, with a configuration.

A schedule has no state. The step count, which checkpoints hold, decides the rate, so that a resumed run goes on with
the rate that it would have had. Names and arguments are those of Keras, where it has the schedule.

As text a schedule is a call: "cosine(0.001, decay_steps=900)", or "warm_up(cosine(0.001, 900), warmup_steps=100)".
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.settings.loss_scale import class_of, configured, serialize
from amp_rewrite.train.update.plain_numbers import settle


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

    STEPS: ClassVar[tuple[str, ...]] = ("decay_steps", "warmup_steps", "total_steps")

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
        cosine = _cosine(1.0, 0.0, min(step / self.decay_steps, 1.0))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Multiply the rate by a factor after every `decay_steps` steps, as PyTorch's StepLR.

    Args:
        initial_learning_rate: the rate of the first step.
        decay_steps: steps with the same rate.
        decay_rate: the factor.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.initial_learning_rate * self.decay_rate ** (step // self.decay_steps))


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


@dataclass(frozen=True)
class OneCycle(Schedule):
    """Rise to the largest rate and fall to almost 0, each along half a cosine (Smith and Topin, 2018).

    It is PyTorch's OneCycleLR without its cycle of the momentum. The last rate stays.

    Args:
        max_learning_rate: the largest rate.
        total_steps: steps of the cycle, 2 or more.
        rise: share of the steps in which the rate rises, less than 1.
        initial_divisor: the first rate is the largest divided by this.
        final_divisor: the last rate is the first divided by this.
    """

    max_learning_rate: float
    total_steps: int
    rise: float = 0.3
    initial_divisor: float = 25.0
    final_divisor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_steps < 2 or self.rise >= 1 or not self.initial_divisor or not self.final_divisor:
            raise TrainingError(f"{self} is not a cycle; use 2 steps or more, a rise below 1, and divisors above 0")

    def __call__(self, step: int) -> float:
        first = self.max_learning_rate / self.initial_divisor
        peak, end = self.rise * self.total_steps - 1, self.total_steps - 1
        if step <= peak:
            return _cosine(first, self.max_learning_rate, step / peak if peak else 1.0)
        return _cosine(self.max_learning_rate, first / self.final_divisor, min((step - peak) / (end - peak), 1.0))


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


SCHEDULES: Mapping[str, type[Schedule]] = {
    c.__name__: c for c in (CosineDecay, StepDecay, ExponentialDecay, OneCycle, WarmUp)
}
"""Schedule classes by name."""
_WORDS = {
    "cosine": CosineDecay,
    "step": StepDecay,
    "exponential": ExponentialDecay,
    "one_cycle": OneCycle,
    "warm_up": WarmUp,
}
"""Schedule classes by their names in texts, besides those of the classes."""


def rate_after(rate: Schedule | float, step: int = 0) -> float:
    """Return a learning rate as a number: that of a schedule after so many steps."""
    return rate(step) if isinstance(rate, Schedule) else rate


def serialized_rate(rate: Any) -> Any:
    """Return a rate in a plain form: a schedule as its class name and configuration."""
    return serialize(rate) if isinstance(rate, Schedule) else rate


def rate_of_config(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the rate of a `serialized_rate` result or of a text. TrainingError for an unknown schedule.

    `custom_objects`: schedule classes by name, besides those of the package.
    """
    if isinstance(config, str):
        return parsed_rate(config)
    if not isinstance(config, Mapping):
        return config
    schedule_class, inner = class_of(config, "schedule", SCHEDULES, custom_objects)
    return schedule_class.from_config(inner, custom_objects)


def parsed_rate(text: str) -> Schedule | float:
    """Return the rate of a text: a number, or a schedule such as "cosine(0.001, decay_steps=900)".

    TrainingError for an unknown schedule, setting or value.
    """
    try:
        rate: Schedule | float = _rate_of(ast.parse(text.strip(), mode="eval").body, text)
        return rate
    except TrainingError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        hint = "use a number, or a schedule such as cosine(0.001, 1000)"
        raise TrainingError(f"{text!r} is not a learning rate; {hint}") from cause


def _rate_of(tree: ast.expr, text: str) -> Any:
    """Return the value of a part of a text. ValueError for anything but numbers, True, False and calls of schedules."""
    if not isinstance(tree, ast.Call):
        value = ast.literal_eval(tree)
        if not isinstance(value, (int, float)):
            raise ValueError
        return value
    name = tree.func.id if isinstance(tree.func, ast.Name) else ""
    schedule_class = _WORDS.get(name) or SCHEDULES.get(name)
    if schedule_class is None:
        hint = advice(name, _WORDS, f"use one of {', '.join(_WORDS)}")
        raise TrainingError(f"unknown schedule {name!r} in {text!r}; {hint}")
    names = [part.name for part in fields(schedule_class)][: len(tree.args)]
    if len(names) < len(tree.args) or any(part.arg is None or part.arg in names for part in tree.keywords):
        raise TrainingError(f"{text!r} gives a setting of {name} twice, or too many; {_settings(schedule_class)}")
    given = dict(zip(names, tree.args, strict=True)) | {str(part.arg): part.value for part in tree.keywords}
    try:
        return schedule_class(**{setting: _rate_of(value, text) for setting, value in given.items()})
    except TypeError as cause:
        raise TrainingError(
            f"{text!r} lacks a setting of {name} or has an unknown one; {_settings(schedule_class)}"
        ) from cause


def _settings(schedule_class: type[Schedule]) -> str:
    return f"it has {', '.join(part.name for part in fields(schedule_class))}"


def _cosine(start: float, end: float, share: float) -> float:
    """Return the point of half a cosine between two rates."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
