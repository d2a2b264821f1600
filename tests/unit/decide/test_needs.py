"""Needs: variances and distances as differences, long sums, and steps that grow with the number of ops."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.decide.needs.backward import Backward
from amp_rewrite.decide.needs.facts import MOST_NAMED
from amp_rewrite.decide.needs.find import MOST_TERMS, find_needs, long_sums
from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import Op, ValueId, View
from support import cases
from support.held import held

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
    """Return a layer, copies, and Acos, which needs digits of them all."""
    return ["c0=MatMul(x,w)", *(f"c{i + 1}=Identity(c{i})" for i in range(count)), f"y=Acos(c{count})"]


def sums_of_copies(count: int) -> list[str]:
    """Return a layer, copies, and the sum of each and a bias."""
    adds = [f"a{i}=Add(c{i},b)" for i in range(count)]
    return [*behind_copies(count)[:-1], *adds, f"y=Sum({','.join(f'a{i}' for i in range(count))})"]


@pytest.mark.parametrize("nodes", [behind_copies, sums_of_copies])
def test_no_op_walks_along_all_copies(nodes: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(nodes(500), "y", w=EYE, b=np.ones(8, np.float32))
    steps, step = 0, View.producer

    def counted(self: View, value: ValueId | None, *kinds: str) -> Op | None:
        nonlocal steps
        steps += 1
        return step(self, value, *kinds)

    monkeypatch.setattr(View, "producer", counted)
    Backward(find_facts(view, F16))
    assert 0 < steps < 20 * len(view.ops)


def test_a_need_passes_many_iterations_in_few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
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
    held = Backward(find_facts(view, F16)).pinned
    assert {op.id for op in view.ops if op.kind == "Neg"} <= held.keys()
    assert len(view.ops) <= visits < 4 * len(view.ops)


def test_a_sum_of_many_values_names_few_and_its_own_state_among_them() -> None:
    names = [f"s{i}" for i in range(3 * MOST_NAMED)]
    sums = [f"a{i + 1}=Add(a{i},{name})" for i, name in enumerate(names)]
    view = view_of(["a0=Identity(x)", *sums], f"a{len(names)}")
    fact = find_facts(view, F16)[view.scopes[0].outputs[0]]
    assert len(fact.sources) == len(fact.levels) == len(fact.states) == MOST_NAMED
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
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MOST_TERMS", terms - 1)
    assert notes(body) == [f"adds up {terms} terms"]
    monkeypatch.setattr("amp_rewrite.decide.needs.find.MOST_TERMS", terms)
    assert notes(body) == []


def test_the_longest_sums_are_pinned_until_the_others_have_few_terms_in_all() -> None:
    body = """(float[4,99] x, float[99,80] a, float[80,60] b, float[60,50] c, float[50,3] d) => (float[4,3] y)
    { p = MatMul (x, a) q = MatMul (p, b) r = MatMul (q, c) y = MatMul (r, d) }"""
    assert 50 + 60 <= MOST_TERMS < 50 + 60 + 80
    assert notes(body) == ["adds up 99 terms", "adds up 80 terms"]


@pytest.mark.parametrize(
    "body",
    [
        f"(float[4,{MOST_TERMS}] x, float[{MOST_TERMS},3] w) => (float[4,3] y) {{ y = MatMul (x, w) }}",
        "(float[1,64,9,9] x, float[64,1,3,3] w) => (float[1,64,7,7] y) { y = Conv <group = 64> (x, w) }",
        "(float[1,64,9] x, float[64,1,2] w) => (float[1,64,10] y) { y = ConvTranspose <group = 64> (x, w) }",
        '(float[4,9] x, float[4,9] w) => (float[4,9] y) { y = Einsum <equation = "ij,ij->ij"> (x, w) }',
        "(double[4,40] x, double[40,3] w) => (double[4,3] y) { y = MatMul (x, w) }",
    ],
)
def test_short_sums_and_other_types_are_left_alone(body: str) -> None:
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
    return set(held(view, to))


DIFFERENCES = {
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)": "q e m s v",
    "q=Pow(x,two);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Pow(m,two);n=Neg(s);v=Add(n,e)": "q e m s n v",
    # sums, and what makes means of them
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
    "q=Mul(x,z);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of one factor alone
    "e=ReduceMean[axes=-1](x);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no product
    "q=Mul(x,x);e=ReduceMax[axes=-1](q);m=ReduceMax[axes=-1](x);s=Mul(m,m);v=Sub(e,s)",  # of no means
    "q=Mul(x,x);e=ReduceMean[axes=-1](q);m=ReduceMean[axes=-1](x);s=Mul(m,m);v=Add(e,s)",  # a sum
    "q=Mul(x,z);e=MatMul(q,w);m=MatMul(x,r);n=MatMul(z,t);s=Mul(m,n);v=Sub(e,s)",  # layers, each of its own
    "a=MatMul(x,w);b=MatMul(x,r);m=Mul(a,b);v=Sub(a,m)",
    "r=RandomNormal[shape=8 8]();s=Mul(r,r);v=Sub(r,s)",  # of what nothing is read for
    "a=MatMul(x,w);v=Sub(a,a)",
    "q=ReduceSumSquare[axes=-1](h);m=MatMul(h,c);s=Sqrt(q);v=Div(m,s)",  # a cosine: the norm alone
    "q=ReduceSumSquare[axes=-1](h);t=Tanh(h);m=MatMul(t,c);v=Add(q,m)",  # of something else
    "q=ReduceSum(h,last);m=MatMul(h,c);v=Add(q,m)",  # a sum without squares
)


@pytest.mark.parametrize("text", [*DIFFERENCES, *PRODUCTS, *NEITHER])
def test_a_difference_of_products_is_held_with_what_computes_it_and_no_other(text: str) -> None:
    assert holds(text) == set((DIFFERENCES | PRODUCTS).get(text, "").split())


@pytest.mark.parametrize("text", DIFFERENCES)
def test_a_difference_of_means_of_products_is_held_in_float16(text: str) -> None:
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
    assert ("r" in held(view)) is expected


def test_a_softmax_of_old_opsets_has_rows_of_several_axes() -> None:
    text = "a=MatMul(x,w);p=Softmax[axis=1](a);r=ReduceSum[axes={}](p);v=Div(p,r)"
    found = []
    for axes in ("2", "1 2"):
        proto = cases.build(text.format(axes), ["v"], shapes={"x": (2, 16, 8)}, constants={"w": np.eye(8)}, opset=11)
        found.append("r" in held(View.of(Model.load(proto))))
    assert found == [True, False]
