"""The words about a region that is shifted."""

from __future__ import annotations

import pytest

from amp_rewrite.pipeline.shift_rows import DATA, PROOF, _some, _words
from amp_rewrite.reports.rows import ShiftRow

ROOMS = "the largest goes from 131072 to 16384 (headroom 0.5, then 4)"


@pytest.mark.parametrize(
    ("names", "shown"), [("a", "a"), ("a b c", "a, b, c"), ("a b c d", "a, b, c and 1 more"), ("abcdef", "abcdef")]
)
def test_three_names_are_shown_and_others_counted(names: str, shown: str) -> None:
    assert _some(names.split()) == shown


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            ShiftRow("v", 3, DATA, 2, 131072.0, 0.5, 4.0, (), ("y",)),
            f"2 values times 2^-3, by data; {ROOMS}; ends at y",
        ),
        (
            ShiftRow("v", 3, PROOF, 1, 131072.0, 0.5, 4.0, ("k", "l"), ()),
            f"1 value times 2^-3, by proof, for inputs of size 1; {ROOMS}; 2 values too small for it, k, l; "
            "no op needs it undone",
        ),
        (ShiftRow("v", 4, "option", 1, 0.0, 0.0, 0.0), "1 value times 2^-4, as asked for; no op needs it undone"),
    ],
)
def test_a_region_is_told_with_its_extent_headroom_and_ends(row: ShiftRow, words: str) -> None:
    assert _words(row) == words
