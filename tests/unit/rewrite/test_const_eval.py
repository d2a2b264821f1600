"""Ops whose results are computed where constants are looked at."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.const_eval import numbers, ops_behind
from support.fusing import outputs_of


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


@pytest.mark.parametrize(
    ("body", "known", "opset"),
    [
        ("s = Mul (w, tenth)  t = LessOrEqual (s, limit)  y = Cast <to = 1> (t)", True, 17),
        ("s = Cast <to = 10> (w)  r = Cast <to = 1> (s)  t = IsInf (r)  y = Cast <to = 1> (t)", True, 17),
        ("y = Slice (w, last, first, axis)", True, 17),
        ("y = Slice (w, far_back, far_back, axis, back)", False, 17),
        ("y = Slice (w, last, least, axis, back)", False, 17),
        ("y = Softmax (w)", True, 17),
        ("y = Softmax <axis = 2> (w)", True, 11),
        ("y = Softmax <axis = -1> (w)", True, 11),
        ("y = Softmax (w)", False, 11),
    ],
)
def test_known_numbers_are_those_of_the_runtime(body: str, known: bool, opset: int) -> None:
    constants = """float[1,2,3] w = {5, 1, 7, 100000, 6, 0}, float tenth = {0.1}, float limit = {0.5},
        int64[1] last = {-1}, int64[1] first = {1}, int64[1] axis = {2}, int64[1] back = {-1},
        int64[1] far_back = {-9}, int64[1] least = {-9223372036854775807}"""
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g () => (float[a,b,c] y) <{constants}> {{ {body} }}'
    model = onnx.parser.parse_model(text)
    view = View.of(Model(model))
    found = numbers(view, view.ops[-1].results[0])
    assert (found is not None) is known
    if found is not None:
        np.testing.assert_allclose(found, outputs_of(model, {})[0], rtol=1e-6)
