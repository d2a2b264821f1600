"""Sensitivity: does a criterion tell a reference's outputs for one input from those for another?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from amp_rewrite.evidence.containers import as_array, differences
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.evidence.metric import Criterion
from amp_rewrite.runtime.runner import Given

SAME_OUTPUTS = (
    "the reference gives the same outputs for all inputs, as far as this criterion can tell, so a model that ignores"
    " its inputs passes, too; check the reference, feed inputs that differ more, or ask for a smaller error"
)


class Sensitivity:
    """Watches a reference batch by batch, until its outputs for two inputs differ by more than the criterion accepts.

    Two batches are compared, and the samples of one batch: the first axis, where all inputs and outputs share it. The
    first batch is kept until then.
    """

    def __init__(self, by: Criterion) -> None:
        self._by = by
        self._first: tuple[Mapping[str, object], Sequence[Given]] | None = None
        self._compared = False
        self._differs = not math.isfinite(by.limit)  # a criterion that accepts every number never sees a difference

    def add(self, batch: Batch, outputs: Sequence[Given]) -> None:
        """Take a batch and what the reference gives for it."""
        if self._differs:
            return
        for before, after in self._pairs(batch, outputs):
            self._compared = True
            if not all(_same(a, b, self._by) for a, b in zip(before, after, strict=True)):
                self._differs, self._first = True, None
                return
        self._first = self._first or (dict(batch), outputs)

    def notes(self) -> Iterator[str]:
        """Yield a note if all inputs give the same outputs, as the criterion sees them."""
        if self._compared and not self._differs:
            yield SAME_OUTPUTS

    def _pairs(self, batch: Batch, outputs: Sequence[Given]) -> Iterator[tuple[Sequence[Given], Sequence[Given]]]:
        """Yield outputs for one input and for another one."""
        if self._first is not None and not _equal(self._first[0], batch):
            yield self._first[1], outputs
        tables = [as_array(value) for value in outputs]
        arrays = [value for value in (*batch.values(), *tables) if isinstance(value, np.ndarray)]
        whole = len(arrays) == len(batch) + len(tables)
        lengths = {array.shape[0] if array.ndim else 0 for array in arrays}
        if whole and len(lengths) == 1 and max(lengths) > 1 and _varies(batch):
            results = [value for value in tables if isinstance(value, np.ndarray)]
            yield [np.broadcast_to(value[:1], value.shape) for value in results], results


def _equal(first: Mapping[str, object], second: Batch) -> bool:
    return first.keys() == second.keys() and all(_alike(first[name], value) for name, value in second.items())


def _alike(a: object, b: object) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else False


def _varies(batch: Batch) -> bool:
    return any(isinstance(value, np.ndarray) and bool((value != value[:1]).any()) for value in batch.values())


def _same(a: Given, b: Given, by: Criterion) -> bool:
    return all(difference.ok for _, difference in differences(a, b, by))
