"""Formulas of losses, appended to a model in float32. Names, options and values are those of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.train.objective.prediction import (
    CLASSES,
    SHARES,
    YES_OR_NO,
    AppendedLoss,
    Prediction,
    TargetInput,
    share_of,
)


@dataclass(frozen=True, slots=True)
class Formula:
    """A loss: the function that appends it, and the names of its options.

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
    ignored = p.whole("ignore_index")
    labels = p.targets((shape[0], *shape[2:]), DType.INT64, DType.INT32)
    count = shape[1] if isinstance(shape[1], int) else None
    weights = p.weights("class_weights", count)
    smoothing = p.share("label_smoothing")
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
    weights, smoothing = p.weights("class_weights", count), p.share("label_smoothing")
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
    smoothing = p.share("label_smoothing")
    if smoothing:
        targets = b.op("Add", p.times(targets, 1 - smoothing), b.scalar(smoothing / 2, DType.FLOAT))
    positive = p.positive("pos_weight", 1.0)
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
    b, delta = p.b, p.positive("delta", 1.0)
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
