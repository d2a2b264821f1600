"""Dimensions that a value can have."""

from __future__ import annotations

import pytest

from amp_rewrite.files.tensors import MOST_ELEMENTS
from amp_rewrite.ir.shapes.onnx_shapes import MOST_AXES, _possible


@pytest.mark.parametrize(
    ("dims", "possible"),
    [
        ((), True),
        ((0, 5, "n", None), True),
        ((-1, 5), False),
        ((0, -1), False),
        (("n", 3, -2), False),
        ((MOST_ELEMENTS, 1), True),
        ((MOST_ELEMENTS, 2), False),
        ((2, 0, MOST_ELEMENTS), False),
        ((1,) * MOST_AXES, True),
        ((1,) * (MOST_AXES + 1), False),
    ],
)
def test_dimensions_are_few_not_negative_and_of_elements_that_can_be_addressed(
    dims: tuple[int | str | None, ...], possible: bool
) -> None:
    assert _possible.__wrapped__(dims) is possible
