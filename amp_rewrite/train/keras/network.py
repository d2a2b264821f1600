"""A model as custom loops of TensorFlow call it: predictions of inputs, losses of predictions, gradients on a tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions
from amp_rewrite.settings.loss_scale import Gradient
from amp_rewrite.settings.policy import Policy
from amp_rewrite.settings.request import Painting
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable, differentiable, listed
from amp_rewrite.train.step.model_loss import ModelLoss


class Network:
    """A model for a custom loop: call it for predictions, and a loss object with them for a loss.

    The loss, its gradients and the metrics come from one forward pass. All losses of a network share its variables.

    Arguments are those of `training_step`, but for `policy`, which is by default that of `ModelLoss.of`.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import SGD, GradientTape, Losses, LossScaleOptimizer, Network
        >>> model, optimizer = Network("model.onnx"), LossScaleOptimizer(SGD(0.1))
        >>> with GradientTape() as tape:
        ...     predictions = model(np.ones((4, 1, 8, 8), np.float32))
        ...     loss = Losses.SparseCategoricalCrossentropy()(np.arange(4), predictions)
        ...     scaled_loss = optimizer.get_scaled_loss(loss)
        >>> gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled_loss, model.trainable_variables))
        >>> optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        >>> float(loss) > 0
        True
    """

    def __init__(
        self,
        model: object,
        *,
        parameters: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        policy: str | Policy | None = None,
        training_mode: bool = False,
        seed: int = 0,
        folder: str | Path | None = None,
        **painting: Unpack[Painting],
    ) -> None:
        self._given, self._model = model, Model.load(model, folder=folder)
        self._options: dict[str, Any] = dict(
            parameters=parameters, freeze=freeze, policy=policy, training_mode=training_mode, seed=seed, **painting
        )
        self._losses: dict[str, ModelLoss] = {}
        graph = self._model.proto.graph
        held = {tensor.name for tensor in graph.initializer}
        self.inputs = tuple(v.name for v in graph.input if v.name not in held)
        self.outputs = tuple(v.name for v in graph.output)

    def loss(self, text: str) -> ModelLoss:
        """Return a loss of the network, by a text as `training_step` takes it, with its variables."""
        if text not in self._losses:
            source = self._given if hasattr(self._given, "exported_program") else self._model
            made = ModelLoss.of(source, text, **self._options)
            first = next(iter(self._losses.values()), made)
            if [v.name for v in made.variables] != [v.name for v in first.variables]:
                raise TrainingError(
                    f"the loss {text!r} depends on other parameters than the first loss of this network; name those to"
                    " train in `parameters`"
                )
            self._losses[text] = replace(made, variables=first.variables, _state=first._state)
        return self._losses[text]

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables; a network has them from its first loss on."""
        return self._first().variables

    def _first(self) -> ModelLoss:
        if not self._losses:
            raise TrainingError(
                "the network has no loss yet, which decides what is trained; call a loss object with its predictions"
                " first"
            )
        return next(iter(self._losses.values()))

    def __call__(self, inputs: object, training: bool | None = None) -> Predictions:
        """Return the predictions for inputs; they are computed when a loss or numpy asks for them.

        Args:
            inputs: an array for a model of one input, or a mapping from names to arrays.
            training: accepted as in Keras. Numbers of predictions are always those of the model in evaluation; a loss
                of them is in training mode if the network is.
        """
        if not isinstance(inputs, Mapping):
            if len(self.inputs) != 1:
                raise TrainingError(
                    f"the model has the inputs {', '.join(self.inputs)}; pass a mapping with all of them"
                )
            inputs = {self.inputs[0]: np.asarray(inputs)}
        return Predictions(self, dict(inputs))

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the model by name."""
        loss = next(iter(self._losses.values()), None)
        if loss is None:
            (batch,) = Feed.of([inputs], self._model, allow_nonfinite=True)
            results = Runner.open(self._model, SessionOptions(providers=(CPU,))).run(batch, self.outputs)
            return {name: np.asarray(results[name]) for name in self.outputs}
        return loss.predict(inputs)

    def export(self) -> Model:
        """Return the model with the current parameters, float32, ready for `convert`."""
        return self._first().export()

    def save(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Write a checkpoint; see `ModelLoss.save`."""
        self._first().save(path, optimizer)

    def load(self, path: str | Path, optimizer: StatefulOptimizer | None = None) -> None:
        """Continue from a checkpoint; see `ModelLoss.load`."""
        self._first().load(path, optimizer)


@dataclass(frozen=True, eq=False)
class Predictions:
    """Outputs of a network for inputs. numpy functions compute them: `np.argmax(predictions, 1)`.

    Attributes:
        network: the network.
        inputs: arrays by name.
        output: the output that is meant; by default the first.
    """

    network: Network
    inputs: Mapping[str, Array]
    output: str = ""

    @property
    def name(self) -> str:
        """Name of the output."""
        return self.output or self.network.outputs[0]

    def __getitem__(self, output: str) -> Predictions:
        """Return the predictions of another output."""
        if output not in self.network.outputs:
            raise TrainingError(f"the model has no output {output!r}; it has {', '.join(self.network.outputs)}")
        return replace(self, output=output)

    def numpy(self) -> Array:
        """Return the numbers."""
        return self.network.predict(self.inputs)[self.name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.numpy(), dtype)


@dataclass(frozen=True)
class LossObject:
    """A loss of targets and predictions, with the options of its formula."""

    formula: str
    options: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, y_true: object, y_pred: Predictions, sample_weight: object = None) -> ModelLoss:
        """Return the loss of a batch: `float` gives its value, a `GradientTape` its gradients.

        Args:
            y_true: targets.
            y_pred: predictions of a network.
            sample_weight: a weight for each row, or None.
        """
        if not isinstance(y_pred, Predictions):
            raise TrainingError(f"{type(y_pred).__name__} is not a result of a Network; pass network(inputs)")
        options = "".join(f", {name}={value!r}" for name, value in self.options.items() if value is not None)
        targets = np.asarray(y_true)
        classes = self.formula == "cross_entropy"
        target, weight = "y_true", "sample_weight"
        while {target, weight} & {*y_pred.network.inputs}:
            target, weight = f"{target}_", f"{weight}_"
        batch = {**y_pred.inputs, target: targets.astype(np.int64 if classes else np.float32)}
        if sample_weight is not None:
            options += f", sample_weight={weight}"
            batch[weight] = np.asarray(sample_weight, np.float32).reshape(len(targets))
        return y_pred.network.loss(f"{self.formula}({y_pred.name}, {target}{options})").on(batch)


_LOGITS, _SMOOTHING = "from_logits", "label_smoothing"
_PROBABILITIES = {_LOGITS: False}
"""What predictions are by default in Keras."""
_MEAN = (None, "auto", "sum_over_batch_size", "AUTO", "SUM_OVER_BATCH_SIZE")
"""Reductions of Keras that are the mean."""


def _loss(formula: str, words: str, *places: str, **defaults: object) -> Callable[..., LossObject]:
    """Return a function from options to the loss object of a formula; it is documented as `words`.

    `places`: the options that Keras takes by place.
    """

    def make(*given: object, reduction: str | None = None, name: str | None = None, **options: object) -> LossObject:
        if len(given) > len(places) or set(places[: len(given)]) & options.keys():
            raise TrainingError(f"{formula} takes {', '.join(places) or 'nothing'} by place; name other options")
        if reduction not in _MEAN:
            raise TrainingError(
                f"reduction={reduction!r} is not here: losses are means; multiply them, as in loss * 32"
            )
        return LossObject(formula, {**defaults, **dict(zip(places, given, strict=False)), **options})

    make.__doc__ = words
    return make


class Losses:
    """Keras's loss objects, for predictions of a `Network`. Options are those of the formula in `training_step`'s text.

    Predictions are probabilities, unless `from_logits=True` says otherwise; of the result of a Softmax or Sigmoid the
    loss reads the logits. Classes are on the last axis, or on that of `axis`. All are means over all numbers or rows;
    `KLDivergence` divides by the rows alone, as PyTorch does.
    """

    SparseCategoricalCrossentropy = staticmethod(
        _loss("cross_entropy", "Cross entropy with class indices.", _LOGITS, **_PROBABILITIES, axis=-1)
    )
    CategoricalCrossentropy = staticmethod(
        _loss(
            "categorical_cross_entropy",
            "Cross entropy with class probabilities.",
            _LOGITS,
            _SMOOTHING,
            **_PROBABILITIES,
            axis=-1,
        )
    )
    BinaryCrossentropy = staticmethod(
        _loss("binary_cross_entropy", "Cross entropy of two classes.", _LOGITS, _SMOOTHING, **_PROBABILITIES)
    )
    KLDivergence = staticmethod(_loss("kl_divergence", "Kullback-Leibler divergence.", **_PROBABILITIES))
    MeanSquaredError = staticmethod(_loss("mean_squared_error", "Mean squared error."))
    MeanAbsoluteError = staticmethod(_loss("mean_absolute_error", "Mean absolute error."))
    Huber = staticmethod(_loss("huber", "Huber's loss.", "delta"))


class GradientTape:
    """Gradients of losses in the form of tf.GradientTape. The graph has them already; the tape records nothing.

    Args:
        persistent: accepted as in TensorFlow; every tape gives gradients as often as it is asked.
    """

    def __init__(self, persistent: bool = False) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @overload
    def gradient(self, target: object, sources: Variable) -> Gradient: ...
    @overload
    def gradient(self, target: object, sources: Sequence[Variable]) -> list[Gradient]: ...
    def gradient(self, target: object, sources: Variable | Sequence[Variable]) -> Gradient | list[Gradient]:
        """Return the gradients of a loss, or of a scaled loss: one for one variable, a list for several.

        Raises:
            TrainingError: the target is not a loss of a model.
        """
        found = differentiable(target).gradients(listed(sources), np.array(1, np.float32))
        return found[0] if isinstance(sources, Variable) else found
