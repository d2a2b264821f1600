"""New names: never one that is taken, and taken from then on."""

from __future__ import annotations

from amp_rewrite.ir.names import claimed, numbered, unused


def test_a_name_that_is_free_stays_as_it_is() -> None:
    taken = {"y"}
    assert (unused("x", taken), claimed("x", taken), taken) == ("x", "x", {"x", "y"})


def test_a_name_that_is_taken_gets_a_tail_until_it_is_free() -> None:
    taken = {"x", "x_"}
    assert [claimed("x", taken), claimed("x", taken)] == ["x__", "x___"]
    assert unused("x", taken) == "x____"


def test_names_are_counted_from_the_second_one_on() -> None:
    taken: set[str] = set()
    assert [numbered("x", taken) for _ in range(3)] == ["x", "x_2", "x_3"]
    assert taken == {"x", "x_2", "x_3"}
