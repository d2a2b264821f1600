"""The safety rules together: which rule speaks for an op, and what the sum of them says."""

from __future__ import annotations

import onnx.parser

from amp_rewrite.decide.hazards.find import PINNING, find_hazards
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View


def view_of(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')))


def rules(text: str) -> dict[str, str]:
    """The rule of each pin, by first result of the op."""
    view = view_of(text)
    return {view.ops[pin.op].node.output[0]: pin.rule for pin in find_hazards(view, DType.FLOAT16).pins}


def test_the_first_of_several_rules_speaks_for_an_op_and_each_op_has_one_pin() -> None:
    text = """g (int64[1] n, float[N] x) => (float[K] y, bool[1] z) <float seven = {7}> {
        f = Cast <to = 1> (n)
        d = Div (f, seven)
        r = Floor (d)
        i = Cast <to = 7> (r)
        y = Expand (x, i)
        z = Equal (f, seven)
    }"""
    assert rules(text) == {**dict.fromkeys("fdri", "whole_number"), "z": "whole_number"}


def test_every_rule_is_run() -> None:
    text = """g (int64[N] n, float[N] x, float[1,2,H,W] image, float[N] m, float[N] wave, int64 trips, bool yes,
           float[M,4] features, float[4,16] w, float8e5m2[N] codes, float step,
           int8[N] bytes)
        => (float[K] y, bool[N] z, float[N] sine, float[1,2,H,W] normal, float[N] p, float[N] big, float[N] small,
            float[N] root, float[N] last, float[N] share, float table,
            float[M,16] at, float[M,16] away, float[N] decoded, float[1] product, float[M,4] grown,
            float[M,1] spread, float[N] surprise, float[M,1] average, float[M,16] nearest, float[M,4] moved,
            int8[N] squashed)
        <float seven = {7}, float[2] ones = {1, 1}, float[2] zeros = {0, 0}, float far = {-3.4e38}, float huge = {1e6},
         float[4,4] placeholder = {5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4, 5e4},
         float least = {1e-9}, float eps = {1e-6}, int64[1] k = {1}, float fine = {0.1}, int8 nought = {0},
         float[16] grid = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
         float[4,1] fourth = {0.25, 0.25, 0.25, 0.25},
         float[16] slope = {80, 75, 70, 65, 60, 55, 50, 45, 40, 35, 30, 25, 20, 15, 10, 5},
         float[4,4] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}, float hundredth = {0.01}> {
        average = MatMul (features, fourth)
        logits = MatMul (features, w)
        biased = Add (logits, slope)
        nearest = Softmax (biased)
        f1 = MatMul (features, v)  d1 = Mul (f1, hundredth)  s1 = Add (features, d1)
        f2 = MatMul (s1, v)  d2 = Mul (f2, hundredth)  s2 = Add (s1, d2)
        f3 = MatMul (s2, v)  d3 = Mul (f3, hundredth)  s3 = Add (s2, d3)
        f4 = MatMul (s3, v)  d4 = Mul (f4, hundredth)  moved = Add (s3, d4)
        decoded = DequantizeLinear (codes, step)
        floats = DequantizeLinear (bytes, fine)
        squash = Sigmoid (floats)
        squashed = QuantizeLinear (squash, fine, nought)
        power = Mul (features, features)
        mean_power = ReduceMean <axes = [-1]> (power)
        mean = ReduceMean <axes = [-1]> (features)
        power_mean = Mul (mean, mean)
        spread = Sub (mean_power, power_mean)
        odds = Sigmoid (wave)
        surprise = Log (odds)
        product = ReduceProd (x)
        grown = MatMul (features, placeholder)
        boxes = MatMul (features, w)
        at = Add (boxes, grid)
        square = ReduceSumSquare (features, k)
        scores = MatMul (features, w)
        away = Sub (square, scores)
        e = Exp (x)
        i = Cast <to = 7> (e)
        y = Expand (x, i)
        f = Cast <to = 1> (n)
        z = Equal (f, seven)
        turns = Mul (wave, seven)
        sine = Sin (turns)
        normal = BatchNormalization (image, ones, zeros, zeros, zeros)
        bias = Mul (m, far)
        s = Add (x, bias)
        p = Softmax <axis = 0> (s)
        big = Mul (x, huge)
        small = Mul (x, least)
        a = Add (x, eps)
        root = Sqrt (a)
        elements = Size (image)
        held = Cast <to = 1> (elements)
        share = Div (wave, held)
        table = Mul (seven, seven)
        last = Loop (trips, yes, x) <
            body = l (int64 at, bool go, float[N] state) => (bool more, float[N] next) {
                more = Identity (go)
                next = Add (state, seven)
            }
        >
    }"""
    assert rules(text) == {
        "e": "whole_number",
        "i": "whole_number",
        "f": "whole_number",
        "z": "whole_number",
        "next": "running_sum",
        "held": "whole_number",
        "share": "whole_number",
        "turns": "position",
        "normal": "constant_range",
        "bias": "mask_fill",
        "s": "mask_fill",
        "p": "mask_fill",
        "big": "constant_range",
        "small": "constant_range",
        "a": "magnified",
        "root": "magnified",
        "table": "folded",
        "at": "position",
        "scores": "cancellation",
        "away": "cancellation",
        "decoded": "constant_range",
        "squash": "quantized",
        **dict.fromkeys(("power", "mean_power", "mean", "power_mean", "spread"), "cancellation"),
        **dict.fromkeys(("odds", "surprise"), "magnified"),
        "average": "running_sum",
        **dict.fromkeys(("biased", "nearest"), "position"),
        **dict.fromkeys(("s1", "s2", "s3", "moved"), "running_sum"),
    }
    assert len(PINNING) == 10


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
