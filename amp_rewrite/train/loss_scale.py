"""Loss scales: fixed or adaptive factors of the loss to keep float16 gradients from underflowing.

Method: Micikevicius et al., *Mixed Precision Training* (2018), section 3.2. The constants and the order of decisions
follow TensorFlow 2.1 to 2.3 (`tf.mixed_precision.experimental.LossScale`). In Keras 3, by contrast, the dynamic scale
is unbounded. `scale_after` implements the rule for both numbers and graph nodes, so the two go through the same
states, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import checked_arguments, quoted

INITIAL = 2.0**15
PERIOD = 2000
MULTIPLIER = 2.0
MINIMUM = 1.0
"""Default minimum of the scale, as in TensorFlow."""
MIN_NORMAL = float(np.finfo(np.float32).tiny)
"""The smallest normal float32 number, and the lowest possible minimum of a scale."""


class IndexedSlices(NamedTuple):
    """A sparse gradient: `values[i]` is the gradient of row `indices[i]`; repeated rows are summed.

    Args:
        values: float32 array of gradient rows.
        indices: integer vector with the row number of each gradient row.
        dense_shape: the shape of the dense gradient, if known.
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...] | None = None


Gradient = Array | IndexedSlices | None
"""The gradient of one variable; None if the loss does not depend on the variable."""


@dataclass(frozen=True, slots=True)
class ScaleState:
    """State of a loss scale between two steps: its value, and the number of finite steps since its last change."""

    scale: np.float32
    good_steps: int


def scale_after(rule: DynamicLossScale, scale: Any, good_steps: Any, finite: Any) -> tuple[Any, Any]:
    """Return the scale after a step and the number of finite steps since its last change, as numbers or graph nodes."""
    counted = good_steps + np.int64(1)
    due = counted >= np.int64(rule.increment_period)
    if rule.backoff_factor is None:
        factor = np.float32(rule.multiplier)
        grown, shrunk = scale * factor, scale / factor
    else:  # products of doubles, as PyTorch computes them
        float64_scale = scale.astype(np.float64)
        grown, shrunk = (
            (float64_scale * np.float64(factor)).astype(np.float32) for factor in (rule.multiplier, rule.backoff_factor)
        )
    up = np.where(due & (grown <= np.float32(DType.FLOAT.max)), grown, scale)
    down = np.maximum(shrunk, np.float32(rule.minimum))
    return np.where(finite, up, down), np.where(finite & ~due, counted, np.int64(0))


@checked_arguments()
class LossScale(ABC):
    """Base class of loss scales. Subclasses implement `__call__`, `update` and `get_config`.

    `get_config` returns the arguments of the subclass's `__init__`. A custom subclass works only in custom
    loops: a training step computes its scale in the graph, so it needs a `FixedLossScale` or a `DynamicLossScale`. Two
    scales of the same class and configuration are equal.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import LossScale, LossScaleOptimizer, SGD
        >>> class Halving(LossScale):
        ...     def __init__(self, start=1024.0):
        ...         self.start = self.now = start
        ...
        ...     def __call__(self):
        ...         return np.array(self.now, np.float32)
        ...
        ...     def update(self, grads):
        ...         self.now = max(self.now / 2, 1.0)
        ...         return None, True
        ...
        ...     def get_config(self):
        ...         return {"start": self.start}
        >>> config = LossScaleOptimizer(SGD(0.1), Halving(64.0)).get_config()
        >>> LossScaleOptimizer.from_config(config, custom_objects={"Halving": Halving}).loss_scale.start
        64.0
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> Array:
        """Return the scale: a float32 scalar, shape ()."""

    @abstractmethod
    def update(self, grads: object) -> tuple[Any, bool]:
        """Adapt the scale to a step's unscaled gradients, a nest of arrays. Return (None, whether to apply them)."""

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`, without the state."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a new scale from a `get_config` result."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return bool(spec(self) == (spec(other) if isinstance(other, LossScale) else other))

    def __hash__(self) -> int:
        return hash(repr(spec(self)))


@checked_arguments()
@dataclass(frozen=True, slots=True, eq=False)
class FixedLossScale(LossScale):
    """A constant loss scale. As in TensorFlow, gradients are always applied, even if they are NaN.

    Args:
        loss_scale_value: the scale.

    Raises:
        TrainingError: the scale is not a finite number ≥ 1.
    """

    loss_scale_value: float

    def __post_init__(self) -> None:
        value = _number("loss scale", self.loss_scale_value, MINIMUM, DType.FLOAT.max)
        object.__setattr__(self, "loss_scale_value", value)

    def __call__(self) -> Array:
        """Return the scale: a float32 scalar, shape ()."""
        return np.array(self.loss_scale_value, np.float32)

    def update(self, grads: object) -> tuple[None, bool]:
        """Return (None, True); the scale never changes."""
        return None, True

    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`."""
        return {"loss_scale_value": self.loss_scale_value}

    def __repr__(self) -> str:
        return f"FixedLossScale({self.loss_scale_value})"


@checked_arguments()
@dataclass(eq=False, repr=False)
class DynamicLossScale(LossScale):
    """An adaptive loss scale: it grows after a run of finite steps and shrinks after each nonfinite step.

    Args:
        initial_loss_scale: the scale of the first step.
        increment_period: number of consecutive finite steps after which the scale grows, unless it would overflow
            float32.
        multiplier: factor by which the scale grows.
        backoff_factor: factor below 1 after a nonfinite step; None divides by `multiplier`.
        minimum: the smallest scale, by default 1, as in TensorFlow; the first nonfinite step at this scale issues a
            warning. If gradients overflow even without a scale, set a minimum below 1.

    Raises:
        TrainingError: the scale is not finite or below its minimum, the period is below 1, or a factor is out of range.

    Example:
        >>> from amp_rewrite.train import DynamicLossScale
        >>> scale = DynamicLossScale(1024.0)
        >>> scale.update([float("nan")]), float(scale())
        ((None, False), 512.0)
    """

    initial_loss_scale: float = INITIAL
    increment_period: int = PERIOD
    multiplier: float = MULTIPLIER
    backoff_factor: float | None = None
    minimum: float = MINIMUM

    def __post_init__(self) -> None:
        period, backoff, largest = self.increment_period, self.backoff_factor, DType.FLOAT.max
        self.minimum = _number("minimum", self.minimum, MIN_NORMAL, MINIMUM)
        self.initial_loss_scale = _number("initial loss scale", self.initial_loss_scale, self.minimum, largest)
        self.increment_period = int(_number("increment period", period, 1, _MAX_STEPS))
        if self.increment_period != period:
            raise TrainingError(f"the increment period must be a whole number of steps ≥ 1, not {period!r}")
        self.multiplier = _number("multiplier", self.multiplier, 1, largest, excluded=1)
        if backoff is not None:
            self.backoff_factor = _number("backoff factor", backoff, MIN_NORMAL, 1, excluded=1)
        self.state, self._warned = self.initial, False

    @classmethod
    def of_grad_scaler(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> DynamicLossScale:
        """Return a new scale from the arguments of torch.amp.GradScaler, with its defaults.

        It goes through the same scales as a GradScaler, even below 1, down to 2**-126, the smallest normal number.
        Above about 2**120, gradients may overflow in only one of the two.

        Args:
            init_scale: the first scale.
            growth_factor: factor after `growth_interval` consecutive finite steps.
            backoff_factor: factor after a nonfinite step.
            growth_interval: number of consecutive finite steps before the scale grows.

        Example:
            >>> from amp_rewrite.train import DynamicLossScale
            >>> scale = DynamicLossScale.of_grad_scaler(growth_factor=1.5, backoff_factor=0.25)
            >>> scale.update([float("inf")]), float(scale())
            ((None, False), 16384.0)
        """
        return cls(init_scale, growth_interval, growth_factor, backoff_factor, MIN_NORMAL)

    @property
    def initial(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(np.float32(self.initial_loss_scale), 0)

    def __call__(self) -> Array:
        """Return the current scale: a float32 scalar, shape ()."""
        return np.array(self.state.scale, np.float32)

    def update(self, grads: object) -> tuple[None, bool]:
        """Adapt the scale to the gradients of a step. Return (None, whether to apply them).

        A nest without gradients counts as finite. With several workers, pass the reduced gradients, so that all
        workers make the same decision.
        """
        finite = all_finite(grads)
        if not finite and self.state.scale <= np.float32(self.minimum) and not self._warned:
            self._warned = True
            hint = "scale the loss down, or look for NaN in the data and the loss"
            if self.minimum == MINIMUM:
                hint = f"lower the minimum with DynamicLossScale(minimum=2**-14) or of_grad_scaler(), or {hint}"
            warnings.warn(
                f"gradients are not finite at the minimum loss scale {self.minimum:g}, so the step is skipped; {hint}",
                UserWarning,
                stacklevel=3,
            )
        self.state = self.after(self.state, finite)
        return None, finite

    def after(self, state: ScaleState, finite: bool) -> ScaleState:
        """Return the state after a step."""
        with np.errstate(over="ignore"):
            scale, good_steps = scale_after(self, state.scale, np.int64(state.good_steps), np.bool_(finite))
        return ScaleState(np.float32(scale), int(good_steps))

    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`, without the state, which checkpoints store."""
        settings = {part: getattr(self, part.name) for part in fields(self)}
        not_in_tensorflow = ("backoff_factor", "minimum")
        return {p.name: v for p, v in settings.items() if p.name not in not_in_tensorflow or v != p.default}

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value}" for name, value in self.get_config().items())
        return (
            f"DynamicLossScale(current_loss_scale={self.state.scale}, num_good_steps={self.state.good_steps}{settings})"
        )


_MAX_STEPS = 2**63 - 1
"""Maximum number of steps in an int64 counter."""


def _number(what: str, value: object, low: float, high: float, excluded: float | None = None) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or number == excluded:
        exception = "" if excluded is None else f" other than {excluded:g}"
        raise TrainingError(f"the {what} must be a number{exception} from {low:.3g} to {high:.3g}, not {value!r}")
    return number


_CLASSES: Mapping[str, type[LossScale]] = {c.__name__: c for c in (FixedLossScale, DynamicLossScale)}


def get(loss_scale: object) -> LossScale | None:
    """Return a loss scale from None, a number, "dynamic", a `serialize` result or a LossScale.

    TrainingError for anything else.
    """
    if loss_scale is None or isinstance(loss_scale, LossScale):
        return loss_scale
    if isinstance(loss_scale, Real) and not isinstance(loss_scale, bool):
        return FixedLossScale(float(loss_scale))
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, Mapping):
        return deserialize(loss_scale)
    raise TrainingError(f"loss_scale must be None, 'dynamic', a finite number ≥ 1 or a LossScale, not {loss_scale!r}")


def spec(scale: LossScale | None) -> Any:
    """Return the shortest form of a loss scale: None, "dynamic", a number, or its `serialize` result."""
    if scale is None:
        return None
    if type(scale) is FixedLossScale:
        return scale.loss_scale_value
    if type(scale) is DynamicLossScale and scale.get_config() == DynamicLossScale().get_config():
        return "dynamic"
    return serialize(scale)


def deserialize(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> LossScale:
    """Return a new loss scale in its initial state from a `serialize` result. TrainingError for anything else.

    `custom_objects`: additional classes by name.
    """
    custom = {name: c for name, c in (custom_objects or {}).items() if isinstance(c, type) and issubclass(c, LossScale)}
    scale_class, inner = serialized_class(config, "loss scale", _CLASSES, custom)
    return scale_class.from_config(inner)  # type: ignore[no-any-return]


def all_finite(grads: object) -> bool:
    """Return True if all gradients in a nest are finite; None and sparse gradients' indices are ignored."""
    if isinstance(grads, IndexedSlices):
        grads = np.asarray(grads.values)
    if isinstance(grads, Mapping):
        grads = list(grads.values())
    if isinstance(grads, (list, tuple)):
        return all(map(all_finite, grads))
    array = np.asarray(0.0 if grads is None else grads)
    if array.dtype.kind in "OSU":
        raise TrainingError(f"a gradient must be an array of numbers, not {quoted(grads)}")
    return bool(np.isfinite(array).all())


# -- serialization to dictionaries, in Keras's format ----------------------------------------------------------


def serialize(part: Any) -> dict[str, Any]:
    """Return an object as a dictionary of its class name and configuration, without its state."""
    return {"class_name": type(part).__name__, "config": part.get_config()}


def serialized_class(
    config: Mapping[str, Any], what: str, classes: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> tuple[Any, Mapping[str, Any]]:
    """Return the class and the configuration of a `serialize` result. TrainingError for anything else.

    `classes`: classes of the package by name, or by lowercase name. `custom_objects`: additional classes by name.
    """
    name, inner = str(config.get("class_name")), config.get("config")
    match = (custom_objects or {}).get(name) or classes.get(name) or classes.get(name.lower())
    if match is None or not isinstance(inner, Mapping):
        names = ", ".join(sorted({cls.__name__ for cls in classes.values()}))
        raise TrainingError(
            f"{dict(config)!r} is not a serialized {what}; pass the result of serialize() for one of {names}, or pass"
            " your own classes in custom_objects"
        )
    return match, inner
