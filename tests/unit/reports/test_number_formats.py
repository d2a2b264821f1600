"""Which types hold every number of another: by their ranges, and by casts there and back."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.reports.lineage import _FORMATS, _holds

WHOLE = [DType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64)]


def limits(dtype: DType) -> tuple[int, int]:
    known = np.iinfo(dtype.numpy)
    return int(known.min), int(known.max)


@pytest.mark.parametrize("narrow", WHOLE)
def test_an_integer_type_holds_another_if_that_has_no_more_numbers(narrow: DType) -> None:
    low, high = limits(narrow)
    assert [wide for wide in WHOLE if _holds(wide, narrow)] == [
        wide for wide in WHOLE if limits(wide)[0] <= low and high <= limits(wide)[1]
    ]
    assert all(_holds(wide, DType.BOOL) for wide in WHOLE)


@pytest.mark.parametrize("narrow", WHOLE)
def test_a_floating_type_holds_an_integer_one_if_no_number_is_rounded(narrow: DType) -> None:
    low, high = limits(narrow)
    ends = np.array([*range(high - 300 if high > 300 else low, high), high], dtype=narrow.numpy)
    for wide in (DType.DOUBLE, DType.FLOAT, DType.FLOAT16, DType.BFLOAT16):
        exact = [int(float(np.array(int(n)).astype(wide.numpy))) == int(n) for n in ends if n < 2**15 or wide.bits > 16]
        assert _holds(wide, narrow) == (all(exact) and len(exact) == len(ends))


def test_a_floating_type_holds_another_with_fewer_digits_and_exponents() -> None:
    held = {wide.name: {narrow.name for narrow in _FORMATS if _holds(wide, narrow)} for wide in _FORMATS}
    assert held["DOUBLE"] == set(held)
    assert held["FLOAT"] == set(held) - {"DOUBLE"}
    small = {name for name in held if name.startswith(("FLOAT8", "FLOAT4"))} - {"FLOAT8E8M0"}
    assert held["FLOAT16"] == small | {"FLOAT16"}
    assert "FLOAT16" not in held["BFLOAT16"] and "BFLOAT16" not in held["FLOAT16"]
    assert not any(_holds(whole, narrow) for whole in WHOLE for narrow in _FORMATS)
