"""Operators that only move numbers give what onnx's reference gives; nothing where they do more, or cannot run."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from amp_rewrite.rewrite.limited_evaluation import evaluate_movement

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

OTHERS = [
    "y = Neg (x)",
    "t = Transpose (x)  y = Neg (t)",
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
    found = evaluate_movement(model.graph.node, "y", feed)
    (expected,) = ReferenceEvaluator(model).run(None, feed)
    assert found is not None
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("body", OTHERS)
def test_what_does_more_than_move_or_can_not_run_is_left_to_the_reference(body: str) -> None:
    model, feed = nodes_of(body)
    assert evaluate_movement(model.graph.node, "y", feed) is None


def test_every_row_is_held_to_the_reference() -> None:
    from amp_rewrite.rewrite.limited_evaluation import _ROWS

    assert {word for body in MOVES for word in body.split()} >= _ROWS.keys()
