"""Rows of arrays, cut into batches in an order that a seed gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.evidence.data.sources import is_array
from amp_rewrite.files.casting import Array
from amp_rewrite.train.objective.prediction import CLASSES, TargetInput
from amp_rewrite.train.step.batch_check import whole_classes
from amp_rewrite.train.update.plain_numbers import whole_number

BATCH_SIZE = 32
"""Default number of rows of a batch, as in Keras."""


def with_targets(x: object, y: object, names: Sequence[str]) -> object:
    """Return inputs and targets together, as a mapping or a tuple; the inputs alone if `y` is None.

    `names`: of all inputs of a step. TrainingError for targets that are not arrays.
    """
    if y is None:
        return x
    targets = tuple(y) if isinstance(y, (tuple, list)) and all(map(is_array, y)) else (y,)
    if not isinstance(y, Mapping) and not all(map(is_array, targets)) and not np.ndim(y):  # type: ignore[arg-type]
        raise TrainingError(f"the targets are {y!r}, not an array; pass fit(x, y, epochs=…), or fit((x, y), epochs=…)")
    targets = tuple(map(np.asarray, targets))
    if isinstance(x, Mapping):
        missing = [name for name in names if name not in x]
        return {**x, **(y if isinstance(y, Mapping) else dict(zip(missing, targets, strict=False)))}
    inputs = tuple(x) if isinstance(x, (tuple, list)) and all(map(is_array, x)) else (np.asarray(x),)
    if isinstance(y, Mapping):
        return {**dict(zip([name for name in names if name not in y], inputs, strict=False)), **y}
    return (*inputs, *targets)


@dataclass(frozen=True, eq=False)
class Rows:
    """Arrays with one row per example, all of one length, by name.

    `batch_size`: rows of a batch; the last batch may have fewer. `shuffle`: take rows in a new order in each epoch,
    from `seed` and the number of the epoch; None draws a seed.
    """

    arrays: Mapping[str, Array]
    batch_size: int = BATCH_SIZE
    shuffle: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size, 1)
        if self.seed is None:
            object.__setattr__(self, "seed", int(np.random.default_rng().integers(2**31)))
        whole_number("seed", self.seed, 0)
        lengths = {name: a.shape[0] for name, a in self.arrays.items() if a.ndim}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "none"
            raise FeedError(f"the arrays have different numbers of rows ({told}); pass arrays of one length")

    @classmethod
    def of(
        cls,
        data: object,
        names: Sequence[str],
        batch_size: int | None,
        shuffle: bool | None,
        seed: int | None = None,
        target: TargetInput | None = None,
    ) -> Rows | None:
        """Return a mapping of arrays, an array, or a tuple of arrays with these names, as rows.

        None for data that are batches already, which take no batch size. FeedError for another number of arrays,
        TrainingError for classes of the `target` that are not whole.
        """
        arrays = (data,) if is_array(data) else data
        if isinstance(arrays, tuple) and arrays and all(map(is_array, arrays)):
            if len(arrays) != len(names):
                raise FeedError(
                    f"{len(arrays)} array{'s' if len(arrays) > 1 else ''} for the inputs {', '.join(map(repr, names))};"
                    " give a tuple of arrays in this order, or a mapping from input names to arrays"
                )
            data = dict(zip(names, arrays, strict=True))
        if isinstance(data, Mapping):
            arrays = {str(name): np.asarray(value) for name, value in data.items()}
            if target is not None and target.kind == CLASSES and target.name in arrays:
                arrays[target.name] = whole_classes(target.name, arrays[target.name])
            return cls(arrays, BATCH_SIZE if batch_size is None else batch_size, shuffle is not False, seed)
        if batch_size is not None or shuffle:
            raise TrainingError(
                "batch_size and shuffle cut a mapping from names to arrays into batches, but these data are batches"
                " already; pass such a mapping, or leave both out"
            )
        return None

    def __len__(self) -> int:
        return int(next(a.shape[0] for a in self.arrays.values() if a.ndim))

    @property
    def count(self) -> int:
        """Number of batches."""
        return -(-len(self) // self.batch_size)

    def batches(self, epoch: int) -> Iterator[dict[str, Array]]:
        """Yield the batches of an epoch."""
        order = np.random.default_rng([self.seed or 0, epoch]).permutation(len(self)) if self.shuffle else None
        for start in range(0, len(self), self.batch_size):
            end = start + self.batch_size
            part = slice(start, end) if order is None else order[start:end]
            yield {name: array[part] if array.ndim else array for name, array in self.arrays.items()}

    def split(self, share: float) -> tuple[Rows, Rows]:
        """Return the first rows, and the last `share` of them in their order, as Keras splits."""
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share < 1:
            raise TrainingError(f"validation_split is {share!r}; use a number above 0 and below 1")
        at = len(self) - round(len(self) * share)
        if not 0 < at < len(self):
            raise TrainingError(f"validation_split={share} of {len(self)} rows leaves none on one side; give more rows")
        first, last = (
            {n: a[part] if a.ndim else a for n, a in self.arrays.items()} for part in (slice(at), slice(at, None))
        )
        return replace(self, arrays=first), replace(self, arrays=last, shuffle=False)
