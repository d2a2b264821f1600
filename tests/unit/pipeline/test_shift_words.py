"""The words about a region that is shifted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.pipeline.shift import DATA, _words, region_rows
from amp_rewrite.reports.rows import ShiftRow

ROOMS = "the largest goes from 131072 to 16384 (headroom 0.5, then 4)"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            ShiftRow("v", 3, DATA, 2, 131072.0, 0.5, 4.0, (), ("y",)),
            f"2 values times 2^-3, by data; {ROOMS}; ends at y",
        ),
        (
            ShiftRow("v", 3, DATA, 1, 131072.0, 0.5, 4.0, ("k", "l"), ()),
            f"1 value times 2^-3, by data; {ROOMS}; 2 values too small for it, k, l; no op needs it undone",
        ),
        (ShiftRow("v", 4, "option", 1, 0.0, 0.0, 0.0), "1 value times 2^-4, as asked for; no op needs it undone"),
    ],
)
def test_a_region_is_told_with_its_extent_headroom_and_ends(row: ShiftRow, words: str) -> None:
    assert _words(row) == words


def test_a_row_counts_the_values_that_are_shifted_and_names_the_others() -> None:
    view: Any = SimpleNamespace(value_name=lambda value: "abc"[value], ops={7: SimpleNamespace(name="end")})
    region = SimpleNamespace(values=(0, 1, 2), largest=1, absmax=131008.0, exponent=2)
    muls = {7: [SimpleNamespace(value=0, exponent=0)]}
    shift: Any = SimpleNamespace(
        plan=SimpleNamespace(regions=[region], exponents={0: 2, 1: 2}), emitted=SimpleNamespace(muls=muls)
    )
    assert [*region_rows(view, shift, DATA)] == [ShiftRow("b", 2, DATA, 2, 131008.0, 0.5, 2.0, ("c",), ("end",))]
