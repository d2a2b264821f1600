"""Loss scales: how far a loss is blown up so that its float16 gradients do not vanish, and how that adapts.

The method is that of Micikevicius et al., *Mixed Precision Training* (2018), section 3.2; the numbers and the order
of decisions are those of TensorFlow 2.1 to 2.3 (`tf.mixed_precision.experimental.LossScale`). Keras 3 differs: its
dynamic scale has no floor and no cap. All arithmetic is float32, so that the same rule as graph nodes
(`update.adjusted`) goes through the same states bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError

Array = NDArray[Any]

INITIAL = 2.0**15
PERIOD = 2000
MULTIPLIER = 2.0
FLOOR = np.float32(1.0)


class IndexedSlices(NamedTuple):
    """A sparse gradient: `values[i]` belongs to row `indices[i]`; rows may repeat, and then add up.

    The shape of the whole, if known, is `dense_shape`.
    """

    values: Array
    indices: Array
    dense_shape: tuple[int, ...] | None = None


Gradient = Array | IndexedSlices | None
"""A gradient of one variable; None where the loss does not depend on it."""


@dataclass(frozen=True, slots=True)
class ScaleState:
    """A loss scale between two steps: its value, and the finite steps since it last changed."""

    scale: np.float32
    good_steps: int


@dataclass(frozen=True, slots=True)
class FixedLossScale:
    """A loss scale that stays. TrainingError unless it is an int or a float, finite, and 1 or more.

    Its update always says that the gradients may be applied, NaN or not, as in TensorFlow.
    """

    loss_scale_value: float

    def __post_init__(self) -> None:
        value = self.loss_scale_value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TrainingError(f"a fixed loss scale must be an int or a float, not {value!r}")
        if not 1 <= value <= DType.FLOAT.max:  # beyond, float32 has only infinity
            raise TrainingError(f"a fixed loss scale must be finite and at least 1, not {value!r}")
        object.__setattr__(self, "loss_scale_value", float(value))

    def __call__(self) -> Array:
        """The scale: float32, of no dimensions."""
        return np.array(self.loss_scale_value, np.float32)

    def update(self, grads: object) -> tuple[None, bool]:
        """Nothing changes; (None, True)."""
        del grads
        return None, True

    def get_config(self) -> dict[str, Any]:
        return {"loss_scale_value": self.loss_scale_value}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FixedLossScale:
        return cls(**config)

    def __repr__(self) -> str:
        return f"FixedLossScale({self.loss_scale_value})"


class DynamicLossScale:
    """A loss scale that follows the gradients: up after a run of finite steps, down as soon as one is not.

    After `increment_period` finite steps in a row the scale is multiplied by `multiplier`, unless that leaves
    float32: then it stays. After a step that is not finite it is divided by it, down to 1 and no further. So the
    scale is never assigned a value that is not finite. TrainingError for an initial scale that is not finite or
    below 1, a period below 1, a multiplier of 1 or less.
    """

    def __init__(
        self,
        initial_loss_scale: float = INITIAL,
        increment_period: int = PERIOD,
        multiplier: float = MULTIPLIER,
    ) -> None:
        self.initial_loss_scale = float(initial_loss_scale)
        self.increment_period = int(increment_period)
        self.multiplier = float(multiplier)
        with np.errstate(over="ignore"):
            initial = np.float32(self.initial_loss_scale)
        if not (np.isfinite(initial) and initial >= FLOOR):
            raise TrainingError(f"the initial loss scale must be at least 1 and finite, not {initial_loss_scale!r}")
        if self.increment_period < 1:
            raise TrainingError(f"the increment period must be at least 1 step, not {increment_period!r}")
        if not (math.isfinite(self.multiplier) and self.multiplier > 1):
            raise TrainingError(f"the multiplier must be more than 1 and finite, not {multiplier!r}")
        self.state = self.initial

    @property
    def initial(self) -> ScaleState:
        """The state before the first step."""
        return ScaleState(np.float32(self.initial_loss_scale), 0)

    def __call__(self) -> Array:
        """The current scale: float32, of no dimensions."""
        return np.array(self.state.scale, np.float32)

    def update(self, grads: object) -> tuple[None, bool]:
        """Adapt to one step's gradients, any nest of them; (None, whether they may be applied).

        A nest without a single gradient counts as finite. On several workers give the reduced gradients, so that
        all of them decide alike.
        """
        finite = all_finite(grads)
        self.state = self.after(self.state, finite)
        return None, finite

    def after(self, state: ScaleState, finite: bool) -> ScaleState:
        """The state after a step, from the one before it and whether its gradients were finite."""
        factor = np.float32(self.multiplier)
        if not finite:
            return ScaleState(max(state.scale / factor, FLOOR), 0)
        if state.good_steps + 1 < self.increment_period:
            return ScaleState(state.scale, state.good_steps + 1)
        with np.errstate(over="ignore"):
            grown = state.scale * factor
        return ScaleState(grown if np.isfinite(grown) else state.scale, 0)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs; the state is not in it but in the checkpoint."""
        return {
            "initial_loss_scale": self.initial_loss_scale,
            "increment_period": self.increment_period,
            "multiplier": self.multiplier,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DynamicLossScale:
        return cls(**config)

    def __repr__(self) -> str:
        return (
            f"DynamicLossScale(current_loss_scale={self.state.scale}, num_good_steps={self.state.good_steps}, "
            f"initial_loss_scale={self.initial_loss_scale}, increment_period={self.increment_period}, "
            f"multiplier={self.multiplier})"
        )


LossScale = FixedLossScale | DynamicLossScale

_CLASSES: dict[str, type[FixedLossScale] | type[DynamicLossScale]] = {
    "FixedLossScale": FixedLossScale,
    "DynamicLossScale": DynamicLossScale,
}


def get(loss_scale: object) -> LossScale | None:
    """The loss scale that is meant: itself, None, a number, "dynamic", or what `serialize` gave; else TrainingError."""
    if loss_scale is None or isinstance(loss_scale, (FixedLossScale, DynamicLossScale)):
        return loss_scale
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return FixedLossScale(loss_scale)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, Mapping):
        return deserialize(loss_scale)
    raise TrainingError(f"loss scale {loss_scale!r} is none; use None, 'dynamic', a number or a LossScale")


def serialize(loss_scale: LossScale) -> dict[str, Any]:
    """The plain form of a loss scale, without its state."""
    return {"class_name": type(loss_scale).__name__, "config": loss_scale.get_config()}


def deserialize(config: Mapping[str, Any]) -> LossScale:
    """The loss scale behind `serialize`, in its initial state. TrainingError for anything else."""
    found = _CLASSES.get(str(config.get("class_name")))
    inner = config.get("config")
    if found is None or not isinstance(inner, Mapping):
        raise TrainingError(f"not a serialized loss scale: {dict(config)!r}; use what serialize gave")
    try:
        return found.from_config(inner)
    except TypeError as cause:
        raise TrainingError(f"not the configuration of a {found.__name__}: {dict(inner)!r}") from cause


def all_finite(grads: object) -> bool:
    """Whether every element of all gradients in a nest is finite. None counts for nothing; of sparse, values do."""
    return all(bool(np.isfinite(array).all()) for array in _arrays(grads))


def _arrays(nest: object) -> Iterable[Array]:
    if nest is None:
        return
    if isinstance(nest, IndexedSlices):
        yield np.asarray(nest.values)
    elif isinstance(nest, Mapping):
        for inner in nest.values():
            yield from _arrays(inner)
    elif isinstance(nest, (list, tuple)):
        for inner in nest:
            yield from _arrays(inner)
    else:
        yield np.asarray(nest)
