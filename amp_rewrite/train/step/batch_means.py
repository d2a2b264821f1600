"""Means over batches, each weighted by what its own means count, so that they are those over all rows together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.casting import Array
from amp_rewrite.train.objective.prediction import CLASSES, TargetInput


class BatchMeans:
    """Sums of a loss and of metrics over batches.

    A batch weighs the classes that count in it, for the loss times their weights, if the target of the loss are
    classes; else its rows. `weight`: the result that the loss weighs, if there is one.
    """

    def __init__(self, loss: str, metrics: Sequence[str], target: TargetInput | None, weight: str = "") -> None:
        self.rows, self._weight = 0, weight
        self._loss, self._target = loss, target
        self._sums = dict.fromkeys((loss, *metrics), 0.0)
        self._weights = self._sums.copy()

    def add(self, batch: Batch, results: Mapping[str, Array]) -> None:
        """Add the results of a batch. A batch without rows that count is ignored."""
        rows = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
        self.rows += rows
        weight = counted = float(rows)
        if self._target is not None and self._target.kind == CLASSES:
            weight, counted = self._target.counts(batch[self._target.name])
        if self._weight:
            weight = results[self._weight].item()
        for name in self._sums:
            here = weight if name == self._loss else counted
            if here:
                self._sums[name] += results[name].item() * here
                self._weights[name] += here

    def means(self) -> dict[str, float]:
        """Return the means by name; NaN without rows that count."""
        return {
            name: value / weight if (weight := self._weights[name]) else float("nan")
            for name, value in self._sums.items()
        }
