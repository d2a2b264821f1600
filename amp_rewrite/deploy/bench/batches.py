"""Batch size: its axis in a model's inputs, and batches resized to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from amp_rewrite.errors import FeedError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import size as in_words
from amp_rewrite.runtime.memory import main_memory
from amp_rewrite.runtime.ports import Port


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The free dimension of the batch size: its name, if any, and each (input, axis) with it."""

    name: str | None
    places: tuple[tuple[str, int], ...]

    def size(self, batch: Batch) -> int:
        """Return the number of items in a batch."""
        name, axis = self.places[0]
        return int(batch[name].shape[axis])

    def nbytes(self, batch: Batch, size: int) -> int:
        """Return the bytes of a batch with that many items, without allocating it."""
        shares = {name: array.nbytes for name, array in batch.items()}
        for name, axis in self.places:
            shares[name] = shares[name] * size // batch[name].shape[axis]
        return sum(shares.values())

    def resized(self, batch: Batch, size: int) -> dict[str, Array]:
        """Return the batch repeated or cut to that many items. Raise FeedError if memory does not hold it."""
        needed, there = self.nbytes(batch, size), main_memory()
        if there and needed > there:
            fact = f"the inputs of {size} items take {in_words(needed)}"
            raise FeedError(f"{fact}, and this machine has {in_words(there)}")
        arrays = dict(batch)
        for name, axis in self.places:
            array = arrays[name]
            arrays[name] = np.ascontiguousarray(np.take(array, np.arange(size) % array.shape[axis], axis=axis))
        return arrays


def batch_axis(ports: Sequence[Port], batch: Batch) -> BatchAxis | None:
    """Return the axis of the batch size; None if no fed input has a free first dimension.

    The first such input decides: a named dimension is the batch wherever its name occurs; without a name, the first
    dimension of each input is.
    """
    fed = [port for port in ports if port.name in batch and port.container == TENSOR and port.shape]
    free = [port.shape[0] for port in fed if port.shape and not isinstance(port.shape[0], int)]
    if not free:
        return None
    leading = free[0]
    places = [
        (port.name, axis)
        for port in fed
        for axis, dim in enumerate(port.shape or ())
        if (dim == leading if leading is not None else dim is None and axis == 0)
    ]
    filled = all(batch[name].shape[axis] for name, axis in places)
    return BatchAxis(leading, tuple(places)) if filled else None
