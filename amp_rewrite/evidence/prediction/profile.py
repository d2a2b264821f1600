"""Profile: the part of each element in the error of an output, from one run with all ops low.

Probes tell sizes of errors by rows or groups of rows. The profile tells how an error is spread within them, which
decides the largest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.evidence.prediction.probes import Outputs, row_of
from amp_rewrite.files.casting import Array

Squares = NDArray[np.float64]

_DOUBTED = 12
"""Elements that count as of average size in the mean of a row or column."""


def profiled(outputs: Sequence[Outputs], together: Sequence[Mapping[str, Array]]) -> tuple[Outputs, ...]:
    """Return the outputs of batches with profiles, from their outputs with all ops low. O(elements).

    A profile is the mean of a row in its batch times that of a column over all batches. Outputs that are not finite
    then have none.
    """
    squares = [_squares(each.values, low) for each, low in zip(outputs, together, strict=True)]
    pooled: dict[tuple[str, int], list[Squares]] = defaultdict(list)
    for batch in squares:
        for name, rows in batch.items():
            means = rows.mean(axis=1, keepdims=True)
            felt = means[:, 0] > 0
            pooled[name, rows.shape[1]].append(rows[felt] / means[felt])
    columns = {key: _shrunk(np.concatenate([np.ones((1, key[1])), *parts]), 0) for key, parts in pooled.items()}

    def profile(name: str, rows: Squares) -> Squares:
        return (_shrunk(rows, 1) * columns[name, rows.shape[1]]).reshape(-1)

    return tuple(
        replace(each, profile={name: profile(name, rows) for name, rows in batch.items()})
        for each, batch in zip(outputs, squares, strict=True)
    )


def _squares(values: Mapping[str, Array], together: Mapping[str, Array]) -> dict[str, Squares]:
    """Return the squared errors of outputs by row."""
    found = {}
    for name, value in values.items():
        low = together[name]
        if low.shape == value.shape:
            finite = np.isfinite(value)
            error = np.where(finite, low, 0.0).astype(np.float64) - np.where(finite, value, 0.0)
            if np.isfinite(error).all():
                found[name] = error.reshape(-1, row_of(value)) ** 2
    return found


def _shrunk(squares: Squares, axis: int) -> Squares:
    """Return means along an axis, drawn towards that of all where few elements tell them."""
    count, means = squares.shape[axis], squares.mean(axis=axis, keepdims=True)
    return np.asarray((means * count + squares.mean() * _DOUBTED) / (count + _DOUBTED))
