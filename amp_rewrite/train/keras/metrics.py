"""Metrics of a loop in the form of Keras: the mean of numbers, and the share of right predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.settings.door import Namespace, door, floats


class Metric:
    """Base of metrics: `update_state` for each batch, `result`, and `reset_state`, as in Keras."""

    def update_state(self, *values: Any, sample_weight: object = None) -> None:
        raise NotImplementedError

    def result(self) -> float:
        """Return the metric of all batches since `reset_state`; NaN without any."""
        raise NotImplementedError

    def reset_state(self) -> None:
        """Forget all batches."""
        raise NotImplementedError

    def reset_states(self) -> None:
        self.reset_state()

    def __call__(self, *values: Any, sample_weight: object = None) -> float:
        self.update_state(*values, sample_weight=sample_weight)
        return self.result()


@door()
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
            given = floats(1.0 if sample_weight is None else sample_weight, "sample_weight", np.float64)
            weights = np.broadcast_to(given, array.shape)
            self._total += float((array * weights).sum())
            self._weight += float(weights.sum())

    def result(self) -> float:
        return self._total / self._weight if self._weight else float("nan")


@door()
@dataclass(eq=False)
class Accuracy(Metric):
    """Share of right predictions, in a loop by `update_state(targets, predictions)`.

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
            TrainingError: the shapes do not fit, targets could be read in two ways, or one is not a class, yes or no.
        """
        if len(values) != 2:
            raise TrainingError(f"the metric {self.name!r} takes targets and predictions, not {len(values)} arrays")
        targets, predictions = (floats(v, "an array of the metric", np.float64) for v in values)
        own, chosen = self._read(targets, predictions)
        kept = np.ones(len(own), bool) if self.ignore_index is None else own != self.ignore_index
        given = np.ones(len(own)) if sample_weight is None else sample_weight
        weights = floats(given, "sample_weight", np.float64).reshape(-1)
        if len(weights) != len(kept):
            raise TrainingError(f"the metric {self.name!r} has {len(weights)} weights for {len(kept)} rows")
        self._right += float(weights[kept & (chosen == own)].sum())
        self._count += float(weights[kept].sum())

    def result(self) -> float:
        return self._right / self._count if self._count else float("nan")

    def _read(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        """Return the classes of all rows and the predicted ones, or answers of yes or no and the predicted ones."""
        shape, axis = predictions.shape, self.axis
        classes = shape[axis] if -len(shape) <= axis < len(shape) else 1
        alike = targets.size == predictions.size and np.squeeze(targets).shape == np.squeeze(predictions).shape
        told = f"the metric {self.name!r} has predictions of shape {shape}"
        if alike and classes > 1 and self.one_hot is None:
            self._check_yes_or_no(targets, told)
            raise TrainingError(
                f"{told} and targets of that shape; give one_hot=True if each row has one class, one_hot=False if each"
                " number is a yes or no"
            )
        if alike and classes > 1 and self.one_hot:
            own, chosen = targets.reshape(shape).argmax(axis), predictions.argmax(axis)
        elif alike or classes == 1:
            own, chosen = targets, predictions >= self.threshold
        else:
            own, chosen = targets, predictions.argmax(axis)
        if own.size != chosen.size:
            raise TrainingError(f"{told} and targets of shape {targets.shape}; without axis {axis} they must agree")
        own, chosen = own.reshape(-1), chosen.reshape(-1)
        counted = own if self.ignore_index is None else own[own != self.ignore_index]
        if (alike and not self.one_hot) or classes == 1:
            self._check_yes_or_no(counted, told)
        elif (strange := counted[(counted < 0) | (counted >= classes) | (counted % 1 != 0)]).size:
            raise TrainingError(
                f"the metric {self.name!r} has the target {strange[0]:g}, but predictions have classes 0 to"
                f" {classes - 1}; correct the targets, or leave a class out by ignore_index"
            )
        return own, chosen

    def _check_yes_or_no(self, targets: Array, told: str) -> None:
        if not np.isin(targets, (0, 1)).all():
            raise TrainingError(
                f"{told}, one for each target, so targets must be 0 or 1; numbers have no accuracy, so compare them"
                " with the result of predict"
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
        """Return the share of right answers of yes or no; yes begins at the threshold."""
        return Accuracy(name=name, one_hot=False, threshold=threshold)
