"""Op patterns: matches and captures, and a spelling and a near miss for each row of the tables."""

from collections.abc import Iterable

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.patterns import written_out as patterns
from amp_rewrite.ir.patterns.clusters import ANCHORS, clusters
from amp_rewrite.ir.patterns.scores import even
from amp_rewrite.ir.patterns.written_out import Pattern, X, is_closed, matches, op, with_entry_casts
from amp_rewrite.ir.view import OpId, View

CONSTANTS = """<float two = {2}, float three = {3}, float eps = {1e-5}, float one = {1}, float half = {0.5},
    float root2 = {1.4142}, float k = {0.0447}, float c = {0.7978}, float minus_half = {-0.5},
    float[4] gain = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0}, int64[1] last = {-1}, int64[2] size = {2, 4}>"""


def view_of(body: str, outputs: str = "float[B,4] y", inputs: str = "float[B,4] x") -> View:
    head = '<ir_version: 8, opset_import: ["": 18]>\n'
    return View.of(Model.load(onnx.parser.parse_model(f"{head}g ({inputs}) => ({outputs}) {CONSTANTS} {{ {body} }}")))


def names(view: View, ops: Iterable[OpId]) -> str:
    """Return the first results of ops."""
    return " ".join(view.ops[op_id].node.output[0] for op_id in sorted(ops))


def found(
    pattern: Pattern, anchor: str, body: str, outputs: str = "float[B,4] y", inputs: str = "float[B,4] x"
) -> list[str]:
    """Return the closed matches of a pattern, each by the first results of its ops."""
    view, closed = view_of(body, outputs, inputs), []
    for rare in view.of_kinds((anchor,)):
        for match, last in matches(view, rare, pattern):
            whole = with_entry_casts(view, match)
            if is_closed(view, whole, last):
                closed.append(names(view, whole.ops))
    return closed


EXP = op("Exp", X)
SWISH = op("Mul", X, op("Sigmoid", X))


@pytest.mark.parametrize("product", ["Mul (x, s)", "Mul (s, x)"])
def test_operands_of_a_commutative_op_match_in_any_order(product: str) -> None:
    assert found(SWISH, "Sigmoid", f"s = Sigmoid (x)  y = {product}") == ["s y"]


def test_equal_names_capture_equal_values() -> None:
    assert found(SWISH, "Sigmoid", "n = Neg (x)  s = Sigmoid (x)  y = Mul (n, s)") == []


@pytest.mark.parametrize("more", ["z = Neg (e)", "z = Identity (e)"])
def test_a_match_with_an_inner_value_read_outside_is_not_closed(more: str) -> None:
    pattern = op("Sqrt", EXP)
    assert found(pattern, "Exp", "e = Exp (x)  y = Sqrt (e)") == ["e y"]
    assert found(pattern, "Exp", f"e = Exp (x)  y = Sqrt (e)  {more}", "float[B,4] y, float[B,4] z") == []
    assert found(pattern, "Exp", "e = Exp (x)  y = Sqrt (e)", "float[B,4] y, float[B,4] e") == []


def test_a_match_does_not_cross_into_a_body() -> None:
    body = """e = Exp (x)
        y = If (go) < then_branch = a () => (float[B,4] p) { p = Sqrt (e) },
                      else_branch = b () => (float[B,4] q) { q = Neg (x) } >"""
    assert found(op("Sqrt", EXP), "Exp", body, inputs="float[B,4] x, bool go") == []


def test_a_cast_of_the_entry_belongs_to_the_match_of_its_only_reader() -> None:
    body, half = "f = Cast <to = 1> (x)  s = Sigmoid (f)  y = Mul (f, s)", "float16[B,4] x"
    assert found(SWISH, "Sigmoid", body, inputs=half) == ["f s y"]
    assert found(SWISH, "Sigmoid", body + "  z = Neg (f)", "float[B,4] y, float[B,4] z", half) == ["s y"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("w = Constant <value_float = 2.0> ()", True), ("w = Mul (gain, shift)", True), ("w = Mul (gain, x)", False)],
)
def test_weights_are_constants_or_one_op_of_them(nodes: str, expected: bool) -> None:
    view = view_of(f"{nodes}  y = Mul (x, w)")
    value = view.ops[-1].inputs[1]
    assert value is not None
    assert patterns.is_weight(view, value) == expected
    assert patterns.is_constant(view, value) == ("Constant" in nodes)


LAYER = """m = ReduceMean (x, last)  d = Sub (x, m)  p = Pow (d, two)  v = ReduceMean (p, last)  e = Add (v, eps)
    s = Sqrt (e)  y = Div (d, s)"""
RMS = "p = Mul (x, x)  v = ReduceMean (p, last)  e = Add (v, eps)  r = Pow (e, minus_half)  y = Mul (x, r)"
L2 = "p = Mul (x, x)  v = ReduceSum (p, last)  s = Sqrt (v)  b = Max (s, eps)  w = Expand (b, size)  y = Div (x, w)"
REDUCED = "l = ReduceL2 (x, last)  b = Clip (l, eps)  w = Expand (b, size)  y = Div (x, w)"
SOFTMAX = "m = ReduceMax (x, last)  d = Sub (x, m)  e = Exp (d)  t = ReduceSum (e, last)  y = Div (e, t)"
ERF = "q = Div (x, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)"
TANH = """h = Mul (half, x)  p = Pow (x, three)  a = Mul (p, k)  i = Add (x, a)  q = Mul (i, c)  b = Tanh (q)
    o = Add (b, one)  y = Mul (h, o)"""
SNAKE = "a = Mul (x, two)  s = Sin (a)  p = Pow (s, two)  f = Mul (p, half)  y = Add (x, f)"
QUICK = "a = Mul (x, c)  s = Sigmoid (a)  y = Mul (x, s)"

ROWS: dict[str, tuple[Pattern, str, dict[str, str]]] = {
    LAYER: (
        patterns.LAYER,
        "Sqrt",
        {
            "d = Sub (x, m)": "d = Sub (m, x)",
            "Pow (d, two)": "Pow (d, three)",
            "p = Pow (d, two)": "p = Mul (d, x)",
            "Div (d, s)": "Div (s, d)",
            "y = Div (d, s)": "y = Div (x, s)",
            "m = ReduceMean": "m = ReduceMax",
        },
    ),
    RMS: (
        patterns.RMS,
        "Pow",
        {
            "Mul (x, x)": "Mul (x, gain)",
            "minus_half": "half",
            "Mul (x, r)": "Div (x, r)",
            "ReduceMean": "ReduceSum",
            "y = Mul (x, r)": "y = Mul (gain, r)",
        },
    ),
    L2: (patterns.L2, "Sqrt", {"ReduceSum": "ReduceMean", "Max (s": "Add (s", "Div (x, w)": "Mul (x, w)"}),
    REDUCED: (patterns.L2, "ReduceL2", {"ReduceL2": "ReduceL1", "Clip": "Mul", "Div (x, w)": "Div (w, x)"}),
    SOFTMAX: (
        patterns.SOFTMAX,
        "ReduceMax",
        {"ReduceMax": "ReduceMin", "Sub (x, m)": "Sub (m, x)", "ReduceSum (e": "ReduceSum (d", "Exp": "Sqrt"},
    ),
    ERF: (
        patterns.GELU_ERF,
        "Erf",
        {"Add (b, one)": "Add (b, x)", "Div (x, root2)": "Add (x, root2)", "Mul (g, half)": "Mul (g, x)"},
    ),
    TANH: (
        patterns.GELU_TANH,
        "Tanh",
        {"Mul (half, x)": "Neg (x)", "Add (b, one)": "Sub (b, one)", "Mul (i, c)": "Div (i, c)"},
    ),
    SNAKE: (patterns.SNAKE, "Sin", {"Sin": "Cos", "Add (x, f)": "Add (a, f)", "Mul (p, half)": "Neg (p)"}),
    QUICK: (
        patterns.QUICK_GELU,
        "Sigmoid",
        {"Sigmoid": "Tanh", "Mul (x, s)": "Div (x, s)", "Mul (x, c)": "Add (x, c)"},
    ),
}


@pytest.mark.parametrize(("body", "row"), ROWS.items())
def test_a_pattern_matches_unless_a_condition_is_violated(body: str, row: tuple[Pattern, str, dict[str, str]]) -> None:
    pattern, anchor, twins = row
    every = " ".join(part.split()[-1] for part in body.split(" =")[:-1])
    assert found(pattern, anchor, body) == [every]
    for part, other in twins.items():
        assert part in body
        assert found(pattern, anchor, body.replace(part, other)) == []


@pytest.mark.parametrize("step", ["g = Mul (n, gain)", "g = Mul (gain, n)", "g = Mul (n, w)"])
def test_scale_and_bias_of_a_cluster_are_captured(step: str) -> None:
    body = LAYER.replace("y =", "n =") + f"  {step}  y = Add (g, shift)"
    view = view_of(body, inputs="float[B,4] x, float[4] w")
    (cluster,) = clusters(view)
    captured = {name: view.value_name(value) for name, value in cluster.values.items()}
    scale = "w" if "w)" in step else "gain"
    assert (captured["scale"], captured["bias"], captured["guard"]) == (scale, "shift", "eps")


@pytest.mark.parametrize("bound", ["Max", "Clip"])
def test_a_bound_below_the_root_is_not_an_epsilon(bound: str) -> None:
    (cluster,) = clusters(view_of(LAYER.replace("e = Add", f"e = {bound}")))
    assert "guard" not in cluster.values


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        ([0, 1, 2, 3], 4, True),
        ([3, 1, 2, 0, 3], 4, True),  # in any order, any number of times
        ([0, 1, 5], 3, True),  # half of 0 to 5
        ([0, 1, 6], 3, False),
        ([0, 0.1, 0.2, 0.35], 3, False),
        ([0, np.inf, 1], 3, True),  # three values without a known step
        ([5], 1, True),
        ([5, 6], 1, True),
    ],
)
def test_equal_steps_fill_half_of_a_row_or_more(values: list[float], least: int, expected: bool) -> None:
    assert even(np.array(values, np.float32), minimum=least) is expected


NORM = LAYER.replace("y =", "n =") + "  "
RECIPROCAL = """m = ReduceMean (x, last)  d = Sub (x, m)  p = Mul (d, d)  v = ReduceMean (p, last)  e = Add (eps, v)
    s = Sqrt (e)  r = Reciprocal (s)  n = Mul (d, r)  g = Mul (n, gain)  y = Add (shift, g)"""
MEAN = "v = ReduceMean (p, last)  e = Add (v, eps)  "


SCALED = "y = Mul (gain, n)"
CUBED = "p = Pow (x, three)  a = Mul (p, k)"
SPELLINGS = {
    "layer_normalization": [
        (NORM + "g = Mul (n, gain)  y = Add (g, shift)", "m d p v e s n g y", "g y"),
        (NORM + "y = Relu (n)", "m d p v e s n", ""),
        (NORM + "y = Mul (n, x)", "m d p v e s n", ""),  # its scale is computed
        (RECIPROCAL, "m d p v e s r n g y", "g y"),
    ],
    "rms_normalization": [
        (f"p = Pow (x, two)  {MEAN} s = Sqrt (e)  n = Div (x, s)  {SCALED}", "p v e s n y", "y"),
        (f"p = Mul (x, x)  {MEAN} s = Sqrt (e)  r = Div (one, s)  n = Mul (x, r)  {SCALED}", "p v e s r n y", "y"),
        (f"p = Pow (x, two)  {MEAN} r = Pow (e, minus_half)  n = Mul (x, r)  {SCALED}", "p v e r n y", "y"),
    ],
    "l2_normalization": [
        (REDUCED, "l b w y", ""),
        ("l = ReduceL2 (x, last)  b = Max (l, eps)  y = Div (x, b)", "l b y", ""),
        ("p = Mul (x, x)  t = ReduceSum (p, last)  s = Sqrt (t)  b = Clip (s, eps)  y = Div (x, b)", "p t s b y", ""),
    ],
    "softmax": [(SOFTMAX, "m d e t y", "")],
    "gelu_erf": [
        (ERF, "q b o g y", ""),
        ("q = Div (x, root2)  b = Erf (q)  o = Add (one, b)  g = Mul (o, half)  y = Mul (x, g)", "q b o g y", ""),
        ("h = Mul (x, half)  q = Mul (x, c)  b = Erf (q)  o = Add (b, one)  y = Mul (h, o)", "h q b o y", ""),
    ],
    "gelu_tanh": [
        (TANH, "h p a i q b o y", ""),
        (TANH.replace(CUBED, "p = Mul (x, x)  r = Mul (p, x)  a = Mul (k, r)"), "h p r a i q b o y", ""),
        (
            TANH.replace("Pow (x, three)", "Mul (x, x)").replace("i = Add (x, a)", "r = Add (a, one)  i = Mul (x, r)"),
            "h p a r i q b o y",
            "",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "body", "ops", "tail"), [(kind, *row) for kind, spelled in SPELLINGS.items() for row in spelled]
)
def test_a_cluster_is_found_in_every_spelling(kind: str, body: str, ops: str, tail: str) -> None:
    view = view_of(body)
    (cluster,) = clusters(view)
    assert (cluster.kind, names(view, cluster.ops), names(view, cluster.tail)) == (kind, ops, tail)
    assert cluster.entry is not None and view.value_name(cluster.entry) == "x"


def test_casts_inside_a_cluster_belong_to_it_and_the_entry_precedes_them() -> None:
    body = f"""xf = Cast <to = 1> (x)  p = Pow (xf, two)  {MEAN} s = Sqrt (e)  n = Div (xf, s)  nh = Cast <to = 10> (n)
        y = Mul (w, nh)"""
    view = view_of(body, "float16[B,4] y", "float16[B,4] x, float16[4] w")
    (cluster,) = clusters(view)
    assert (names(view, cluster.ops), names(view, cluster.tail)) == ("xf p v e s n nh y", "nh y")
    assert cluster.entry is not None and view.value_name(cluster.entry) == "x"


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (NORM + "y = Relu (n)  z = Neg (v)", "float[B,1] z"),
        (f"p = Pow (x, three)  {MEAN} s = Sqrt (e)  y = Div (x, s)", ""),
        (f"p = Pow (x, two)  {MEAN} s = Sqrt (e)  y = Div (gain, s)", ""),
        (f"p = Pow (x, two)  {MEAN} y = Sqrt (e)", ""),
        ("b = Tanh (x)  o = Add (b, one)  y = Mul (o, gate)", ""),
        ("q = Div (x, root2)  b = Erf (q)  o = Add (b, gate)  g = Mul (x, o)  y = Mul (g, half)", ""),
        ("q = Div (gate, root2)  b = Erf (q)  o = Add (b, one)  g = Mul (x, o)  y = Mul (g, half)", ""),
    ],
)
def test_a_near_miss_is_not_a_cluster(body: str, more: str) -> None:
    outputs = ", ".join(filter(None, ("float[B,4] y", more)))
    assert clusters(view_of(body, outputs, "float[B,4] x, float[B,4] gate")) == ()


@pytest.mark.parametrize("behind", [1, 10])
@pytest.mark.parametrize("scale", [1, 10])
@pytest.mark.parametrize("shared", [False, True])
def test_onnxruntime_opens_a_norm_iff_tail_and_entry_have_the_same_type(behind: int, scale: int, shared: bool) -> None:
    """The entry of its fusion lies before a Cast that the normalization alone reads, and after one that others
    read too. Were this test to fail with a newer onnxruntime, the rule could go."""
    ort = pytest.importorskip("onnxruntime")
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    body = f"""r = Exp (given)
        a = Cast <to = {behind}> (r)
        x = Cast <to = 1> (a)
        {NORM}
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


def test_each_cluster_has_an_anchor_op() -> None:
    assert {anchor for _, anchors, *_ in patterns._CLUSTERS for anchor in anchors} == ANCHORS
