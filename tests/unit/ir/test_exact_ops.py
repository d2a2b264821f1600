"""Ops whose results need no rounding."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import exact
from amp_rewrite.ir.view import View

NUMBER = "n = Constant <value_float = 1.0> ()"


@pytest.mark.parametrize(
    ("body", "opset", "expected"),
    [
        ("y = Relu (x)", 18, True),
        ("y = Max (x, x)", 18, True),
        ("y = Add (x, x)", 18, False),
        ("y = ScatterElements (x, i, x)", 18, True),
        ('y = ScatterElements <reduction = "none"> (x, i, x)', 18, True),
        ('y = ScatterElements <reduction = "max"> (x, i, x)', 18, True),
        ('y = ScatterElements <reduction = "min"> (x, i, x)', 18, True),
        ('y = ScatterElements <reduction = "add"> (x, i, x)', 18, False),
        ('y = ScatterElements <reduction = "mul"> (x, i, x)', 18, False),
        (f"{NUMBER} y = Clip (x, n, n)", 18, True),
        (f"{NUMBER} y = Clip (x, n)", 18, False),
        (f'{NUMBER} y = Clip (x, "", n)', 18, False),
        ("y = Clip <min = 0.1> (x)", 10, False),
        (f"p = Constant <value_ints = [0, 0, 0, 0]> () {NUMBER} y = Pad (x, p, n)", 18, True),
        ("y = Pad <pads = [0, 0, 0, 0], value = 0.1> (x)", 10, False),
    ],
)
def test_an_op_is_exact_where_no_number_is_new(body: str, opset: int, expected: bool) -> None:
    text = f"g (float[2,3] x, int64[2,3] i) => (float[2,3] y) {{ {body} }}"
    view = View.of(Model(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')))
    assert exact(view.ops[-1]) is expected
