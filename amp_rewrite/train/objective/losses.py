"""Objectives: a model with its loss, a value of the model or appended to it, with inputs for targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError, advice, nearest
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import LABEL_LOSSES
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.facts import Shape
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.settings.door import stated
from amp_rewrite.train.objective.prediction import (
    CLASSES,
    SHARES,
    YES_OR_NO,
    AppendedLoss,
    LossCall,
    Prediction,
    TargetInput,
    share_of,
)

REGION = "amp.loss"


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss: the function to append it, and the names of its options.

    `activation`: the op whose result it also takes, in place of what goes into that op.
    """

    append: Callable[[Prediction], AppendedLoss]
    options: tuple[str, ...] = ()
    activation: str | None = None


# -- classes -----------------------------------------------------------------------------------------


def _cross_entropy(p: Prediction) -> AppendedLoss:
    """The mean of -log p(class), as torch's cross_entropy with class indices."""
    b = p.b
    shape = p.by_class()
    ignored = p.option("ignore_index")
    labels = p.targets((shape[0], *shape[2:]), DType.INT64, DType.INT32)
    count = shape[1] if isinstance(shape[1], int) else None
    weights = p.weights("class_weights", count)
    smoothing = p.option("label_smoothing")
    read = (labels,) if weights is None else (labels, weights)
    whole = not smoothing and "sample_weight" not in p.options
    reduction = "mean" if whole else "none"
    if p.logits and not smoothing:
        value = b.op("SoftmaxCrossEntropyLoss", p.x, *read, reduction=reduction, ignore_index=ignored)
    else:
        logs = p.logarithms(1)
        value = b.op("NegativeLogLikelihoodLoss", logs, *read, reduction=reduction, ignore_index=ignored)
        if smoothing:
            share = smoothing / p.known_classes(count)
            spread = p.times(_spread(p, logs, labels, weights, ignored), share)
            value = b.op("Add", p.times(value, 1 - smoothing), spread)
    if not whole:
        total = b.reduce("ReduceSum", p.weighted(value, len(shape) - 1), None, keepdims=False)
        value = b.op("Div", total, b.reduce("ReduceSum", share_of(b, labels, weights, ignored), None, keepdims=False))
    accuracy = _accuracy(p, labels, ignored)
    target = TargetInput(labels, count, ignored, CLASSES, p.class_axis(), p.numbers("class_weights", count))
    return AppendedLoss(value, {"accuracy": accuracy}, target)


def _spread(p: Prediction, logs: str, labels: str, weights: str | None, ignored: int | None) -> str:
    """The sum of -log p over all classes, weighted, for each row; 0 for ignored ones."""
    b = p.b
    of_classes = logs if weights is None else b.op("Mul", logs, p.along_classes(weights))
    rows = b.op("Neg", b.reduce("ReduceSum", of_classes, [1], keepdims=False))
    return b.op("Mul", rows, p.kept(labels, ignored))


def _accuracy(p: Prediction, labels: str, ignored: int | None) -> str:
    b = p.b
    classes = b.op("ArgMax", p.x, axis=1, keepdims=0)
    right = b.op("Equal", classes, b.cast(labels, DType.INT64))
    if ignored is None:
        return _share(b, right)
    hits = b.op("Cast", right, to=DType.FLOAT.code)
    kept = p.kept(labels, ignored)
    sums = [b.reduce("ReduceSum", part, None, keepdims=False) for part in (b.op("Mul", hits, kept), kept)]
    return b.op("Div", *sums)


def _agreement(p: Prediction, targets: str, axis: int) -> str:
    return _share(p.b, p.b.op("Equal", *(p.b.op("ArgMax", v, axis=axis, keepdims=0) for v in (p.x, targets))))


def _share(b: Builder, right: str) -> str:
    return b.reduce("ReduceMean", b.op("Cast", right, to=DType.FLOAT.code), None, keepdims=False)


def _categorical(p: Prediction) -> AppendedLoss:
    """The mean over rows of -Σ t log p, as torch's cross_entropy with class probabilities."""
    b = p.b
    shape = p.by_class()
    given = p.targets(p.shape(), DType.FLOAT)
    targets = p.classes_second(given)
    count = shape[1] if isinstance(shape[1], int) else None
    weights, smoothing = p.weights("class_weights", count), p.option("label_smoothing")
    if smoothing:
        uniform = smoothing / p.known_classes(count)
        targets = b.op("Add", p.times(targets, 1 - smoothing), b.scalar(uniform, DType.FLOAT))
    logs = p.logarithms(1)
    if weights is not None:
        logs = b.op("Mul", logs, p.along_classes(weights))
    rows = b.reduce("ReduceSum", b.op("Mul", targets, logs), [1], keepdims=False)
    value = b.op("Neg", p.mean(rows, len(shape) - 1))
    target = TargetInput(given, kind=SHARES, axis=p.class_axis())
    return AppendedLoss(value, {"accuracy": _agreement(p, targets, 1)}, target)


def _kl_divergence(p: Prediction) -> AppendedLoss:
    """Σ t (log t - log p) over the number of rows, as torch's kl_div with reduction="batchmean"."""
    b = p.b
    axis = p.class_axis(last=True)
    given = p.targets(p.shape(), DType.FLOAT)
    terms = b.op("Mul", given, b.op("Sub", p.log_of(given), p.logarithms(axis)))
    total = b.reduce("ReduceSum", p.weighted(terms, len(p.shape())), None, keepdims=False)
    target = TargetInput(given, kind=SHARES, axis=axis)
    return AppendedLoss(p.over_rows(total), {"accuracy": _agreement(p, given, axis)}, target)


def _binary_cross_entropy(p: Prediction) -> AppendedLoss:
    """The mean of -(w t log p + (1 - t) log(1 - p)), as torch's binary_cross_entropy_with_logits with pos_weight w."""
    b = p.b
    targets = given = p.targets(p.shape(), DType.FLOAT)
    smoothing = p.option("label_smoothing")
    if smoothing:
        targets = b.op("Add", p.times(targets, 1 - smoothing), b.scalar(smoothing / 2, DType.FLOAT))
    positive = p.option("pos_weight")
    if not p.logits:
        yes, no = p.log_of(p.x), p.log_of(b.op("Sub", p.one, p.x))
        gains = b.op("Mul", targets, p.times(yes, positive))
        each = b.op("Neg", b.op("Add", gains, b.op("Mul", b.op("Sub", p.one, targets), no)))
    elif positive == 1:
        each = b.op("Sub", b.op("Softplus", p.x), b.op("Mul", p.x, targets))
    else:
        factor = b.op("Add", p.one, p.times(targets, positive - 1))
        misses = b.op("Mul", factor, b.op("Softplus", b.op("Neg", p.x)))
        each = b.op("Add", b.op("Mul", b.op("Sub", p.one, targets), p.x), misses)
    said = b.op("GreaterOrEqual", p.x, b.scalar(0.0 if p.logits else 0.5, DType.FLOAT))
    right = b.op("Equal", b.op("Cast", said, to=DType.FLOAT.code), given)
    return AppendedLoss(p.mean(each), {"accuracy": _share(b, right)}, TargetInput(given, kind=YES_OR_NO))


# -- numbers -----------------------------------------------------------------------------------------


def _mean_squared_error(p: Prediction) -> AppendedLoss:
    targets = p.targets(p.shape(), DType.FLOAT)
    off = p.b.op("Sub", p.x, targets)
    return AppendedLoss(p.mean(p.b.op("Mul", off, off)), {}, TargetInput(targets))


def _mean_absolute_error(p: Prediction) -> AppendedLoss:
    targets = p.targets(p.shape(), DType.FLOAT)
    return AppendedLoss(p.mean(p.b.op("Abs", p.b.op("Sub", p.x, targets))), {}, TargetInput(targets))


def _huber(p: Prediction) -> AppendedLoss:
    """½ d² within delta of the target, delta (|d| - ½ delta) beyond (Huber, 1964)."""
    b, delta = p.b, p.option("delta")
    targets = p.targets(p.shape(), DType.FLOAT)
    off = b.op("Sub", p.x, targets)
    size = b.op("Abs", off)
    near = p.times(b.op("Mul", off, off), 0.5)
    far = p.times(b.op("Sub", size, b.scalar(delta / 2, DType.FLOAT)), delta)
    inside = b.op("LessOrEqual", size, b.scalar(delta, DType.FLOAT))
    return AppendedLoss(p.mean(b.op("Where", inside, near, far)), {}, TargetInput(targets))


_CLASSES = ("axis", "from_logits", "class_weights", "label_smoothing", "sample_weight")
LOSSES: Mapping[str, Formula] = {
    "cross_entropy": Formula(_cross_entropy, (*_CLASSES, "ignore_index"), "Softmax"),
    "categorical_cross_entropy": Formula(_categorical, _CLASSES, "Softmax"),
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
    """A model with its loss: names of the loss and of the metrics, all float32.

    Metrics are scalars. The loss has one element: its `shape` is () or all ones. `notes`: sentences for the report.
    """

    model: Model
    loss: str
    shape: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    target: TargetInput | None = None
    notes: tuple[str, ...] = ()


def objective(model: Model, loss: str) -> Objective:
    """Return the model with its loss: the name of a value with one element, or a text.

    A text is LOSS(PREDICTION[, TARGET][, OPTION=VALUE, …]): "cross_entropy(logits, label, label_smoothing=0.1)".
    PREDICTION: a value of the model. TARGET: an input of the model, or the name of a new input, by default "targets".
    `formulas` has the losses.

    Cross entropies and kl_divergence take logits, or with from_logits=False probabilities. The result of a Softmax or
    Sigmoid is replaced by what goes into it.

    TrainingError for an unknown loss, option or value, a loss that is not a float32 scalar, and targets that do not
    fit.
    """
    if not isinstance(loss, str):
        raise TrainingError(
            f"the loss is {stated(loss)}, not text; use the name of a value, or text such as"
            " cross_entropy(LOGITS, TARGETS)"
        )
    b = Builder.of(inlined(model), region=REGION)
    options = {name: formula.options for name, formula in LOSSES.items()}
    call = None if b.known(loss) is not None else parsed(loss, lambda name: b.known(name) is not None, options)
    if call is None:
        return Objective(b.model(), loss, _ones(b, loss), target=_labels(b))
    if b.known(call.prediction) is None:
        raise TrainingError(f"the model has no value {call.prediction!r}; {_outputs(b)}{_of_terms(call.prediction)}")
    dtype = b.dtype(call.prediction)
    if dtype is None or not dtype.floating:
        raise TrainingError(f"{call.prediction!r} is {type_name(dtype)}; use a floating prediction")
    formula, prediction = LOSSES[call.loss], Prediction(b, call)
    if formula.activation is not None:
        prediction.decide(formula.activation)
    made = formula.append(prediction)
    names = {name: b.fresh(name) for name in ("loss", *made.metrics)}
    for name, source in {"loss": made.value, **made.metrics}.items():
        b.append(onnx.helper.make_node("Identity", [source], [names[name]], name=b.fresh(f"{REGION}/{name}")))
    metrics = tuple(names[metric] for metric in made.metrics)
    return Objective(b.model(), names["loss"], (), metrics, made.target, tuple(prediction.notes))


def _of_terms(name: str) -> str:
    return "; a loss is one value or one formula, so compute sums in the model" if {*name} & {*"+*()"} else ""


def _labels(b: Builder) -> TargetInput | None:
    """The input with the classes of the model's own loss; None without one, and with several.

    The input is checked, because a class out of range makes onnxruntime's CPU kernel fail without naming the input, and
    other kernels read outside the array.
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


def _ones(b: Builder, name: str) -> tuple[int, ...]:
    value = b.known(name)
    if value is None:
        losses, own = ", ".join(f"{n}(…)" for n in LOSSES), _own_name(name)
        hint = f"write {own}({b.graph.output[0].name}, targets)" if own else f"{_outputs(b)}, or use {losses}"
        raise TrainingError(f"the model has no value {name!r} that could be the loss; {hint}{_of_terms(name)}")
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
    return dtype.spelling if dtype else "of unknown type"


def _dims(shape: Shape | None) -> str:
    return "an unknown shape" if shape is None else f"shape {list(shape)}"


def _outputs(b: Builder) -> str:
    return "its outputs are " + ", ".join(repr(v.name) for v in b.graph.output)


_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_OPTION = re.compile(r"(?P<before>.*),\s*(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>\[[^\[\]]*\]|[^,\[\]=]+)\s*", re.DOTALL)

_WORD = "sample_weight"
"""The option that is a word."""
_ELSEWHERE = {
    **dict.fromkeys(("sparse_categorical_crossentropy", "crossentropy", "nll"), "cross_entropy"),
    "categorical_crossentropy": "categorical_cross_entropy",
    **dict.fromkeys(("binary_crossentropy", "bce", "bce_with_logits", "bcewithlogits"), "binary_cross_entropy"),
    **dict.fromkeys(("kl_div", "kld", "kullback_leibler_divergence"), "kl_divergence"),
    **dict.fromkeys(("mse", "l2", "meansquarederror"), "mean_squared_error"),
    **dict.fromkeys(("mae", "l1", "meanabsoluteerror"), "mean_absolute_error"),
}
"""Names of losses in Keras and PyTorch, in lower case without "_loss", and those here."""


def _word(name: str) -> str:
    return name.lower().removesuffix("loss").removesuffix("_")


def _own_name(name: str) -> str | None:
    words = {**_ELSEWHERE, **{own: own for own in LOSSES}}
    near = nearest(_word(name), words) if name.isidentifier() else ()
    return words[near[0]] if near else None


Known = Callable[[str], bool]
"""True for the name of a value of the model."""


def parsed(text: str, known: Known, losses: Mapping[str, Collection[str]]) -> LossCall | None:
    """Return the call of a loss; None for a text of another form. `losses`: the options of each loss by its name.

    Names of values may contain any character. TrainingError for an unknown loss or option, and for an option that is
    not a number, a list, True or False.
    """
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    if call[1] not in losses:
        own = _ELSEWHERE.get(_word(call[1]))
        hint = f"it is {own} here" if own else advice(call[1], losses, f"use one of {', '.join(losses)}")
        raise TrainingError(f"unknown loss {call[1]!r}; {hint}")
    inside, options = _options(call[1], call[2], known, losses[call[1]])
    prediction, target = _arguments(inside, known)
    return LossCall(call[1], prediction, target, options)


def _options(loss: str, text: str, known: Known, allowed: Collection[str]) -> tuple[str, dict[str, object]]:
    options: dict[str, object] = {}
    while not known(text.strip()) and (match := _OPTION.fullmatch(text)) is not None:
        name = match["name"]
        if name not in allowed:
            legal = f"it has {', '.join(allowed)}" if allowed else "it has no options"
            raise TrainingError(f"{loss} has no option {name!r}; {advice(name, allowed, legal)}")
        try:
            value = ast.literal_eval(match["value"].strip())
        except (ValueError, SyntaxError):
            value = match["value"].strip()
            if name != _WORD:
                raise TrainingError(
                    f"{name}={value} of {loss} is neither a number nor a list of numbers, True or False; correct it"
                ) from None
        if name in options:
            raise TrainingError(f"{loss} sets {name} twice; set it once")
        options[name] = value
        text = match["before"]
    return text, options


def _arguments(text: str, known: Known) -> tuple[str, str | None]:
    """Split a text into prediction and target. Names may contain blanks, commas and brackets; known names win."""
    commas = [match.start() for match in re.finditer(",", text)]
    named = [(text.strip(), None), *((text[:at].strip(), text[at + 1 :].strip()) for at in commas)]
    fallback = named[-1] if len(named) <= 2 else named[0]
    fits = (
        (prediction, goal)
        for prediction, goal in reversed(named)
        if known(prediction) and goal != "" and (goal is None or "," not in goal or known(goal))
    )
    return next(fits, fallback)
