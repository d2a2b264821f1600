"""Needs: differences, long sums, integers and sizes, unneeded deny entries, and the cost of propagation."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import MAX_NAMED
from amp_rewrite.decide.needs.find import MAX_TERMS, find_needs, long_sums
from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.pipeline.conversion import Converted
from support import cases
from support.pins import pinned

F16 = DType.FLOAT16
EYE = np.eye(8, dtype=np.float32)


def view_of(statements: Sequence[str], out: str, **constants: np.ndarray) -> View:
    proto = cases.build(";".join(statements), [out], shapes={"x": (1, 8)}, constants=constants, opset=20)
    return View.of(Model.load(proto))


@pytest.mark.filterwarnings("error")
def test_weights_with_infinities_of_both_signs_are_read_without_a_warning() -> None:
    weights = np.array([[np.inf, 1], [-np.inf, 2]], np.float32).repeat(4, axis=0)
    assert find_needs(view_of(["y=MatMul(x,w)"], "y", w=weights), F16).pins == {}


def behind_copies(count: int) -> list[str]:
    """Return a layer, copies, and Acos, which needs the digits of all of them."""
    return ["c0=MatMul(x,w)", *(f"c{i + 1}=Identity(c{i})" for i in range(count)), f"y=Acos(c{count})"]


def sums_of_copies(count: int) -> list[str]:
    """Return a layer, copies, and the sum of each and a bias."""
    adds = [f"a{i}=Add(c{i},b)" for i in range(count)]
    return [*behind_copies(count)[:-1], *adds, f"y=Sum({','.join(f'a{i}' for i in range(count))})"]


@pytest.mark.parametrize("nodes", [behind_copies, sums_of_copies])
def test_no_op_traverses_all_copies(nodes: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(nodes(500), "y", w=EYE, b=np.ones(8, np.float32))
    steps, step = 0, View.producer

    def counted(self: View, value: ValueId | None, *kinds: str) -> Op | None:
        nonlocal steps
        steps += 1
        return step(self, value, *kinds)

    monkeypatch.setattr(View, "producer", counted)
    Backward(find_facts(view, F16))
    assert 0 < steps < 20 * len(view.ops)


def test_a_need_propagates_through_iterations_in_few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 200
    shifted = " ".join(f"z{i} = Neg (s{i + 1})" for i in range(count - 1))
    into = ", ".join(f"float[1,8] s{i}" for i in range(count))
    out = ", ".join(f"float[1,8] z{i}" for i in range(count))
    view = parsed_view(f"""g (float[1,8] x, float[8,8] w, int64 n) => (float[1,8] y) {{
        y{"".join(f", y{i}" for i in range(1, count))} = Loop (n{", " + ", x" * count}) <
            body = b (int64 i, bool c, {into}) => (bool d, {out}) {{
                d = Identity (c) {shifted} a = Acos (s0) z{count - 1} = MatMul (a, w) }}> }}""")
    visits, visit = 0, Backward._visit

    def counted(self: Backward, op: Op) -> None:
        nonlocal visits
        visits += 1
        visit(self, op)

    monkeypatch.setattr(Backward, "_visit", counted)
    pins = Backward(find_facts(view, F16)).pinned
    assert {op.id for op in view.ops if op.kind == "Neg"} <= pins.keys()
    assert len(view.ops) <= visits < 4 * len(view.ops)


def test_a_sum_of_many_values_names_a_few_including_its_own_state() -> None:
    names = [f"s{i}" for i in range(3 * MAX_NAMED)]
    sums = [f"a{i + 1}=Add(a{i},{name})" for i, name in enumerate(names)]
    view = view_of(["a0=Identity(x)", *sums], f"a{len(names)}")
    fact = find_facts(view, F16)[view.scopes[0].outputs[0]]
    assert len(fact.sources) == len(fact.levels) == len(fact.states) == MAX_NAMED
    assert names[-1] in {view.value_name(state) for state in fact.states}


def parsed_view(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{text}')))


def notes(body: str) -> list[str]:
    return [note.partition(";")[0] for _, note in long_sums(parsed_view(f"g {body}"))]


@pytest.mark.parametrize(
    ("body", "terms"),
    [
        ("(float[4,40] x, float[40,3] w) => (float[4,3] y) { y = MatMul (x, w) }", 40),
        ("(float[4,N] x, float[N,3] w) => (float[4,3] y) { y = MatMul (x, w) }", 128),
        ("(float[50,4] x, float[50,3] w) => (float[4,3] y) { y = Gemm <transA = 1> (x, w) }", 50),
        ("(float[4,50] x, float[50,3] w) => (float[4,3] y) <float[3] b = {1, 2, 3}> { y = Gemm (x, w, b) }", 50),
        ("(float[1,8,9,9] x, float[4,8,3,3] w) => (float[1,4,7,7] y) { y = Conv (x, w) }", 72),
        ("(float[1,64,9] x, float[64,4,2] w) => (float[1,4,10] y) { y = ConvTranspose (x, w) }", 64),
        ('(float[4,40] x, float[40,3] w) => (float[4,3] y) { y = Einsum <equation = "ij,jk->ik"> (x, w) }', 40),
        ('(float[4,6,7] x) => (float[4] y) { y = Einsum <equation = "ijk->i"> (x) }', 42),
        ("(float[1,8,9,9] x) => (float[1,8,1,1] y) { y = GlobalAveragePool (x) }", 81),
    ],
)
def test_a_sum_is_pinned_with_the_number_of_its_terms(body: str, terms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MAX_TERMS", terms - 1)
    assert notes(body) == [f"sums {terms} terms"]
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MAX_TERMS", terms)
    assert notes(body) == []


def test_the_longest_sums_are_pinned_until_few_terms_remain_in_the_others() -> None:
    body = """(float[4,99] x, float[99,80] a, float[80,60] b, float[60,50] c, float[50,3] d) => (float[4,3] y)
    { p = MatMul (x, a) q = MatMul (p, b) r = MatMul (q, c) y = MatMul (r, d) }"""
    assert 50 + 60 <= MAX_TERMS < 50 + 60 + 80
    assert notes(body) == ["sums 99 terms", "sums 80 terms"]


@pytest.mark.parametrize(
    "body",
    [
        f"(float[4,{MAX_TERMS}] x, float[{MAX_TERMS},3] w) => (float[4,3] y) {{ y = MatMul (x, w) }}",
        "(float[1,64,9,9] x, float[64,1,3,3] w) => (float[1,64,7,7] y) { y = Conv <group = 64> (x, w) }",
        "(float[1,64,9] x, float[64,1,2] w) => (float[1,64,10] y) { y = ConvTranspose <group = 64> (x, w) }",
        '(float[4,9] x, float[4,9] w) => (float[4,9] y) { y = Einsum <equation = "ij,ij->ij"> (x, w) }',
        "(double[4,40] x, double[40,3] w) => (double[4,3] y) { y = MatMul (x, w) }",
    ],
)
def test_short_sums_and_other_types_are_not_pinned(body: str) -> None:
    assert notes(body) == []


SHAPES = {"p": (1, 1, 8, 8), "o": (1, 1, 8, 8), "h": (6, 16)}
CODES = np.random.default_rng(0).normal(size=(16, 5))
CONSTANTS = {
    "two": 2.0,
    "eighth": 0.125,
    "eight": 8.0,
    "last": np.array([-1]),
    "blur": np.full((1, 1, 3, 3), 1 / 9),
    "w": np.eye(8),
    "c": CODES,
    "cc": (CODES**2).sum(0),
    "less": -2.0,
}
CODEC = "p=Pow(h,two);q=ReduceSum(p,last);d=Mul(h,two);m=MatMul(d,c);a=Sub(q,m);v=Add(a,cc)"
SPELLED = "q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);n=Mul(m,less);a=Add(q,n);v=Add(a,cc)"


def holds(text: str, to: DType = DType.BFLOAT16) -> set[str]:
    view = View.of(Model.load(cases.build(text, ["v"], shapes=SHAPES, constants=CONSTANTS)))
    return set(pinned(view, to))


DIFFERENCES = {
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)": "q e m s v",
    "q=Pow(x,two);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Pow(m,two);n=Neg(s);v=Add(n,e)": "q e m s n v",
    # sums and means
    "t=ReduceSumSquare[axes=-1](x);e=Mul(eighth,t);r=ReduceSum(x,last);m=Div(r,eight);s=Mul(m,m);v=Sub(e,s)": (
        "t e r m s v"
    ),
    # structural similarity: windows, and a covariance
    "q=Mul(p,o);e=Conv(q,blur);m=Conv(p,blur);n=Conv(o,blur);s=Mul(n,m);v=Sub(e,s)": "q e m n s v",
}
PRODUCTS = {
    CODEC: "p q d m a v",
    SPELLED: "q m n a v",
    "q=ReduceSumSquare[axes=-1](h);v=Gemm[alpha=-2.](h,c,q)": "q v",
    "p=Mul(h,h);q=ReduceSum(p,last);m=MatMul(h,c);b=Add(m,cc);v=Sub(q,b)": "p q m b v",
}
NEITHER = (
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](z);s=Mul(m,m);v=Sub(e,s)",  # of another value
    "q=Mul(x,z);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of only one factor
    "e=ReduceMean[axes=-1](x);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # not of products
    "q=Mul(x,x);e=ReduceMax[axes=-1](q);m=ReduceMax[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # not of means
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Add(e,s)",  # a sum
    "q=Mul(x,z);e=MatMul(q,w);m=MatMul(x,r);n=MatMul(z,t);s=Mul(m,n);v=Sub(e,s)",  # separate layers
    "a=MatMul(x,w);b=MatMul(x,r);m=Mul(a,b);v=Sub(a,m)",
    "r=RandomNormal[shape=8 8]();s=Mul(r,r);v=Sub(r,s)",  # without a reader
    "a=MatMul(x,w);v=Sub(a,a)",
    "q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);s=Sqrt(q);v=Div(m,s)",  # a cosine: only the norm
    "q=ReduceSumSquare[axes=-1](h);t=Tanh(h);m=MatMul(t,c);v=Add(q,m)",  # of something else
    "q=ReduceSum(h,last);m=MatMul(h,c);v=Add(q,m)",  # a sum without squares
)


@pytest.mark.parametrize("text", [*DIFFERENCES, *PRODUCTS, *NEITHER])
def test_a_difference_of_products_is_pinned_only_with_its_producers(text: str) -> None:
    assert holds(text) == set((DIFFERENCES | PRODUCTS).get(text, "").split())


@pytest.mark.parametrize("text", DIFFERENCES)
def test_a_difference_of_means_of_products_is_pinned_in_float16(text: str) -> None:
    assert set(DIFFERENCES[text].split()) <= holds(text, DType.FLOAT16)


WRITTEN = "m=ReduceMax[keepdims=1](a,{});d=Sub(a,m);p=Exp(d);"


@pytest.mark.parametrize(
    ("peaks", "summed", "expected"), [("last", "last", False), ("first", "last", True), ("first", "both", False)]
)
@pytest.mark.parametrize("softmax", ["p=Softmax[axis={}](a);", WRITTEN], ids=["one op", "written out"])
def test_a_sum_of_exponentials_is_small_unless_it_adds_all_peaks(
    softmax: str, peaks: str, summed: str, expected: bool
) -> None:
    axes = {"first": np.array([0]), "last": np.array([-1]), "both": np.array([0, 1])}
    rows = softmax.format(peaks if softmax == WRITTEN else axes[peaks][0])
    text = f"a=MatMul(x,w);{rows}r=ReduceSum[keepdims=1](p,{summed});v=Div(p,r)"
    shapes = {"x": (16, 8)}
    view = View.of(Model.load(cases.build(text, ["v"], shapes=shapes, constants={"w": np.eye(8), **axes}, opset=18)))
    assert ("r" in pinned(view)) is expected


def test_a_softmax_of_old_opsets_normalizes_over_several_axes() -> None:
    text = "a=MatMul(x,w);p=Softmax[axis=1](a);r=ReduceSum[axes={}](p);v=Div(p,r)"
    found = []
    for axes in ("2", "1 2"):
        proto = cases.build(text.format(axes), ["v"], shapes={"x": (2, 16, 8)}, constants={"w": np.eye(8)}, opset=11)
        found.append("r" in pinned(View.of(Model.load(proto))))
    assert found == [True, False]


ONE = ", ".join("1" if row == column else "0" for row in range(8) for column in range(8))
GELU = """g (float[N,8] x) => (float[N,8] y)
<float[8,8] w = {ONE}, float half = {0.5}, float k = {0.044715},
 float less = {-0.044715}, float c = {0.797884583}, float one = {1}, float two = {2}, float three = {3},
 float four = {4}> {
    a = MatMul (x, w)
    h = Mul (half, a)  p = Pow (a, EXPONENT)  q = Mul (p, FACTOR)  i = Add (a, q)  j = Mul (i, c)
    t = Tanh (j)  o = Add (t, one)  r = Mul (h, o)
    y = MatMul (r, w)
}"""


def gelu(exponent: str = "three", factor: str = "k") -> onnx.ModelProto:
    text = GELU.replace("{ONE}", f"{{{ONE}}}").replace("EXPONENT", exponent).replace("FACTOR", factor)
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]>' + text)


def dtype(converted: Converted, op: str) -> str:
    return next(row.dtype for row in converted.report.rows if row.name == op or row.op == op)


def test_the_cube_in_a_gelu_is_lowered_and_accurate_despite_overflow() -> None:
    converted = amp_rewrite.convert(gelu(), fuse="basic")
    assert (dtype(converted, "Pow"), dtype(converted, "Tanh")) == ("float16", "float16")
    points = np.array([0, 1e-3, 0.5, 1, 2, 3, 6, 40, 41, 300, 6e4], np.float32)
    feed = {"x": np.concatenate((points, -points))[:, None] * np.eye(1, 8, dtype=np.float32)}
    twin = amp_rewrite.emulate(converted.model).to_proto()
    found, wanted = (
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for proto in (twin, gelu())
    )
    # Each of the seven roundings is at most 2⁻¹¹; 1 + tanh has an absolute error of that size, however small it is.
    assert (np.abs(found - wanted) <= 7 * 2.0**-11 * np.maximum(np.abs(feed["x"]), np.abs(wanted))).all()


@pytest.mark.parametrize("entry", [{"op": "Pow"}, {"op": "Pow", "need": "place"}])
def test_an_entry_without_this_need_always_denies(entry: dict[str, str]) -> None:
    assert dtype(amp_rewrite.convert(gelu(), fuse="basic", lists=[{"deny": [entry]}]), "Pow") == "float32"


SNAKE = "u=Conv(x,w);r=Mul(u,a);s=Sin(r);p=Pow(s,two);t=Mul(p,b);v=Add(u,t);y=Conv(v,w)"
SLOPES = np.array([0.5, 1, 4, 16]).reshape(1, 4, 1)


def snake(
    text: str = SNAKE, slopes: object = SLOPES, factors: object = 1 / SLOPES, level: str = "default"
) -> Converted:
    constants = {"a": slopes, "b": factors, "two": 2.0}
    proto = cases.build(text, ["y"], shapes={"x": (1, 4, 9), "w": (4, 4, 1)}, constants=constants)
    return amp_rewrite.convert(proto, level=level)


@pytest.mark.parametrize(
    "text", [SNAKE, SNAKE.replace("Pow(s,two)", "Mul(s,s)"), "c=Identity(a);" + SNAKE.replace(",a)", ",c)")]
)
def test_a_snake_activation_is_lowered_and_its_sine_is_not_a_position(text: str) -> None:
    assert {row.dtype for row in snake(text).report.rows} == {"float16"}


@pytest.mark.parametrize(
    ("text", "slopes", "factors"),
    [
        (SNAKE, SLOPES * 2, 0.5 / SLOPES),  # its angle soon overflows float16
        (SNAKE, SLOPES, 8 / SLOPES),  # the square weighs more than the sum
        (SNAKE.replace("Add(u,t)", "Add(x,t)"), SLOPES, 1 / SLOPES),  # a sum with something else
        (SNAKE.replace("Pow(s,two)", "Pow(s,a)"), SLOPES, 1 / SLOPES),  # another power
    ],
)
def test_another_sine_stays_float32(text: str, slopes: object, factors: object) -> None:
    assert dtype(snake(text, slopes, factors), "Sin") == "float32"


MAPS = {"x": (1, 4, 8, 8), "w": (4, 4, 1, 1), "v": (4, 4), "u": (4, 1, 1, 1)}
TALL = {"x": (1, 4, 65, 64), "u": (64, 64), "v": (4, 4)}
AVERAGE = "a=Conv(x,w);m=ReduceMean[axes=2 3](a);"
POOLED = "a=MatMul(x,u);m=ReduceMean[axes=2 3](a);f=Flatten(m);b=MatMul(f,v)"
STREAM = "a=MatMul(x,u);m=ReduceMean[axes=1](a);n=Add(a,m);b=MatMul(n,u)"
GATED = "a=Conv(x,w);g=Mul(a,x);m=ReduceMean[axes=AXES](g);n=Mul(a,m);b=Conv(n,w)"
SQUARE = "a=MatMul(x,w);p=Pow(a,two);"
SUM = "a=MatMul(x,w);t=Relu(a);s=ReduceSum(t,last);b=MatMul(s,u)"
NUMBERS: dict[str, object] = {"whole": [1, 4, 1, 1], "two": 2.0, "last": [1], "first": [0], "both": [0, 1]}


def rows(*terms: int, row: int | str = "N") -> dict[str, tuple[int | str, ...]]:
    """Return shapes of rows with this many terms, and of one value per row."""
    return {"x": (row, 8), "w": (8, *terms), "u": (1, 5)}


@pytest.mark.parametrize(
    ("text", "op", "shapes", "expected"),
    [
        # A mean that is neither subtracted nor a variance.
        (AVERAGE + "b=Conv(m,w)", "m", MAPS, "float16"),
        (AVERAGE.replace("2 3", "-1 -2") + "f=Flatten(m);b=Gemm(f,v)", "m", MAPS, "float16"),
        (AVERAGE.replace("2 3", "1 2") + "b=Conv(m,u)", "m", MAPS, "float16"),
        (AVERAGE + "n=Add(a,m);b=Conv(n,w)", "m", MAPS, "float16"),
        (AVERAGE + "s=Sub(a,m);b=Conv(s,w)", "m", MAPS, "float32"),
        (AVERAGE + "r=Reshape(m,whole);s=Sub(a,r);b=Conv(s,w)", "m", MAPS, "float32"),
        ("a=Conv(x,w);p=Mul(a,a);m=ReduceMean[axes=2 3](p);b=Conv(m,w)", "m", MAPS, "float32"),
        ("a=Conv(x,w);p=Pow(a,two);m=ReduceMean[axes=2 3](p);b=Conv(m,w)", "m", MAPS, "float32"),
        (GATED.replace("AXES", "-1"), "m", MAPS, "float32"),
        (GATED.replace("AXES", "2"), "m", MAPS, "float16"),
        # 4096 numbers may average 16, more of them less, because the sum is stored before the division.
        (POOLED, "m", {**TALL, "x": (1, 4, 64, 64)}, "float16"),
        (POOLED, "m", TALL, "float32"),
        # Fewer numbers are averaged in a stream than in pooled maps.
        (STREAM, "m", {"x": (1, 256, 8)}, "float16"),
        (STREAM, "m", {"x": (1, 257, 8)}, "float32"),
        # A square, unless its reader is a sum, a root or a divisor.
        (SQUARE + "b=MatMul(p,w)", "p", {}, "float16"),
        (SQUARE + "r=Relu(p);b=MatMul(r,w)", "p", {}, "float16"),
        (SQUARE + "s=ReduceSum(p);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "s=ReduceMean(p);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "t=Transpose[perm=1 0](p);s=ReduceSum(t);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "s=Sqrt(p);b=MatMul(s,w)", "p", {}, "float32"),
        (SQUARE + "s=Div(x,p);b=MatMul(s,w)", "p", {}, "float32"),
        # A sum of at most eight terms other than squares.
        (SUM, "s", rows(8), "float16"),
        (SUM.replace("last", "both"), "s", rows(4, row=2), "float16"),
        (SUM, "s", rows(9), "float32"),
        (SUM.replace("last", "first").replace("(s,u)", "(s,v)"), "s", {**rows(8), "v": (8, 5)}, "float32"),
        (SUM.replace("Relu(a)", "Mul(a,a)"), "s", rows(4), "float32"),
        (SUM.replace("Relu(a)", "Pow(a,two)"), "s", rows(4), "float32"),
    ],
)
def test_a_mean_a_square_or_a_sum_is_lowered_if_its_readers_allow_it(
    text: str, op: str, shapes: dict[str, Any], expected: str
) -> None:
    constants = {name: np.array(array) for name, array in NUMBERS.items() if name in text}
    proto = cases.build(text, ["b"], shapes=shapes, constants=constants)
    assert dtype(amp_rewrite.convert(proto), op) == expected


def test_the_sum_behind_a_mean_fits_bfloat16() -> None:
    assert dtype(amp_rewrite.convert(cases.build(POOLED, ["b"], shapes=TALL), to="bfloat16"), "m") == "bfloat16"


WHOLE_SHAPES: dict[str, Any] = {
    "image": (1, 3, "H", "W"),
    "seen": ("N",),
    "ids": ("N",),
    "rows": ("N", 8),
    "table": (100,),
    "given": (4,),
    "until": ("N",),
    "row": (1,),
    "f": ("B", "C", "N"),
    "t": ("N", "C"),
    **dict.fromkeys(("a", "b", "c", "scale"), ()),
}
TYPES = {"ids": "int", "seen": "bool"}
WHOLE_NUMBERS: dict[str, Any] = {
    "sizes": np.array([1, 3]),
    "none": np.zeros(0),
    "all": np.array([-1]),
    "first": np.array([1]),
    "zero": np.array(0),
    "one": np.array(1),
    "five": np.array(5),
    "eight": np.array(8),
    "nought": 0.0,
    "half": 0.5,
    "seven": 7.0,
    "values": np.array([0.0, 1.0]),
    "numbers": np.arange(8.0)[:, None],
    "powers": 2.0 ** np.arange(8)[:, None],
}


def kept_in(text: str) -> list[str]:
    """Return the first results of the ops that stay float32, in graph order."""
    return list(pinned(View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')))))


SIZE = (
    "s=Shape[start=2](image);i=Cast[to=float](s);m=Mul(i,scale);r=Floor(m);n=Cast[to=int](r);"
    "z=Concat[axis=0](sizes,n);y=Resize[mode=linear](image,none,none,z)"
)
PREDICTED = "l=MatMul(x,w);e=Exp(l);u=Ceil(e);s=ReduceSum[keepdims=0](u);n=Cast[to=int](s);y=Range(zero,n,one)"
PICKED = (
    "l=MatMul(rows,w);p=Sigmoid(l);o=Reshape(p,all);top,at=TopK(o,first);r=Div(at,five);k=Cast[to=float](at);"
    "e=Equal(k,nought);m=MatMul(rows,v);s=Sigmoid(m);y=Gather(s,r)"
)
RANKED = "l=MatMul(x,w);s=Relu(l);INDEX;n=ReduceMax[keepdims=0](i);k=Reshape(n,first);y=Expand(row,k)"
BITS = "BITS;h=MatMul(o,powers);y=Cast[to=int](h)"
GRAM = "gram=MatMul(f,t);s=Shape[start=1](f);COUNT;y=Mul(q,q)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SIZE, "i m r n"),  # up to its source integer
        (PREDICTED, "e u s n"),  # up to the layer
        ("r=Relu(image);s=Reciprocal(given);y=Resize[mode=nearest](r,,s)", "s"),
        ("l=Mul(a,b);y=Range(c,l,a)", "l y"),
        (RANKED.replace("INDEX", "i=ArgMax[axis=1,keepdims=0](s)"), ""),
        (RANKED.replace("INDEX", "i=NonZero(s)"), ""),
        (RANKED.replace("INDEX", "d=Greater(s,half);i=Cast[to=int](d)"), ""),
        ("i=Cast[to=float](ids);d=Div(i,seven);r=Floor(d);j=Cast[to=int](r);y=Gather(table,j)", "i d r j"),
        (PICKED, "p o top"),  # the ranked scores, but not the selected values
        (BITS.replace("BITS", "o=Sign(rows)"), "o h y"),
        (BITS.replace("BITS", "o=Floor(rows)"), "o h y"),
        (BITS.replace("BITS", "e=Greater(rows,half);o=Cast[to=float](e)"), "e h y"),
        ("i=Cast[to=float](seen);n=CumSum(i,zero);y=Less(n,until)", "n y"),
        ("o=OneHot(ids,eight,values);i=MatMul(o,numbers);at=Cast[to=int](i);y=Gather(table,at)", "i at"),
        (GRAM.replace("COUNT", "n=ReduceProd[keepdims=0](s);k=Cast[to=float](n);q=Div(gram,k)"), "gram k q"),
        (GRAM.replace("COUNT", "n=Size(f);k=Cast[to=float](n);r=Reciprocal(k);q=Mul(gram,r)"), "gram k r q"),
        (
            GRAM.replace("COUNT", "h=Gather(s,first);m=Mul(h,h);n=Sub(m,one);k=CastLike(n,gram);e=Sqrt(k);q=Div(f,e)"),
            "k e q",
        ),
        (GRAM.replace("COUNT", "z=Cast[to=float](s);k=ReduceProd[keepdims=0](z);q=Mul(gram,k)"), "k"),
    ],
)
def test_exactly_sizes_positions_and_counts_are_pinned(text: str, expected: str) -> None:
    read = {name: array for name, array in WHOLE_NUMBERS.items() if name in re.findall(r"\w+", text)}
    proto = cases.build(text, ["y"], shapes=WHOLE_SHAPES, types=TYPES, constants=read, opset=18)
    assert " ".join(pinned(View.of(Model.load(proto)))) == expected


def test_needs_of_a_shape_go_into_branches_and_out_of_loops() -> None:
    text = """g (float[N] x, float scale, bool c, int64 trips, bool yes, float start) => (float[K] y, float[L] z) {
        h = Mul (scale, scale)
        s = If (c) <
            then_branch = a () => (float p) { p = Neg (h) },
            else_branch = b () => (float q) { q = Identity (h) }
        >
        n = Cast <to = 7> (s)
        one = Constant <value = int64[1] {1}> ()
        shape = Reshape (n, one)
        y = Expand (x, shape)
        last = Loop (trips, yes, start) <
            body = l (int64 i, bool go, float state) => (bool more, float next) {
                more = Identity (go)
                next = Exp (state)
            }
        >
        k = Cast <to = 7> (last)
        shape2 = Reshape (k, one)
        z = Expand (x, shape2)
    }"""
    assert kept_in(text) == ["h", "p", "q", "n", "next", "k"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("one = Constant <value_float = 1.0> ()  sum = Add (state, one)  next = Identity (sum)", ["sum", "next"]),
        ("z = MatMul (state, w)  next = Add (state, z)", ["next"]),
        ("f = Sigmoid (start)  m = Mul (state, f)  next = Add (m, start)", ["f", "m", "next"]),
        ("z = MatMul (state, w)  a = Add (state, z)  next = Relu (z)", []),
        ("z = MatMul (state, w)  next = Tanh (z)", []),
    ],
)
def test_a_loop_state_is_accumulated_in_float32_and_a_recurrent_one_is_not(body: str, expected: list[str]) -> None:
    text = f"""g (int64 trips, bool yes, float[N,8] start, float[8,8] w) => (float[N,8] last) {{
        last = Loop (trips, yes, start) <
            body = l (int64 i, bool go, float[N,8] state) => (bool more, float[N,8] next) {{
                more = Identity (go)
                {body}
            }}
        >
    }}"""
    assert kept_in(text) == expected


@pytest.mark.parametrize(
    "product", ['Einsum <equation = "ij,k->ik"> (time, k)', "MatMul (time, k1)", "Gemm <transB = 1> (time, k2)"]
)
def test_an_outer_product_is_an_angle_in_every_spelling(product: str) -> None:
    inputs = "float[N,1] time, float[4] k, float[1,4] k1, float[4,1] k2"
    assert "turns" in kept_in(f"g ({inputs}) => (float[N,4] y) {{ turns = {product}  y = Sin (turns) }}")


def test_a_reason_names_the_state_that_an_output_replaces() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[8] f, float[8] mean, float[8] squares) => (float[8] squares_out, float[8] mean_out)
        <float rate = {0.001}> {
            off = Sub (f, mean)  step = Mul (off, rate)  mean_out = Add (mean, step)  rest = Sub (f, mean_out)
            square = Mul (rest, rest)  change = Sub (square, squares)  part = Mul (change, rate)
            squares_out = Add (squares, part)
        }""")
    view = View.of(Model.load(model))
    pins = find_needs(view, F16).pins
    named = {op.node.output[0]: pins[op.id].note.split("'")[1] for op in view.ops if op.id in pins}
    assert named["mean_out"] == "mean"
    assert named["squares_out"] == named["part"] == named["change"] == "squares"
