"""Objectives: a model with a built-in loss, or with an appended loss and target inputs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.train.arguments import quoted
from amp_rewrite.train.objective.prediction import BINARY, CLASSES, PROBABILITIES, Prediction, TargetInput

REGION = "amp.loss"


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss: its function and the names of its options.

    `append`: appends the loss to a model, and returns the names of the loss and the accuracy. `activation`: the op that
    turns logits into the probabilities of this loss. If it computes the prediction, the loss reads its input instead.
    """

    append: Callable[[Prediction], tuple[str, str | None]]
    options: tuple[str, ...] = ()
    activation: str | None = None


# -- classification ----------------------------------------------------------------------------------


def _cross_entropy(p: Prediction) -> tuple[str, str]:
    """Append the mean of -log p(class), like torch's cross_entropy with class indices."""
    b, shape = p.b, p.move_class_axis()
    count = shape[1] if isinstance(shape[1], int) else None
    ignored, weights = p.option("ignore_index"), p.class_weights(count)
    fields = {"classes": count, "ignored": ignored, "axis": p.class_axis(), "class_weights": weights}
    labels = p.targets((shape[0], *shape[2:]), DType.INT64, DType.INT32, kind=CLASSES, **fields)
    logs, mask, smoothing = p.logarithms(1), p.mask(labels, ignored), p.option("label_smoothing")
    inputs, counted = [labels] if weights is None else [labels, b.constant(np.array(weights, np.float32))], mask
    picked = partial(b.op, "NegativeLogLikelihoodLoss", reduction="none", ignore_index=ignored)
    terms = picked(logs, *inputs)
    if weights is not None:
        counted = picked(b.full(b.shape_of(logs), -1.0, DType.FLOAT), *inputs)
    if smoothing:
        rows = b.op("Neg", b.reduce("ReduceSum", p.times_classes(logs, weights), [1], keepdims=False))
        spread = p.times(b.op("Mul", rows, mask), smoothing / p.known_classes(count))
        terms = b.op("Add", p.times(terms, 1 - smoothing), spread)
    equal = b.op("Equal", b.op("ArgMax", p.x, axis=1, keepdims=0), b.cast(labels, DType.INT64))
    correct = b.op("Mul", b.op("Cast", equal, to=DType.FLOAT.code), mask)
    value, divisor, accuracy, total = (
        b.reduce("ReduceSum", part, None, keepdims=False)
        for part in (p.weighted(terms, len(shape) - 1), counted, correct, mask)
    )
    return b.op("Div", value, divisor), b.op("Div", accuracy, total)


def _accuracy(p: Prediction, targets: str, axis: int) -> str:
    return _mean_of_bools(p.b, p.b.op("Equal", *(p.b.op("ArgMax", v, axis=axis, keepdims=0) for v in (p.x, targets))))


def _mean_of_bools(b: Builder, correct: str) -> str:
    return b.reduce("ReduceMean", b.op("Cast", correct, to=DType.FLOAT.code), None, keepdims=False)


def _categorical_cross_entropy(p: Prediction) -> tuple[str, str]:
    """Append the mean over rows of -Σ t log p, like torch's cross_entropy with class probabilities."""
    b, shape = p.b, p.move_class_axis()
    targets = p.permuted(p.targets(p.shape(), DType.FLOAT, kind=PROBABILITIES, axis=p.class_axis()))
    count = shape[1] if isinstance(shape[1], int) else None
    smoothing = p.option("label_smoothing")
    if smoothing:
        uniform = smoothing / p.known_classes(count)
        targets = b.op("Add", p.times(targets, 1 - smoothing), b.scalar(uniform, DType.FLOAT))
    logs = p.times_classes(p.logarithms(1), p.class_weights(count))
    rows = b.reduce("ReduceSum", b.op("Mul", targets, logs), [1], keepdims=False)
    return b.op("Neg", p.mean(rows, len(shape) - 1)), _accuracy(p, targets, 1)


def _kl_divergence(p: Prediction) -> tuple[str, str]:
    """Append Σ t (log t - log p) divided by the number of rows, like torch's kl_div with reduction="batchmean"."""
    b, axis = p.b, p.class_axis(last=True)
    targets = p.targets(p.shape(), DType.FLOAT, kind=PROBABILITIES, axis=axis)
    terms = b.op("Mul", targets, b.op("Sub", p.clamped_log(targets), p.logarithms(axis)))
    total = b.reduce("ReduceSum", p.weighted(terms, len(p.shape())), None, keepdims=False)
    rows = p.shape()[0]
    if isinstance(rows, int):
        return p.times(total, 1 / rows), _accuracy(p, targets, axis)
    count = b.op("Gather", b.op("Shape", p.x), b.scalar(0, DType.INT64))
    return b.op("Div", total, b.op("Cast", count, to=DType.FLOAT.code)), _accuracy(p, targets, axis)


def _binary_cross_entropy(p: Prediction) -> tuple[str, str]:
    """Append the mean of -(w t log p + (1 - t) log(1 - p)), with w = pos_weight, like torch on logits."""
    b = p.b
    targets = smoothed = p.targets(p.shape(), DType.FLOAT, kind=BINARY)
    smoothing = p.option("label_smoothing")
    if smoothing:
        smoothed = b.op("Add", p.times(targets, 1 - smoothing), b.scalar(smoothing / 2, DType.FLOAT))
    weight = p.option("pos_weight")
    if p.logits:
        terms = b.op("Sub", b.op("Softplus", p.x), b.op("Mul", p.x, smoothed))
        if weight != 1:
            positive = b.op("Mul", smoothed, b.op("Softplus", b.op("Neg", p.x)))
            terms = b.op("Add", terms, p.times(positive, weight - 1))
    else:
        positive = b.op("Mul", smoothed, p.times(p.clamped_log(p.x), weight))
        negative = b.op("Mul", b.op("Sub", p.one, smoothed), p.clamped_log(b.op("Sub", p.one, p.x)))
        terms = b.op("Neg", b.op("Add", positive, negative))
    predicted = b.op("GreaterOrEqual", p.x, b.scalar(0.0 if p.logits else 0.5, DType.FLOAT))
    correct = b.op("Equal", b.op("Cast", predicted, to=DType.FLOAT.code), targets)
    return p.mean(terms), _mean_of_bools(b, correct)


# -- regression --------------------------------------------------------------------------------------


def _difference(p: Prediction) -> str:
    return p.b.op("Sub", p.x, p.targets(p.shape(), DType.FLOAT))


def _mean_squared_error(p: Prediction) -> tuple[str, None]:
    error = _difference(p)
    return p.mean(p.b.op("Mul", error, error)), None


def _mean_absolute_error(p: Prediction) -> tuple[str, None]:
    return p.mean(p.b.op("Abs", _difference(p))), None


def _huber(p: Prediction) -> tuple[str, None]:
    """Append the mean of ½ d² within delta of the target, and delta (|d| - ½ delta) beyond (Huber, 1964)."""
    b, delta, error = p.b, p.option("delta"), _difference(p)
    size = b.op("Abs", error)
    near = p.times(b.op("Mul", error, error), 0.5)
    far = p.times(b.op("Sub", size, b.scalar(delta / 2, DType.FLOAT)), delta)
    inside = b.op("LessOrEqual", size, b.scalar(delta, DType.FLOAT))
    return p.mean(b.op("Where", inside, near, far)), None


_CLASS_OPTIONS = ("axis", "from_logits", "class_weights", "label_smoothing", "sample_weight")
LOSSES: Mapping[str, Formula] = {
    "cross_entropy": Formula(_cross_entropy, (*_CLASS_OPTIONS, "ignore_index"), "Softmax"),
    "categorical_cross_entropy": Formula(_categorical_cross_entropy, _CLASS_OPTIONS, "Softmax"),
    "binary_cross_entropy": Formula(
        _binary_cross_entropy, ("from_logits", "pos_weight", "label_smoothing", "sample_weight"), "Sigmoid"
    ),
    "kl_divergence": Formula(_kl_divergence, ("axis", "from_logits", "sample_weight"), "Softmax"),
    "mean_squared_error": Formula(_mean_squared_error, ("sample_weight",)),
    "mean_absolute_error": Formula(_mean_absolute_error, ("sample_weight",)),
    "huber": Formula(_huber, ("delta", "sample_weight")),
}
"""Losses by name."""


@dataclass(frozen=True)
class Objective:
    """A model with the names of its loss and metrics, all float32.

    Metrics are scalars. The loss has one element: its `shape` is () or all ones. `notes` are for the report.
    """

    model: Model
    loss: str
    shape: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    target: TargetInput | None = None
    notes: tuple[str, ...] = ()


def objective(model: Model, loss: str) -> Objective:
    """Return the objective of a model: `loss` is the name of a value with one element, or a formula.

    A formula is LOSS(PREDICTION[, TARGET][, OPTION=VALUE, …]): "cross_entropy(logits, label, label_smoothing=0.1)".
    LOSS is a key of `LOSSES`. PREDICTION is a value of the model. TARGET is an input of the model, or the name of a new
    input, by default "targets".

    Cross entropies and kl_divergence take logits, or probabilities with from_logits=False. If the prediction is the
    result of a Softmax or Sigmoid, they read its logits instead.

    TrainingError for an unknown loss, option or value, a loss that is not a float32 scalar, and targets of the wrong
    type or shape.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss must be a string, not {quoted(loss)}; use the name of a value, or a formula such as"
            " cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(inlined(model), region=REGION)
    call = None if b.original(loss) is not None else _CALL.fullmatch(loss)
    if call is None:
        return Objective(b.model(), loss, _loss_shape(b, loss), target=_labels(b))
    values, options = _arguments(call[1], call[2], loss)
    if b.original(values[0]) is None:
        raise TrainingError(f"the model has no value {values[0]!r}; {_outputs(b)}")
    dtype = b.dtype(values[0])
    if dtype is None or not dtype.floating:
        raise TrainingError(f"the prediction {values[0]!r} is {type_name(dtype)}; use a floating-point value")
    formula = LOSSES[call[1]]
    prediction = Prediction(b, call[1], values[0], values[1] if len(values) > 1 else None, options)
    if formula.activation is not None:
        prediction.find_logits(formula.activation)
    value, accuracy = formula.append(prediction)
    results = {"loss": value} if accuracy is None else {"loss": value, "accuracy": accuracy}
    names = {name: b.fresh(name) for name in results}
    for name, source in results.items():
        b.nodes.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    metrics = tuple(names.values())[1:]
    return Objective(b.model(), names["loss"], (), metrics, prediction.target, tuple(prediction.notes))


def _labels(b: Builder) -> TargetInput | None:
    """Return the class index input of the model's built-in loss; None if it has none, or several.

    Batches are checked against it: for a class out of range, onnxruntime's CPU kernel fails without naming the input,
    and other kernels read out of bounds.
    """
    inputs = {formal.name for formal in b.graph.input} - {tensor.name for tensor in b.graph.initializer}
    losses = [n for n in b.graph.node if n.op_type in LABEL_LOSSES and not n.domain and n.input[1] in inputs]
    if len(losses) != 1:
        return None
    ignored = next((a.i for a in losses[0].attribute if a.name == "ignore_index"), None)
    shape = b.shape(losses[0].input[0])
    classes = shape[1] if shape is not None and len(shape) > 1 else None
    count = classes if isinstance(classes, int) else None
    return TargetInput(losses[0].input[1], count, ignored, kind=CLASSES, axis=1)


def _loss_shape(b: Builder, name: str) -> tuple[int, ...]:
    value = b.original(name)
    if value is None:
        losses = ", ".join(f"{n}(…)" for n in LOSSES)
        raise TrainingError(f"the model has no value {name!r} to use as the loss; {_outputs(b)}, or use {losses}")
    kind = b.view.types[value.id]
    if kind is None or kind.container != TENSOR or kind.dtype is not DType.FLOAT:
        what = type_name(kind.dtype if kind else None)
        raise TrainingError(f"the loss {name!r} is {what}, but a training step needs a float32 loss; cast it")
    shape = b.shape(name)
    if shape is None or any(dim != 1 for dim in shape):
        dims = "an unknown shape" if shape is None else f"shape {list(shape)}"
        raise TrainingError(f"the loss {name!r} has {dims}, but a loss must have one element; reduce it to its mean")
    return (1,) * len(shape)


def type_name(dtype: DType | None) -> str:
    return dtype.spelling if dtype else "of unknown type"


def _outputs(b: Builder) -> str:
    return "its outputs are " + ", ".join(repr(v.name) for v in b.graph.output)


_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside a list."""
_NAME_OPTION = "sample_weight"
"""Option with a name as its value."""


def _arguments(name: str, arguments: str, text: str) -> tuple[list[str], dict[str, object]]:
    """Parse a formula. Return the names of the prediction and of the target, if any, and the options.

    TrainingError for an unknown loss or option, for more arguments than a prediction and a target, and for an option
    that is not a number, a list, True or False.
    """
    formula = LOSSES.get(name)
    if formula is None:
        raise TrainingError(f"unknown loss {name!r}; {advice(name, LOSSES)}")
    values, options = list[str](), dict[str, object]()
    for part in _COMMA.split(arguments):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            values.append(key)
        elif key not in formula.options:
            legal = f"it has {', '.join(formula.options)}"
            raise TrainingError(f"{name} has no option {key!r}; {advice(key, formula.options, legal)}")
        elif key in options:
            raise TrainingError(f"{name} sets {key} twice; set it once")
        else:
            try:
                options[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                if key != _NAME_OPTION:
                    raise TrainingError(
                        f"{key} of {name} must be a number, a list of numbers, True or False, not {value}"
                    ) from None
                options[key] = value
    if len(values) not in (1, 2) or "" in values:
        raise TrainingError(f"{text!r} is not a loss formula; write {name}(PREDICTION, TARGET, OPTION=VALUE, …)")
    return values, options
