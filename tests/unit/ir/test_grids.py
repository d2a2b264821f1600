"""Rows of numbers with equal steps, of which some may be missing."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.ir.patterns.scores import even


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        ([0, 1, 2, 3], 4, True),
        ([3, 1, 2, 0, 3], 4, True),  # in any order, any number of times
        ([0, 1, 2, 3], 5, False),
        ([0, 1, 5], 3, True),  # half of 0 to 5
        ([0, 1, 6], 3, False),
        ([0, 1, 7], 3, False),
        ([0, 0.1, 0.2, 0.35], 3, False),
        ([-1, -0.5, 0, 0.5, 1], 3, True),
        ([0, np.inf, 1], 3, True),  # three values, of which no step is known
        ([0, np.inf, 1, 2], 3, False),
        ([5], 1, True),
        ([5], 2, False),
        ([5, 6], 1, True),
    ],
)
def test_equal_steps_fill_half_of_a_row_or_more(values: list[float], least: int, expected: bool) -> None:
    assert even(np.array(values, np.float32), least=least) is expected
