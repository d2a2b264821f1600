"""What all needs hold together: one pin for each op, in the order of the ops."""

from __future__ import annotations

import onnx.parser

from amp_rewrite.decide.needs.find import find_hazards
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import held


def view_of(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')))


def test_an_op_with_several_needs_has_one_pin() -> None:
    text = """g (int64[1] n, float[N] x) => (float[K] y, bool[1] z) <float seven = {7}> {
        f = Cast <to = 1> (n)
        d = Div (f, seven)
        r = Floor (d)
        i = Cast <to = 7> (r)
        y = Expand (x, i)
        z = Equal (f, seven)
    }"""
    view = view_of(text)
    assert held(view) == dict.fromkeys("fdriz", "whole_number")
    assert len(find_hazards(view, DType.FLOAT16).pins) == 5


def test_pins_come_in_the_order_of_the_ops_and_do_not_change_from_run_to_run() -> None:
    text = """g (int64[N] n, float[N] x) => (float[N] y, bool[N] z) <float seven = {7}, float eps = {1e-6}> {
        a = Add (x, eps)
        f = Cast <to = 1> (n)
        z = Equal (f, seven)
        y = Sqrt (a)
    }"""
    first, second = (find_hazards(view_of(text), DType.FLOAT16) for _ in range(2))
    assert first == second
    assert [pin.op for pin in first.pins] == sorted(pin.op for pin in first.pins)
