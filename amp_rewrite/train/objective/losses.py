"""Losses: a value of the model, or one of three losses appended to the model with an input for targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.facts import Shape

REGION = "amp.loss"
_SPEC = re.compile(r"\s*(\w+)\s*\((.+)\)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """The input with the targets of a loss. `classes`: number of classes, for integer targets."""

    name: str
    classes: int | None = None


@dataclass(frozen=True)
class Objective:
    """A model that contains its loss: names of the loss and of the metrics, all float32.

    Metrics are scalars. The loss has one element: its `shape` is () or all ones.
    """

    model: Model
    loss: str
    shape: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    target: Target | None = None


def objective(model: Model, loss: str) -> Objective:
    """Return the model with its loss: the name of a value with one element, or LOSS(PREDICTION[, TARGET]).

    LOSS: cross_entropy (of logits over axis 1, with integer targets; adds the metric "accuracy"),
    binary_cross_entropy (of logits) or mean_squared_error, each a mean over all elements. PREDICTION: a value of the
    model. TARGET: an input of the model, or the name of a new input, by default "targets".

    TrainingError for an unknown loss or value, a loss that is not a float32 scalar, and targets that do not fit.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss is {loss!r}, not text; use the name of a value, or text such as cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(model, region=REGION)
    spec = _SPEC.fullmatch(loss)
    if b.known(loss) is not None or spec is None:
        return Objective(model, loss, _ones(b, loss), target=_labels(b))
    make = LOSSES.get(spec[1])
    if make is None:
        hint = advice(spec[1], LOSSES, f"use one of {', '.join(LOSSES)}")
        raise TrainingError(f"unknown loss {spec[1]!r}; {hint}")
    prediction, goal = _arguments(b, spec[2])
    dtype = b.dtype(prediction)
    if b.known(prediction) is None:
        raise TrainingError(f"the model has no value {prediction!r}; {_outputs(b)}")
    if dtype is None or not dtype.floating:
        raise TrainingError(f"{prediction!r} is {type_name(dtype)}; use a floating prediction")
    value, metrics, target = make(b, prediction, goal)
    names = {name: b.fresh(name) for name in ("loss", *metrics)}
    for name, source in {"loss": value, **metrics}.items():
        b.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    return Objective(b.model(), names["loss"], (), tuple(names[m] for m in metrics), target)


def _labels(b: Builder) -> Target | None:
    """The input with the classes of the model's own loss; None without one, with several, or with an ignored class.

    The input is checked, because a class out of range makes onnxruntime's CPU kernel fail without naming the input,
    and other kernels read outside the array.
    """
    inputs = {formal.name for formal in b.graph.input} - {tensor.name for tensor in b.graph.initializer}
    losses = [n for n in b.graph.node if n.op_type in LABEL_LOSSES and not n.domain and n.input[1] in inputs]
    if len(losses) != 1 or any(a.name == "ignore_index" for a in losses[0].attribute):
        return None
    shape = b.shape(losses[0].input[0])
    classes = shape[1] if shape is not None and len(shape) > 1 else None
    return Target(losses[0].input[1], classes if isinstance(classes, int) else None)


def _arguments(b: Builder, text: str) -> tuple[str, str]:
    """Split a text into prediction and target. Names may contain blanks, commas and brackets; known names win."""
    splits = [(text, "targets")]
    splits += [(text[: comma.start()], text[comma.end() :]) for comma in re.finditer(",", text)]
    named = [(prediction.strip(), goal.strip()) for prediction, goal in splits]
    fallback = named[-1] if len(named) <= 2 else named[0]
    known = (
        (prediction, goal)
        for prediction, goal in reversed(named)
        if b.known(prediction) is not None and goal and ("," not in goal or b.known(goal) is not None)
    )
    return next(known, fallback)


Appended = tuple[str, Mapping[str, str], Target]
"""An appended loss: its name, metrics by label, and the target."""


def _cross_entropy(b: Builder, logits: str, target: str) -> Appended:
    shape = b.shape(logits)
    if shape is None or len(shape) < 2:
        raise TrainingError(f"cross_entropy needs logits of shape [batch, classes, …]; {logits!r} has {_dims(shape)}")
    labels = _target(b, target, (shape[0], *shape[2:]), DType.INT64, DType.INT32)
    wide = b.cast(logits, DType.FLOAT)
    value = b.op("SoftmaxCrossEntropyLoss", wide, labels, reduction="mean")
    classes = b.op("ArgMax", logits, axis=1, keepdims=0)
    hits = b.op("Cast", b.op("Equal", classes, b.cast(labels, DType.INT64)), to=DType.FLOAT.code)
    accuracy = b.reduce("ReduceMean", hits, None, keepdims=False)
    return value, {"accuracy": accuracy}, Target(labels, shape[1] if isinstance(shape[1], int) else None)


def _binary_cross_entropy(b: Builder, logits: str, target: str) -> Appended:
    targets = _target(b, target, b.shape(logits), DType.FLOAT)
    wide = b.cast(logits, DType.FLOAT)
    each = b.op("Sub", b.op("Softplus", wide), b.op("Mul", wide, targets))
    return b.reduce("ReduceMean", each, None, keepdims=False), {}, Target(targets)


def _mean_squared_error(b: Builder, prediction: str, target: str) -> Appended:
    targets = _target(b, target, b.shape(prediction), DType.FLOAT)
    off = b.op("Sub", b.cast(prediction, DType.FLOAT), targets)
    return b.reduce("ReduceMean", b.op("Mul", off, off), None, keepdims=False), {}, Target(targets)


LOSSES: Mapping[str, Callable[[Builder, str, str], Appended]] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mean_squared_error": _mean_squared_error,
}


def _target(b: Builder, name: str, shape: Shape | None, *kinds: DType) -> str:
    """Return the input of that name, appended if new. TrainingError for another type."""
    if b.known(name) is None:
        if shape is None:
            raise TrainingError(
                f"cannot declare the target {name!r}: the rank of the prediction is unknown; declare input shapes"
            )
        return b.input(name, kinds[0], shape)
    if all(formal.name != name for formal in b.graph.input):
        raise TrainingError(
            f"the target {name!r} is a value of the model, but not an input; use an input or a new name"
        )
    dtype = b.dtype(name)
    if dtype not in kinds:
        raise TrainingError(f"the target {name!r} is {type_name(dtype)}; this loss needs {kinds[0].spelling}")
    return name


def _ones(b: Builder, name: str) -> tuple[int, ...]:
    """Return the shape of a loss that is a value of the model. TrainingError unless it is one float32 number."""
    value = b.known(name)
    if value is None:
        losses = ", ".join(f"{n}(…)" for n in LOSSES)
        raise TrainingError(f"the model has no value {name!r} that could be the loss; {_outputs(b)}, or use {losses}")
    kind = b.facts.view.types[value.id]
    if kind is None or kind.container != TENSOR or kind.dtype is not DType.FLOAT:
        what = type_name(kind.dtype if kind else None)
        raise TrainingError(f"the loss {name!r} is {what}, but a training step needs a float32 loss; cast it")
    shape = b.shape(name)
    if shape is None or any(dim != 1 for dim in shape):
        raise TrainingError(
            f"the loss {name!r} has {_dims(shape)}, but a loss is one number; reduce it to its mean first"
        )
    return (1,) * len(shape)


def type_name(dtype: DType | None) -> str:
    """Return the type as messages spell it."""
    return dtype.spelling if dtype else "of unknown type"


def _dims(shape: Shape | None) -> str:
    return "an unknown shape" if shape is None else f"shape {list(shape)}"


def _outputs(b: Builder) -> str:
    return "its outputs are " + ", ".join(repr(v.name) for v in b.graph.output)
