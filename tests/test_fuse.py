"""What becomes one operator before painting, what does not and why, and that both compute the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.convert import convert
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError
from amp_rewrite.expand import inline_functions, spell_out_casts
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from amp_rewrite.fuse.canonical import Fuse, canonical
from amp_rewrite.fuse.proof import ROUNDINGS, UNIT, doubt
from amp_rewrite.kernels import Kernels
from amp_rewrite.opset import at_opset
from amp_rewrite.policy import Target
from amp_rewrite.view import View

CONSTANTS = """float two = {2}, float three = {3}, float eps = {1e-5}, float one = {1}, float half = {0.5},
    float root2 = {1.41421354}, float k = {0.044715}, float c = {0.797884583}, float minus_half = {-0.5},
    float[4] gain = {1.5, -2, 0.25, 1}, float[4] shift = {0.5, 0, -1, 3}, float[1,1] wide = {1},
    int64[1] last = {-1}, int64[1] first = {0}, int64[2] both = {-2, -1}"""
CENTERED = "m = ReduceMean (x, last)  d = Sub (x, m)  p = Pow (d, two)  v = ReduceMean (p, last)  e = Add (v, eps)  "
LAYER_NORM = CENTERED + "s = Sqrt (e)  n = Div (d, s)  "
RMS_NORM = "p = Mul (x, x)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  n = Div (x, s)  y = Mul (n, gain)"
ERF = "q = Div (x, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)"
TANH = """u = Pow (x, three)  r = Mul (k, u)  a = Add (x, r)  t = Mul (c, a)  b = Tanh (t)  o = Add (b, one)
    h = Mul (half, x)  y = Mul (h, o)"""
SOFTMAX = "m = ReduceMax (x, last)  d = Sub (x, m)  b = Exp (d)  s = ReduceSum (b, last)  y = Div (b, s)"


def model_of(body: str, opset: int = 18, outputs: str = "float[2,4] y", inputs: str = "float[2,4] x") -> ModelProto:
    if opset < 18:
        body = re.sub(r"(ReduceMean|ReduceMax) \((\w+), last\)", r"\1 <axes = [-1]> (\2)", body)
    head = f'<ir_version: 8, opset_import: ["": {opset}]>\ng ({inputs}) => ({outputs}) <{CONSTANTS}>'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    return model


def standard(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    """The model in standard form, and what was said."""
    arguments = {"to": DType.FLOAT16, "target": Target.ORT_CUDA, **options}
    view, told = canonical(View.of(Model.load(model)), **arguments)  # type: ignore[arg-type]
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.to_proto(), [(f.kind, f.subject, f.message) for f in told]


def kinds(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def outputs_of(model: ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feed)))


def agree(a: ModelProto, b: ModelProto, shape: tuple[int, ...] = (2, 4)) -> None:
    """Both compute in float32, in another order, each result a sum of some 10 roundings of at most its magnitude."""
    feed = {"x": np.random.default_rng(7).standard_normal(shape).astype(np.float32)}
    (first,), (second,) = outputs_of(a, feed), outputs_of(b, feed)
    np.testing.assert_allclose(second, first, rtol=0, atol=32 * UNIT * float(np.abs(first).max()))


# -- operators of the standard ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "opset", "expected"),
    [
        (LAYER_NORM + "g = Mul (n, gain)  y = Add (g, shift)", 17, ["LayerNormalization"]),
        (LAYER_NORM + "g = Mul (gain, n)  y = Add (shift, g)", 18, ["LayerNormalization"]),
        (LAYER_NORM + "g = Mul (n, gain)  y = Relu (g)", 18, ["LayerNormalization", "Relu"]),
        (CENTERED + "s = Sqrt (e)  r = Reciprocal (s)  n = Mul (d, r)  y = Mul (n, gain)", 18, ["LayerNormalization"]),
        (RMS_NORM, 23, ["RMSNormalization"]),
        (RMS_NORM.replace("s = Sqrt (e)  n = Div (x, s)", "r = Pow (e, minus_half)  n = Mul (x, r)"), 23, None),
        (ERF, 20, ["Gelu"]),
        (TANH, 20, ["Gelu"]),
        (SOFTMAX, 18, ["Softmax"]),
    ],
)
def test_what_is_written_out_becomes_one_operator(body: str, opset: int, expected: list[str] | None) -> None:
    model = model_of(body, opset)
    made, told = standard(model)
    assert kinds(made) == (expected or ["RMSNormalization"])
    assert [kind for kind, _, _ in told] == ["fused"]
    agree(model, made)


def test_a_fusion_says_what_became_what_and_leaves_no_constant_behind() -> None:
    made, told = standard(model_of(LAYER_NORM + "g = Mul (n, gain)  y = Add (g, shift)"))
    (node,) = made.graph.node
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (node.name, list(node.input), list(node.output)) == ("the_y", ["x", "gain", "shift"], ["y"])
    assert attributes == {"axis": -1, "epsilon": float(np.float32(1e-5))}
    assert {"gain", "shift"} <= {t.name for t in made.graph.initializer}
    assert not {"eps", "last", "two"} & {t.name for t in made.graph.initializer}
    parts = "the_m, the_d, the_p, the_v, the_e, the_s, the_n, the_g, the_y"
    assert told == [("fused", "the_y", f"layer normalization: one LayerNormalization in place of {parts}")]


FIRST_AXIS = LAYER_NORM.replace("last", "first") + "y = Mul (n, gain)"
ENDS_IN_Y = "the one that ends in the_y: "


@pytest.mark.parametrize(
    ("body", "opset", "inputs", "kind", "why"),
    [
        (
            LAYER_NORM + "y = Mul (n, gain)",
            16,
            "",
            "layer_normalization",
            "opset 16 has no LayerNormalization; opset 17 has",
        ),
        (RMS_NORM, 22, "", "rms_normalization", "opset 22 has no RMSNormalization; opset 23 has"),
        (ERF, 19, "", "gelu_erf", "opset 19 has no Gelu; opset 20 has"),
        (FIRST_AXIS, 18, "", "layer_normalization", "it is not over the last axis alone"),
        (FIRST_AXIS.replace("first", "both"), 18, "", "layer_normalization", "it is not over the last axis alone"),
        (
            LAYER_NORM + "y = Mul (n, gain)",
            18,
            "float[A,B] x",
            "layer_normalization",
            "the size of the axis that it normalizes is not known",
        ),
        (
            LAYER_NORM + "y = Mul (n, gain)",
            18,
            "float[2,1] x",
            "layer_normalization",
            "gain is not one number for each of the 1 that it normalizes",
        ),
        (
            LAYER_NORM.replace("(v, eps)", "(v, lift)") + "y = Mul (n, gain)",
            18,
            "float[2,4] x, float lift",
            "layer_normalization",
            "its epsilon is not one constant number that is added below the root",
        ),
        (
            LAYER_NORM.replace("(d, two)", "(d, power)") + "y = Mul (n, gain)",
            18,
            "float[2,4] x, float power",
            "layer_normalization",
            "it also reads power, which is not one constant number",
        ),
        (
            ERF.replace("one", "wide"),
            20,
            "float[N] x",
            "gelu_erf",
            "the rank of what it is applied to is not known, or less than that of its constants",
        ),
    ],
)
def test_what_the_operator_does_not_quite_say_stays(body: str, opset: int, inputs: str, kind: str, why: str) -> None:
    outputs = "float[A,B] y" if "[A,B]" in inputs else "float[1,N] y" if "[N]" in inputs else "float[2,4] y"
    model = model_of(body, opset, outputs, inputs or "float[2,4] x")
    made, told = standard(model)
    assert told == [("not_fused", kind, ENDS_IN_Y + why)]
    assert made.SerializeToString() == model.SerializeToString()


def test_without_a_scale_there_is_no_layer_normalization() -> None:
    model = model_of(LAYER_NORM + "b = Add (n, shift)  y = Mul (b, gain)")
    made, told = standard(model)
    assert told == [
        ("not_fused", "layer_normalization", "the one that ends in the_n: no scale follows, and the operator wants one")
    ]
    assert kinds(made) == kinds(model)


@pytest.mark.parametrize(
    "body",
    [
        ERF.replace("root2", "c"),
        ERF.replace("(g, half)", "(g, one)"),
        ERF.replace("(b, one)", "(b, half)"),
        TANH.replace("(k, u)", "(c, u)"),
        TANH.replace("(x, three)", "(x, two)"),
    ],
)
def test_numbers_that_are_not_those_of_gelu_are_refused_by_trial(body: str) -> None:
    """A must-fail twin of the proof: the structure is that of GELU, the function another."""
    model = model_of(body, 20)
    made, told = standard(model)
    assert [(kind, message.split(" by ")[0]) for kind, _, message in told] == [
        ("not_fused", ENDS_IN_Y + "on random inputs the results differ")
    ]
    assert kinds(made) == kinds(model)


@pytest.mark.parametrize(("digits", "expected"), [(4, "Erf"), (5, "Erf"), (7, "Gelu")])
def test_a_constant_of_gelu_needs_the_digits_of_float32(digits: int, expected: str) -> None:
    """√2 to five digits is off by 2e-6 of its size: more than float32 confuses, whatever it looks like."""
    model = model_of(ERF, 20)
    rounded = numpy_helper.from_array(np.array(round(2**0.5, digits), np.float32), "root2")
    next(t for t in model.graph.initializer if t.name == "root2").CopyFrom(rounded)
    assert expected in kinds(standard(model)[0])


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (LAYER_NORM + "y = Mul (n, gain)", "float[2,4] y, float[2,1] v"),
        (LAYER_NORM + "y = Mul (n, gain)  z = Neg (v)", "float[2,4] y, float[2,1] z"),
        (ERF + "  z = Neg (b)", "float[2,4] y, float[2,4] z"),
    ],
)
def test_what_others_read_stays(body: str, outputs: str) -> None:
    model = model_of(body, 20, outputs)
    assert standard(model)[0].SerializeToString() == model.SerializeToString()


def test_what_a_pattern_names_stays() -> None:
    model = model_of(ERF, 20)
    view = View.of(Model.load(model))
    made, told = standard(model, named={op.id for op in view.ops if op.kind == "Erf"})
    assert kinds(made) == kinds(model)
    assert told == [("not_fused", "gelu_erf", ENDS_IN_Y + "a pattern names the_b")]


def test_no_kernel_is_given_up_for_a_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.fuse.canonical.load_kernels", lambda: Kernels("no runtime", "cuda", {}, {}))
    model = model_of(ERF, 20)
    made, told = standard(model)
    assert (kinds(made), told) == (kinds(model), [("not_fused", "gelu_erf", ENDS_IN_Y + "no cuda kernel for Gelu")])
    assert kinds(standard(model, target=Target.ONNX)[0]) == ["Gelu"]


def test_a_model_that_carries_its_training_is_left_alone() -> None:
    model = model_of(ERF, 20)
    model.training_info.add().algorithm.name = "step"
    view, told = canonical(View.of(Model.load(model)), DType.FLOAT16, Target.ORT_CUDA)
    assert (view.model.proto.SerializeToString(), told) == (model.SerializeToString(), ())


def test_a_model_that_lists_its_weights_as_inputs_is_left_alone() -> None:
    model = model_of(SOFTMAX, 18)
    model.ir_version = 3
    view, told = canonical(View.of(Model.load(model)), DType.FLOAT16, Target.ORT_CUDA)
    assert (view.model.proto.SerializeToString(), told) == (model.SerializeToString(), ())


def test_a_norm_in_a_branch_is_fused_there() -> None:
    branch = LAYER_NORM + "y = Mul (n, gain)"
    then = f"then_branch = t () => (float[2,4] y) {{ {branch} }}"
    body = f"y0 = If (flag) <{then}, else_branch = f () => (float[2,4] z) {{ z = Neg (x) }}>"
    made, _ = standard(model_of(body, 18, "float[2,4] y0", "float[2,4] x, bool flag"))
    branches = {a.name: [n.op_type for n in a.g.node] for a in made.graph.node[0].attribute}
    assert branches == {"then_branch": ["LayerNormalization"], "else_branch": ["Neg"]}


# -- BatchNormalization -------------------------------------------------------------------------------


def with_batch_norm(
    op: str, weight: tuple[int, ...], channels: int, shape: tuple[int, ...], **stated: object
) -> ModelProto:
    """A linear op with or without bias, then BatchNormalization, on random weights."""
    rng = np.random.default_rng(3)
    biased = bool(stated.pop("biased", True))
    arrays = {
        "w": rng.standard_normal(weight),
        "b": rng.standard_normal(channels),
        "gamma": rng.standard_normal(channels),
    }
    arrays |= {"beta": rng.standard_normal(channels), "mean": rng.standard_normal(channels)}
    arrays["var"] = rng.uniform(0.1, 2, channels)
    reads = ["x", "w", "b"] if biased else ["x", "w"]
    nodes = [
        helper.make_node(op, reads, ["a"], "linear", **stated),
        helper.make_node("BatchNormalization", ["a", "gamma", "beta", "mean", "var"], ["y"], "norm", epsilon=1e-3),
    ]
    tensors = [
        numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items() if n in reads or n not in "wb"
    ]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))]
    graph = helper.make_graph(nodes, "g", values, out, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


FORMS = {
    "conv": ("Conv", (6, 4, 3, 3), 6, (2, 4, 5, 5), {"pads": [1, 1, 1, 1]}),
    "no bias": ("Conv", (6, 4, 3, 3), 6, (2, 4, 5, 5), {"biased": False}),
    "grouped": ("Conv", (6, 2, 3), 6, (2, 4, 9), {"group": 2, "dilations": [2]}),
    "transposed": ("ConvTranspose", (4, 6, 2, 2), 6, (2, 4, 5, 5), {"strides": [2, 2]}),
    "gemm": ("Gemm", (4, 6), 6, (2, 4), {"alpha": 0.5}),
    "gemm of rows": ("Gemm", (6, 4), 6, (2, 4), {"transB": 1}),
}


@pytest.mark.parametrize("form", FORMS)
def test_batch_normalization_is_folded_into_what_stands_before_it(form: str) -> None:
    op, weight, channels, shape, stated = FORMS[form]
    model = with_batch_norm(op, weight, channels, shape, **stated)
    made, told = standard(model)
    assert kinds(made) == [op]
    assert [t.name for t in made.graph.initializer] == ["w_folded", "w_folded_bias"]
    assert told == [("fused", "norm", f"batch normalization: one {op} in place of linear, norm")]
    agree(model, made, shape)


def changed(model: ModelProto, name: str, array: object) -> ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(array, np.float32), name))
    return model


def conv(**stated: object) -> ModelProto:
    op, weight, channels, shape, rest = FORMS["conv"]
    return with_batch_norm(op, weight, channels, shape, **{**rest, **stated})


def with_reader(model: ModelProto) -> ModelProto:
    model.graph.node.append(helper.make_node("Relu", ["a"], ["z"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 4))
    return model


def with_fed(model: ModelProto, name: str) -> ModelProto:
    kept = [t for t in model.graph.initializer if t.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [6]))
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (with_reader(conv()), "others read what linear gives, or it lies in another graph"),
        (with_fed(conv(), "mean"), "mean is no constant"),
        (changed(conv(), "gamma", [9e9] * 6), "its folded weights would reach 1.97e+10, beyond the range of float16"),
        (changed(conv(), "gamma", [1e-9] * 6), "the folded weights of 6 channels would be subnormal in float16"),
        (changed(conv(), "var", [-1] * 6), "its folded weights are not finite"),
        (
            with_batch_norm("ConvTranspose", (4, 3, 2, 2), 6, (2, 4, 5, 5), group=2),
            "its ConvTranspose has groups",
        ),
        (with_batch_norm("Gemm", (4, 6), 6, (2, 4), beta=0.5), "its Gemm scales its bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_normalization_that_does_not_fold_says_why(model: ModelProto, why: str) -> None:
    made, told = standard(model)
    found = re.sub(r"reach [\d.e+]+", "reach N", told[0][2])
    wanted = re.sub(r"reach [\d.e+]+", "reach N", why)
    assert (len(told), told[0][:2], found) == (
        1,
        ("not_fused", "batch_normalization"),
        f"the one that ends in norm: {wanted}",
    )
    assert kinds(made) == kinds(model)


def test_a_shared_weight_is_folded_for_each_of_its_readers() -> None:
    model = conv(biased=False)
    twin = [onnx.NodeProto(), onnx.NodeProto()]
    for copy, node in zip(twin, model.graph.node, strict=True):
        copy.CopyFrom(node)
    twin[0].output[0], twin[0].name = "a2", "linear2"
    twin[1].input[0], twin[1].output[0], twin[1].name = "a2", "y2", "norm2"
    model.graph.node.extend(twin)
    model.graph.output.append(helper.make_tensor_value_info("y2", TensorProto.FLOAT, [None] * 4))
    made, _ = standard(model)
    assert [list(n.input) for n in made.graph.node] == [
        ["x", "w_a_folded", "w_a_folded_bias"],
        ["x", "w_a2_folded", "w_a2_folded_bias"],
    ]
    assert [t.name for t in made.graph.initializer] == [n for node in made.graph.node for n in list(node.input)[1:]]


def test_weights_that_nothing_folds_stay_in_their_file(tmp_path: Path) -> None:
    model = conv()
    large = numpy_helper.from_array(np.zeros((6, 6, 32, 32), np.float32), "large")
    model.graph.initializer.append(large)
    model.graph.node.append(helper.make_node("Conv", ["y", "large"], ["z"], "last", pads=[16, 16, 16, 16]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None] * 4))
    onnx.save(model, tmp_path / "m.onnx")
    view, told = canonical(View.of(Model.load(tmp_path / "m.onnx")), DType.FLOAT16, Target.ORT_CUDA)
    stubs = {t.name: is_stub(t) for t in view.model.proto.graph.initializer}
    assert ([f.kind for f in told], stubs) == (["fused"], {"large": True, "w_folded": False, "w_folded_bias": False})


# -- constants ----------------------------------------------------------------------------------------


def test_small_float_constants_are_computed_now_to_the_bit() -> None:
    model = model_of("a = Add (gain, shift)  b = Sqrt (half)  s = Mul (a, b)  y = Mul (x, s)", 18)
    made, told = standard(model)
    assert kinds(made) == ["Constant", "Mul"]
    assert told == [("fused", "constants", "computed now, each to the bit what it would be at run time: the_s")]
    feed = {"x": np.ones((2, 4), np.float32)}
    np.testing.assert_array_equal(outputs_of(made, feed)[0], outputs_of(model, feed)[0])


@pytest.mark.parametrize(
    "body",
    [
        "s = Exp (gain)  y = Mul (x, s)",  # rounded otherwise on other machines
        "s = Identity (gain)  y = Mul (x, s)",  # a second name of one weight
        "s = Unsqueeze (gain, first)  y = Mul (x, s)",  # the same weight once more
        "z = Sub (half, half)  s = Div (one, z)  y = Mul (x, s)",  # infinite
        "s = Neg (x)  y = Mul (x, s)",
    ],
)
def test_what_is_not_exact_or_no_constant_is_left(body: str) -> None:
    assert kinds(standard(model_of(body, 18))[0])[-2:] == kinds(model_of(body, 18))[-2:]


def test_large_constants_are_left_where_they_lie() -> None:
    model = model_of("s = Neg (big)  y = MatMul (x, s)", 18, "float[2,2048] y")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 2048), np.float32), "big"))
    assert kinds(standard(model)[0]) == ["Neg", "MatMul"]


# -- the proof ----------------------------------------------------------------------------------------


def test_the_bound_tells_a_difference_that_float32_could_see() -> None:
    y = np.ones(3)
    assert doubt([y], [y * (1 + ROUNDINGS * UNIT / 2)], [y]) is None
    assert doubt([y], [y * (1 + ROUNDINGS * UNIT * 2)], [y]) == "on random inputs the results differ by up to 4.8e-07"
    assert (
        doubt([y], [np.array([1, np.nan, 1])], [y])
        == "on random inputs the results differ by up to more than any bound"
    )
    assert doubt([y], [np.ones((1, 3))], [y]) == "its shape would be [1, 3] instead of [3]"
    assert doubt("no shape", [y], []) == "no shape"


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"^unknown fuse 'all'; use one of 'none', 'basic', 'contrib'$"):
        Fuse.parse("all")


# -- whole models -------------------------------------------------------------------------------------

MODELS = Path(__file__).parent / "models"
FIXTURES = sorted(path.stem for path in MODELS.glob("*.onnx") if path.stem != "cnn_external_dynamo22")


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fused_model_computes_what_torch_computed(name: str) -> None:
    """In float32, at the best opset, with all that fuses there: within the 1e-4 that its exporter accepted, too."""
    view = spell_out_casts(View.of(inline_functions(Model.load(MODELS / f"{name}.onnx"))[0]))
    moved, _ = at_opset(view, "auto", DType.FLOAT16, Target.ORT_CUDA)
    made, told = canonical(moved, DType.FLOAT16, Target.ORT_CUDA)
    assert [f.message for f in told if "differ" in f.message or "can not run" in f.message] == []
    with np.load(MODELS / f"{name}.npz") as stored:
        feed = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
        expected = [stored[f"output/{v.name}"] for v in made.model.proto.graph.output]
    for found, array in zip(outputs_of(made.model.to_proto(), feed), expected, strict=True):
        np.testing.assert_allclose(found, array, rtol=0, atol=1e-4)


def test_what_is_fused_in_the_models_of_exporters() -> None:
    """How many of what, each at the opset that serves it best."""
    found = {}
    for name in ("bert_ts13", "cnn_dynamo18", "gpt2_ts17", "llama_dynamo21", "t5_ts14", "vit_ts17"):
        made = convert(MODELS / f"{name}.onnx", opset="auto")
        kinds = [
            f.message.split(":")[0] for f in made.report.findings if f.kind == "fused" and f.subject != "constants"
        ]
        found[name] = dict(Counter(kinds))
    assert found == {
        "bert_ts13": {"attention": 2, "gelu erf": 2, "layer normalization": 5},
        "cnn_dynamo18": {"batch normalization": 5},
        "gpt2_ts17": {"attention": 2, "gelu tanh": 2},
        "llama_dynamo21": {"attention": 2, "rms normalization": 5},
        "t5_ts14": {"attention": 4, "rms normalization": 12},
        "vit_ts17": {"attention": 2, "gelu erf": 2},
    }


def test_a_batch_norm_whose_variance_half_would_flush_is_folded_and_lowered() -> None:
    """Its variance of 1e-9 is no number of float16; the factor that it comes to is."""
    model = changed(conv(), "var", [1e-9] * 6)
    made = convert(changed(model, "gamma", [1e-3] * 6), fuse="basic")
    assert [(row.op, row.dtype) for row in made.report.rows] == [("Conv", "float16")]
