"""The search for the fewest suspects: minimal, and within its budget."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from amp_rewrite.pipeline.repair import BudgetSpent, minimal_set


def blames(*guilty: int) -> tuple[list[frozenset[int]], Callable[[frozenset[int]], bool]]:
    """A test that passes if all of these are held back, and the questions that it was asked."""
    asked: list[frozenset[int]] = []

    def enough(held: frozenset[int]) -> bool:
        asked.append(held)
        return held.issuperset(guilty)

    return asked, enough


def test_where_even_all_are_not_enough_nothing_is_chosen() -> None:
    assert minimal_set(100, lambda held: False) is None


@pytest.mark.parametrize("guilty", [0, 1, 5, 499, 998, 999])
def test_one_of_a_thousand_is_found_in_some_thirty_tests(guilty: int) -> None:
    asked, enough = blames(guilty)

    chosen = minimal_set(1000, enough)

    assert chosen == (guilty,)
    assert len(asked) <= 24  # none, all; log2(1000) to double and to bisect; the one alone


@given(st.integers(1, 60), st.data())
def test_what_is_chosen_is_enough_and_nothing_less_is(suspects: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, suspects - 1)))
    _, enough = blames(*guilty)

    assert minimal_set(suspects, enough) == tuple(sorted(guilty))


@given(st.integers(1, 40), st.integers(1, 30), st.data())
def test_what_was_found_before_the_budget_is_spent_passes(suspects: int, budget: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, suspects - 1)))
    asked, enough = blames(*guilty)

    def bounded(held: frozenset[int]) -> bool:
        if len(asked) == budget:
            raise BudgetSpent
        return enough(held)

    chosen = minimal_set(suspects, bounded)

    assert chosen is None or guilty.issubset(chosen)


@given(st.integers(2, 7), st.data())
def test_where_more_is_not_better_what_is_chosen_still_was_tested(suspects: int, data: st.DataObject) -> None:
    table: dict[frozenset[int], bool] = {frozenset(): False}

    def enough(held: frozenset[int]) -> bool:
        return table.setdefault(held, data.draw(st.booleans()))

    chosen = minimal_set(suspects, enough)

    if chosen is not None:
        assert table[frozenset(chosen)]
        assert not any(table[frozenset(chosen) - {i}] for i in chosen)
