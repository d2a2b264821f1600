"""What is raised together, what the gate refuses, what pins ask for, and what the report says of it."""

from __future__ import annotations

import pytest
from onnx import ModelProto

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.coloring.paint import paint
from amp_rewrite.decide.coloring.problem import PaintOptions
from amp_rewrite.decide.plan import plan_casts
from amp_rewrite.decide.reasons import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.reports.explain import explained
from amp_rewrite.rewrite.apply import apply
from amp_rewrite.settings.op_lists import load_lists
from support.half_models import HALF, half, raised, raised_ops, rules, told, weights, written

# -- bodies and sequences ------------------------------------------------------------------------------

LOOP = """trips = Constant <value = int64 {3}> ()
    yes = Constant <value = bool {1}> ()
    y = Loop (trips, yes, x) <body = b (int64 n, bool go, float16[8,8] s) => (bool on, float16[8,8] t) {
        on = Identity (go)
        a = Exp (s)
        c = MatMul (a, w)
        t = Tanh (c)
    }>"""


def test_in_a_loop_the_edges_keep_their_type_and_weights_are_widened_outside() -> None:
    result = raised(half(LOOP), "*").model
    assert told(result) == [
        "trips = Constant()",
        "yes = Constant()",
        "s_float32 = Cast<float32>(s)",
        "on = Identity(go)",
        "a = Exp(s_float32)",
        "c = MatMul(a, w)",
        "t_float32 = Tanh(c)",
        "t = Cast<float16>(t_float32)",
        "y = Loop(trips, yes, x)",
    ]
    assert weights(result) == {"w": "float32"}


def test_a_sequence_of_the_models_edge_holds_its_ops_in_the_low_type() -> None:
    body = "p = Constant <value = int64 {0}> ()  a = SequenceAt (s, p)  y = Exp (a)"
    result = raised(half(body, "seq(float16[8,8]) s"), "op=SequenceAt", "op=Exp")
    assert rules(result) == {
        "Constant_0": ("int64", None),
        "SequenceAt_1": ("float16", "unraised"),
        "Exp_2": ("float32", "raised"),
    }


# -- what cannot be in two types ------------------------------------------------------------------------

HELD = """<float16 two = {16384}, float16 eps = {1024},
    float16[8] gain = {15360, 15360, 15360, 15360, 15360, 15360, 15360, 15360},
    float16[8] shift = {0, 0, 0, 0, 0, 0, 0, 0}>"""
NORM = """m = ReduceMean <axes = [-1]> (x)
    d = Sub (x, m)
    p = Pow (d, two)
    v1 = ReduceMean <axes = [-1]> (p)
    e = Add (v1, eps)
    s = Sqrt (e)
    n = Div (d, s)
    g = Mul (n, gain)
    z = Add (g, shift)
    y = Relu (z)"""
BODY_OF_NORM = {"ReduceMean_1", "Sub_2", "Pow_3", "ReduceMean_4", "Add_5", "Sqrt_6", "Div_7"}


def norm(opset: int) -> ModelProto:
    text = f"x = Neg (given)  {NORM}"
    return half(text, f"{HALF} given", opset=opset, held=HELD)


def test_a_norm_that_is_written_out_is_raised_whole() -> None:
    """Raised alone, Pow would round its square to float16 again before anyone reads it."""
    result = raised(norm(opset=16), "op=Pow")
    assert raised_ops(result) == BODY_OF_NORM | {"Mul_8", "Add_9"}
    assert [row.because for row in result.report.raised if row.name == "Sub_2"] == ["Pow_3"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("op=Pow", BODY_OF_NORM),  # what is normalized is float16
        ("op=Mul", BODY_OF_NORM),
        ("op=Neg", {"Neg_0", "Mul_8", "Add_9"}),  # what is normalized is float32
        ("*", {"Neg_0", "Relu_10", "Mul_8", "Add_9"} | BODY_OF_NORM),
        ("op=Relu", {"Relu_10"}),
    ],
)
def test_scale_and_bias_of_a_norm_have_the_type_of_what_is_normalized(keep: str, expected: set[str]) -> None:
    """From opset 17 on onnxruntime fuses it to one LayerNormalization, and refuses a model that differs there."""
    ort = pytest.importorskip("onnxruntime")
    result = raised(norm(opset=17), keep)
    assert raised_ops(result) == expected
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(written(result.model), options, providers=["CPUExecutionProvider"])


# -- what the gate says ----------------------------------------------------------------------------------


ATTENTION = "y, k1, v1 = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, x, x, k, k, s, t)"
ATTENTION_INPUTS = "float16[1,1,8] x, float16[1,1,8,8] k, int32[1] s, int32 t"


def test_a_kernel_is_not_lost_by_raising() -> None:
    """CUDA has GroupQueryAttention in float16 and bfloat16 alone."""
    model = half(ATTENTION, ATTENTION_INPUTS, "float16[1,1,8] y")
    assert rules(raised(model, "*")) == {"GroupQueryAttention_0": ("float16", "unraised")}
    assert rules(raised(model, "*", target="onnx")) == {"GroupQueryAttention_0": ("float32", "raised")}


def test_variables_that_no_kernel_mixes_are_raised_together() -> None:
    channels = "float16[4] k"
    model = half("y = BatchNormalization (x, k, k, k, k)", f"float16[2,4,4] x, {channels}", "float16[2,4,4] y")
    (row,) = [row for row in raised(model, "*").report.rows if row.op == "BatchNormalization"]
    assert row.variables == {"T": "float32", "T1": "float32", "T2": "float32"}


# -- pins ------------------------------------------------------------------------------------------------


def coloring(model: ModelProto, *pins: Pin, **options: dict[int, str]) -> tuple[View, Coloring]:
    view = View.of(Model.load(model))
    asked = PaintOptions(pins=pins, **options)  # type: ignore[arg-type]
    return view, paint(view, load_lists(DType.FLOAT16), DType.FLOAT16, asked)


def test_a_pin_from_data_raises_and_one_from_a_rule_does_not() -> None:
    model = half("a = Exp (x)  y = Tanh (a)")
    seen = Pin(0, "overflow", None, "absmax 1e5", raises=True)  # type: ignore[arg-type]
    foreseen = Pin(1, "epsilon", None, "1e-12")  # type: ignore[arg-type]
    view, found = coloring(model, seen, foreseen)
    assert {op: (p.rule, p.note) for (op, _), p in found.paints.items()} == {0: ("raised", "overflow: absmax 1e5")}
    assert told(apply(view, plan_casts(view, found)).to_proto()) == [
        "x_float32 = Cast<float32>(x)",
        "a = Exp(x_float32)",
        "a_float16 = Cast<float16>(a)",
        "y = Tanh(a_float16)",
    ]


# -- the report ------------------------------------------------------------------------------------------


def test_the_report_counts_what_is_raised_and_says_who_asked() -> None:
    result = raised(half("[one] a = MatMul (x, w)  [two] b = Exp (a)  [three] y = MatMul (b, w)"), "one", "op=Exp")
    totals = result.report.totals
    assert (totals.raised, totals.compute_raised, totals.compute_lowered, totals.compute_ops) == (2, 1, 1, 2)
    text = result.report.text()
    assert (
        "2 ops of a low type raised to float32\n  1  kept by 'one' (1 MatMul)\n  1  kept by 'op=Exp' (1 Exp)\n" in text
    )
    assert "why" not in text
    assert str(explained(result.report, ["one"])) == (
        "one (MatMul) is float32: raised\n"
        "    low in the model, and raised to float32: kept by 'one'\n"
        "    on the allow list (float16.yaml:26): matrix product on tensor cores, float32 accumulation\n"
    )
