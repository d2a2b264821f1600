"""Metrics of a loop in the form of Keras: the mean of numbers, and the share of rows whose class is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.door import Namespace, door, floats


class Metric:
    """Base of metrics: `update_state` for each batch, `result`, and `reset_state`, as in Keras."""

    def update_state(self, *values: Any, sample_weight: object = None) -> None:
        """Add a batch."""
        raise NotImplementedError

    def result(self) -> float:
        """Return the metric of all batches since `reset_state`; NaN without any."""
        raise NotImplementedError

    def reset_state(self) -> None:
        """Forget all batches."""
        raise NotImplementedError

    def reset_states(self) -> None:
        """Forget all batches."""
        self.reset_state()

    def __call__(self, *values: Any, sample_weight: object = None) -> float:
        """Add a batch; return the result."""
        self.update_state(*values, sample_weight=sample_weight)
        return self.result()


class Mean(Metric):
    """The mean of numbers, each times its weight, such as of the losses of an epoch.

    Args:
        name: the name.
    """

    def __init__(self, name: str = "mean") -> None:
        self.name = name
        self.reset_state()

    def reset_state(self) -> None:
        self._total, self._weight = 0.0, 0.0

    def update_state(self, *values: Any, sample_weight: object = None) -> None:
        for value in values:
            array = floats(value, f"the value of {self.name!r}", np.float64)
            weights = np.broadcast_to(1.0 if sample_weight is None else np.asarray(sample_weight), array.shape)
            self._total += float((array * weights).sum())
            self._weight += float(weights.sum())

    def result(self) -> float:
        return self._total / self._weight if self._weight else float("nan")


@door()
@dataclass(eq=False)
class Accuracy(Metric):
    """Share of rows whose class is predicted, in a loop by `update_state(targets, predictions)`.

    Targets are class indices, where predictions have an axis of classes; or a yes or no for each prediction; or, with
    `one_hot`, a number for each class of a row. `fit` and `evaluate` give the accuracy of the loss by themselves.

    Args:
        name: the name.
        axis: that of the classes.
        one_hot: True: targets of the shape of the predictions are a number for each class, the largest tells it; False:
            each is a yes or no.
        ignore_index: a class that does not count.
        threshold: from which on a prediction of two classes is yes.
    """

    name: str = "accuracy"
    axis: int = -1
    one_hot: bool | None = None
    ignore_index: int | None = None
    threshold: float = 0.5

    def __post_init__(self) -> None:
        self.reset_state()

    def reset_state(self) -> None:
        self._right, self._count = 0.0, 0.0

    def update_state(self, *values: Any, sample_weight: object = None) -> None:
        """Add the targets and the predictions of a batch.

        Raises:
            TrainingError: the shapes do not fit, targets could be read in two ways, or one is no class, yes or no.
        """
        if len(values) != 2:
            raise TrainingError(f"the metric {self.name!r} takes targets and predictions, not {len(values)} arrays")
        targets, predictions = (floats(v, "an array of the metric", np.float64) for v in values)
        own, rows, kept = self._rows(targets, predictions)
        weights = np.ones(len(kept)) if sample_weight is None else np.asarray(sample_weight, np.float64).reshape(-1)
        if len(weights) != len(kept):
            raise TrainingError(f"the metric {self.name!r} has {len(weights)} weights for {len(kept)} rows")
        chosen = rows.argmax(axis=1) if rows.shape[1] > 1 else rows[:, 0] >= self.threshold
        self._right += float(weights[kept][chosen == own].sum())
        self._count += float(weights[kept].sum())

    def result(self) -> float:
        return self._right / self._count if self._count else float("nan")

    def _rows(self, targets: Array, predictions: Array) -> tuple[Array, Array, Array]:
        """Return the classes that count, for each a row with the predictions of all classes or of yes, and a mask."""
        shape, own, axis = predictions.shape, targets, self.axis
        classes = shape[axis] if -len(shape) <= axis < len(shape) else 1
        rows = np.moveaxis(predictions, axis, -1).reshape(-1, classes) if classes > 1 else predictions.reshape(-1, 1)
        if targets.size == predictions.size and np.squeeze(targets).shape == np.squeeze(predictions).shape:
            if classes > 1 and self._is_one_hot(targets, shape):
                own = np.moveaxis(targets.reshape(shape), axis, -1).reshape(-1, classes).argmax(1)
            else:
                rows = predictions.reshape(-1, 1)
        if own.size != len(rows):
            raise TrainingError(
                f"the metric {self.name!r} has predictions of shape {shape} and targets of shape {targets.shape};"
                f" without axis {axis} they must agree"
            )
        own = own.reshape(-1)
        kept = np.ones(len(own), bool) if self.ignore_index is None else own != self.ignore_index
        own, rows = own[kept], rows[kept]
        if rows.shape[1] == 1:
            self._check_yes_or_no(own, shape)
        elif (strange := own[(own < 0) | (own >= classes) | (own % 1 != 0)]).size:
            raise TrainingError(
                f"the metric {self.name!r} has the target {strange[0]:g}, but predictions have classes 0 to"
                f" {classes - 1}; correct the targets, or leave a class out by ignore_index"
            )
        return own, rows, kept

    def _is_one_hot(self, targets: Array, shape: tuple[int, ...]) -> bool:
        """True if targets of the shape of the predictions are numbers of classes that exclude each other."""
        if self.one_hot is None:
            self._check_yes_or_no(targets, shape)
            raise TrainingError(
                f"the metric {self.name!r} has targets of the shape of the predictions, {shape}; give one_hot=True if"
                " each row has one class, one_hot=False if each number is a yes or no"
            )
        return self.one_hot

    def _check_yes_or_no(self, targets: Array, shape: tuple[int, ...]) -> None:
        if not np.isin(targets, (0, 1)).all():
            raise TrainingError(
                f"the metric {self.name!r} has predictions of shape {shape}, one for each target, so targets must be 0"
                " or 1; numbers have no accuracy, so compare them with the result of predict"
            )


class Metrics(metaclass=Namespace):
    """Keras's metrics under its names: `Mean`, and the accuracy for classes, one-hot rows, and answers of yes or no.

    Example:
        >>> from amp_rewrite.train import Metrics
        >>> mean = Metrics.Mean()
        >>> mean.update_state([1.0, 2.0])
        >>> mean(6.0)
        3.0
    """

    Mean = Mean
    Accuracy = Accuracy

    @staticmethod
    def SparseCategoricalAccuracy(name: str = "sparse_categorical_accuracy") -> Metric:
        """Return the accuracy for class indices."""
        return Accuracy(name=name)

    @staticmethod
    def CategoricalAccuracy(name: str = "categorical_accuracy") -> Metric:
        """Return the accuracy for a number for each class."""
        return Accuracy(name=name, one_hot=True)

    @staticmethod
    def BinaryAccuracy(name: str = "binary_accuracy", threshold: float = 0.5) -> Metric:
        """Return the share of answers of yes or no, where yes begins at the threshold."""
        return Accuracy(name=name, one_hot=False, threshold=threshold)
