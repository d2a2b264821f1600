"""A model as TensorFlow's documentation uses one: compile, fit, predictions, losses of them, gradients on a tape."""

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
from amp_rewrite.train.door import Named, Namespace, door, floats, stated, to_array
from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.keras.variables import Variable, differentiable, listed
from amp_rewrite.train.loss_scale import Gradient
from amp_rewrite.train.objective.losses import LOSSES as FORMULAS
from amp_rewrite.train.objective.parameters import TRAINED, trained
from amp_rewrite.train.step.assembly import ModelOptions, Subject, batch_of, statistics_of
from amp_rewrite.train.step.batches import Predictions, Scores, inputs_of
from amp_rewrite.train.step.fitting import FitOptions, History, Progress, Rate
from amp_rewrite.train.step.model_loss import ModelLoss, Weights, WithWeights
from amp_rewrite.train.step.step import step_of
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizer import Optimizer
from amp_rewrite.train.update.optimizers import named


@door(options=ModelOptions)
class Network(WithWeights):
    """A model as TensorFlow's documentation uses one: `compile`, `fit`, `evaluate`, `predict`, and calls in a loop.

    Calls give predictions, and a loss object with them a loss. Both have the values of the weights at the call. The
    loss, its gradients and the metrics come from one forward pass. All losses of a network share its variables.

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

    def __init__(self, model: object, **options: Unpack[ModelOptions]) -> None:
        self._subject = Subject.of(model, options, policies.policy_of_sessions)
        self._losses: dict[str, ModelLoss] = {}
        self._compiled: Trainer | None = None
        self.inputs = batch_of(self._subject.source)
        self.outputs = tuple(v.name for v in self._subject.source.proto.graph.output)

    # -- weights -----------------------------------------------------------------------------------------

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables: those of the outputs, and those of losses besides."""
        return tuple(self._weights.variables.values())

    @cached_property
    def _weights(self) -> Weights:  # type: ignore[override]
        """The weights, with a variable for each parameter of an output."""
        own, source = Weights(self._subject), self._subject.source
        view = View.of(inlined(source))
        for output in self.outputs:
            for row in trained(view, output, self._subject.choice, least=0):
                if row.role == TRAINED:
                    own.variables.setdefault(row.name, Variable(source.array(self._tensors[row.name]), row.name))
        if self._subject.training_mode:
            for name in statistics_of(source):
                own.running.setdefault(f"buffer/{name}", source.array(self._tensors[name]).copy())
        return own

    @cached_property
    def _tensors(self) -> dict[str, TensorProto]:
        return {tensor.name: tensor for tensor in self._subject.source.proto.graph.initializer}

    def _names(self) -> list[str]:
        """Names of the weights in order: those of the module or Keras model, else trained ones and statistics."""
        module, own, statistics = self._subject.choice.module, self._weights.held(), statistics_of(self._subject.source)
        return [*module] if module is not None else [n for n in self._tensors if n in own or n in statistics]

    def get_weights(self) -> list[Array]:
        """Return copies of all weights, in the order of the PyTorch module or Keras model, for its `set_weights`."""
        own, source = self._weights.held(), self._subject.source
        return [np.array(own[n] if n in own else source.array(self._tensors[n])) for n in self._names()]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set all weights.

        Args:
            weights: arrays, as `get_weights` gives them.

        Raises:
            TrainingError: the number of arrays or a shape is another, or a weight that is not trained would change.
        """
        names, before = self._names(), self.get_weights()
        if not isinstance(weights, (list, tuple)) or len(weights) != len(names):
            raise TrainingError(f"pass a list of {len(names)} arrays, as get_weights() gives it: {', '.join(names)}")
        for name, old, new in zip(names, before, weights, strict=True):
            if np.shape(new) != old.shape:
                raise TrainingError(f"weight {name!r} has shape {old.shape}, not {np.shape(new)}; assign that shape")
            if name in self._weights.variables:
                self._weights.variables[name].assign(new)
            elif f"buffer/{name}" in self._weights.running:
                self._weights.running[f"buffer/{name}"] = floats(new, f"weight {name!r}")
            elif not np.array_equal(old, np.asarray(new)):
                raise TrainingError(f"weight {name!r} is a constant here, since it is not trained; make a new network")

    # -- predictions and losses ----------------------------------------------------------------------------

    def loss(self, text: str) -> ModelLoss:
        """Return a loss of the network, by a text as `training_step` takes it, with its variables."""
        if text not in self._losses:
            require("Network")
            self._losses[text] = self._weights.loss(text)
        return self._losses[text]

    def __call__(self, inputs: object, training: bool | None = None) -> Predictions:
        """Return the predictions for inputs with the weights as they are now; numpy computes them when it reads them.

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
            inputs = {self.inputs[0]: floats(inputs, "the input") if inputs is None else to_array(inputs, "the input")}
        own = self._weights
        batch, held = dict(inputs_of(self._subject.source, self.inputs, inputs)), own.held()
        computed = cache(lambda: own.predictor(batch, held))
        return Predictions(computed, self.outputs, self.outputs[0], _Source(self, batch, held))

    # -- fit -----------------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: StatefulOptimizer | Optimizer | str = "rmsprop",
        loss: LossObject | str = "",
        metrics: str | Sequence[str] = (),
    ) -> None:
        """Choose optimizer, loss and metrics for `fit` and `evaluate`, as in Keras.

        Args:
            optimizer: an optimizer or its name; a `LossScaleOptimizer` brings its loss scale, others take the policy's.
            loss: a loss object, its name in Keras, such as "sparse_categorical_crossentropy", or as `training_step`
                takes it.
            metrics: "accuracy", which losses of classes have; they give it unasked, too.

        Raises:
            TrainingError: the loss, the optimizer or a metric is unknown.
        """
        if isinstance(optimizer, str):
            optimizer = named(optimizer)
        if isinstance(optimizer, Optimizer):
            optimizer = StatefulOptimizer(optimizer)
        kind = KERAS_LOSSES.get(loss.lower(), loss) if isinstance(loss, str) else loss
        if callable(kind) and not isinstance(kind, LossObject):
            raise TrainingError(
                f"the loss is {stated(kind)}, which is not a loss object of `Losses`; use one, such as"
                f" Losses.MeanSquaredError(), or a name: {', '.join(KERAS_LOSSES)}"
            )
        text = kind.text(self.outputs[0], _free("y_true", self.inputs)) if isinstance(kind, LossObject) else kind
        step = step_of(self._subject, text, optimizer)
        for metric in as_names(metrics):
            if metric != "accuracy":
                raise TrainingError(
                    f"not a metric of fit: {stated(metric)}; use 'accuracy', and compute others from what predict gives"
                )
            if not step.metrics:
                raise TrainingError(f"the loss {step.objective!r} has no accuracy; leave metrics out")
        self._compiled = Trainer(step)

    @door(options=FitOptions)
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
        """Train by the choices of `compile` and return losses and metrics; see `Trainer.fit`.

        The variables have the trained values afterwards.
        """
        trainer = self._synchronized()
        try:
            return trainer.fit(x, y, batch_size, epochs, learning_rate=learning_rate, progress=progress, **options)
        finally:
            trained_now = trainer.get_weights()
            for name, array in trained_now.items():
                if name in self._weights.variables:
                    self._weights.variables[name].assign(array)
                else:
                    self._weights.running[f"buffer/{name}"] = array

    def evaluate(
        self, x: object = None, y: object = None, batch_size: int | None = None, verbose: object = None
    ) -> Scores:
        """Return loss and metrics over data; see `Trainer.evaluate`."""
        return self._synchronized().evaluate(x, y, batch_size)

    def predict(self, x: object, batch_size: int | None = None, verbose: object = None) -> Predictions:
        """Return the predictions for all rows, computed by batches; [NAME] gives another output.

        Args:
            x: inputs, as `fit` takes them.
            batch_size: rows of a batch.
            verbose: accepted as in Keras.
        """
        return self._weights.predictor.rows(x, batch_size, self._weights.held())

    def _synchronized(self) -> Trainer:
        if self._compiled is None:
            raise TrainingError("the network has no loss and no optimizer for fit and evaluate; call compile first")
        own = self._weights.held()
        self._compiled.set_weights({n: own[n] for n in self._compiled.get_weights() if n in own})
        return self._compiled


class _Source(NamedTuple):
    """What predictions were computed from: a network, inputs by name, and weights by name."""

    network: Network
    inputs: Mapping[str, Array]
    held: Mapping[str, Array]


def _free(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


@door()
@dataclass(frozen=True)
class LossObject:
    """A loss of targets and predictions, with the options of its formula."""

    formula: str
    options: Mapping[str, object] = field(default_factory=dict)

    def text(self, prediction: str, target: str, weight: str | None = None) -> str:
        options = {**self.options, "sample_weight": None} if weight is None else self.options
        said = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"{self.formula}({prediction}, {target}{said}{f', sample_weight={weight}' if weight else ''})"

    def __call__(self, y_true: object, y_pred: object, sample_weight: object = None) -> ModelLoss:
        """Return the loss of a batch with the weights of its predictions; a `GradientTape` gives its gradients.

        Args:
            y_true: targets.
            y_pred: predictions of a network.
            sample_weight: a weight for each row, or None.
        """
        source = getattr(y_pred, "source", None)
        if not isinstance(source, _Source) or not isinstance(y_pred, Predictions):
            raise TrainingError(f"{type(y_pred).__name__} is not a result of a Network; call with (y, network(inputs))")
        target, weight = _free("y_true", source.network.inputs), _free("sample_weight", source.network.inputs)
        loss = source.network.loss(self.text(y_pred.output, target, None if sample_weight is None else weight))
        batch = {**source.inputs, target: to_array(y_true, "y_true")}
        if sample_weight is not None:
            batch[weight] = floats(sample_weight, "sample_weight").reshape(len(batch[target]))
        return loss.on(batch, source.held)


_LOGITS, _SMOOTHING = "from_logits", "label_smoothing"
_PROBABILITIES: Mapping[str, object] = {_LOGITS: False}
"""What predictions are by default in Keras."""
_BY_CLASS: Mapping[str, object] = {**_PROBABILITIES, "axis": -1}
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
        unknown = next((o for o in options if o not in FORMULAS[formula].options), None)
        if unknown is not None:
            legal = FORMULAS[formula].options
            raise TrainingError(f"{formula} has no option {unknown!r}; {advice(unknown, legal, f'it has {legal}')}")
        return LossObject(formula, {**defaults, **dict(zip(places, given, strict=False)), **options})

    make.__doc__ = words
    return make


class Losses(metaclass=Namespace):
    """Keras's loss objects, for predictions of a `Network`. Options are those of the formula in `training_step`'s text.

    Predictions are probabilities, unless `from_logits=True` says otherwise; of the result of a Softmax or Sigmoid the
    loss reads the logits. Classes are on the last axis, or on that of `axis`. All are means over all numbers or rows;
    `KLDivergence` divides by the rows alone, as PyTorch does.
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
"""Loss objects by their names in Keras."""


@door()
class GradientTape(Named):
    """Gradients of losses in the form of tf.GradientTape. The graph has them already; the tape records nothing.

    Args:
        persistent: accepted as in TensorFlow; every tape gives gradients as often as it is asked.
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
        """Return the gradients of a loss, or of a scaled loss: one for one variable, a list for several.

        Raises:
            TrainingError: the target is not a loss of a model.
        """
        found = differentiable(target).gradients(listed(sources, target), np.array(1, np.float32))
        return found[0] if isinstance(sources, Variable) else found
