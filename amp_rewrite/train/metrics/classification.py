"""Metrics of classes and probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.metrics.metric import Means, Metric

_CLOSE = 1e-3
"""Largest difference from 1 of the sum of probabilities."""
AVERAGES = ("macro", "micro", "weighted")


@dataclass(eq=False, kw_only=True)
class Accuracy(Means):
    """Share of rows whose class is predicted.

    Predictions have one more axis than the targets, that of the classes; or the same shape, for two classes each.

    Args:
        prediction: an output of the model.
        target: class indices, or 0 and 1.
        name: as in `Metric`.
        axis: of the classes.
        threshold: from which on a prediction of two classes is 1; use 0 for logits.
    """

    NAME = "accuracy"
    axis: int = 1
    threshold: float = 0.5

    def update(self, targets: Array, predictions: Array) -> None:
        classes, targets = predicted(targets, predictions, self.axis, self.threshold, self.name)
        self.add(classes == targets)


@dataclass(eq=False, kw_only=True)
class TopKAccuracy(Means):
    """Share of rows whose class is among the `k` largest predictions; equal ones count as in scikit-learn.

    Args:
        prediction: an output of the model.
        target: class indices.
        name: as in `Metric`.
        k: number of predictions that count.
        axis: of the classes.
    """

    NAME = "top_k"
    k: int = 5
    axis: int = 1

    def update(self, targets: Array, predictions: Array) -> None:
        rows = np.moveaxis(predictions, self.axis, -1).reshape(-1, predictions.shape[self.axis])
        best = np.argsort(rows, axis=1, kind="stable")[:, ::-1][:, : self.k]
        self.add((best == targets.reshape(-1, 1)).any(axis=1))


@dataclass(eq=False, kw_only=True)
class F1Score(Metric):
    """Harmonic mean of precision and recall, of each class, averaged. A class without rows and predictions is left out.

    An average is "macro", the mean over classes, "weighted" by their rows, "micro", of all rows together, or "binary",
    of class 1 alone.

    Args:
        prediction: an output of the model.
        target: class indices, or 0 and 1.
        name: as in `Metric`.
        average: as above.
        axis: of the classes.
        threshold: as in `Accuracy`.

    Raises:
        TrainingError: `average` is another word.
    """

    NAME = "f1"
    average: str = "macro"
    axis: int = 1
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.average not in (*AVERAGES, "binary"):
            raise TrainingError(f"average of F1Score is {self.average!r}; use {', '.join(AVERAGES)} or binary")
        super().__post_init__()

    def reset(self) -> None:
        self._counts = np.zeros((3, 0))

    def update(self, targets: Array, predictions: Array) -> None:
        classes, targets = (
            a.reshape(-1).astype(np.int64)
            for a in predicted(targets, predictions, self.axis, self.threshold, self.name)
        )
        size = max(self._counts.shape[1], int(max(classes.max(initial=0), targets.max(initial=0))) + 1, 2)
        grown = np.zeros((3, size))
        grown[:, : self._counts.shape[1]] = self._counts
        for row, chosen in enumerate((classes[classes == targets], classes, targets)):
            grown[row] += np.bincount(chosen, minlength=size)
        self._counts = grown

    def result(self) -> float:
        if not self._counts.size:
            return float("nan")
        right, given, wanted = self._counts
        if self.average == "micro":
            return float(2 * right.sum() / (given.sum() + wanted.sum()))
        present = given + wanted > 0
        each = 2 * right / np.where(present, given + wanted, 1)
        if self.average == "binary":
            return float(each[1])
        weights = wanted if self.average == "weighted" else present
        return float(np.average(each, weights=weights))


@dataclass(eq=False, kw_only=True)
class AUC(Metric):
    """Area under the curve of true over false positives, from all rows, exact.

    Predictions are scores of the class 1, or have an axis of classes. More than two classes give the mean of one
    against the rest.

    Args:
        prediction: an output of the model.
        target: class indices, or 0 and 1.
        name: as in `Metric`.
        axis: of the classes.
    """

    NAME = "auc"
    axis: int = 1

    def reset(self) -> None:
        self._rows: list[tuple[Array, Array]] = []

    def update(self, targets: Array, predictions: Array) -> None:
        if predictions.size == targets.size:
            scores = predictions.reshape(-1, 1)
        else:
            scores = np.moveaxis(predictions, self.axis, -1).reshape(-1, predictions.shape[self.axis])
            scores = scores[:, 1:] if scores.shape[1] == 2 else scores
        self._rows.append((np.array(targets.reshape(-1)), np.array(scores)))

    def result(self) -> float:
        if not self._rows:
            return float("nan")
        targets, scores = (np.concatenate(part) for part in zip(*self._rows, strict=True))
        if scores.shape[1] == 1:
            return area(targets == 1, scores[:, 0])
        return float(np.mean([area(targets == c, scores[:, c]) for c in range(scores.shape[1])]))


@dataclass(eq=False, kw_only=True)
class Perplexity(Means):
    """The exponential of the mean cross entropy of all tokens.

    Args:
        prediction: logits of each token, or probabilities.
        target: class indices.
        name: as in `Metric`.
        axis: of the classes.
        from_logits: False for probabilities; None: they are, where all rows lie in [0, 1] and add up to 1.
        ignore_index: a class that does not count.
    """

    NAME = "perplexity"
    axis: int = -1
    from_logits: bool | None = None
    ignore_index: int | None = None

    def update(self, targets: Array, predictions: Array) -> None:
        rows = np.moveaxis(predictions, self.axis, -1).reshape(-1, predictions.shape[self.axis]).astype(np.float64)
        classes = targets.reshape(-1)
        kept = np.ones(len(classes), bool) if self.ignore_index is None else classes != self.ignore_index
        rows, classes = rows[kept], classes[kept]
        here = np.take_along_axis(rows, classes[:, None].astype(np.int64), axis=1)[:, 0]
        logits = self.from_logits
        if logits is None:
            logits = bool((rows < 0).any() or (rows > 1).any() or (np.abs(rows.sum(axis=1) - 1) > _CLOSE).any())
        if logits:
            largest = rows.max(axis=1, initial=-np.inf)
            self.add(np.log(np.exp(rows - largest[:, None]).sum(axis=1)) + largest - here)
        else:
            self.add(-np.log(np.maximum(here, np.finfo(np.float32).tiny)))

    def result(self) -> float:
        return float(np.exp(super().result()))


def predicted(targets: Array, predictions: Array, axis: int, threshold: float, name: str) -> tuple[Array, Array]:
    """Return the predicted classes and the targets in one shape.

    TrainingError if the shapes do not fit, or targets of two classes are not 0 and 1.
    """
    if predictions.size == targets.size:
        if not np.isin(targets, (0, 1)).all():
            raise TrainingError(
                f"the metric {name!r} has predictions of shape {predictions.shape}, one for each target, so targets"
                " must be 0 or 1; use mean_absolute_error or mean_squared_error for numbers"
            )
        return (predictions.reshape(targets.shape) >= threshold).astype(np.int64), targets
    classes = predictions.argmax(axis=axis)
    if classes.size != targets.size:
        raise TrainingError(
            f"the metric {name!r} has predictions of shape {predictions.shape} and targets of shape {targets.shape};"
            f" without axis {axis} they must agree"
        )
    return classes, targets.reshape(classes.shape)


def area(positive: Array, scores: Array) -> float:
    """Return the area under the ROC curve, by ranks; equal scores share their mean rank. NaN for one class."""
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[place][positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
