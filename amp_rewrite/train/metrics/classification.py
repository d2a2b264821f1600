"""Metrics of classes and probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.metrics.metric import Means, Metric, OfAllRows
from amp_rewrite.train.objective.prediction import CLASSES, LOGARITHMS, SHARES, YES_OR_NO, TargetInput
from amp_rewrite.train.update.plain_numbers import whole_number

_CLOSE = 1e-3
"""Largest difference from 1 of the sum of probabilities."""
AVERAGES = ("macro", "micro", "weighted")


@dataclass(eq=False, kw_only=True)
class ClassMetric(Metric):
    """Base of metrics of classes.

    Targets are class indices, where predictions have an axis of classes; or a yes or no for each prediction; or, with
    `one_hot`, a number for each class of a row.

    Args:
        axis: of the classes.
        one_hot: targets are a number for each class, the largest tells it; None: as the loss takes them.
        ignore_index: a class that does not count; None: that of the loss.
    """

    axis: int = 1
    one_hot: bool | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        self._goal: TargetInput | None = None
        super().__post_init__()

    def follow(self, goal: TargetInput | None) -> None:
        """Read targets as the loss reads them; None: the loss has another target."""
        self._goal = goal

    def rows(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        """Return the classes that count, and for each a row with the predictions of all classes, or of yes alone.

        Raises:
            TrainingError: the shapes do not fit, targets could be read in two ways, or one is no class, yes or no.
        """
        shape, own = predictions.shape, targets
        classes = shape[self.axis] if -len(shape) <= self.axis < len(shape) else 1
        rows = (
            np.moveaxis(predictions, self.axis, -1).reshape(-1, classes) if classes > 1 else predictions.reshape(-1, 1)
        )
        if targets.size == predictions.size and np.squeeze(targets).shape == np.squeeze(predictions).shape:
            if classes > 1 and self._is_one_hot(targets, shape):
                own = np.moveaxis(targets.reshape(shape), self.axis, -1).reshape(-1, classes).argmax(1)
            else:
                rows = predictions.reshape(-1, 1)
        if own.size != len(rows):
            raise TrainingError(
                f"the metric {self.name!r} has predictions of shape {shape} and targets of shape {targets.shape};"
                f" without axis {self.axis} they must agree"
            )
        ignored = self._goal.ignored if self.ignore_index is None and self._goal is not None else self.ignore_index
        own = own.reshape(-1)
        kept = np.ones(len(own), bool) if ignored is None else own != ignored
        own, rows = own[kept], rows[kept]
        if rows.shape[1] == 1:
            _check_yes_or_no(own, shape, self.name)
        elif (strange := own[(own < 0) | (own >= classes) | (own % 1 != 0)]).size:
            raise TrainingError(
                f"the metric {self.name!r} has the target {strange[0]:g}, but predictions have classes 0 to"
                f" {classes - 1}; correct the targets, or leave a class out by ignore_index"
            )
        return own, rows

    def _is_one_hot(self, targets: Array, shape: tuple[int, ...]) -> bool:
        """True if targets of the shape of the predictions are numbers of classes that exclude each other."""
        known = {CLASSES: True, SHARES: True, LOGARITHMS: True, YES_OR_NO: False}
        told = known.get("" if self._goal is None else self._goal.kind) if self.one_hot is None else self.one_hot
        if told is None:
            _check_yes_or_no(targets, shape, self.name)
            raise TrainingError(
                f"the metric {self.name!r} has targets of the shape of the predictions, {shape}, and the loss does not"
                " tell what they are; give one_hot=True if each row has one class, one_hot=False if each number is a"
                " yes or no"
            )
        return told

    def chosen(self, targets: Array, predictions: Array, threshold: float | None) -> tuple[Array, Array]:
        """Return the classes that count, and the predicted ones: a prediction of yes alone is 1 from the threshold on.

        Raises:
            TrainingError: as `rows` raises it.
        """
        targets, rows = self.rows(targets, predictions)
        if rows.shape[1] > 1:
            return targets.astype(np.int64), rows.argmax(axis=1)
        if threshold is None:
            threshold = 0.0 if self._goal is not None and self._goal.logits == self.prediction else 0.5
        return targets.astype(np.int64), (rows[:, 0] >= threshold).astype(np.int64)


def _check_yes_or_no(targets: Array, shape: tuple[int, ...], name: str) -> None:
    if not np.isin(targets, (0, 1)).all():
        raise TrainingError(
            f"the metric {name!r} has predictions of shape {shape}, one for each target, so targets must be 0 or 1; use"
            " mean_absolute_error or mean_squared_error for numbers"
        )


@dataclass(eq=False, kw_only=True)
class Accuracy(ClassMetric, Means):
    """Share of rows whose class is predicted.

    Args:
        threshold: from which on a prediction of two classes is 1; None: 0 for what the loss takes for logits, else 0.5.
    """

    NAME = "accuracy"
    threshold: float | None = None

    def update(self, targets: Array, predictions: Array) -> None:
        targets, classes = self.chosen(targets, predictions, self.threshold)
        self.add(classes == targets)


@dataclass(eq=False, kw_only=True)
class TopKAccuracy(ClassMetric, Means):
    """Share of rows whose class is among the `k` largest predictions; equal ones count as in scikit-learn.

    Args:
        k: number of predictions that count, 1 or more.
    """

    NAME = "top_k"
    k: int = 5

    def __post_init__(self) -> None:
        self.k = whole_number("k", self.k, 1)
        super().__post_init__()

    def update(self, targets: Array, predictions: Array) -> None:
        targets, rows = self.rows(targets, predictions)
        best = np.argsort(rows, axis=1, kind="stable")[:, ::-1][:, : self.k]
        self.add((best == targets[:, None]).any(axis=1))


@dataclass(eq=False, kw_only=True)
class F1Score(ClassMetric):
    """Harmonic mean of precision and recall, of each class, averaged. A class without rows and predictions is left out.

    An average is "macro", the mean over classes, "weighted" by their rows, "micro", of all rows together, or "binary",
    of class 1 alone.

    Args:
        average: as above.
        threshold: as in `Accuracy`.

    Raises:
        TrainingError: `average` is another word.
    """

    NAME = "f1"
    average: str = "macro"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.average not in (*AVERAGES, "binary"):
            raise TrainingError(f"average of F1Score is {self.average!r}; use {', '.join(AVERAGES)} or binary")
        super().__post_init__()

    def reset(self) -> None:
        self._counts = np.zeros((3, 0))

    def update(self, targets: Array, predictions: Array) -> None:
        targets, classes = self.chosen(targets, predictions, self.threshold)
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
class AUC(ClassMetric, OfAllRows):
    """Area under the curve of true over false positives, from all rows, exact. NaN for rows of one class.

    Predictions are scores of the class 1, or have an axis of classes. More than two classes give the mean of one
    against the rest.
    """

    NAME = "auc"

    def update(self, targets: Array, predictions: Array) -> None:
        targets, scores = self.rows(targets, predictions)
        self.keep(targets, scores[:, 1:] if scores.shape[1] == 2 else scores)

    def compute(self, targets: Array, predictions: Array) -> float:
        scores = predictions
        if scores.shape[1] == 1:
            return area(targets == 1, scores[:, 0])
        return float(np.mean([area(targets == c, scores[:, c]) for c in range(scores.shape[1])]))


@dataclass(eq=False, kw_only=True)
class Perplexity(ClassMetric, Means):
    """The exponential of the mean cross entropy of all tokens; predictions are logits, or probabilities, of each.

    Args:
        from_logits: False for probabilities; None: they are, where all rows lie in [0, 1] and add up to 1.
    """

    NAME = "perplexity"
    axis: int = -1
    from_logits: bool | None = None

    def update(self, targets: Array, predictions: Array) -> None:
        classes, rows = self.rows(targets, predictions)
        rows = rows.astype(np.float64)
        here = np.take_along_axis(rows, classes[:, None].astype(np.int64), axis=1)[:, 0]
        logits = self.from_logits
        if logits is None:
            logits = bool((rows < 0).any() or (np.abs(rows.sum(axis=1) - 1) > _CLOSE).any())
        if logits:
            largest = rows.max(axis=1, initial=-np.inf)
            self.add(np.log(np.exp(rows - largest[:, None]).sum(axis=1)) + largest - here)
        else:
            self.add(-np.log(np.maximum(here, np.finfo(np.float32).tiny)))

    def result(self) -> float:
        return float(np.exp(super().result()))


def area(positive: Array, scores: Array) -> float:
    """Return the area under the ROC curve, by ranks; equal scores share their mean rank. NaN for one class or a NaN."""
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros or np.isnan(scores).any():
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[place][positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
