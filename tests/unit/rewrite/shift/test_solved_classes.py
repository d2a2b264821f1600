"""Exponents of classes that follow from those wanted, by the relations between classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from amp_rewrite.rewrite.shift.equations import Equations, Relation
from amp_rewrite.rewrite.shift.plan import LARGEST_EXPONENT, solve_classes

A, B, Y, Z = range(4)
PRODUCT = Relation(1, Y, ((1, A), (1, B)))
ROOT = Relation(2, Y, ((1, A),))
QUOTIENT = Relation(1, Y, ((1, A), (-1, B)))
MOST = LARGEST_EXPONENT


@pytest.mark.parametrize(
    ("relations", "joints", "wanted", "solved"),
    [
        ([PRODUCT], {}, {A: 3}, {A: 3, Y: 3}),
        ([PRODUCT], {}, {A: 3, B: 2}, {A: 3, B: 2, Y: 5}),
        ([PRODUCT], {Y: 1}, {A: 3}, {A: 3}),  # a Mul would be needed behind the product
        ([PRODUCT], {Y: 1}, {A: 3, Y: 2}, {A: 3, Y: 3}),  # there is one
        ([PRODUCT], {}, {Y: 4}, {Y: 4, A: 4}),
        ([PRODUCT], {A: 1}, {Y: 4}, {Y: 4, B: 4}),  # the factor without a Mul first
        ([PRODUCT], {A: 1, B: 1}, {Y: 4}, {Y: 4}),
        ([PRODUCT], {A: 1, B: 1}, {Y: 4, B: 1}, {Y: 4, B: 4}),  # it is shifted anyway
        ([PRODUCT], {}, {Y: 5, A: 1, B: 2}, {Y: 5, A: 1, B: 4}),  # the one that is shifted most
        ([PRODUCT], {}, {A: MOST}, {A: MOST, Y: MOST}),
        ([PRODUCT], {}, {A: MOST, B: 1}, {A: MOST, B: 1}),  # one more than the largest
        ([PRODUCT], {}, {A: MOST - 1, B: 1}, {A: MOST - 1, B: 1, Y: MOST}),
        ([ROOT], {}, {A: 3}, {A: 4, Y: 2}),  # twice the exponent of the root, which is rounded up
        ([ROOT], {}, {A: 4}, {A: 4, Y: 2}),
        ([ROOT], {}, {Y: 2}, {Y: 2, A: 4}),
        ([QUOTIENT], {}, {B: 3}, {B: 3, Y: -3}),
        ([QUOTIENT], {Y: 1}, {B: 3}, {B: 3, A: 3}),
        ([QUOTIENT], {Y: 1, A: 1}, {B: 3}, {B: 3}),
        ([PRODUCT, Relation(1, Z, ((2, Y),))], {}, {A: 2}, {A: 2, Y: 2, Z: 4}),
        ([Relation(1, Z, ((2, Y),)), PRODUCT], {}, {A: 2}, {A: 2, Y: 2, Z: 4}),  # in the second round
        ([Relation(1, Z, ((3, Y),))], {}, {Z: 4}, {Z: 6, Y: 2}),
    ],
)
def test_results_follow_their_factors_and_factors_follow_what_is_shifted_more(
    relations: list[Relation], joints: Mapping[int, int], wanted: dict[int, int], solved: dict[int, int]
) -> None:
    nothing: Any = None
    equations = Equations(nothing, {}, {}, tuple(relations), Counter(joints))
    assert solve_classes(equations, wanted) == solved
