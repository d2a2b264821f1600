"""Weights that an exporter wrote twice: equal, or one the transpose of the other."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.train.objective.split_weights import _same

A = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (A, A.copy(), True),
        (A, A.T.copy(), True),
        (A, A + 1, False),
        (A, A.T + 1, False),
        (A, A.reshape(3, 2), False),
        (A[0], A[0].copy(), True),
        (A[0], A[1], False),
        (A[None], A.T[..., None].copy(), False),  # of three axes
    ],
)
def test_matrices_are_the_same_up_to_a_transpose(a: np.ndarray, b: np.ndarray, expected: bool) -> None:
    assert _same(a, b) is expected
