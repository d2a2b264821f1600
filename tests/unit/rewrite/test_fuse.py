"""Fusion into one operator before painting: fused forms, refused forms and reasons, and equal results."""

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.equivalence import ROUNDINGS, UNIT, mismatch
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.runtime.kernels import Kernels
from amp_rewrite.settings.choices import Target
from support.fuse_models import CENTERED, ERF, LAYER_NORM, RMS_NORM, SOFTMAX, TANH, agree, model_of
from support.fusing import kinds, outputs_of, standard

FASTER = "faster with --opset auto, unless other ops lose a kernel at opset"
AUTO = f"left unfused: same results, more kernel launches · {FASTER}"


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
def test_a_decomposed_operator_becomes_one_op(body: str, opset: int, expected: list[str] | None) -> None:
    model = model_of(body, opset)
    result, notes = standard(model)
    assert kinds(result) == (expected or ["RMSNormalization"])
    assert [kind for kind, _, _ in notes] == ["fused"]
    agree(model, result)


def test_a_fusion_records_its_ops_and_leaves_no_unused_constant() -> None:
    result, notes = standard(model_of(LAYER_NORM + "g = Mul (n, gain)  y = Add (g, shift)"))
    (node,) = result.graph.node
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (node.name, list(node.input), list(node.output)) == ("the_y", ["x", "gain", "shift"], ["y"])
    assert attributes == {"axis": -1, "epsilon": float(np.float32(1e-5))}
    assert {"gain", "shift"} <= {t.name for t in result.graph.initializer}
    assert not {"eps", "last", "two"} & {t.name for t in result.graph.initializer}
    parts = "the_m, the_d, the_p, the_v, the_e, the_s, the_n, the_g, the_y"
    assert notes == [("fused", "the_y", f"layer normalization: one LayerNormalization in place of {parts}")]


FIRST_AXIS = LAYER_NORM.replace("last", "first") + "y = Mul (n, gain)"
ENDS_IN_Y = "1 match is not fused (it ends at the_y): "


NORMED = LAYER_NORM + "y = Mul (n, gain)"
NO_AXES = "the rank of its operand is not known, or is less than that of its constants"
TWICE = LAYER_NORM + "b = Add (n, shift)  y = Mul (b, gain)"
PLAIN = "float[2,4] x"


@pytest.mark.parametrize(
    ("body", "opset", "inputs", "why"),
    [
        (NORMED, 16, PLAIN, f"opset 16 has no LayerNormalization · {AUTO} 17"),
        (RMS_NORM, 22, PLAIN, f"opset 22 has no RMSNormalization · {AUTO} 23"),
        (ERF, 19, PLAIN, f"opset 19 has no Gelu · {AUTO} 20"),
        (FIRST_AXIS, 18, PLAIN, "it reduces axes other than the last"),
        (FIRST_AXIS.replace("first", "both"), 18, PLAIN, "it reduces axes other than the last"),
        (NORMED, 18, "float[A,B] x", "the size of the normalized axis is not known"),
        (NORMED, 18, "float[2,1] x", "gain does not have one number for each of the 1 normalized elements"),
        (
            NORMED.replace("(v, eps)", "(v, lift)"),
            18,
            PLAIN + ", float lift",
            "its epsilon is not a constant scalar added inside the root",
        ),
        (
            NORMED.replace("(d, two)", "(d, power)"),
            18,
            PLAIN + ", float power",
            "it also reads power, which is not a constant scalar",
        ),
        (TWICE, 18, PLAIN, "it is not followed by a scale, but the operator requires one"),
        (ERF.replace("one", "wide"), 20, "float[N] x", NO_AXES),
    ],
)
def test_near_misses_of_the_operator_stay(body: str, opset: int, inputs: str, why: str) -> None:
    kind = "gelu_erf" if "Erf" in body else "layer_normalization" if "Sub" in body else "rms_normalization"
    outputs = "float[A,B] y" if "[A,B]" in inputs else "float[1,N] y" if "[N]" in inputs else "float[2,4] y"
    model = model_of(body, opset, outputs, inputs)
    result, notes = standard(model)
    assert [(subject, message.partition("): ")[2]) for _, subject, message in notes] == [(kind, why)]
    assert result.SerializeToString() == model.SerializeToString()


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
def test_coefficients_other_than_those_of_gelu_fail_the_trial(body: str) -> None:
    """The structure is GELU's, but the function is not, so the proof must fail."""
    model = model_of(body, 20)
    result, notes = standard(model)
    assert [(kind, message.rpartition(" by ")[0]) for kind, _, message in notes] == [
        ("not_fused", ENDS_IN_Y + "on random inputs the results differ")
    ]
    assert kinds(result) == kinds(model)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (LAYER_NORM + "y = Mul (n, gain)", "float[2,4] y, float[2,1] v"),
        (LAYER_NORM + "y = Mul (n, gain)  z = Neg (v)", "float[2,4] y, float[2,1] z"),
        (ERF + "  z = Neg (b)", "float[2,4] y, float[2,4] z"),
    ],
)
def test_values_with_other_readers_stay(body: str, outputs: str) -> None:
    model = model_of(body, 20, outputs)
    assert standard(model)[0].SerializeToString() == model.SerializeToString()


def test_a_fusion_never_loses_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "amp_rewrite.runtime.kernels.load_kernels", lambda _release="": Kernels("no runtime", "cuda", {}, {})
    )
    model = model_of(ERF, 20)
    result, notes = standard(model)
    assert (kinds(result), notes) == (kinds(model), [("not_fused", "gelu_erf", ENDS_IN_Y + "no cuda kernel for Gelu")])
    assert kinds(standard(model, target=Target.ONNX)[0]) == ["Gelu"]


@pytest.mark.parametrize("ir", [3, 10])
def test_a_model_with_training_info_or_weights_as_inputs_is_left_alone(ir: int) -> None:
    model = model_of(SOFTMAX, 18)
    model.ir_version = ir
    if ir == 3:
        weights = ((t.name, t.data_type, t.dims) for t in model.graph.initializer)
        model.graph.input.extend(helper.make_tensor_value_info(*weight) for weight in weights)
    else:
        model.training_info.add().algorithm.name = "step"
    view, notes = fuse_operators(View.of(Model.load(model)), Context(DType.FLOAT16), Target.ORT_CUDA)
    assert (view.model.proto.SerializeToString(), notes) == (model.SerializeToString(), ())


def test_a_norm_in_a_branch_is_fused_there() -> None:
    branch = LAYER_NORM + "y = Mul (n, gain)"
    then = f"then_branch = t () => (float[2,4] y) {{ {branch} }}"
    body = f"y0 = If (flag) <{then}, else_branch = f () => (float[2,4] z) {{ z = Neg (x) }}>"
    result, _ = standard(model_of(body, 18, "float[2,4] y0", "float[2,4] x, bool flag"))
    branches = {a.name: [n.op_type for n in a.g.node] for a in result.graph.node[0].attribute}
    assert branches == {"then_branch": ["LayerNormalization"], "else_branch": ["Neg"]}


@pytest.mark.parametrize(("rank", "fused"), [(24, True), (64, False)])
def test_a_softmax_is_fused_if_numpy_can_evaluate_it(rank: int, fused: bool) -> None:
    dims = "1," * (rank - 1) + "8"
    result, _ = standard(model_of(SOFTMAX, 18, f"float[{dims}] y", f"float[{dims}] x"))
    assert (kinds(result) == ["Softmax"]) == fused


def test_an_activation_of_unknown_rank_is_fused_if_its_constants_are_scalars() -> None:
    result, _ = standard(model_of("x = Reshape (r, s)  " + ERF, 20, inputs="float[N] r, int64[K] s"))
    assert kinds(result) == ["Reshape", "Gelu"]


def test_small_float_constants_are_folded_to_the_bit() -> None:
    model = model_of("a = Add (gain, shift)  b = Sqrt (half)  s = Mul (a, b)  y = Mul (x, s)", 18)
    result, notes = standard(model)
    assert kinds(result) == ["Constant", "Mul"]
    assert notes == [("fused", "constants", "computed ahead of time, bit-identical to the run-time result: the_s")]
    feed = {"x": np.ones((2, 4), np.float32)}
    np.testing.assert_array_equal(outputs_of(result, feed)[0], outputs_of(model, feed)[0])


@pytest.mark.parametrize(
    "body",
    [
        "s = Exp (gain)  y = Mul (x, s)",  # rounded differently on other machines
        "s = Identity (gain)  y = Mul (x, s)",  # a second name of one weight
        "s = Unsqueeze (gain, first)  y = Mul (x, s)",  # a second copy of one weight
        "z = Sub (half, half)  s = Div (one, z)  y = Mul (x, s)",  # infinite
        "s = Neg (x)  y = Mul (x, s)",
    ],
)
def test_inexact_or_variable_operands_are_not_folded(body: str) -> None:
    assert kinds(standard(model_of(body, 18))[0])[-2:] == kinds(model_of(body, 18))[-2:]


def test_the_bound_separates_differences_visible_in_float32() -> None:
    y, step, differ = np.ones(3), ROUNDINGS * UNIT, "on random inputs the results differ"
    assert mismatch([y], [y * (1 + step / 2)], [1.0]) is None
    assert mismatch([y], [y * (1 + step * 2)], [None]) == f"{differ} by up to 4.8e-07"
    assert mismatch([y], [np.array([1, np.nan, 1])], [None]) == f"{differ} in NaN or infinite elements"
    assert mismatch([y], [np.ones((1, 3))], [None]) == "its shape would be [1, 3], not [3]"
    assert mismatch("no shape", [y], []) == "no shape"


WRITTEN_OUT = ["Reshape", "InstanceNormalization", "Reshape", "Mul", "Add"]


def group_norm(dims: str, *, opset: int = 21, groups: int = 2, scale: str = "1, 2, 3, 4") -> ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[{dims}] x) => (float[{dims}] y) <float[4] s = {{{scale}}}, float[4] b = {{0, 1, 0, -1}}>
        {{ y = GroupNormalization <num_groups = {groups}, epsilon = 0.01> (x, s, b) }}""")


@pytest.mark.parametrize(
    ("dims", "shape", "before"),
    [
        ("2,4,6,5", (2, 4, 6, 5), []),
        ("N,4,6,L", (3, 4, 6, 7), []),
        ("N,4,H,W", (1, 4, 3, 2), ["Shape"]),
        ("2,4,L", (2, 4, 9), []),
        ("N,C,4,4,4", (2, 4, 4, 4, 4), []),
        ("2,4" + ",1" * 6, (2, 4, *[1] * 6), []),
    ],
)
def test_the_standard_form_computes_the_same_numbers(dims: str, shape: tuple[int, ...], before: list[str]) -> None:
    proto = group_norm(dims)
    after, _ = standard(proto)
    assert kinds(after) == WRITTEN_OUT[:1] + before + WRITTEN_OUT[1:]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 3 + 2
    (expected,), (actual,) = outputs_of(proto, {"x": x}), outputs_of(after, {"x": x})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"to": DType.BFLOAT16}, "no cuda kernel for InstanceNormalization"),
        ({"target": Target.ONNX}, "the target may have a kernel for it"),
    ],
)
def test_without_a_kernel_an_activation_stays_with_a_finding(options: dict[str, Any], why: str) -> None:
    after, notes = standard(group_norm("2,4,6,5"), **options)
    assert kinds(after) == ["GroupNormalization"]
    assert [(kind, why in message) for kind, _, message in notes] == [("not_fused", True)]


def test_at_opset_22_there_is_no_kernel_for_the_spelling() -> None:
    after, _ = standard(group_norm("2,4,6,5", opset=22))
    assert kinds(after) == ["GroupNormalization"]
