"""Half-precision models: named ops are raised to float32, or all are converted to the other low type."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.explain import explained
from support.corpus import exported
from support.half_models import HALF, half, listing, raised, raised_ops, rules, weights, written

RAISED: dict[str, tuple[str, dict[str, str], str, str]] = {
    "an op between two Casts": (
        "a = Relu (x)  b = Exp (a)  y = Relu (b)",
        {},
        "op=Exp",
        "a = Relu(x)  a_float32 = Cast<float32>(a)  b = Exp(a_float32)  b_float16 = Cast<float16>(b)"
        "  y = Relu(b_float16)",
    ),
    "ops beside each other without Casts": (
        "a = Relu (x)  b = Exp (a)  c = Tanh (b)  y = Relu (c)",
        {},
        "op=Exp op=Tanh",
        "a = Relu(x)  a_float32 = Cast<float32>(a)  b = Exp(a_float32)  c = Tanh(b)  c_float16 = Cast<float16>(c)"
        "  y = Relu(c_float16)",
    ),
    "one Cast for all who read a value in a type": (
        "a = Exp (x)  b = Exp (x)  c = Relu (a)  d = Neg (a)  y = Sum (b, c, d)",
        {},
        "op=Exp",
        "x_float32 = Cast<float32>(x)  a = Exp(x_float32)  a_float16 = Cast<float16>(a)  b = Exp(x_float32)"
        "  b_float16 = Cast<float16>(b)  c = Relu(a_float16)  d = Neg(a_float16)  y = Sum(b_float16, c, d)",
    ),
    "an output that is read inside before it is rounded": (
        "a = Exp (x)  y = Tanh (a)",
        {"outputs": f"{HALF} y, {HALF} a"},
        "*",
        "x_float32 = Cast<float32>(x)  a_float32 = Exp(x_float32)  a = Cast<float16>(a_float32)"
        "  y_float32 = Tanh(a_float32)  y = Cast<float16>(y_float32)",
    ),
    "raising beside lowering of the float32 half": (
        "a = MatMul (x, w)  b = Exp (a)  c = Cast <to = 1> (b)  d = MatMul (c, c)  y = Cast <to = 10> (d)",
        {},
        "op=Exp",
        "a = MatMul(x, w)  a_float32 = Cast<float32>(a)  b = Exp(a_float32)  c = Cast<float16>(b)  d = MatMul(c, c)"
        "  y = Identity(d)",
    ),
    "lowered ops behind a Cast that goes": (
        "a = Exp (x)  b = Cast <to = 1> (a)  c = MatMul (b, b)  y = ReduceSum (b)",
        {"outputs": "float[1,1] y, float[8,8] c"},
        "op=Exp",
        "x_float32 = Cast<float32>(x)  a = Exp(x_float32)  a_float16 = Cast<float16>(a)"
        "  c_float16 = MatMul(a_float16, a_float16)  c = Cast<float32>(c_float16)  y = ReduceSum(a)",
    ),
    "a Cast of the model goes with its rounding": (
        "a = Tanh (x)  b = Cast <to = 10> (a)  c = Exp (b)  y = Relu (c)",
        {"inputs": "float[4,4] x"},
        "op=Exp",
        "a = Tanh(x)  c = Exp(a)  c_float16 = Cast<float16>(c)  y = Relu(c_float16)",
    ),
    "not a named Cast that low ops read too": (
        "a = Tanh (x)  b = Cast <to = 10> (a)  c = Exp (b)  y = Sum (b, c)",
        {"inputs": "float[8,8] x"},
        "op=Cast op=Exp",
        "a = Tanh(x)  b = Cast<float16>(a)  c = Exp(a)  c_float16 = Cast<float16>(c)  y = Sum(b, c_float16)",
    ),
    "ops that move a Cast value to raised ops": (
        "a = Cast <to = 10> (i)  b = Transpose (a)  c = Identity (b)  d = Exp (c)  y = Relu (d)",
        {"inputs": "int64[8,8] i"},
        "op=Exp",
        "a = Cast<float32>(i)  b = Transpose(a)  c = Identity(b)  d = Exp(c)  d_float16 = Cast<float16>(d)"
        "  y = Relu(d_float16)",
    ),
    "not those that move it to low ops too": (
        "a = Cast <to = 10> (i)  b = Transpose (a)  c = Exp (b)  y = Sum (b, c)",
        {"inputs": "int64[8,8] i"},
        "op=Exp",
        "a = Cast<float16>(i)  b = Transpose(a)  b_float32 = Cast<float32>(b)  c = Exp(b_float32)"
        "  c_float16 = Cast<float16>(c)  y = Sum(b, c_float16)",
    ),
    "not those that move no Cast value": (
        "b = Transpose (x)  y = Exp (b)",
        {},
        "op=Exp",
        "b = Transpose(x)  b_float32 = Cast<float32>(b)  y_float32 = Exp(b_float32)  y = Cast<float16>(y_float32)",
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_named_ops_compute_in_float32(name: str) -> None:
    body, formals, keep, expected = RAISED[name]
    assert "  ".join(listing(raised(half(body, **formals), *keep.split()).model)) == expected


def test_without_keep_a_half_model_stays_unchanged() -> None:
    model = half("a = MatMul (x, w)  b = Exp (a)  c = Cast <to = 1> (b)  y = Cast <to = 10> (c)")
    assert written(convert(model).model) == written(model)


def test_shape_reads_a_raised_value_without_a_cast() -> None:
    result = raised(
        half("a = Exp (x)  s = Shape (a)  y = Tanh (a)", outputs=f"{HALF} y, int64[2] s"), "op=Exp", "op=Tanh"
    )
    assert listing(result.model) == [
        "x_float32 = Cast<float32>(x)",
        "a = Exp(x_float32)",
        "s = Shape(a)",
        "y_float32 = Tanh(a)",
        "y = Cast<float16>(y_float32)",
    ]
    assert rules(result)["Shape_1"] == ("float32", "shape_follows")


def test_a_shared_weight_keeps_its_low_version() -> None:
    result = raised(half("a = MatMul (x, w)  y = Add (a, w)"), "op=MatMul").model
    assert weights(result) == {"w": "float16", "w_float32": "float32"}
    assert listing(result)[1:] == [
        "a = MatMul(x_float32, w_float32)",
        "a_float16 = Cast<float16>(a)",
        "y = Add(a_float16, w)",
    ]


def test_a_constant_is_widened_for_its_readers_even_if_named_itself() -> None:
    model = half("k = Constant <value = float16[1] {15360}> ()  a = Mul (x, k)  y = Relu (a)")
    result = raised(model, "op=Constant", "op=Mul")
    assert result.plan.bakes[0].to is DType.FLOAT
    (constant,) = [node for node in result.model.graph.node if node.op_type == "Constant"]
    assert numpy_helper.to_array(constant.attribute[0].t) == np.float32(1)
    assert raised(model, "op=Constant").plan.empty


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("a = RandomNormal <dtype = 10, shape = [8, 8], seed = 1.0> ()  y = Neg (a)", f"{HALF} x"),
        ("a = RandomNormalLike <dtype = 10, seed = 1.0> (i)  y = Neg (a)", "int64[8,8] i"),
        ("a = RandomNormalLike <seed = 1.0> (x)  y = Neg (a)", f"{HALF} x"),
        ("a = EyeLike <dtype = 10> (x)  y = Neg (a)", f"{HALF} x"),
        ("a = EyeLike (x)  y = Neg (a)", f"{HALF} x"),
        ("s = Shape (x)  a = ConstantOfShape <value = float16[1] {15360}> (s)  y = Neg (a)", f"{HALF} x"),
        ("a = Cast <to = 10> (i)  y = Neg (a)", "int64[8,8] i"),
    ],
)
def test_a_type_attribute_follows(body: str, inputs: str) -> None:
    result = raised(half(body, inputs), "*").model
    onnx.checker.check_model(result, full_check=True)
    view = View.of(Model.load(result))
    value_id = next(value.id for value in view.values if value.name == "a")
    assert view.dtype(value_id) is DType.FLOAT


def test_only_the_type_inside_a_norm_follows() -> None:
    body = "y = GroupNormalization <num_groups = 16, stash_type = 10> (x, s, s)"
    model = half(body, "float16[1,16,4] x, float16[16] s", "float16[1,16,4] y", opset=21)
    (node,) = [node for node in raised(model, "*").model.graph.node if node.op_type == "GroupNormalization"]
    assert {a.name: a.i for a in node.attribute} == {"num_groups": 16, "stash_type": TensorProto.FLOAT}


def test_a_sequence_at_the_models_edge_keeps_its_ops_low() -> None:
    body = "p = Constant <value = int64 {0}> ()  a = SequenceAt (s, p)  y = Exp (a)"
    result = raised(half(body, "seq(float16[8,8]) s"), "op=SequenceAt", "op=Exp")
    assert rules(result) == {
        "Constant_0": ("int64", None),
        "SequenceAt_1": ("float16", "unraised"),
        "Exp_2": ("float32", "raised"),
    }


CONSTANTS = """<float16 two = {16384}, float16 eps = {1024},
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
    return half(text, f"{HALF} given", opset=opset, constants=CONSTANTS)


def test_a_decomposed_norm_is_raised_whole() -> None:
    """If only Pow were raised, its square would be rounded to float16 again for its readers."""
    result = raised(norm(opset=16), "op=Pow")
    assert raised_ops(result) == BODY_OF_NORM | {"Mul_8", "Add_9"}
    assert [row.because for row in result.report.raised if row.name == "Sub_2"] == ["Pow_3"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("op=Pow", BODY_OF_NORM),  # the normalized value is float16
        ("op=Mul", BODY_OF_NORM),
        ("op=Neg", {"Neg_0", "Mul_8", "Add_9"}),  # the normalized value is float32
        ("*", {"Neg_0", "Relu_10", "Mul_8", "Add_9"} | BODY_OF_NORM),
        ("op=Relu", {"Relu_10"}),
    ],
)
def test_scale_and_bias_of_a_norm_have_the_type_of_its_input(keep: str, expected: set[str]) -> None:
    """From opset 17 on onnxruntime fuses it to one LayerNormalization and refuses mixed types in it."""
    ort = pytest.importorskip("onnxruntime")
    result = raised(norm(opset=17), keep)
    assert raised_ops(result) == expected
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(written(result.model), options, providers=["CPUExecutionProvider"])


ATTENTION = "y, k1, v1 = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, x, x, k, k, s, t)"
ATTENTION_INPUTS = "float16[1,1,8] x, float16[1,1,8,8] k, int32[1] s, int32 t"


def test_a_kernel_is_not_lost_by_raising() -> None:
    """CUDA has GroupQueryAttention only in float16 and bfloat16."""
    model = half(ATTENTION, ATTENTION_INPUTS, "float16[1,1,8] y")
    assert rules(raised(model, "*")) == {"GroupQueryAttention_0": ("float16", "unraised")}
    assert rules(raised(model, "*", target="onnx")) == {"GroupQueryAttention_0": ("float32", "raised")}


def test_variables_that_no_kernel_mixes_are_raised_together() -> None:
    channels = "float16[4] k"
    model = half("y = BatchNormalization (x, k, k, k, k)", f"float16[2,4,4] x, {channels}", "float16[2,4,4] y")
    (row,) = [row for row in raised(model, "*").report.rows if row.op == "BatchNormalization"]
    assert row.variables == {"T": "float32", "T1": "float32", "T2": "float32"}


def test_the_report_counts_raised_ops_and_names_the_option() -> None:
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


OTHER = {"float16": "bfloat16", "bfloat16": "float16"}
NAMES = ("examples/models/digits_cnn.onnx", "tests/models/bert_dynamo20.onnx", "tests/models/gpt2_ts17.onnx")


def text(body: str, *, low: str = "bfloat16", constants: str = "", opset: int = 22) -> ModelProto:
    """Build a model in a low type; `w` and `v` are its weights."""
    head = f'<ir_version: 10, opset_import: ["": {opset}]>'
    proto = onnx.parser.parse_model(f"{head} g ({low}[8,8] x) => ({low}[8,8] y) <{constants}> {{ {body} }}")
    code = DType.parse(low).code
    for name, top in (("w", 1.0), ("v", 1e5)):
        values = np.linspace(-top, top, 64, dtype=np.float32)
        proto.graph.initializer.append(onnx.helper.make_tensor(name, code, (8, 8), values.tolist()))
    return proto


def types(model: object) -> Counter[str]:
    """Count the values of each floating type."""
    dtypes = (value_type.dtype for value_type in View.of(Model.load(model)).types if value_type is not None)
    return Counter(dtype.spelling for dtype in dtypes if dtype is not None and dtype.floating)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", OTHER)
def test_a_half_model_is_lowered_as_far_as_its_float32_model(name: str, to: str) -> None:
    source = exported(name)
    half = convert(source, to=OTHER[to], opset=22).model
    result, direct = convert(half, to=to), convert(source, to=to, opset=22)
    assert result.report.totals.compute_lowered == result.report.totals.compute_ops
    assert result.report.totals.compute_lowered == direct.report.totals.compute_lowered > 0
    assert OTHER[to] not in types(result.model)
    assert f"100% of FLOPs in {to}: " in result.report.text()
    (finding,) = (finding for finding in result.report.findings if finding.kind == "widened")
    assert f" in {OTHER[to]}, decided as if in float32" in finding.message


def test_inputs_and_outputs_keep_their_type_by_default() -> None:
    model = text("a = MatMul (x, w)  y = MatMul (a, w)")
    kept, low = (convert(model, to="float16", io=io).model.graph for io in (None, "low"))
    edges = [[v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)] for graph in (kept, low)]
    assert edges == [[TensorProto.BFLOAT16] * 2, [TensorProto.FLOAT16] * 2]
    assert [sum(node.op_type == "Cast" for node in graph.node) for graph in (kept, low)] == [2, 0]
    wide = convert(model, to="float16", io=["x=float32", "out:low"]).model.graph
    assert [v.type.tensor_type.elem_type for v in (*wide.input, *wide.output)] == [
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
    ]
    unchanged = convert(model, to="float16", io=["low", "keep"]).model.graph
    assert unchanged.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16


def test_ops_that_are_not_lowered_become_float32() -> None:
    result = convert(text("a = Softmax (x)  y = Exp (a)"), to="float16")
    assert types(result.model) == {"bfloat16": 2, "float32": 5}  # two of them unused weights
    assert [finding.kind for finding in result.report.findings] == ["widened"]
    assert {row.dtype for row in result.report.rows if row.op == "Exp"} == {"float32"}
