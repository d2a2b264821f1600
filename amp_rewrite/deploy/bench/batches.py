"""The size of a batch: where it stands in a model's inputs, and the same batch in another size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.deploy.bench.device import main_memory
from amp_rewrite.errors import FeedError
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.reports.render import size as in_words
from amp_rewrite.runtime.ports import Port

Array = NDArray[Any]
Batch = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The free dimension that the size of a batch is: its name, if it has one, and each (input, axis) where it is."""

    name: str | None
    places: tuple[tuple[str, int], ...]

    def size(self, batch: Batch) -> int:
        """How many items a batch has."""
        name, axis = self.places[0]
        return int(batch[name].shape[axis])

    def nbytes(self, batch: Batch, size: int) -> int:
        """Bytes of the inputs of the batch with that many items, told before they are made."""
        shares = {name: array.nbytes for name, array in batch.items()}
        for name, axis in self.places:
            shares[name] = shares[name] * size // batch[name].shape[axis]
        return sum(shares.values())

    def resized(self, batch: Batch, size: int) -> dict[str, Array]:
        """The batch with that many items: those it has, over and over. FeedError where no memory holds them."""
        needed, there = self.nbytes(batch, size), main_memory()
        if there and needed > there:
            raise FeedError(
                f"the inputs of {size} items take {in_words(needed)}, and this machine has {in_words(there)}"
            )
        found = dict(batch)
        for name, axis in self.places:
            array = found[name]
            found[name] = np.ascontiguousarray(np.take(array, np.arange(size) % array.shape[axis], axis=axis))
        return found


def batch_axis(ports: Sequence[Port], batch: Batch) -> BatchAxis | None:
    """Where the size of a batch stands; None where no input that is fed has a free first dimension.

    The first such input decides: a dimension with a name is the batch wherever that name stands; of those without
    a name the first one of each input is.
    """
    fed = [port for port in ports if port.name in batch and port.container == TENSOR and port.shape]
    leading = next((port.shape[0] for port in fed if port.shape and not isinstance(port.shape[0], int)), 0)
    if isinstance(leading, int):
        return None
    places = [
        (port.name, axis)
        for port in fed
        for axis, dim in enumerate(port.shape or ())
        if (dim == leading if leading is not None else dim is None and axis == 0)
    ]
    filled = all(batch[name].shape[axis] for name, axis in places)
    return BatchAxis(leading, tuple(places)) if filled else None
