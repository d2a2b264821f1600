"""Models in ONNX's own syntax with names of nodes, which the package reads where onnx does not."""

from __future__ import annotations

import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.files import text
from support.corpus import TEXT_MODELS
from support.paths import TESTS

HEAD = '<ir_version: 8, opset_import: ["" : 13]> g (float[N] x, bool c) => (float[1] y)'
BODY = """{
    ["layer/first"]  # a comment
      y = Neg (x)
    [second] z = here.Scale <factors = [1, 2], word = "[no] w = Neg (x)"> (x) [third] u, v = Split (z) <axis = 0>
    [branch] w = If (c) <
        then_branch = t () => (float[1] o) { [inner] o = Neg (x) },
        else_branch = e () => (float[1] o) { o = Neg (x) }
    >
}"""


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that knows no names of nodes, as that of onnx 1.17."""
    parsed = text._parsed

    def refusing(source: str) -> ModelProto:
        if text._marked(source, "", []) != source:
            raise onnx.parser.ParseError("Expected character = not found.")
        return parsed(source)

    monkeypatch.setattr(text, "_parsed", refusing)


@pytest.mark.usefixtures("nameless")
def test_names_of_nodes_are_read_where_the_parser_knows_none() -> None:
    nodes = text.parse_model(f"{HEAD} {BODY}").graph.node
    assert [(n.name, n.domain, n.op_type) for n in nodes] == [
        ("layer/first", "", "Neg"),
        ("second", "here", "Scale"),
        ("third", "", "Split"),
        ("branch", "", "If"),
    ]
    assert [n.name for a in nodes[3].attribute for n in a.g.node] == ["inner", ""]
    assert nodes[1].attribute[1].s == b"[no] w = Neg (x)"


@pytest.mark.usefixtures("nameless")
def test_text_that_is_no_model_is_still_refused() -> None:
    with pytest.raises(onnx.parser.ParseError):
        text.parse_model(f"{HEAD} {{ [a] y = ")


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_both_ways_read_the_same_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = (TESTS / "models_text" / f"{name}.onnxtxt").read_text("utf-8")
    whole, parsed = text.parse_model(source), text._parsed
    calls: list[str] = []

    def second_only(given: str) -> ModelProto:
        calls.append(given)
        if len(calls) == 1 and text._marked(given, "", []) != given:
            raise onnx.parser.ParseError("Expected character = not found.")
        return parsed(given)

    monkeypatch.setattr(text, "_parsed", second_only)
    assert text.parse_model(source) == whole
