"""Optimizers: one formula each, computed by numpy or written into a graph.

A formula is generic over an `Arithmetic`: `NUMPY` here, `graph.NODES` for nodes. Both do the same float32 operations
in the same order, so host and graph agree bit by bit; reductions (clipping by a norm) agree up to the order of
summation. All hyperparameters but the learning rate are constants of the graph.

Names and defaults are those of Keras in TensorFlow 2.1 to 2.3, except where a docstring states otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.settings.loss_scale import Array, Gradient, IndexedSlices

Values = Mapping[str, Any]
"""Operands of an `Arithmetic`, by slot."""
Result = tuple[Any, Values]
"""The new value of a variable, and its new slots."""
number = np.float32
"""Convert a hyperparameter for a formula."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Functions for formulas, besides + - * / between operands and with np.float32 numbers."""

    sqrt: Callable[[Any], Any]
    maximum: Callable[[Any, np.float32], Any]
    clamp: Callable[[Any, np.float32], Any]
    """Bound each element to ± a number."""
    square_sum: Callable[[Any], Any]
    sum: Callable[[list[Any]], Any]
    bias_correction: Callable[[float, Any], Any]
    """1 - beta**step, computed in float64 and rounded once; `step` counts from 1."""


NUMPY = Arithmetic(
    sqrt=np.sqrt,
    maximum=np.maximum,
    clamp=lambda x, bound: np.clip(x, -bound, bound),
    square_sum=lambda x: np.asarray(np.sum(np.square(x), dtype=np.float32)),
    sum=lambda xs: np.asarray(np.sum(np.stack(xs), dtype=np.float32)),
    bias_correction=lambda beta, step: np.asarray(1.0 - np.float64(beta) ** step.astype(np.float64), np.float32),
)
"""Arithmetic on numpy arrays."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base class of optimizers. Frozen: slots and the step count hold the state of training.

    Gradients are clipped first, by at most one of three. Then `weight_decay` times the variable is added to its
    gradient.

    Args:
        clipnorm: the largest norm of each gradient.
        clipvalue: each element is clipped to ± this.
        global_clipnorm: the largest norm of all gradients together.
        weight_decay: factor of the variable in its gradient.
        learning_rate: the rate without a schedule.

    Raises:
        TrainingError: a hyperparameter is out of range.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None
    weight_decay: float = 0.0
    learning_rate: float
    SLOTS: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        for part in fields(self):
            self._check(part.name, getattr(self, part.name))
        clips = [name for name in _CLIPS if getattr(self, name) is not None]
        if len(clips) > 1:
            raise TrainingError(f"{type(self).__name__} clips gradients by {' and by '.join(clips)}; set only one")

    def _check(self, name: str, value: object) -> None:
        if (isinstance(value, bool) and name in _FLAGS) or (value is None and name in _CLIPS):
            return
        if name in _FLAGS:
            raise TrainingError(f"{name} of {type(self).__name__} must be true or false, not {value!r}")
        low, high, range_ = _RANGES.get(name, (0.0, math.inf, "at least 0"))
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        inside = real and low <= value < high and value <= DType.FLOAT.max  # type: ignore[operator]
        if not inside or (name in _CLIPS and not number(value)):  # type: ignore[arg-type]
            range_ = "more than 0" if name in _CLIPS else range_
            raise TrainingError(f"{name} of {type(self).__name__} must be {range_} and finite, not {value!r}")

    def slots(self) -> Mapping[str, float]:
        """Return the slot names of each variable, with their initial fill values."""
        return self.SLOTS

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        """Return the variable and its slots after a step.

        Args:
            by: the arithmetic, of arrays or of a graph.
            variable: the variable.
            gradient: its gradient.
            slots: its slots by name.
            rate: the learning rate.
            step: the number of this step, counted from 1.
        """
        raise NotImplementedError

    def updated(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        """Apply weight decay, then `rule`; the gradient is already clipped. Return as `rule` does.

        Args:
            by: the arithmetic, of arrays or of a graph.
            variable: the variable.
            gradient: its gradient.
            slots: its slots by name.
            rate: the learning rate.
            step: the number of this step, counted from 1.
        """
        if self.weight_decay:
            gradient = gradient + number(self.weight_decay) * variable
        return self.rule(by, variable, gradient, slots, rate, step)

    def clipped(self, by: Arithmetic, gradients: list[Any]) -> list[Any]:
        """Return the gradients of all variables after clipping.

        Args:
            by: the arithmetic, of arrays or of a graph.
            gradients: one per variable.
        """
        if self.clipvalue is not None:
            return [by.clamp(g, number(self.clipvalue)) for g in gradients]
        if self.clipnorm is not None:
            return [self._shrunk(by, g, by.square_sum(g), self.clipnorm) for g in gradients]
        if self.global_clipnorm is not None and gradients:
            square = by.sum([by.square_sum(g) for g in gradients])
            return [self._shrunk(by, g, square, self.global_clipnorm) for g in gradients]
        return gradients

    def _shrunk(self, by: Arithmetic, gradient: Any, square: Any, norm: float) -> Any:
        """Scale a gradient as tf.clip_by_norm does: g * norm / max(|g|, norm)."""
        return gradient * (number(norm) / by.maximum(by.sqrt(square), number(norm)))

    @property
    def spelling(self) -> str:
        """Text for `named`: the name, the learning rate, and all hyperparameters that differ from their defaults."""
        said = {p.name: v for p in fields(self) if (v := getattr(self, p.name)) != p.default or p.name == _RATE}
        settings = [f"{k}={v:g}" if not isinstance(v, bool) else f"{k}={str(v).lower()}" for k, v in said.items()]
        return ",".join([type(self).__name__.lower(), *settings])

    def get_config(self) -> dict[str, Any]:
        """Return the hyperparameters as arguments for `from_config`."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Optimizer:
        """Return the optimizer of a `get_config` result.

        Args:
            config: hyperparameters by name.
        """
        try:
            return cls(**config)
        except TypeError as cause:
            known = ", ".join(f.name for f in fields(cls))
            raise TrainingError(f"not the configuration of {cls.__name__}: {dict(config)!r}; it has {known}") from cause


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with Keras's momentum: velocity = momentum * velocity - rate * gradient.

    Args:
        learning_rate: the rate without a schedule.
        momentum: factor of the velocity; 0 for none.
        nesterov: change by momentum * velocity - rate * gradient (Sutskever et al., 2013).

    Example:
        >>> from amp_rewrite.train import SGD
        >>> SGD(0.1, momentum=0.9).spelling
        'sgd,learning_rate=0.1,momentum=0.9'
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False

    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        if not self.momentum:
            return variable - rate * gradient, {}
        factor = number(self.momentum)
        velocity = factor * slots["momentum"] - rate * gradient
        move = factor * velocity - rate * gradient if self.nesterov else velocity
        return variable + move, {"momentum": velocity}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Tieleman and Hinton's RMSprop; epsilon is added to the root, as in Keras without momentum and in PyTorch.

    Args:
        learning_rate: the rate without a schedule.
        rho: decay of the mean square.
        momentum: factor of the velocity; 0 for none.
        epsilon: added to the root.
    """

    learning_rate: float = 0.001
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


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba's Adam, algorithm 1: epsilon is added to the root of the corrected second moment.

    Keras adds it before the correction ("epsilon hat"), so its first steps are smaller for gradients of the order
    of epsilon.

    Args:
        learning_rate: the rate without a schedule.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the root.
    """

    learning_rate: float = 0.001
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    SLOTS: ClassVar[Mapping[str, float]] = {"m": 0.0, "v": 0.0}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        m = number(self.beta_1) * slots["m"] + number(1 - self.beta_1) * gradient
        v = number(self.beta_2) * slots["v"] + number(1 - self.beta_2) * (gradient * gradient)
        root = by.sqrt(v) / by.sqrt(by.bias_correction(self.beta_2, step)) + number(self.epsilon)
        return variable - rate / by.bias_correction(self.beta_1, step) * (m / root), {"m": m, "v": v}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): it subtracts rate * weight_decay * variable.

    Args:
        weight_decay: factor of the variable.
    """

    weight_decay: float = field(default=0.01, kw_only=True)

    def updated(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        if self.weight_decay:
            variable = variable - (rate * number(self.weight_decay)) * variable
        return self.rule(by, variable, gradient, slots, rate, step)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer's Adagrad; epsilon is added to the root.

    Args:
        learning_rate: the rate without a schedule.
        initial_accumulator_value: first value of the sum of squares.
        epsilon: added to the root.
    """

    learning_rate: float = 0.001
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def rule(self, by: Arithmetic, variable: Any, gradient: Any, slots: Values, rate: Any, step: Any) -> Result:
        accumulator = slots["accumulator"] + gradient * gradient
        return variable - rate * gradient / (by.sqrt(accumulator) + number(self.epsilon)), {"accumulator": accumulator}


_RATE = "learning_rate"
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_FLAGS = ("nesterov",)
_RANGES = {
    **dict.fromkeys(("beta_1", "beta_2", "rho"), (0.0, 1.0, "at least 0 and less than 1")),
    "momentum": (0.0, math.nextafter(1.0, 2.0), "at least 0 and at most 1"),  # as in Keras
}

OPTIMIZERS: Mapping[str, type[Optimizer]] = {c.__name__.lower(): c for c in (SGD, RMSprop, Adam, AdamW, Adagrad)}
"""Optimizer classes by name in lower case."""


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the optimizer of a `serialize` result. TrainingError for anything else.

    `custom_objects`: classes by name, besides those of the package: subclasses of Optimizer or of StatefulOptimizer.
    """
    name, inner = str(config.get("class_name")), config.get("config")
    optimizer_class = (custom_objects or {}).get(name) or OPTIMIZERS.get(name.lower())
    if optimizer_class is None or not isinstance(inner, Mapping):
        raise TrainingError(
            f"not a serialized optimizer: {dict(config)!r}; use the result of serialize(), and name your own classes in"
            " custom_objects"
        )
    return optimizer_class.from_config(inner)


def named(text: str) -> Optimizer:
    """Parse an optimizer such as "adam" or "sgd,learning_rate=0.1,momentum=0.9,nesterov=true".

    `lr` is short for learning_rate. TrainingError for an unknown name, hyperparameter or value.
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
            raise TrainingError(f"optimizer {name!r}: {setting!r} is not a setting; write NAME=NUMBER") from None
    return optimizer_class.from_config(config)


def initial_slots(optimizer: Optimizer, variables: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return the slots of all variables before the first step."""
    return {
        name: {slot: np.full(array.shape, value, np.float32) for slot, value in optimizer.slots().items()}
        for name, array in variables.items()
    }


def applied(
    optimizer: Optimizer,
    variables: Mapping[str, Array],
    gradients: Mapping[str, Gradient],
    slots: Mapping[str, Mapping[str, Array]],
    *,
    step: int,
    learning_rate: float | np.float32 | None = None,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Return variables and slots after step number `step`, counted from 1; the arguments are not changed.

    All arrays are float32; `slots` has them by variable and slot. A variable with gradient None keeps its value and
    slots. A sparse gradient is zero in absent rows, so slots decay there too (as in Keras's Adam, unlike its momentum).
    """
    rate = np.array(optimizer.learning_rate if learning_rate is None else learning_rate, np.float32)
    names = [name for name in variables if gradients.get(name) is not None]
    dense = [_dense(gradients[name], variables[name]) for name in names]
    new_variables = {name: np.array(array) for name, array in variables.items()}
    new_slots = {name: {slot: np.array(a) for slot, a in slots.get(name, {}).items()} for name in variables}
    with np.errstate(all="ignore"):  # a fixed loss scale lets nonfinite gradients through on purpose
        for name, gradient in zip(names, optimizer.clipped(NUMPY, dense), strict=True):
            new_variables[name], after = optimizer.updated(
                NUMPY, variables[name], gradient, slots[name], rate, np.array(step, np.int64)
            )
            new_slots[name] = dict(after)
    return new_variables, new_slots


def _dense(gradient: Gradient, variable: Array) -> Array:
    """Return a gradient as a float32 array of the variable's shape. TrainingError if it does not fit."""
    assert gradient is not None
    if isinstance(gradient, IndexedSlices):
        rows = np.asarray(gradient.indices)
        wrong = rows[(rows < 0) | (rows >= (len(variable) if variable.ndim else 0))]
        if wrong.size:
            raise TrainingError(
                f"a sparse gradient has row {wrong[0]}, out of range for a variable of shape {variable.shape};"
                " correct its indices"
            )
        dense = np.zeros(variable.shape, np.float32)
        np.add.at(dense, np.asarray(gradient.indices), np.asarray(gradient.values, np.float32))
        return dense
    array = np.asarray(gradient, np.float32)
    if array.shape != variable.shape:
        raise TrainingError(
            f"a gradient has shape {array.shape}, but its variable has shape {variable.shape}; pass one gradient per"
            " variable, in order"
        )
    return array
