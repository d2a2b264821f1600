"""Operators computed by numpy give what onnx's reference gives; nothing where their form is unknown, or cannot run."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from amp_rewrite.rewrite.limited_evaluation import evaluate_plain

X = np.arange(24.0).reshape(2, 3, 4)
FLAT = np.arange(3.0).reshape(1, 3, 1)

MOVES = [
    "y = Identity (x)",
    "y = Transpose (x)",
    "y = Transpose <perm = [1, 2, 0]> (x)",
    "s = Constant <value_ints = [0, -1]> ()  y = Reshape (x, s)",
    "s = Constant <value_ints = [4, 3, 2]> ()  y = Reshape <allowzero = 1> (x, s)",
    "a = Constant <value_ints = [-1, 0]> ()  y = Unsqueeze (x, a)",
    "a = Constant <value_ints = [-1]> ()  y = Squeeze (flat, a)",
    "y = Squeeze (flat)",
    "s = Constant <value_ints = [2, 1, 5]> ()  y = Expand (flat, s)",
    "s = Constant <value_ints = [3, 1]> ()  y = Expand (flat, s)",
    "y = Concat <axis = -1> (x, x)",
    "y = Shape (x)",
    "y = Shape <start = -2, end = -1> (x)",
    "a = Constant <value_ints = [1]> ()  b = Constant <value_ints = [9]> ()  y = Slice (x, a, b)",
    "a = Constant <value_ints = [-1, 3]> ()  b = Constant <value_ints = [-9, 0]> ()"
    "  c = Constant <value_ints = [1, 2]> ()  d = Constant <value_ints = [-1, -2]> ()  y = Slice (x, a, b, c, d)",
    "t = Transpose (x)  s = Constant <value_ints = [-1]> ()  y = Reshape (t, s)",
]

ARITHMETIC = [
    *(f"y = {op} (x, flat)" for op in ("Add", "Mul", "Sub")),
    "s = Softmax <axis = -1> (x)  y = Div (x, s)",
    "t = Transpose <perm = [0, 2, 1]> (x)  y = MatMul (t, x)",
    "y = Softmax <axis = -1> (x)",
    "y = Erf (flat)",
    "y = Tanh (x)",
    "y = Gelu (flat)",
    "s = Softmax <axis = -1> (x)  n = IsNaN (s)  y = Where (n, x, s)",
    "a = Constant <value_ints = [1]> ()  y = ReduceSum <keepdims = 0> (x, a)",
    "t = Transpose <perm = [0, 2, 1]> (flat)  y = LayerNormalization <epsilon = 0.25> (flat, t, t)",
    "i = Cast <to = 7> (x)  y = Cast <to = 11> (i)",
]

OTHERS = [
    "y = Neg (x)",
    "t = Transpose (x)  y = Neg (t)",
    "y = Softmax <axis = 1> (x)",
    "y = Softmax (x)",
    'y = Gelu <approximate = "tanh"> (x)',
    "y = ReduceSum (x)",
    "y = LayerNormalization <axis = 1> (x, x)",
    "y = MatMul (x, x)",
    "y = Transpose <perm = [0, 1]> (x)",
    "s = Constant <value_ints = [5]> ()  y = Reshape (x, s)",
    "s = Constant <value_ints = [2, 2]> ()  y = Expand (x, s)",
    "y = Concat <axis = 0> (x, flat)",
    "y = com.microsoft.Identity (x)",
]


def nodes_of(body: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The nodes, and what they are fed; Constants are fed, as those of a model are."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
        f" g (double[2,3,4] x, double[1,3,1] flat) => (double[A] y) {{ {body} }}"
    )
    feed = {"x": X, "flat": FLAT}
    feed |= {n.output[0]: np.array(n.attribute[0].ints, np.int64) for n in model.graph.node if n.op_type == "Constant"}
    kept = [node for node in model.graph.node if node.op_type != "Constant"]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    for name in feed.keys() - {"x", "flat"}:
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [None]))
    return model, feed


@pytest.mark.parametrize("body", MOVES)
def test_a_move_gives_what_the_reference_gives(body: str) -> None:
    model, feed = nodes_of(body)
    found = evaluate_plain(model.graph.node, "y", feed)
    (expected,) = ReferenceEvaluator(model).run(None, feed)
    assert found is not None
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("body", ARITHMETIC)
def test_arithmetic_gives_what_the_reference_gives(body: str) -> None:
    """But for its Erf, which is rounded to float32."""
    model, feed = nodes_of(body)
    found = evaluate_plain(model.graph.node, "y", feed)
    (expected,) = ReferenceEvaluator(model).run(None, feed)
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-7 if "Erf" in body or "Gelu" in body else 1e-14, strict=True)


@pytest.mark.parametrize("body", ["t = Transpose <perm = [0, 2, 1]> (flat)  y = MatMul (flat, t)", "y = Add (x, flat)"])
def test_no_more_elements_are_computed_than_allowed(body: str) -> None:
    model, feed = nodes_of(body)
    assert evaluate_plain(model.graph.node, "y", feed, most=5) is None


@pytest.mark.parametrize("body", OTHERS)
def test_what_is_in_no_table_or_can_not_run_is_left_to_the_reference(body: str) -> None:
    model, feed = nodes_of(body)
    assert evaluate_plain(model.graph.node, "y", feed) is None


def test_every_row_is_held_to_the_reference() -> None:
    from amp_rewrite.rewrite.limited_evaluation import _ROWS

    assert {word for body in MOVES + ARITHMETIC for word in body.replace("<", " ").split()} >= _ROWS.keys()
