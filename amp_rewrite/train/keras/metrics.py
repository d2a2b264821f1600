"""Metrics of a loop in the form of Keras: the mean of numbers, and the share of right predictions."""

from __future__ import annotations

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.door import Namespace, door, floats


@door()
class Mean:
    """The mean of numbers, each times its weight, such as of the losses of an epoch.

    Args:
        name: the name.
    """

    def __init__(self, name: str = "mean") -> None:
        self.name = name
        self.reset_state()

    def reset_state(self) -> None:
        """Forget all numbers."""
        self._total, self._weight = 0.0, 0.0

    def reset_states(self) -> None:
        self.reset_state()

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add numbers, each with its weight."""
        array = floats(values, f"the value of {self.name!r}", np.float64)
        given = floats(1.0 if sample_weight is None else sample_weight, "sample_weight", np.float64)
        try:
            weights = np.broadcast_to(given.reshape(given.shape + (1,) * (array.ndim - given.ndim)), array.shape)
        except ValueError as cause:
            raise TrainingError(
                f"sample_weight has shape {given.shape}, but the values of {self.name!r} have {array.shape}; pass one"
                " weight for each row"
            ) from cause
        self._total += float((array * weights).sum())
        self._weight += float(weights.sum())

    def result(self) -> float:
        """Return the mean since `reset_state`; NaN of no numbers."""
        return self._total / self._weight if self._weight else float("nan")

    def __call__(self, values: object, sample_weight: object = None) -> float:
        self.update_state(values, sample_weight)
        return self.result()


class _Accuracy(Mean):
    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:  # type: ignore[override]
        targets, predictions = (floats(v, f"an array of {self.name!r}", np.float64) for v in (y_true, y_pred))
        expected, found = self.read(targets, predictions)
        if expected.size != found.size:
            raise TrainingError(
                f"{self.name!r} has targets of shape {targets.shape} for predictions of shape {predictions.shape}; pass"
                " class indices to SparseCategoricalAccuracy, and a number for each prediction to the other ones"
            )
        super().update_state(expected.reshape(found.shape) == found, sample_weight)

    def read(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        """Return the expected and the predicted classes."""
        raise NotImplementedError

    def __call__(self, y_true: object, y_pred: object, sample_weight: object = None) -> float:  # type: ignore[override]
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()


@door()
class SparseCategoricalAccuracy(_Accuracy):
    """Accuracy for class indices; classes of predictions are on the last axis."""

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(name)

    def read(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets, predictions.argmax(-1)


@door()
class CategoricalAccuracy(_Accuracy):
    """Accuracy for a number for each class, the largest of which tells it."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(name)

    def read(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets.argmax(-1), predictions.argmax(-1)


@door()
class BinaryAccuracy(_Accuracy):
    """Share of right answers of yes or no, 1 or 0; a prediction above the threshold is yes."""

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = threshold

    def read(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets, predictions > self.threshold


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
    SparseCategoricalAccuracy = SparseCategoricalAccuracy
    CategoricalAccuracy = CategoricalAccuracy
    BinaryAccuracy = BinaryAccuracy
