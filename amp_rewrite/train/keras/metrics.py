"""Metrics for custom loops, as in Keras: mean and accuracy."""

from __future__ import annotations

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import Namespace, checked_arguments, float_array


@checked_arguments()
class Mean:
    """Weighted mean of numbers, such as the losses of an epoch.

    Args:
        name: the name.
    """

    def __init__(self, name: str = "mean") -> None:
        self.name = name
        self.reset_state()

    def reset_state(self) -> None:
        """Discard all numbers."""
        self._total, self._weight = 0.0, 0.0

    def reset_states(self) -> None:
        self.reset_state()

    def update_state(self, values: object, sample_weight: object = None) -> None:
        """Add numbers. `sample_weight`: one weight per row; None weights all rows equally."""
        array = float_array(values, f"the value of {self.name!r}", np.float64)
        rows = float_array(1.0 if sample_weight is None else sample_weight, "sample_weight", np.float64)
        try:
            weights = np.broadcast_to(rows.reshape(rows.shape + (1,) * (array.ndim - rows.ndim)), array.shape)
        except ValueError as cause:
            raise TrainingError(
                f"sample_weight has shape {rows.shape}, but the values of {self.name!r} have shape {array.shape}; pass"
                " one weight for each row"
            ) from cause
        self._total += float((array * weights).sum())
        self._weight += float(weights.sum())

    def result(self) -> float:
        """Return the mean of the numbers since `reset_state`; NaN if there are none."""
        return self._total / self._weight if self._weight else float("nan")

    def __call__(self, values: object, sample_weight: object = None) -> float:
        self.update_state(values, sample_weight)
        return self.result()


class _Accuracy(Mean):
    def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:  # type: ignore[override]
        targets, predictions = (float_array(v, f"an array of {self.name!r}", np.float64) for v in (y_true, y_pred))
        expected, predicted = self.labels(targets, predictions)
        if expected.size != predicted.size:
            raise TrainingError(
                f"{self.name!r} has targets of shape {targets.shape} for predictions of shape {predictions.shape}; pass"
                " class indices to SparseCategoricalAccuracy, and one target per prediction to the others"
            )
        super().update_state(expected.reshape(predicted.shape) == predicted, sample_weight)

    def labels(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        raise NotImplementedError

    def __call__(self, y_true: object, y_pred: object, sample_weight: object = None) -> float:  # type: ignore[override]
        self.update_state(y_true, y_pred, sample_weight)
        return self.result()


@checked_arguments()
class SparseCategoricalAccuracy(_Accuracy):
    """Accuracy of predictions [..., classes] against class indices."""

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(name)

    def labels(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets, predictions.argmax(-1)


@checked_arguments()
class CategoricalAccuracy(_Accuracy):
    """Accuracy of predictions [..., classes] against one-hot rows."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(name)

    def labels(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets.argmax(-1), predictions.argmax(-1)


@checked_arguments()
class BinaryAccuracy(_Accuracy):
    """Accuracy of binary predictions against 0 and 1; a prediction above the threshold counts as 1."""

    def __init__(self, name: str = "binary_accuracy", threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = threshold

    def labels(self, targets: Array, predictions: Array) -> tuple[Array, Array]:
        return targets, predictions > self.threshold


class Metrics(metaclass=Namespace):
    """Metrics under their Keras names: `Mean`, and the accuracy for class indices, one-hot rows and binary targets.

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
