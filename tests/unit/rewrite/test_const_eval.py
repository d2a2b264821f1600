"""Ops whose results are computed where constants are looked at."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.const_eval import ops_behind


@pytest.mark.parametrize(
    ("body", "cheap"),
    [
        ("y = Add (x, x)", True),
        ("y = Reshape (x, s)", True),
        ("t = Shape (x) y = ConstantOfShape (t)", True),
        ("y = EyeLike (x)", True),
        ("y = Range (n, n, n)", True),
        ("p = Cast <to = 7> (x) y = OneHot (p, n, s)", True),
        ("y = MaxPool <kernel_shape = [1]> (x)", False),
        ("y = ScatterElements (x, i, x)", False),
        ("y = RandomNormalLike (x)", False),
    ],
)
def test_ops_that_take_a_moment_per_element_are_evaluated(body: str, cheap: bool) -> None:
    inputs = "float[2,2] x, int64[2,2] i, int64[2] s, int64 n"
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.ClearField("output")
    view = View.of(Model(model))
    value = view.ops[-1].results[0]
    found = ops_behind(view, value, view.scopes[view.ops[-1].scope].inputs)
    assert (found is not None) is cheap
    assert found is None or found == tuple(op.id for op in view.ops)
