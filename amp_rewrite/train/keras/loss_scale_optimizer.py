"""TensorFlow's LossScaleOptimizer, and the functions to enable and disable its graph rewrite.

Names, errors and their order follow `tf.keras.mixed_precision.experimental` in TensorFlow 2.1 to 2.3. Later
versions differ in three points:

- A step with nonfinite gradients does not advance `iterations`. Version 2.4 and later count it.
- An inner optimizer that clips gradients is an error. Version 2.4 and later clip after unscaling, as does
  `training_step`.
- The configuration is `{optimizer, loss_scale}`. `from_config` also accepts the configuration of version 2.4 and later.

Values are numpy arrays. Where TensorFlow raises a ValueError, `TrainingError`, a subclass of ValueError, is raised.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import numpy as np

from amp_rewrite.errors import PolicyError, TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train import loss_scale as scales
from amp_rewrite.train import policy as policies
from amp_rewrite.train.arguments import checked_arguments, float_array, quoted
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Differentiable, GradsAndVars, Variable, Variables, gradient_pairs, times
from amp_rewrite.train.loss_scale import DynamicLossScale, Gradient, IndexedSlices, LossScale, serialize
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.update.optimizer import Optimizer
from amp_rewrite.train.update.optimizers import deserialize


@checked_arguments()
class LossScaleOptimizer(StatefulOptimizer):
    """An optimizer with a loss scale: it scales the loss, unscales the gradients, and adapts the scale to them.

    Hyperparameters, iterations, slots and weights belong to the inner optimizer.

    Args:
        optimizer: a `StatefulOptimizer` or an `Optimizer` (SGD(…), Adam(…)).
        loss_scale: "dynamic", a number or a LossScale.

    Raises:
        TrainingError: the optimizer is invalid, has a loss scale or clips gradients, or the loss scale is None.

    Example:
        >>> from amp_rewrite.train import SGD, LossScaleOptimizer, Variable
        >>> weight, optimizer = Variable([1.0, 2.0], "weight"), LossScaleOptimizer(SGD(0.5), 8.0)
        >>> optimizer.apply_gradients([([1.0, 1.0], weight)])
        >>> weight.numpy().tolist()
        [0.5, 1.5]
    """

    inner: StatefulOptimizer
    loss_scale: LossScale

    def __init__(self, optimizer: StatefulOptimizer | Optimizer, loss_scale: object = "dynamic") -> None:
        inner = StatefulOptimizer(optimizer) if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(inner, StatefulOptimizer):
            raise TrainingError(f"{quoted(optimizer)} is not an optimizer; pass an Optimizer such as SGD(0.1)")
        if isinstance(inner, LossScaleOptimizer):
            raise TrainingError("the optimizer already has a loss scale; pass its inner optimizer")
        for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
            if getattr(inner.rule, clip) is not None:
                raise TrainingError(
                    f"LossScaleOptimizer cannot wrap an optimizer that clips gradients, and this one sets {clip};"
                    " clip between get_unscaled_gradients and apply_gradients"
                )
        scale = scales.get(loss_scale)
        if scale is None:
            raise TrainingError(
                "loss_scale is None; use 'dynamic', a number or a LossScale, or the optimizer without a wrapper"
            )
        vars(self).update(inner=inner, loss_scale=scale, _state=inner._state)

    def __getattr__(self, name: str) -> Any:
        if "inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss times the scale, in the loss's type. For a callable loss, return a callable."""
        if isinstance(loss, Differentiable):
            return times(loss, self.loss_scale())
        return (lambda: _times(loss(), self.loss_scale)) if callable(loss) else _times(loss, self.loss_scale)

    def get_unscaled_gradients(self, grads: Iterable[Gradient]) -> list[Gradient]:
        """Return the gradients divided by the scale, each in its own type.

        None is preserved, and sparse gradients remain sparse. The division is in float32, since float16 cannot
        represent a scale above 65504.
        """
        scale = self.loss_scale()
        return [_unscaled(gradient, scale) for gradient in grads]

    def get_gradients(self, loss: Callable[[], Any], params: Variables) -> list[Gradient]:
        """Return the unscaled gradients of a `Differentiable` loss, computed from the scaled loss."""
        return self.get_unscaled_gradients(self.inner.get_gradients(self.get_scaled_loss(loss), params))

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        global_step: Variable | None = None,
    ) -> None:
        """Adapt the loss scale to unscaled gradients, and apply them if they are finite; otherwise skip the step."""
        pairs = gradient_pairs(grads_and_vars)
        _, should_apply = self.loss_scale.update([gradient for gradient, _ in pairs])
        if should_apply:
            self.inner.apply_gradients(pairs, name, experimental_aggregate_gradients, global_step)

    def checkpoint(self) -> dict[str, Array]:
        """Return the inner optimizer's checkpoint, plus "loss_scale" and "good_steps" for a dynamic scale."""
        saved, scale = self.inner.checkpoint(), self.loss_scale
        if isinstance(scale, DynamicLossScale):
            saved["loss_scale"] = np.array(scale.state.scale, np.float32)
            saved["good_steps"] = np.array(scale.state.good_steps, np.int64)
        return saved

    def restore(self, saved: Mapping[str, Array] | str | os.PathLike[str]) -> None:
        """Restore a checkpoint or a file of `Trainer.save`. If it has no loss scale, the current one is kept."""
        saved, scale = checkpoint.saved_state(saved), self.loss_scale
        self.inner.restore(saved)
        if isinstance(scale, DynamicLossScale):
            value, good_steps = (saved.get(name) for name in ("loss_scale", "good_steps"))
            if value is not None and good_steps is not None:
                scale.state = scales.ScaleState(np.float32(value), int(good_steps))

    def get_config(self) -> dict[str, Any]:
        """Return arguments for `from_config`: the configurations of the inner optimizer and of the scale."""
        is_subclass = type(self.inner) is not StatefulOptimizer
        inner = serialize(self.inner) if is_subclass else self.inner.get_config()
        return {"optimizer": inner, "loss_scale": serialize(self.loss_scale)}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Return a new optimizer from a `get_config` result.

        Args:
            config: the result, in the format of TensorFlow 2.1 to 2.3 or of 2.4 and later.
            custom_objects: custom optimizer and loss scale classes by name.
        """
        if "inner_optimizer" in config:
            inner = deserialize(config["inner_optimizer"], custom_objects)
            initial, period = config.get("initial_scale"), config.get("dynamic_growth_steps")
            if config.get("dynamic"):
                return cls(inner, DynamicLossScale(initial or scales.INITIAL, period or scales.PERIOD))
            if initial is None or period is not None:
                raise TrainingError(
                    "a fixed loss scale needs initial_scale and does not take dynamic_growth_steps; correct the"
                    " configuration"
                )
            return cls(inner, scales.FixedLossScale(initial))
        if not {"optimizer", "loss_scale"} <= config.keys():
            raise TrainingError(
                f"{dict(config)!r} is not the configuration of a LossScaleOptimizer; use the result of get_config()"
            )
        inner = deserialize(config["optimizer"], custom_objects)
        return cls(inner, scales.deserialize(config["loss_scale"], custom_objects))


@overload
def enable_mixed_precision_graph_rewrite(opt: None = None) -> None: ...
@overload
def enable_mixed_precision_graph_rewrite(
    opt: StatefulOptimizer | Optimizer, loss_scale: object = "dynamic"
) -> LossScaleOptimizer: ...
def enable_mixed_precision_graph_rewrite(
    opt: StatefulOptimizer | Optimizer | None = None, loss_scale: object = "dynamic"
) -> LossScaleOptimizer | None:
    """Wrap the optimizer in a loss scale, and let new sessions convert their models.

    Checks run in TensorFlow's order; the rewrite is enabled last. A warning gives the number of sessions that are
    already open.

    Args:
        opt: the optimizer; None for a program that only runs models.
        loss_scale: "dynamic", a number or a LossScale.

    Returns:
        The wrapped optimizer; None without one.

    Raises:
        PolicyError: `set_policy` has set a policy.
        TrainingError: the optimizer cannot be wrapped.

    Example:
        >>> import amp_rewrite
        >>> optimizer = amp_rewrite.enable_mixed_precision_graph_rewrite(amp_rewrite.train.SGD(0.1))
        >>> amp_rewrite.disable_mixed_precision_graph_rewrite()
    """
    if policies.state.policy is not None:
        raise PolicyError(
            f"cannot enable the mixed precision graph rewrite: the policy is set to {policies.global_policy().name!r},"
            " and only one of the two can be active; call set_policy(None) first"
        )
    if opened := policies.state.plain_sessions:
        sessions = "1 session was" if opened == 1 else f"{opened} sessions were"
        warnings.warn(
            f"{sessions} opened before the mixed precision graph rewrite was enabled; open sessions do not change, so"
            " open a model again to convert it",
            UserWarning,
            stacklevel=2,
        )
    if opt is None and loss_scale != "dynamic":
        raise TrainingError(f"loss scale {loss_scale!r} needs an optimizer; pass opt, or omit the loss scale")
    wrapped = None if opt is None else LossScaleOptimizer(opt, loss_scale)
    policies.state.rewriting = True
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Let new sessions load models unchanged; warn if the rewrite was off. Open sessions and optimizers do not change.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.enable_mixed_precision_graph_rewrite()
        >>> amp_rewrite.disable_mixed_precision_graph_rewrite()
    """
    if not policies.state.rewriting:
        warnings.warn(
            "disable_mixed_precision_graph_rewrite has no effect: the graph rewrite is not enabled",
            UserWarning,
            stacklevel=2,
        )
    policies.state.rewriting = False


def _times(loss: Any, scale: LossScale) -> Array:
    value = np.asarray(loss)
    if value.dtype.kind in "OSU":
        raise TrainingError(f"the loss is {loss!r}, which cannot be scaled; pass a number, an array or a ModelLoss")
    with np.errstate(over="ignore"):
        return np.asarray(value * scale().astype(value.dtype))


def _unscaled(gradient: Gradient, scale: Array) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, IndexedSlices):
        values = _unscaled(gradient.values, scale)
        assert isinstance(values, np.ndarray)
        return gradient._replace(values=values)
    return np.asarray(float_array(gradient, "a gradient") / scale).astype(np.asarray(gradient).dtype)
