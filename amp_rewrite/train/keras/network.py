"""Networks with the API of a Keras model: compile, fit, predict, loss objects, and gradients on a tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple, Self, Unpack, overload

import numpy as np
from onnx import TensorProto

from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.installation import require
from amp_rewrite.train import policy as policies
from amp_rewrite.train.arguments import AttributeHints, Namespace, checked_arguments, float_array, quoted, to_array
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable, differentiable, variable_list
from amp_rewrite.train.loss_scale import Gradient
from amp_rewrite.train.objective.losses import LOSSES as FORMULAS
from amp_rewrite.train.objective.parameters import TRAINED, parameter_rows
from amp_rewrite.train.step.assembly import ModelOptions, TrainingSource, batch_inputs, statistics_names
from amp_rewrite.train.step.batches import Predictions, Scores, checked_inputs
from amp_rewrite.train.step.fitting import FitOptions, History, Progress, Rate
from amp_rewrite.train.step.model_loss import ModelLoss, Weights, WithWeights
from amp_rewrite.train.step.step import build_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizer import Optimizer
from amp_rewrite.train.update.optimizers import parse_optimizer


@checked_arguments(options=ModelOptions)
class Network(WithWeights):
    """A model with the API of a Keras model: `compile`, `fit`, `evaluate`, `predict`, and calls in custom loops.

    A call returns predictions; a loss object called with them returns a loss. Both use the weights at the time of the
    call. One forward pass computes the loss, its gradients and the metrics. All losses of a network share its
    variables.

    The arguments are the same as for `training_step`, but `policy` has the default of `ModelLoss.of`.

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

    def __init__(self, model: object, **options: Unpack[ModelOptions]) -> None:
        self._source = TrainingSource.of(model, options, policies.policy_of_sessions)
        self._losses: dict[str, ModelLoss] = {}
        self._compiled: Trainer | None = None
        self.inputs = batch_inputs(self._source.model)
        self.outputs = tuple(v.name for v in self._source.model.proto.graph.output)

    # -- weights -----------------------------------------------------------------------------------------

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables of the trained parameters of all outputs and losses."""
        return tuple(self._weights.variables.values())

    @cached_property
    def _weights(self) -> Weights:  # type: ignore[override]
        """The weights, with a variable for each trained parameter of an output."""
        weights, model = Weights(self._source), self._source.model
        view = View.of(inlined(model))
        for output in self.outputs:
            for row in parameter_rows(view, output, self._source.globs, minimum=0):
                if row.role == TRAINED:
                    weights.variables.setdefault(row.name, Variable(model.array(self._tensors[row.name]), row.name))
        if self._source.training_mode:
            for name in statistics_names(model):
                weights.running.setdefault(f"buffer/{name}", model.array(self._tensors[name]).copy())
        return weights

    @cached_property
    def _tensors(self) -> dict[str, TensorProto]:
        return {tensor.name: tensor for tensor in self._source.model.proto.graph.initializer}

    def _names(self) -> list[str]:
        """Names of the weights, in the order of the PyTorch module, the Keras model or the initializers."""
        module, arrays = self._source.globs.module, self._weights.arrays()
        statistics = statistics_names(self._source.model)
        return [*module] if module is not None else [n for n in self._tensors if n in arrays or n in statistics]

    def get_weights(self) -> list[Array]:
        """Return copies of all weights, in the order of the PyTorch module or Keras model, for its `set_weights`."""
        arrays, model = self._weights.arrays(), self._source.model
        return [np.array(arrays[n] if n in arrays else model.array(self._tensors[n])) for n in self._names()]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set all weights.

        Args:
            weights: arrays in the order of `get_weights`.

        Raises:
            TrainingError: the number of arrays or a shape differs, or a weight that is not trained would change.
        """
        names, before = self._names(), self.get_weights()
        if not isinstance(weights, (list, tuple)) or len(weights) != len(names):
            raise TrainingError(f"set_weights takes {len(names)} arrays, in this order: {', '.join(names)}")
        for name, old, new in zip(names, before, weights, strict=True):
            if np.shape(new) != old.shape:
                raise TrainingError(f"weight {name!r} has shape {old.shape}, not {np.shape(new)}; correct the array")
            if name in self._weights.variables:
                self._weights.variables[name].assign(new)
            elif f"buffer/{name}" in self._weights.running:
                self._weights.running[f"buffer/{name}"] = float_array(new, f"weight {name!r}")
            elif not np.array_equal(old, np.asarray(new)):
                raise TrainingError(f"weight {name!r} is not trained, so it cannot change; create a new network")

    # -- predictions and losses ----------------------------------------------------------------------------

    def loss(self, text: str) -> ModelLoss:
        """Return a loss with the network's variables; `text` is the `loss` argument of `training_step`."""
        if text not in self._losses:
            require("Network")
            self._losses[text] = self._weights.loss(text)
        return self._losses[text]

    def __call__(self, inputs: object, training: bool | None = None) -> Predictions:
        """Return the predictions for a batch with the current weights; they are computed on first use.

        Args:
            inputs: an array for a model with one input, or a mapping from names to arrays.
            training: accepted as in Keras, and ignored. Predictions always use evaluation mode; their losses use
                training mode if the network has `training_mode=True`.
        """
        if not isinstance(inputs, Mapping):
            if len(self.inputs) != 1:
                raise TrainingError(
                    f"the model has the inputs {', '.join(self.inputs)}; pass a mapping with all of them"
                )
            convert = float_array if inputs is None else to_array  # float_array rejects None
            inputs = {self.inputs[0]: convert(inputs, "the input")}
        current = self._weights
        batch, weights = dict(checked_inputs(self._source.model, self.inputs, inputs)), current.arrays()
        compute = cache(lambda: current.predictor(batch, weights))
        return Predictions(compute, self.outputs, self.outputs[0], _Origin(self, batch, weights))

    # -- fit -----------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: StatefulOptimizer | Optimizer | str = "rmsprop",
        loss: LossObject | str = "",
        metrics: str | Sequence[str] = (),
    ) -> None:
        """Set the optimizer, the loss and the metrics for `fit` and `evaluate`, as in Keras.

        Args:
            optimizer: an optimizer or its name. A `LossScaleOptimizer` has its own loss scale; others use the policy's.
            loss: a loss object, its name in Keras, such as "sparse_categorical_crossentropy", or the `loss` argument
                of `training_step`.
            metrics: "accuracy", for classification losses, which always compute it.

        Raises:
            TrainingError: the loss, the optimizer or a metric is unknown.
        """
        if isinstance(optimizer, str):
            optimizer = parse_optimizer(optimizer)
        if isinstance(optimizer, Optimizer):
            optimizer = StatefulOptimizer(optimizer)
        chosen = KERAS_LOSSES.get(loss.lower(), loss) if isinstance(loss, str) else loss
        if callable(chosen) and not isinstance(chosen, LossObject):
            raise TrainingError(
                f"the loss must be a loss object of `Losses` or a name, not {quoted(chosen)}; use, for example,"
                f" Losses.MeanSquaredError(), or one of {', '.join(KERAS_LOSSES)}"
            )
        if isinstance(chosen, LossObject):
            chosen = chosen.text(self.outputs[0], _unused("y_true", self.inputs))
        step = build_step(self._source, chosen, optimizer)
        for metric in as_names(metrics):
            if metric != "accuracy":
                raise TrainingError(
                    f"fit does not compute {quoted(metric)}; use 'accuracy', and compute other metrics from predict(x)"
                )
            if not step.metrics:
                raise TrainingError(f"the loss {step.objective!r} has no accuracy; omit metrics")
        self._compiled = Trainer(step)

    @checked_arguments(options=FitOptions)
    def fit(
        self,
        x: object = None,
        y: object = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        learning_rate: Rate | None = None,
        progress: Progress | None = None,
        **options: Unpack[FitOptions],
    ) -> History:
        """Train with the settings of `compile` and return losses and metrics; see `Trainer.fit`.

        Afterwards the variables have the trained values, even if `fit` raises an error.
        """
        trainer = self._synchronized()
        try:
            return trainer.fit(x, y, batch_size, epochs, learning_rate=learning_rate, progress=progress, **options)
        finally:
            weights = trainer.get_weights()
            for name, array in weights.items():
                if name in self._weights.variables:
                    self._weights.variables[name].assign(array)
                else:
                    self._weights.running[f"buffer/{name}"] = array

    def evaluate(
        self, x: object = None, y: object = None, batch_size: int | None = None, verbose: object = None
    ) -> Scores:
        """Return the loss and the metrics over data; see `Trainer.evaluate`."""
        return self._synchronized().evaluate(x, y, batch_size)

    def predict(self, x: object, batch_size: int | None = None, verbose: object = None) -> Predictions:
        """Return the predictions for all rows, computed in batches; index them by name for another output.

        Args:
            x: inputs, as for `fit`.
            batch_size: rows per batch.
            verbose: accepted as in Keras, and ignored.
        """
        return self._weights.predictor.rows(x, batch_size, self._weights.arrays())

    def _synchronized(self) -> Trainer:
        if self._compiled is None:
            raise TrainingError("the network has no loss or optimizer for fit and evaluate; call compile first")
        arrays = self._weights.arrays()
        self._compiled.set_weights({n: arrays[n] for n in self._compiled.get_weights() if n in arrays})
        return self._compiled


class _Origin(NamedTuple):
    """The network, inputs and weights of predictions."""

    network: Network
    inputs: Mapping[str, Array]
    weights: Mapping[str, Array]


def _unused(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


@checked_arguments()
@dataclass(frozen=True)
class LossObject:
    """A Keras loss object: a formula of `training_step` with its options."""

    formula: str
    options: Mapping[str, object] = field(default_factory=dict)

    def text(self, prediction: str, target: str, weight: str | None = None) -> str:
        options = {**self.options, "sample_weight": None} if weight is None else self.options
        settings = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"{self.formula}({prediction}, {target}{settings}{f', sample_weight={weight}' if weight else ''})"

    def __call__(self, y_true: object, y_pred: object, sample_weight: object = None) -> ModelLoss:
        """Return the loss of a batch, at the weights of its predictions; `GradientTape` computes its gradients.

        Args:
            y_true: the targets of the batch.
            y_pred: the predictions of a `Network` for it.
            sample_weight: a weight for each row, or None.
        """
        source = getattr(y_pred, "source", None)
        if not isinstance(source, _Origin) or not isinstance(y_pred, Predictions):
            raise TrainingError(f"{type(y_pred).__name__} is not a result of a Network; pass (y, network(inputs))")
        target, weight = _unused("y_true", source.network.inputs), _unused("sample_weight", source.network.inputs)
        loss = source.network.loss(self.text(y_pred.output, target, None if sample_weight is None else weight))
        batch = {**source.inputs, target: to_array(y_true, "y_true")}
        if sample_weight is not None:
            batch[weight] = float_array(sample_weight, "sample_weight").reshape(len(batch[target]))
        return loss.on(batch, source.weights)


_LOGITS, _SMOOTHING = "from_logits", "label_smoothing"
_PROBABILITIES: Mapping[str, object] = {_LOGITS: False}
"""Keras's default: predictions are probabilities."""
_BY_CLASS: Mapping[str, object] = {**_PROBABILITIES, "axis": -1}
_MEAN = (None, "auto", "sum_over_batch_size", "AUTO", "SUM_OVER_BATCH_SIZE")
"""Keras's names for the mean reduction."""


def _loss(formula: str, doc: str, *positional: str, **defaults: object) -> Callable[..., LossObject]:
    """Return a function from options to the loss object of a formula.

    `doc`: the docstring of that function. `positional`: the options that Keras accepts by position.
    """

    def make(*values: object, reduction: str | None = None, name: str | None = None, **options: object) -> LossObject:
        if len(values) > len(positional) or set(positional[: len(values)]) & options.keys():
            raise TrainingError(f"{formula} takes only {', '.join(positional) or 'names'} by position; name the others")
        if reduction not in _MEAN:
            raise TrainingError(
                f"reduction={reduction!r} is not supported; for a sum, multiply the loss (a mean) by the number of rows"
            )
        unknown = next((o for o in options if o not in FORMULAS[formula].options), None)
        if unknown is not None:
            legal = FORMULAS[formula].options
            raise TrainingError(f"{formula} has no option {unknown!r}; {advice(unknown, legal, f'it has {legal}')}")
        return LossObject(formula, {**defaults, **dict(zip(positional, values, strict=False)), **options})

    make.__doc__ = doc
    return make


class Losses(metaclass=Namespace):
    """Keras's loss objects, for predictions of a `Network`, with the options of `training_step`'s formulas.

    Predictions are probabilities unless `from_logits=True`. If a Softmax or Sigmoid computes them, the loss uses its
    logits instead. The class axis is the last one unless `axis` is set. All losses are means over rows or numbers;
    `KLDivergence` divides by the number of rows, like PyTorch's "batchmean".
    """

    SparseCategoricalCrossentropy = staticmethod(
        _loss("cross_entropy", "Cross entropy with class indices.", _LOGITS, **_BY_CLASS)
    )
    CategoricalCrossentropy = staticmethod(
        _loss("categorical_cross_entropy", "Cross entropy with class probabilities.", _LOGITS, _SMOOTHING, **_BY_CLASS)
    )
    BinaryCrossentropy = staticmethod(
        _loss("binary_cross_entropy", "Cross entropy of two classes.", _LOGITS, _SMOOTHING, **_PROBABILITIES)
    )
    KLDivergence = staticmethod(_loss("kl_divergence", "Kullback-Leibler divergence.", **_PROBABILITIES))
    MeanSquaredError = staticmethod(_loss("mean_squared_error", "Mean squared error."))
    MeanAbsoluteError = staticmethod(_loss("mean_absolute_error", "Mean absolute error."))
    Huber = staticmethod(_loss("huber", "Huber's loss.", "delta"))


KERAS_LOSSES: Mapping[str, LossObject] = {
    "sparse_categorical_crossentropy": Losses.SparseCategoricalCrossentropy(),
    "categorical_crossentropy": Losses.CategoricalCrossentropy(),
    "binary_crossentropy": Losses.BinaryCrossentropy(),
    "kl_divergence": Losses.KLDivergence(),
    **dict.fromkeys(("mean_squared_error", "mse"), Losses.MeanSquaredError()),
    **dict.fromkeys(("mean_absolute_error", "mae"), Losses.MeanAbsoluteError()),
    "huber": Losses.Huber(),
}
"""Loss objects by their Keras names."""


@checked_arguments()
class GradientTape(AttributeHints):
    """Gradients of losses with the API of tf.GradientTape. The tape records nothing: graphs contain their gradients.

    Args:
        persistent: accepted as in TensorFlow, and ignored: every tape is persistent.
    """

    def __init__(self, persistent: bool = False) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    @overload
    def gradient(self, target: object, sources: Variable) -> Gradient: ...
    @overload
    def gradient(self, target: object, sources: Sequence[Variable]) -> list[Gradient]: ...
    def gradient(self, target: object, sources: Variable | Sequence[Variable]) -> Gradient | list[Gradient]:
        """Return the gradient of a loss, scaled or not, for one variable, or a list of gradients for several.

        Raises:
            TrainingError: the target is not a loss of a model.
        """
        gradients = differentiable(target).gradients(variable_list(sources, target), np.array(1, np.float32))
        return gradients[0] if isinstance(sources, Variable) else gradients
