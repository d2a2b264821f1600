"""Which groups of ops are found to compute one thing, and which are not."""

from __future__ import annotations

import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import OpId, View

CONSTANTS = """<float two = {2}, float three = {3}, float eps = {1e-5}, float one = {1}, float half = {0.5},
    float root2 = {1.4142}, float k = {0.0447}, float c = {0.7978}, float minus_half = {-0.5},
    float[4] gain = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0}, int64[1] last = {-1}>"""
LAYER_NORM = """m = ReduceMean (x, last)
    d = Sub (x, m)
    p = Pow (d, two)
    v = ReduceMean (p, last)
    e = Add (v, eps)
    s = Sqrt (e)
    n = Div (d, s)
    """


def view_of(body: str, outputs: str = "float[B,4] y", inputs: str = "float[B,4] x") -> View:
    head = '<ir_version: 8, opset_import: ["": 18]>\n'
    return View.of(Model.load(onnx.parser.parse_model(f"{head}g ({inputs}) => ({outputs}) {CONSTANTS} {{ {body} }}")))


def names(view: View, ops: tuple[OpId, ...]) -> str:
    """The first results of ops."""
    return " ".join(view.ops[op].node.output[0] for op in ops)


def found(body: str, outputs: str = "float[B,4] y", inputs: str = "float[B,4] x") -> list[tuple[str, str, str, str]]:
    """(kind, ops, entry, tail) of each cluster, ops by their first results."""
    view = view_of(body, outputs, inputs)
    return [
        (c.kind, names(view, c.ops), view.value_name(c.entry) if c.entry is not None else "", names(view, c.tail))
        for c in clusters(view)
    ]


# -- normalizations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "ops", "tail"),
    [
        (LAYER_NORM + "g = Mul (n, gain)  y = Add (g, shift)", "m d p v e s n g y", "g y"),
        (LAYER_NORM + "y = Relu (n)", "m d p v e s n", ""),
        (
            "m = ReduceMean (x, last)  d = Sub (x, m)  p = Mul (d, d)  v = ReduceMean (p, last)  e = Add (eps, v)"
            "  s = Sqrt (e)  r = Reciprocal (s)  n = Mul (d, r)  g = Mul (n, gain)  y = Add (shift, g)",
            "m d p v e s r n g y",
            "g y",
        ),
    ],
)
def test_a_layer_normalization_is_one_cluster_however_it_is_written(body: str, ops: str, tail: str) -> None:
    assert found(body) == [("layer_normalization", ops, "x", tail)]


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  n = Div (x, s)", "p v e s n y"),
        (
            "p = Mul (x, x)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  r = Div (one, s)"
            "  n = Mul (x, r)",
            "p v e s r n y",
        ),
        (
            "p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, eps)  r = Pow (e, minus_half)  n = Mul (x, r)",
            "p v e r n y",
        ),
    ],
)
def test_an_rms_normalization_is_one_cluster_however_it_is_written(body: str, ops: str) -> None:
    assert found(body + "  y = Mul (gain, n)") == [("rms_normalization", ops, "x", "y")]


def test_casts_inside_a_cluster_belong_to_it_and_its_entry_lies_before_them() -> None:
    body = """xf = Cast <to = 1> (x)
        p = Pow (xf, two)
        v = ReduceMean (p, last)
        e = Add (v, eps)
        s = Sqrt (e)
        n = Div (xf, s)
        nh = Cast <to = 10> (n)
        y = Mul (w, nh)"""
    inputs = "float16[B,4] x, float16[4] w"
    assert found(body, "float16[B,4] y", inputs) == [
        ("rms_normalization", "xf p v e s n nh y", "x", "nh y"),
    ]


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (LAYER_NORM + "y = Relu (n)  z = Neg (v)", "float[B,4] y, float[B,1] z"),
        (
            "p = Pow (x, three)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  y = Div (x, s)",
            "float[B,4] y",
        ),
        (
            "p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, eps)  s = Sqrt (e)  y = Div (gain, s)",
            "float[B,4] y",
        ),
        ("p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, eps)  y = Sqrt (e)", "float[B,4] y"),
    ],
)
def test_what_only_resembles_a_normalization_is_no_cluster(body: str, outputs: str) -> None:
    assert found(body, outputs) == []


def test_a_scale_that_is_computed_is_not_part_of_the_tail() -> None:
    body = LAYER_NORM + "y = Mul (n, x)"
    assert found(body) == [("layer_normalization", "m d p v e s n", "x", "")]


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("l = ReduceL2 (x, last)  b = Clip (l, eps)  w = Expand (b, size)  y = Div (x, w)", "l b w y"),
        ("l = ReduceL2 (x, last)  b = Max (l, eps)  y = Div (x, b)", "l b y"),
        ("p = Mul (x, x)  t = ReduceSum (p, last)  s = Sqrt (t)  b = Clip (s, eps)  y = Div (x, b)", "p t s b y"),
    ],
)
def test_a_division_by_a_length_is_one_cluster(body: str, ops: str) -> None:
    inputs = "float[B,4] x, int64[2] size"
    assert found(body, inputs=inputs) == [("l2_normalization", ops, "x", "")]


# -- softmax and activations ------------------------------------------------------------------------


SOFTMAX = "m = ReduceMax (x, last)  d = Sub (x, m)  e = Exp (d)  t = ReduceSum (e, last)  y = Div (e, t)"


def test_a_softmax_is_one_cluster() -> None:
    assert found(SOFTMAX) == [("softmax", "m d e t y", "x", "")]


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("q = Div (x, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)", "q b o g y"),
        ("q = Div (x, root2)  b = Erf (q)  o = Add (one, b)  g = Mul (o, half)  y = Mul (x, g)", "q b o g y"),
        ("h = Mul (x, half)  q = Mul (x, c)  b = Erf (q)  o = Add (b, one)  y = Mul (h, o)", "h q b o y"),
    ],
)
def test_a_gelu_is_one_cluster_in_any_order_of_its_products(body: str, ops: str) -> None:
    assert found(body) == [("gelu_erf", ops, "x", "")]


@pytest.mark.parametrize(
    ("cube", "ops"),
    [
        ("p = Pow (x, three)  a = Mul (p, k)  i = Add (x, a)", "h p a i q b o y"),
        ("p = Mul (x, x)  r = Mul (p, x)  a = Mul (k, r)  i = Add (x, a)", "h p r a i q b o y"),
        ("p = Mul (x, x)  a = Mul (p, k)  r = Add (a, one)  i = Mul (x, r)", "h p a r i q b o y"),
    ],
)
def test_a_tanh_gelu_is_one_cluster_however_it_cubes(cube: str, ops: str) -> None:
    body = f"h = Mul (half, x)  {cube}  q = Mul (i, c)  b = Tanh (q)  o = Add (b, one)  y = Mul (h, o)"
    assert found(body) == [("gelu_tanh", ops, "x", "")]


@pytest.mark.parametrize(
    "body",
    [
        "b = Tanh (x)  o = Add (b, one)  y = Mul (o, gate)",
        "q = Div (x, root2)  b = Erf (q)  o = Add (b, gate)  g = Mul (x, o)  y = Mul (g, half)",
        "q = Div (gate, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)",
    ],
)
def test_what_only_resembles_a_gelu_is_no_cluster(body: str) -> None:
    assert found(body, inputs="float[B,4] x, float[B,4] gate") == []


# -- why the tail matters ---------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [1, 10])
@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("shared", [False, True])
def test_onnxruntime_opens_a_normalization_iff_tail_and_entry_have_one_type(
    behind: int, scale: int, shared: bool
) -> None:
    """The entry of its fusion lies before a Cast that the normalization alone reads, and after one that others
    read too. Were this test to fail with a newer onnxruntime, the rule could go."""
    ort = pytest.importorskip("onnxruntime")
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    body = f"""r = Exp (given)
        a = Cast <to = {behind}> (r)
        x = Cast <to = 1> (a)
        {LAYER_NORM}
        nt = Cast <to = {scale}> (n)
        gt = Cast <to = {scale}> (gain)
        bt = Cast <to = {scale}> (shift)
        g = Mul (nt, gt)
        z = Add (g, bt)
        y = Cast <to = 1> (z)
        {"other = Exp (x)" if shared else ""}"""
    view = view_of(body, "float[B,4] y" + (", float[B,4] other" if shared else ""), "float[B,4] given")
    entry = 1 if shared else behind
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    model = view.model.proto.SerializeToString()
    if entry == scale:
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    else:
        with pytest.raises(Fail, match="bound to different types"):
            ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
