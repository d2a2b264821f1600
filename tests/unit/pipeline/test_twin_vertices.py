"""The widened twin of a half model: which of its type variables are low under a coloring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.foresight import is_low


def variable(name: str, dtype: DType | None) -> SimpleNamespace:
    return SimpleNamespace(name=name, type=None if dtype is None else SimpleNamespace(dtype=dtype))


@pytest.mark.parametrize(
    ("painted", "name", "expected"),
    [
        (DType.FLOAT16, "T", True),
        (DType.FLOAT, "U", False),
        (None, "T", False),
        (None, "U", True),
        (None, "V", False),
        (None, "W", False),
    ],
)
def test_a_variable_is_low_as_painted_or_as_it_is_in_the_model(
    painted: DType | None, name: str, expected: bool
) -> None:
    variables = (variable("V", None), variable("T", DType.FLOAT), variable("U", DType.FLOAT16))
    half: Any = SimpleNamespace(variables=[variables])
    coloring: Any = SimpleNamespace(to=DType.FLOAT16, dtype=lambda op, variable: painted)
    assert is_low(half, coloring, (0, name)) is expected  # type: ignore[arg-type]
