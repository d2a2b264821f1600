"""Base classes of optimizers and learning rate schedules: clipping, weight decay, configuration.

A schedule is stateless: the rate depends only on the step count. Checkpoints store that count, so a resumed run
continues with the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import checked_arguments, float_array, unknown_attribute
from amp_rewrite.train.loss_scale import Gradient, IndexedSlices, serialize, serialized_class

Values = Mapping[str, Any]
"""Arrays, or values of a graph under construction, by slot name."""
Result = tuple[Any, Values]
"""The new value of a variable and its new slots."""


def to_python_numbers(record: Any) -> None:
    """Convert numpy numbers in the fields of a frozen dataclass to Python numbers, for JSON."""
    for part in fields(record):
        value = getattr(record, part.name)
        if isinstance(value, np.generic):
            object.__setattr__(record, part.name, value.item())


@dataclass(frozen=True)
class Schedule:
    """Base class of learning rate schedules: a frozen dataclass with its configuration as fields.

    A custom subclass implements `__call__`, and is accepted wherever a learning rate is.

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

    def __post_init__(self) -> None:
        to_python_numbers(self)
        for part in fields(self):
            value, minimum = getattr(self, part.name), int(part.name == "decay_steps")
            if not isinstance(value, (int, float)) or not minimum <= value < math.inf:
                raise TrainingError(
                    f"{part.name} of {type(self).__name__} must be a finite number of at least {minimum}, not {value!r}"
                )

    def __call__(self, step: int) -> float:
        """Return the learning rate of the next step after `step` completed steps."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the fields as arguments for `from_config`."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Schedule:
        """Return a new schedule from a `get_config` result.

        Raises:
            TrainingError: a setting is unknown or missing.
        """
        return cls(**config)


SCHEDULES: dict[str, type[Schedule]] = {}
"""The package's schedule classes by name."""


def rate_from_config(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return a number unchanged, or a schedule from a `serialize` result. TrainingError for an unknown schedule.

    `custom_objects`: additional schedule classes by name.
    """
    if not isinstance(config, Mapping):
        return config
    schedule_class, inner = serialized_class(config, "schedule", SCHEDULES, custom_objects)
    return schedule_class.from_config(inner)


_RATE = "learning_rate"
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_FLAGS = ("nesterov", "epsilon_in_root")
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {"decay": (0,), "amsgrad": (False,), "centered": (False,)}
"""Keras hyperparameters that are not supported here, each with the values that disable it."""
_STATEFUL_ONLY = ("minimize", "apply_gradients", "get_gradients", "compute_gradients", "iterations", "get_weights")

_RANGES = {
    **dict.fromkeys(("beta_1", "beta_2", "rho"), (0.0, 1.0, "at least 0 and less than 1")),
    "momentum": (0.0, math.nextafter(1.0, 2.0), "at least 0 and at most 1"),  # as in Keras
}


@checked_arguments()
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base class of optimizers: a frozen dataclass of hyperparameters, without the state of training.

    Gradients are clipped first, in at most one of the three ways. Then `weight_decay` times the variable is added to
    its gradient.

    Args:
        clipnorm: maximum norm of each gradient.
        clipvalue: maximum magnitude of each element.
        global_clipnorm: maximum norm of all gradients taken together.
        weight_decay: factor of the variable in its gradient.

        learning_rate: a number or a `Schedule`.

    Raises:
        TrainingError: a hyperparameter is out of range.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None
    weight_decay: float = 0.0

    learning_rate: float | Schedule
    DECOUPLED: ClassVar[bool] = False
    """True if weight decay shrinks the variable itself, not its gradient (Loshchilov and Hutter, 2019)."""

    def __post_init__(self) -> None:
        to_python_numbers(self)
        object.__setattr__(self, _RATE, rate_from_config(self.learning_rate))
        for part in fields(self):
            if not (part.name == _RATE and isinstance(self.learning_rate, Schedule)):
                self._check(part.name, getattr(self, part.name))
        clips = [name for name in _CLIPS if getattr(self, name) is not None]
        if len(clips) > 1:
            raise TrainingError(f"{type(self).__name__} clips gradients by {' and by '.join(clips)}; set only one")

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in _STATEFUL_ONLY:
            stateful = f"StatefulOptimizer({kind}(…)) or LossScaleOptimizer({kind}(…))"
            raise AttributeError(f"{kind} has no {name!r}, because it has no state; use {stateful}")
        raise AttributeError(name) if name.startswith("_") else unknown_attribute(type(self), name)

    def _check(self, name: str, value: object) -> None:
        if (isinstance(value, bool) and name in _FLAGS) or (value is None and name in _CLIPS):
            return
        if name in _FLAGS:
            raise TrainingError(f"{name} of {type(self).__name__} must be true or false, not {value!r}")
        low, high, range_ = _RANGES.get(name, (0.0, math.inf, "at least 0"))
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        inside = real and low <= value < high and value <= DType.FLOAT.max  # type: ignore[operator]
        if not inside or (name in _CLIPS and not np.float32(value)):  # type: ignore[arg-type]
            range_ = "more than 0" if name in _CLIPS else range_
            raise TrainingError(f"{name} of {type(self).__name__} must be {range_} and finite, not {value!r}")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of the next step after `step` completed steps."""
        return self.learning_rate(step) if isinstance(self.learning_rate, Schedule) else self.learning_rate

    def slots(self) -> Mapping[str, float]:
        """Return the slot names of a variable with their initial fill values."""
        return {}

    def rule(self, by: Any, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        """Return the variable and its slots after a step.

        Args:
            by: numpy, whose functions take both arrays and values of a training step's graph.
            variable: the variable, float32.
            gradient: its gradient, of the same shape.
            slots: its slots by name, of the same shape.
            rate: the learning rate, a float32 scalar.
            step: the number of this step, an int64 scalar that starts at 1.
        """
        raise NotImplementedError

    def updated(self, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        """Return the result of weight decay and `rule` for a clipped gradient; its arguments are those of `rule`."""
        if self.weight_decay and self.DECOUPLED:
            variable = variable - (rate * np.float32(self.weight_decay)) * variable
        elif self.weight_decay:
            gradient = gradient + np.float32(self.weight_decay) * variable
        return self.rule(np, variable, gradient, slots, rate, step)

    def clipped(self, gradients: list[Any]) -> list[Any]:
        """Return the clipped gradients of all variables."""
        if self.clipvalue is not None:
            bound = np.float32(self.clipvalue)
            return [np.clip(g, -bound, bound) for g in gradients]
        if self.clipnorm is not None:
            return [_shrunk(g, _norm([g]), self.clipnorm) for g in gradients]
        if self.global_clipnorm is not None and gradients:
            norm = _norm(gradients)
            return [_shrunk(g, norm, self.global_clipnorm) for g in gradients]
        return gradients

    @property
    def spelling(self) -> str:
        """The name, the learning rate, and all non-default hyperparameters, as text."""
        shown = {p.name: v for p in fields(self) if (v := getattr(self, p.name)) != p.default or p.name == _RATE}
        parts = (f"{name}={f'{v:g}' if type(v) is float else v}" for name, v in shown.items())
        return ",".join([type(self).__name__.lower(), *parts])

    def get_config(self) -> dict[str, Any]:
        """Return the hyperparameters as arguments for `from_config`."""
        config = {part.name: getattr(self, part.name) for part in fields(self)}
        return config | ({_RATE: serialize(self.learning_rate)} if isinstance(self.learning_rate, Schedule) else {})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Optimizer:
        """Return a new optimizer from a `get_config` result, of this class or of Keras."""
        names = {part.name for part in fields(cls)}
        named = {_RATE if name == "lr" else name: value for name, value in config.items() if name != "name"}
        return cls(**{n: value for n, value in named.items() if n in names or value not in _UNSUPPORTED.get(n, ())})


def _norm(parts: list[Any]) -> Any:
    """Return the Euclidean norm of arrays, or of graph values, taken together."""
    if not isinstance(parts[0], np.ndarray):
        return parts[0].norm(parts)
    return np.sqrt(np.sum([np.sum(np.square(part), dtype=np.float32) for part in parts], dtype=np.float32))


def _shrunk(gradient: Any, norm: Any, bound: float) -> Any:
    """Scale a gradient as tf.clip_by_norm does: g * bound / max(norm, bound)."""
    return gradient * (np.float32(bound) / np.maximum(norm, np.float32(bound)))


def initial_slots(optimizer: Optimizer, variables: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    return {
        name: {slot: _filled(array.shape, value) for slot, value in optimizer.slots().items()}
        for name, array in variables.items()
    }


def _filled(shape: tuple[int, ...], value: float) -> Array:
    """Return a float32 array filled with a value; zeros take no memory until they are written to."""
    return np.full(shape, value, np.float32) if value else np.zeros(shape, np.float32)


def applied(
    optimizer: Optimizer,
    variables: Mapping[str, Array],
    gradients: Mapping[str, Gradient],
    slots: Mapping[str, Mapping[str, Array]],
    *,
    step: int,
    learning_rate: float | np.float32 | None = None,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return the variables and slots after step number `step`, counted from 1; the arguments are not changed.

    All arrays are float32. `slots` maps variables to their slots. A variable with the gradient None keeps its value and
    slots. A sparse gradient is zero in its missing rows, so their slots decay as in Keras's Adam, but unlike in Keras's
    momentum.
    """
    rate = np.array(optimizer.rate_at(step - 1) if learning_rate is None else learning_rate, np.float32)
    names = [name for name in variables if gradients.get(name) is not None]
    dense = [_dense(gradients[name], variables[name]) for name in names]
    new_variables = {name: np.array(array) for name, array in variables.items()}
    new_slots = {name: {slot: np.array(a) for slot, a in slots.get(name, {}).items()} for name in variables}
    with np.errstate(all="ignore"):  # a fixed loss scale lets nonfinite gradients through on purpose
        for name, gradient in zip(names, optimizer.clipped(dense), strict=True):
            count = np.array(step, np.int64)
            new_variables[name], after = optimizer.updated(variables[name], gradient, slots[name], rate, count)
            new_slots[name] = {slot: np.asarray(array) for slot, array in after.items()}
    return new_variables, new_slots


def _dense(gradient: Gradient, variable: Array) -> Array:
    assert gradient is not None
    if isinstance(gradient, IndexedSlices):
        rows = np.asarray(gradient.indices)
        invalid = rows[(rows < 0) | (rows >= (len(variable) if variable.ndim else 0))]
        if invalid.size:
            raise TrainingError(
                f"a sparse gradient has row {invalid[0]}, which is out of range for a variable of shape"
                f" {variable.shape}; correct its indices"
            )
        dense = np.zeros(variable.shape, np.float32)
        np.add.at(dense, np.asarray(gradient.indices), np.asarray(gradient.values, np.float32))
        return dense
    array = float_array(gradient, "a gradient")
    if array.shape != variable.shape:
        raise TrainingError(
            f"a gradient has shape {array.shape}, but its variable has shape {variable.shape}; pass one gradient per"
            " variable, in order"
        )
    return array
