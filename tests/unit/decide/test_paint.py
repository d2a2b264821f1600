"""The painter: its last rules, its vertices and their entries."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.decide.coloring import paint as paint_module
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.paint import finish, paint
from amp_rewrite.decide.coloring.vertices import Vertices, entries_of
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.op_lists import load_lists
from support.paths import ROOT

LISTS = load_lists(DType.FLOAT16)


@pytest.fixture(scope="module")
def view() -> View:
    return View.of(Model.load(ROOT / "examples" / "models" / "digits_vit.onnx"))


def test_the_last_rules_run_once_even_if_a_placement_has_run_them(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    monkeypatch.setattr(paint_module, "FINISH", (lambda _: runs.append(1),))
    for place in (None, finish):
        paint(view, LISTS, DType.FLOAT16, place=place)
    assert len(runs) == 2


def test_a_vertex_reads_each_other_once() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4,4] x) => (float[4,4] y) {
        h = MatMul (x, x)  a = Mul (h, h)  y = Max (a, h, a, h) }"""
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    entries = entries_of(view, LISTS.at_level(Level.DEFAULT))
    vertices = Vertices.build(view, entries, Gate(Target.ONNX, DType.FLOAT16))
    assert [*vertices.sources] == [(), (0,), (0, 1)]
    assert [list(readers) for readers in vertices.readers] == [[1, 2], [2], []]
