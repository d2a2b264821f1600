"""The graph of type variables that painting reads."""

from __future__ import annotations

import onnx.parser

from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.problem import Vertices, entries_of
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.settings.choices import Level, Target
from amp_rewrite.settings.op_lists import load_lists

LISTS = load_lists(DType.FLOAT16)


def test_a_vertex_reads_each_other_once() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[4,4] x) => (float[4,4] y) {
        h = MatMul (x, x)  a = Mul (h, h)  y = Max (a, h, a, h) }"""
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    entries = entries_of(view, LISTS.at_level(Level.DEFAULT))
    vertices = Vertices.build(view, entries, Gate(Target.ONNX, DType.FLOAT16))
    assert sorted(vertices.graph.edges) == [(0, 1), (0, 2), (1, 2)]
