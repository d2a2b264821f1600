"""What is minimised: a value of the model, or one of three losses appended to it with an input for the targets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.train.builder import Builder, Shape

REGION = "amp.loss"
_SPEC = re.compile(r"\s*(\w+)\s*\((.+)\)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """The input that a loss is compared with. `classes`: how many there are, where whole numbers name them."""

    name: str
    classes: int | None = None


@dataclass(frozen=True)
class Objective:
    """A model with its loss in it: the names of the loss and of the metrics, all float32.

    The metrics are scalars, the loss has one element: its `shape` is () or all ones.
    """

    model: Model
    loss: str
    shape: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    target: Target | None = None


def objective(model: Model, loss: str) -> Objective:
    """The model with the loss of a text: the name of a value with one element, or LOSS(PREDICTION[, TARGET]).

    LOSS is cross_entropy (of logits over axis 1, with whole numbers as targets; it also gives "accuracy"),
    binary_cross_entropy (of logits) or mean_squared_error, each a mean over all elements; PREDICTION a value of
    the model; TARGET an input of the model, or the name of a new one ("targets").

    TrainingError for an unknown loss or value, a loss that is no float32 scalar, targets that do not fit.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss is {loss!r}; give the name of a value, or a text as cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(model, region=REGION)
    spec = _SPEC.fullmatch(loss)
    if b.known(loss) is not None or spec is None:
        return Objective(model, loss, _ones(b, loss), target=_labels(b))
    make = LOSSES.get(spec[1])
    if make is None:
        near = difflib.get_close_matches(spec[1], LOSSES, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(LOSSES)}"
        raise TrainingError(f"unknown loss {spec[1]!r}; {advice}")
    prediction, goal = _arguments(b, spec[2])
    _check_prediction(b, prediction)
    value, metrics, target = make(b, prediction, goal)
    names = {name: b.fresh(name) for name in ("loss", *metrics)}
    for name, source in {"loss": value, **metrics}.items():
        b.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    return Objective(b.model(), names["loss"], (), tuple(names[m] for m in metrics), target)


def _labels(b: Builder) -> Target | None:
    """The input that the model's own loss takes classes from; None without one, with several, or with an ignored class.

    A class out of range makes onnxruntime's CPU kernel fail without a name, and others read what is beside the array.
    """
    fed = {formal.name for formal in b.graph.input} - {tensor.name for tensor in b.graph.initializer}
    found = [n for n in b.graph.node if n.op_type in LABEL_LOSSES and not n.domain and n.input[1] in fed]
    if len(found) != 1 or any(a.name == "ignore_index" for a in found[0].attribute):
        return None
    shape = b.shape(found[0].input[0])
    classes = shape[1] if shape is not None and len(shape) > 1 else None
    return Target(found[0].input[1], classes if isinstance(classes, int) else None)


def _arguments(b: Builder, text: str) -> tuple[str, str]:
    """Prediction and target of a text. Names may hold blanks, commas and brackets: what the model has, is meant."""
    splits = [(text, "targets")]
    splits += [(text[: comma.start()], text[comma.end() :]) for comma in re.finditer(",", text)]
    named = [(prediction.strip(), goal.strip()) for prediction, goal in splits]
    fallback = named[-1] if len(named) <= 2 else named[0]
    meant = (
        (prediction, goal)
        for prediction, goal in reversed(named)
        if b.known(prediction) is not None and goal and ("," not in goal or b.known(goal) is not None)
    )
    return next(meant, fallback)


Made = tuple[str, Mapping[str, str], Target]


def _cross_entropy(b: Builder, logits: str, target: str) -> Made:
    shape = b.shape(logits)
    if shape is None or len(shape) < 2:
        known = "unknown" if shape is None else list(shape)
        raise TrainingError(f"cross_entropy takes logits of shape [batch, classes, …]; {logits!r} has {known}")
    labels = _target(b, target, (shape[0], *shape[2:]), DType.INT64, DType.INT32)
    wide = b.cast(logits, DType.FLOAT)
    value = b.op("SoftmaxCrossEntropyLoss", wide, labels, reduction="mean")
    guessed = b.op("ArgMax", logits, axis=1, keepdims=0)
    hits = b.op("Cast", b.op("Equal", guessed, b.cast(labels, DType.INT64)), to=DType.FLOAT.code)
    accuracy = b.reduce("ReduceMean", hits, None, keepdims=False)
    return value, {"accuracy": accuracy}, Target(labels, shape[1] if isinstance(shape[1], int) else None)


def _binary_cross_entropy(b: Builder, logits: str, target: str) -> Made:
    given = _target(b, target, b.shape(logits), DType.FLOAT)
    wide = b.cast(logits, DType.FLOAT)
    each = b.op("Sub", b.op("Softplus", wide), b.op("Mul", wide, given))
    return b.reduce("ReduceMean", each, None, keepdims=False), {}, Target(given)


def _mean_squared_error(b: Builder, prediction: str, target: str) -> Made:
    given = _target(b, target, b.shape(prediction), DType.FLOAT)
    off = b.op("Sub", b.cast(prediction, DType.FLOAT), given)
    return b.reduce("ReduceMean", b.op("Mul", off, off), None, keepdims=False), {}, Target(given)


LOSSES: Mapping[str, Callable[[Builder, str, str], Made]] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mean_squared_error": _mean_squared_error,
}


def _target(b: Builder, name: str, shape: Shape | None, *kinds: DType) -> str:
    """The input of the model of that name, or a new one. TrainingError where it is of another type."""
    if b.known(name) is None:
        if shape is None:
            raise TrainingError(
                f"the rank of what {name!r} is compared with is unknown; declare the shapes of the inputs"
            )
        return b.input(name, kinds[0], shape)
    if all(formal.name != name for formal in b.graph.input):
        raise TrainingError(f"the target {name!r} is a value of the model, but no input; name an input, or a new name")
    dtype = b.dtype(name)
    if dtype not in kinds:
        spelled = dtype.spelling if dtype else "of unknown type"
        raise TrainingError(f"the target {name!r} is {spelled}; this loss takes {kinds[0].spelling}")
    return name


def _check_prediction(b: Builder, name: str) -> None:
    value = b.known(name)
    if value is None:
        raise TrainingError(f"the model has no value {name!r}; {_outputs(b)}")
    dtype = b.dtype(name)
    if dtype is None or not dtype.floating:
        raise TrainingError(f"{name!r} is {dtype.spelling if dtype else 'of unknown type'}; a loss is of floats")


def _ones(b: Builder, name: str) -> tuple[int, ...]:
    """The shape of a loss that is a value of the model. TrainingError unless it is one float32 number."""
    value = b.known(name)
    if value is None:
        losses = ", ".join(f"{n}(…)" for n in LOSSES)
        raise TrainingError(f"the model has no value {name!r} that could be the loss; {_outputs(b)}, or use {losses}")
    stated = b.facts.view.types[value.id]
    if stated is None or stated.container != TENSOR or stated.dtype is not DType.FLOAT:
        what = stated.dtype.spelling if stated and stated.dtype else "of unknown type"
        raise TrainingError(f"the loss {name!r} is {what}; a training step keeps its loss in float32, cast it")
    shape = b.shape(name)
    if shape is None or any(dim != 1 for dim in shape):
        known = "an unknown shape" if shape is None else f"shape {list(shape)}"
        raise TrainingError(f"the loss {name!r} has {known}, and a loss is one number; reduce it to its mean first")
    return (1,) * len(shape)


def _outputs(b: Builder) -> str:
    return "its outputs are " + ", ".join(repr(v.name) for v in b.graph.output)
