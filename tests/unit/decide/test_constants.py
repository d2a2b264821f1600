"""Which ops stay float32 because of a constant, and which constants saturate instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx.parser
import pytest

from amp_rewrite.decide.hazards.constants import constant_range
from amp_rewrite.decide.hazards.constants import overflow as overflowing
from amp_rewrite.decide.hazards.constants import underflow as underflowing
from amp_rewrite.decide.hazards.find import Hazards, find_hazards
from amp_rewrite.decide.hazards.magnified import guarded
from amp_rewrite.decide.hazards.mask_fills import mask_fill, saturated
from amp_rewrite.decide.hazards.rule import HeldOp
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support.held import pins_of

F16, BF16 = DType.FLOAT16, DType.BFLOAT16
LOWEST = "-3.4028234663852886e38"

FILL, HARMLESS = "the fill value -3.40282e+38 becomes", "harmless: it only selects"


def view_of(text: str, opset: int = 18) -> View:
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>\n'
    return View.of(Model.load(onnx.parser.parse_model(head + text)))


def overflow(view: View, to: DType) -> list[Pin]:
    """Both rules about constants that are too large, in the order in which they are run."""
    return [
        *pins_of(mask_fill(view, to), view, mask_fill.reason),
        *pins_of(overflowing(view, to), view, constant_range.reason),
    ]


def underflow(view: View, to: DType) -> list[Pin]:
    return pins_of(underflowing(view, to), view, constant_range.reason)


def pinned(rule: Callable[[View, DType], Iterable[Pin | HeldOp]], text: str, to: DType = F16) -> dict[str, str]:
    """Rule by first result of the pinned op."""
    view = view_of(text)
    pins = [pin if isinstance(pin, Pin) else Pin(pin.op, constant_range.reason, None, "") for pin in rule(view, to)]
    return {view.ops[pin.op].node.output[0]: pin.rule for pin in pins}


# -- overflow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "held"), [("65504", {}), ("70000", {"y": "constant_range"}), ("inf", {})])
def test_an_op_stays_float32_exactly_when_its_constant_rounds_to_infinity(value: str, held: dict[str, str]) -> None:
    view = view_of("g (float[N] x) => (float[N] y) <float[1] c = {1}> { y = Mul (x, c) }")
    tensor = view.model.proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.float_data.append(float(value))
    view = View.of(view.model)
    assert {view.ops[p.op].node.output[0]: p.rule for p in overflow(view, F16)} == held


def test_a_weight_that_overflows_float16_fits_bfloat16() -> None:
    text = "g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, -1e6, 3}> { y = MatMul (x, w) }"
    assert pinned(overflow, text) == {"y": "constant_range"}
    assert pinned(overflow, text, BF16) == {}


@pytest.mark.parametrize(
    ("stated", "held"),
    [
        ("values_floats = [1.0, 65504.0]", {}),
        ("values_floats = [1.0, 1e6]", {"u": "constant_range", "y": "constant_range"}),
        ("values_floats = [1.0, 2.0], default_float = -1e6", {"u": "constant_range", "y": "constant_range"}),
        ("values_tensor = float[2] {1, 1e6}", {"u": "constant_range", "y": "constant_range"}),
        ("values_floats = [7e4, 2.0], default_float = 65504.0", {"u": "constant_range", "y": "constant_range"}),
    ],
)
def test_readers_of_a_label_encoders_numbers_stay_float32_where_they_overflow(
    stated: str, held: dict[str, str]
) -> None:
    head = '<ir_version: 9, opset_import: ["": 20, "ai.onnx.ml": 4]>\n'
    text = f"""g (int64[2,2] x, float[2,2] w) => (float[2,2] y) {{
        l = ai.onnx.ml.LabelEncoder <keys_int64s = [1, 2], {stated}> (x)
        u = Transpose (l)
        y = MatMul (u, w)
    }}"""
    view = View.of(Model.load(onnx.parser.parse_model(head + text)))
    assert {view.ops[pin.op].node.output[0]: pin.rule for pin in overflow(view, F16)} == held
    assert list(overflow(view, BF16)) == []


def test_copies_of_an_overflowing_constant_and_their_readers_alone_stay_float32() -> None:
    text = """g (int64[N] i, float[N,2] x) => (float[N,2] y, float[N,2] z) <float[2,2] table = {1, 2, 1e6, 3}> {
        row = Gather (table, i)
        y = Add (x, row)
        z = Relu (y)
    }"""
    assert pinned(overflow, text) == {"row": "constant_range", "y": "constant_range"}


def test_an_input_that_no_lowering_would_retype_is_no_reason() -> None:
    text = """g (float[1,1,2,2] x) => (float[1,1,H,W] y)
        <float[4] scales = {1, 1, 1e6, 1e6}, float[8] roi = {0, 0, 0, 0, 1, 1, 1e6, 1e6}> {
        y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (x, roi, scales)
    }"""
    assert pinned(overflow, text) == {}


def test_an_overridable_weight_is_no_constant() -> None:
    text = "g (float[N] x, float[1] c = {1e6}) => (float[N] y) { y = Mul (x, c) }"
    assert pinned(overflow, text) == {}


# -- masks ------------------------------------------------------------------------------------------


def test_a_where_mask_saturates_and_its_softmax_is_free() -> None:
    text = f"""g (bool[B,S] mask, float[B,S] q) => (float[B,S] y) <float far = {{{LOWEST}}}> {{
        s = Where (mask, q, far)
        y = Softmax (s)
    }}"""
    for to, bound in ((F16, "-65504"), (BF16, "-3.38953e+38")):
        found = find_hazards(view_of(text), to)
        assert found.pins == ()
        assert found.findings == (Finding("saturated", "far", f"{FILL} {bound} · {HARMLESS}"),)
        assert {view_of(text).value_name(v) for v in found.saturate} == {"far", "s"}


def test_a_where_mask_before_a_decomposed_softmax_saturates() -> None:
    text = f"""g (bool[B,S] mask, float[B,S] q) => (float[B,S] y) <float far = {{{LOWEST}}}> {{
        s = Where (mask, q, far)
        m = ReduceMax <keepdims = 1> (s)
        d = Sub (s, m)
        e = Exp (d)
        t = ReduceSum <keepdims = 1> (e)
        y = Div (e, t)
    }}"""
    assert pinned(overflow, text) == {}


@pytest.mark.parametrize("to", [F16, BF16])
@pytest.mark.parametrize(
    "mask",
    [
        "n = Sub (one, m)  bias = Mul (n, far)",
        "b = Cast <to = 9> (m)  bias = Where (b, zero, far)",
        "n = Sub (one, m)  p = Mul (n, high)  bias = Neg (p)",
    ],
)
def test_an_additive_mask_stays_float32_from_its_constant_to_its_softmax(mask: str, to: DType) -> None:
    text = f"""g (float[B,1,1,S] m, float[B,H,Q,D] q, float[B,H,D,S] k) => (float[B,H,Q,S] y)
        <float far = {{{LOWEST}}}, float high = {{{LOWEST[1:]}}}, float one = {{1}},
         float zero = {{0}}, float d = {{8}}> {{
        {mask}
        raw = MatMul (q, k)
        scaled = Div (raw, d)
        s = Add (scaled, bias)
        y = Softmax (s)
    }}"""
    found = pinned(overflow, text, to)
    assert saturated(view_of(text), to)[1] == ()
    assert set(found.values()) == {"mask_fill"}
    assert {"bias", "s", "y"} <= found.keys()
    assert not {"raw", "scaled", "n"} & found.keys()


def test_a_mask_that_is_just_the_lowest_float16_is_additive_too() -> None:
    text = """g (float[B,S] m, float[B,S] q) => (float[B,S] y) <float far = {-65504}> {
        bias = Mul (m, far)
        s = Add (q, bias)
        y = Softmax (s)
    }"""
    assert pinned(overflow, text) == dict.fromkeys(("bias", "s", "y"), "mask_fill")
    assert pinned(overflow, text, BF16) == {}
    assert saturated(view_of(text), F16) == (frozenset(), ())


def test_one_mask_serves_every_layer_and_holds_each_of_their_softmaxes() -> None:
    layers = "".join(f"s{i} = Add (q, bias)  y{i} = Softmax (s{i})\n" for i in range(3))
    text = f"""g (bool[B,S] m, float[B,S] q) => (float[B,S] y2) <float far = {{{LOWEST}}}, float zero = {{0}}> {{
        bias = Where (m, zero, far)
        {layers}
    }}"""
    assert pinned(overflow, text).keys() == {"bias", "s0", "y0", "s1", "y1", "s2", "y2"}


def test_a_small_additive_mask_is_free() -> None:
    text = """g (float[B,S] m, float[B,S] q) => (float[B,S] y) <float far = {-10000}> {
        bias = Mul (m, far)
        s = Add (q, bias)
        y = Softmax (s)
    }"""
    assert pinned(overflow, text) == {}


def test_a_float_attention_mask_saturates() -> None:
    text = f"""g (bool[Q,S] m, float[B,H,Q,D] q, float[B,H,S,D] k) => (float[B,H,Q,D] y)
        <float far = {{{LOWEST}}}, float zero = {{0}}> {{
        bias = Where (m, zero, far)
        y = Attention (q, k, k, bias)
    }}"""
    view = view_of(text, opset=23)
    found = find_hazards(view, F16)
    assert found.pins == ()
    assert {view.value_name(v) for v in found.saturate} == {"far", "bias"}


def test_a_constant_attention_mask_saturates() -> None:
    text = f"""g (float[B,H,2,D] q, float[B,H,2,D] k) => (float[B,H,2,D] y) <float[2,2] m = {{0, {LOWEST}, 0, 0}}> {{
        y = Attention (q, k, k, m)
    }}"""
    found = find_hazards(view_of(text, opset=23), F16)
    assert found.pins == ()
    assert found.findings == (Finding("saturated", "m", f"{FILL} -65504 · {HARMLESS}"),)


def test_a_fill_made_by_constant_of_shape_saturates() -> None:
    text = f"""g (int64[1] n, bool[N] m, float[N] x) => (float[N] y) {{
        fill = ConstantOfShape <value = float[1] {{{LOWEST}}}> (n)
        s = Where (m, x, fill)
        y = Softmax (s)
    }}"""
    view = view_of(text)
    found = find_hazards(view, F16)
    assert found.pins == ()
    assert found.findings == (Finding("saturated", "fill", f"{FILL} -65504 · {HARMLESS}"),)


def test_the_bounds_of_a_clip_saturate_and_carry_no_mask() -> None:
    text = f"""g (float[B,S] x, float[B,S] q) => (float[B,S] y) <float far = {{{LOWEST}}}, float high = {{1e6}}> {{
        c = Clip (x, far, high)
        s = Add (q, c)
        y = Softmax (s)
    }}"""
    assert pinned(overflow, text) == {}
    assert [f.subject for f in saturated(view_of(text), F16)[1]] == ["far", "high"]


def test_real_data_in_a_where_is_never_clamped() -> None:
    text = """g (bool[2] m, float[2] x) => (float[2] y) <float[2] data = {-70000, -80000}> { y = Where (m, x, data) }"""
    assert pinned(overflow, text) == {"y": "constant_range"}
    assert saturated(view_of(text), F16)[1] == ()


def test_a_huge_factor_that_no_softmax_reads_stays_float32() -> None:
    text = "g (float[N] x) => (float[N] y) <float far = {-1e9}> { y = Mul (x, far) }"
    assert pinned(overflow, text) == {"y": "constant_range"}
    assert saturated(view_of(text), F16)[1] == ()


# -- epsilon ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "held"),
    [
        ("a = Add (v, eps)  s = Sqrt (a)  y = Div (x, s)", {"a", "s", "y"}),
        ("a = Max (v, eps)  y = Div (x, a)", {"a", "y"}),
        ("a = Clip (v, eps)  e = Expand (a, n)  y = Div (x, e)", {"a", "e", "y"}),
        ("a = Add (v, eps)  r = Reciprocal (a)  y = Mul (x, r)", {"a", "r", "y"}),
        ("a = Add (v, eps)  r = Pow (a, half)  y = Mul (x, r)", {"a", "r", "y"}),
        ("a = Add (v, eps)  s = Sqrt (a)  r = Div (one, s)  y = Mul (x, r)", {"a", "s", "r", "y"}),
        ("a = Add (eps, v)  y = Log (a)", {"a", "y"}),
        ("a = Where (b, eps, v)  y = Div (x, a)", {"a", "y"}),
        ("a = Add (v, eps)  y = Div (a, x)", set()),
        ("a = Add (v, eps)  y = Pow (a, two)", set()),
        ("a = Add (v, eps)  r = Relu (a)  y = Mul (x, r)", set()),
        ("a = Add (v, large)  s = Sqrt (a)  y = Div (x, s)", set()),
        ("a = Add (v, minus)  s = Sqrt (a)  y = Div (x, s)", set()),
    ],
)
def test_an_epsilon_below_the_normal_range_holds_its_chain(body: str, held: set[str]) -> None:
    text = f"""g (float[N] x, float[N] v, bool[N] b, int64[1] n) => (float[N] y)
        <float eps = {{1e-5}}, float large = {{1e-3}}, float minus = {{-1e-5}}, float half = {{-0.5}},
         float two = {{2}}, float one = {{1}}> {{ {body} }}"""
    assert pinned(guarded, text).keys() == held
    assert pinned(guarded, text, BF16) == {}


def test_a_factor_that_vanishes_in_part_is_free() -> None:
    text = "g (float[N,2] x) => (float[N,2] y) <float[2] c = {1, 1e-9}> { y = Mul (x, c) }"
    assert pinned(underflow, text) == {}


def test_a_subnormal_divisor_holds_the_division_and_a_factor_only_if_it_vanishes() -> None:
    text = "g (float[N] x) => (float[N] y) <float c = {%s}> { y = %s (x, c) }"
    for op, held in (("Div", {"1e-5": True, "1e-9": True, "1e-4": False}), ("Mul", {"1e-5": False, "1e-9": True})):
        for value, expected in held.items():
            assert (pinned(underflow, text % (value, op)) == {"y": "constant_range"}) is expected, (op, value)


@pytest.mark.parametrize(("opset", "held"), [(21, 1), (13, 0)])
def test_a_tiny_quantization_scale_holds_its_op_where_the_scale_could_be_lowered(opset: int, held: int) -> None:
    text = """g (int8[N] x) => (float[N] y) <float scale = {2e-8}> { y = DequantizeLinear (x, scale) }"""
    assert len(list(underflow(view_of(text, opset), F16))) == held


@pytest.mark.parametrize(("scale", "held"), [("2e-8", {"y": "constant_range"}), ("2e-2", {})])
def test_a_quantizer_stays_float32_where_its_scale_would_vanish(scale: str, held: dict[str, str]) -> None:
    text = "g (float[N] x) => (int8[N] y) <float s = {%s}, int8 z = {0}> { y = QuantizeLinear (x, s, z) }"
    view = view_of(text % scale, 21)
    assert {view.ops[pin.op].node.output[0]: pin.rule for pin in underflow(view, F16)} == held


# -- statistics -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "eps", "held"),
    [
        ("var = {1, 1e-6}", "1e-5", True),
        ("var = {1, 1e-6}", "1e-3", False),
        ("var = {1, 0}", "1e-5", True),
        ("var = {1, 1e-3}", "1e-5", False),
        ("var = {1, 1e6}", "1e-5", True),
        ("mean = {0, -1e6}", "1e-5", True),
        ("mean = {0, 1e-7}", "1e-5", False),
        ("scale = {1, 7e4}", "1e-5", True),
    ],
)
def test_batch_normalization_stays_float32_when_its_statistics_leave_the_range(
    statistic: str, eps: str, held: bool
) -> None:
    given = {"scale": "{1, 1}", "bias": "{0, 0}", "mean": "{0, 0}", "var": "{1, 1}"}
    name, values = statistic.split(" = ")
    constants = ", ".join(f"float[2] {n} = {v}" for n, v in {**given, name: values}.items())
    text = f"""g (float[B,2,H,W] x) => (float[B,2,H,W] y) <{constants}> {{
        y = BatchNormalization <epsilon = {eps}> (x, scale, bias, mean, var)
    }}"""
    assert pinned(constant_range, text) == ({"y": "constant_range"} if held else {})


def test_a_model_without_hazards_has_none() -> None:
    assert find_hazards(view_of("g (float[N] x) => (float[N] y) { y = Relu (x) }"), F16) == Hazards(guarded=True)
