"""Arguments of other converters: patterns for their names, and warnings for what has no effect."""

from __future__ import annotations

import warnings

import pytest

from amp_rewrite.compat.arguments import node_pattern, op_patterns, without_effect


@pytest.mark.parametrize(("value", "warned"), [(None, False), (False, False), (0, True), (True, True), ("x", True)])
def test_only_what_was_given_is_said_to_have_no_effect(value: object, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without_effect({"name": value}, {"name": "nothing reads it"})
    assert [str(w.message) for w in caught] == [f"name={value!r} has no effect: nothing reads it"] * warned


@pytest.mark.parametrize(
    ("name", "pattern"), [("a/b_1.c", "a/b_1.c"), ("a b", r"re:\Aa\ b\Z"), ("a[0]", r"re:\Aa\[0\]\Z"), ("", r"re:\A\Z")]
)
def test_a_node_is_selected_by_exactly_its_name(name: str, pattern: str) -> None:
    assert node_pattern(name) == pattern


def test_an_op_type_is_selected_in_every_domain() -> None:
    assert op_patterns("Conv") == ("op=Conv", "op=*::Conv")
    assert op_patterns("A*,B") == (r"op=A[*]\,B", r"op=*::A[*]\,B")
