"""Attributes of nodes, stated or not, and the equation of an Einsum."""

from __future__ import annotations

import pytest
from onnx import helper

from amp_rewrite.ir.attributes import equation, int_attribute, ints_attribute, text_attribute


@pytest.mark.parametrize(
    ("text", "operands", "result"),
    [
        ("ij,jk->ik", ["ij", "jk"], "ik"),
        ("ij, jk -> ki", ["ij", "jk"], "ki"),
        ("ij->", ["ij"], ""),
        ("kj,ji", ["kj", "ji"], "ik"),
        ("ii", ["ii"], ""),
        ("ba", ["ba"], "ab"),
        ("...ij,...jk", ["...ij", "...jk"], "...ik"),
        ("...ij->...", ["...ij"], "..."),
    ],
)
def test_the_result_of_an_equation_is_stated_or_has_the_labels_that_stand_once(
    text: str, operands: list[str], result: str
) -> None:
    node = helper.make_node("Einsum", ["a", "b"], ["y"], equation=text)
    assert equation(node) == (operands, result)


def test_attributes_that_are_not_stated_have_their_default() -> None:
    node = helper.make_node("Own", ["x"], ["y"], axis=-1, perm=[1, 0], mode="edge")
    assert (int_attribute(node, "axis", 3), int_attribute(node, "to", 3)) == (-1, 3)
    assert (text_attribute(node, "mode"), text_attribute(node, "way"), text_attribute(node, "way", "up")) == (
        "edge",
        "",
        "up",
    )
    assert (ints_attribute(node, "perm"), ints_attribute(node, "axes")) == ((1, 0), ())
