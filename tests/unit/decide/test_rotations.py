"""Rotations of pairs, and sums that look like them."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.decide.bounds.rotation import rotation
from amp_rewrite.files.model import Model
from amp_rewrite.ir.shapes.infer import known_dims
from amp_rewrite.ir.shapes.onnx_shapes import shape_at
from amp_rewrite.ir.view import View

CONSTANTS = """int64[1] zero = {0}, int64[1] half = {4}, int64[1] end = {8}, int64[1] far = {9223372036854775807},
    int64[1] last = {-1}, int64[1] third = {2}, int64[1] one = {1}, int64[1] two = {2}, int64[2] sizes = {4, 4},
    int64[2] uneven = {2, 6}, int64[1] front = {-8}, int64[1] middle = {-4}, float two_thirds = {0.5},
    float[8] cos = {0.6, 1, 0, 0.6, 0.6, 1, 0, 0.6}, float[8] sin = {0.8, 0, 1, 0.8, 0.8, 0, 1, 0.8},
    float[8] other = {0.8, 0, 1, 0.8, 0.8, 0, 1, 0}"""
HALVES = "a = Slice (x, zero, half, last) b = Slice (x, half, end, last)"
TURN = HALVES + " n = Neg (b) t = Concat <axis = -1> (n, a)"
ANGLES = " e = Concat <axis = -1> (angle, angle) c = Cos (e) s = Sin (e)"
SUM = " p = Mul (x, c) q = Mul (t, s) y = Add (p, q)"
TABLES = " p = Mul (x, cos) q = Mul (t, sin) y = Add (p, q)"
PAIRS, APART = ("x", "t", 1.0, True), ("x", "t", 1.0, False)


def found(body: str) -> tuple[str, str, float, bool] | None:
    text = f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[1,4,8] x, float[4,4] angle) => (float[1,4,8] y) <{CONSTANTS}> {{ {body} }}"""
    view = View.of(Model.load(onnx.parser.parse_model(text)))
    dims = known_dims(view)
    turned = rotation(view, view.ops[-1], lambda value: shape_at(dims, view, value))
    if turned is None:
        return None
    return view.value_name(turned.x), view.value_name(turned.y), round(turned.factor, 5), turned.pairs


@pytest.mark.parametrize(
    "turn",
    [
        TURN,
        TURN.replace("last", "two"),
        TURN.replace("axis = -1", "axis = 2"),
        TURN.replace("end, last", "far, last, one"),
        TURN.replace("zero, half", "front, middle").replace("half, end", "middle, far"),
        TURN.replace(HALVES, "a, b = Split <axis = -1, num_outputs = 2> (x)"),
        TURN.replace(HALVES, "a, b = Split <axis = 2> (x, sizes)"),
    ],
)
def test_halves_are_turned_by_slices_or_by_a_split(turn: str) -> None:
    assert found(turn + ANGLES + SUM) == PAIRS
    assert found(turn + TABLES) == PAIRS


@pytest.mark.parametrize(
    "turn",
    [
        TURN.replace("(n, a)", "(a, n)"),
        TURN.replace("Neg", "Abs"),
        TURN.replace("axis = -1", "axis = 0"),
        TURN.replace("half, end", "third, end"),
        TURN.replace("zero, half", "third, half"),
        TURN.replace("half, end, last", "half, end, last, two"),
        TURN.replace("last", "one"),
        TURN.replace(HALVES, "a, b = Split <axis = 1, num_outputs = 2> (x)"),
        TURN.replace(HALVES, "a, b = Split <axis = -1> (x, uneven)"),
        TURN.replace(HALVES, "b, a = Split <axis = -1, num_outputs = 2> (x)"),
        TURN.replace("(x, zero", "(angle, zero"),
        "t = Relu (x)",
    ],
)
def test_other_values_beside_x_are_rotated_with_it_but_not_in_pairs(turn: str) -> None:
    assert found(turn + ANGLES + SUM) == APART
    assert found(turn + TABLES) in (APART, ("t", "x", 1.0, False))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("Add", "Sub"), APART),
        (("(angle, angle)", "(angle, a)"), APART),
        (("c = Cos (e)", "d = Cos (e) c = Mul (d, two_thirds)"), None),
        (
            ("s = Sin (e)", "d = Cos (e) f = Sin (e) c = Mul (d, two_thirds) s = Mul (two_thirds, f)"),
            (*PAIRS[:2], 0.5, True),
        ),
        (("s = Sin (e)", "f = Sin (e) s = Identity (f)"), None),
        (("s = Sin (e)", "s = Cos (e)"), None),
        (("s = Sin (e)", "f = Neg (e) s = Sin (f)"), None),
        (("p = Mul (x, c)", "p = Mul (c, x)"), PAIRS),
        (("p = Mul (x, c)", "p = Add (x, c)"), None),
        (("(p, q)", "(q, p)"), PAIRS),
    ],
)
def test_both_waves_have_one_angle_and_one_factor(
    change: tuple[str, str], expected: tuple[str, str, float, bool] | None
) -> None:
    angles = ANGLES.replace(" c = Cos (e)", "") if "c = Mul" in change[1] and change[0].startswith("s") else ANGLES
    assert found((TURN + angles + SUM).replace(*change)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("t, sin", "t, other"), ("x", "t", 1.0, False)),
        (("x, cos", "cos, x"), PAIRS),
        (("(p, q)", "(q, p)"), PAIRS),
        (("Add", "Sub"), APART),
        (("t, sin", "t, cos"), ("x", "t", 1.41421, True)),
        (("t, sin", "t, two_thirds"), None),
        (("t, sin", "t, x"), None),
    ],
)
def test_tables_rotate_by_their_largest_radius(
    change: tuple[str, str], expected: tuple[str, str, float, bool] | None
) -> None:
    assert found((TURN + TABLES).replace(*change)) == expected
