"""float32 to float16 in integer steps: every boundary between two float16 numbers, and what is handed back."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import BLOCK, cast, to_float16


def boundaries() -> NDArray[np.float32]:
    """Each finite float16, each point halfway to the next, and the float32 numbers right beside those."""
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (exact[:-1] + exact[1:]) / 2
    points = np.concatenate((exact, middle))
    near = np.concatenate((points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e9))))
    return np.concatenate((near, -near))


def halved(values: NDArray[np.float32]) -> NDArray[np.float16] | None:
    """The values in float16, block by block; None where one was not done."""
    low = np.empty(values.size, np.float16)
    blocks = (slice(at, at + BLOCK) for at in range(0, values.size, BLOCK))
    return low if all(to_float16(values[block], low[block]) for block in blocks) else None


def bits(values: NDArray[np.float16]) -> list[int]:
    return list(values.view(np.uint16).tolist())


def test_rounds_to_nearest_even_at_every_boundary_between_two_numbers() -> None:
    values = boundaries()
    found = halved(values)
    assert found is not None
    assert bits(found) == bits(values.astype(np.float16))


@pytest.mark.parametrize("value", [65520.0, -65520.0, np.inf, -np.inf, np.nan])
def test_what_is_no_number_or_rounds_to_infinity_is_left_to_others(value: float) -> None:
    assert halved(np.array([1.0, value], np.float32)) is None


def test_one_block_with_an_overflow_saturates_and_the_others_are_as_before() -> None:
    values = np.linspace(-3, 3, 3 * BLOCK + 5, dtype=np.float32).reshape(1, -1)
    values[0, BLOCK + 7] = 1e6
    values[0, BLOCK + 8] = -np.inf
    found = cast(values, DType.FLOAT16)
    wanted = np.clip(values, -65504, 65504).astype(np.float16)
    wanted[0, BLOCK + 8] = -np.inf
    assert found.shape == values.shape
    assert bits(found.reshape(-1)) == bits(wanted.reshape(-1))
