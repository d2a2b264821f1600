"""Metrics of numbers."""

from __future__ import annotations

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.metrics.metric import Means


class MeanAbsoluteError(Means):
    """Mean of the absolute differences of all elements."""

    NAME = "mean_absolute_error"

    def update(self, targets: Array, predictions: Array) -> None:
        self.add(np.abs(difference(targets, predictions, self.name)))


class MeanSquaredError(Means):
    """Mean of the squared differences of all elements."""

    NAME = "mean_squared_error"

    def update(self, targets: Array, predictions: Array) -> None:
        self.add(np.square(difference(targets, predictions, self.name)))


def difference(targets: Array, predictions: Array, name: str) -> Array:
    """Return the differences in float64. TrainingError if the shapes do not fit."""
    if targets.size != predictions.size:
        raise TrainingError(
            f"the metric {name!r} has predictions of shape {predictions.shape} and targets of shape {targets.shape};"
            " they must agree"
        )
    return predictions.astype(np.float64) - targets.astype(np.float64).reshape(predictions.shape)
