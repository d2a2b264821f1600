"""Models as text: how deep their brackets are nested, and that data files stay unread."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_rewrite.errors import ModelError
from amp_rewrite.files.loading import _deepest, text_model

EMPTY = '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y) { y = Identity (x) }'


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("", 0),
        ("() [] {} <>", 1),
        ("([{<>}])", 4),
        ("()(())()", 2),
        (")))(", 1),
        ("( => ( => (", 3),
        ('( "(((" "\\"((" )', 1),
        ('("(((', 1),
        ("# ((( \n ( # (( \n (", 2),
        (EMPTY, 2),
    ],
)
def test_brackets_count_outside_quotes_and_comments(text: str, depth: int) -> None:
    assert _deepest(text) == depth


def test_text_that_is_nested_too_deep_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxtxt"
    path.write_text(f"# {'(' * 300}\n{EMPTY}")
    assert text_model(path, "onnxtxt").graph.node[0].op_type == "Identity"
    path.write_text("(" * 201 + EMPTY)
    with pytest.raises(ModelError, match="nested deeper than 200 brackets"):
        text_model(path, "onnxtxt")
