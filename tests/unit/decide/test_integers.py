"""Which shapes, indices, counts and angles stay float32, and what is left alone beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

SHAPES: dict[str, Any] = {
    "image": (1, 3, "H", "W"),
    "mask": ("B", 1, 1, "S"),
    "seen": ("N",),
    "ids": ("N",),
    "rows": ("N", 8),
    "scores": ("B", 4, "Q", "S"),
    **dict.fromkeys(("a", "b", "c", "scale", "stop"), ()),
}
TYPES = {"mask": "int", "ids": "int", "seen": "bool"}
ONE = np.array([1])


def view_of(text: str, shapes: dict[str, Any] | None = None, **constants: object) -> View:
    model = cases.build(text, ["y"], shapes={**SHAPES, **(shapes or {})}, types=TYPES, constants=constants, opset=18)
    return View.of(Model.load(model))


def kept(text: str, shapes: dict[str, Any] | None = None, **constants: object) -> list[str]:
    """The first results of the ops that stay float32, in graph order."""
    return list(held(view_of(text, shapes, **constants)))


def kept_in(text: str) -> list[str]:
    """The same for a model in the language of onnx, which has bodies."""
    return list(held(View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')))))


def test_a_size_computed_in_floats_stays_float32_up_to_the_integer_it_came_from() -> None:
    text = (
        "s=Shape[start=2](image);f=Cast[to=float](s);m=Mul(f,scale);r=Floor(m);n=Cast[to=int](r);"
        "sizes=Concat[axis=0](two,n);y=Resize[mode=linear](image,none,none,sizes)"
    )
    assert kept(text, two=np.array([1, 3]), none=np.zeros(0)) == ["f", "m", "r", "n"]


def test_a_size_that_a_layer_predicts_stays_float32_up_to_the_layer() -> None:
    text = "l=MatMul(x,w);e=Exp(l);up=Ceil(e);sum=ReduceSum[keepdims=0](up);n=Cast[to=int](sum);y=Range(zero,n,one)"
    assert kept(text, zero=np.array(0), one=np.array(1)) == ["e", "up", "sum", "n"]


def test_computed_scales_and_lengths_stay_float32_and_the_image_does_not() -> None:
    text = "r=Relu(image);scales=Reciprocal(given);y=Resize[mode=nearest](r,,scales)"
    assert kept(text, {"given": (4,)}) == ["scales"]
    assert kept("limit=Mul(a,b);y=Range(c,limit,a)") == ["limit", "y"]


@pytest.mark.parametrize(
    "index", ["i=ArgMax[axis=1,keepdims=0](s)", "i=NonZero(s)", "d=Greater(s,t);i=Cast[to=int](d)"]
)
def test_a_shape_made_of_an_index_or_a_comparison_leaves_the_scores_alone(index: str) -> None:
    text = f"l=MatMul(x,w);s=Relu(l);{index};n=ReduceMax[keepdims=0](i);k=Reshape(n,one);y=Expand(v,k)"
    assert kept(text, {"v": (1,)}, one=ONE, t=0.5) == []


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


GRAM = "gram=MatMul(f,t);s=Shape[start=1](f);COUNT;y=Mul(a,a)"
FREE: dict[str, Any] = {"f": ("B", "C", "N"), "t": ("N", "C")}


COUNTS = {
    "n=ReduceProd[keepdims=0](s);k=Cast[to=float](n);a=Div(gram,k)": {"k", "a"},
    "n=Size(f);k=Cast[to=float](n);r=Reciprocal(k);a=Mul(gram,r)": {"k", "r", "a"},
    "h=Gather(s,one);m=Mul(h,h);n=Sub(m,one);k=CastLike(n,gram);e=Sqrt(k);a=Div(gram,e)": {"k", "e"},
    "z=Cast[to=float](s);k=ReduceProd[keepdims=0](z);a=Mul(gram,k)": {"k"},
}


@pytest.mark.parametrize("count", COUNTS)
def test_what_reads_a_product_of_sizes_stays_float32(count: str) -> None:
    assert COUNTS[count] <= set(kept(GRAM.replace("COUNT", count), FREE, one=ONE))


def test_integer_division_done_in_floats_stays_float32() -> None:
    text = "f=Cast[to=float](ids);d=Div(f,seven);r=Floor(d);j=Cast[to=int](r);y=Gather(table,j)"
    assert kept(text, {"table": (100,)}, seven=7.0) == ["f", "d", "r", "j"]


def test_what_an_index_picks_is_left_alone_and_the_ranked_scores_are_not() -> None:
    text = (
        "logits=MatMul(rows,w);p=Sigmoid(logits);flat=Reshape(p,all);top,at=TopK(flat,one);row=Div(at,five);"
        "f=Cast[to=float](at);live=Equal(f,zero);b=MatMul(rows,v);s=Sigmoid(b);y=Gather(s,row)"
    )
    assert kept(text, all=np.array([-1]), one=ONE, five=np.array(5), zero=0.0) == ["p", "flat", "top"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("one = Constant <value_float = 1.0> ()  sum = Add (state, one)  next = Identity (sum)", ["sum", "next"]),
        ("z = MatMul (state, w)  next = Add (state, z)", ["next"]),
        ("z = MatMul (state, w)  a = Add (state, z)  next = Relu (z)", []),
        ("z = MatMul (state, w)  next = Tanh (z)", []),
    ],
)
def test_a_state_of_a_loop_is_added_up_in_float32_and_a_recurrent_one_is_not(body: str, expected: list[str]) -> None:
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
def test_an_outer_product_is_an_angle_whatever_it_is_spelled_with(product: str) -> None:
    inputs = "float[N,1] time, float[4] k, float[1,4] k1, float[4,1] k2"
    assert "turns" in kept_in(f"g ({inputs}) => (float[N,4] y) {{ turns = {product}  y = Sin (turns) }}")


POWERS = 2.0 ** np.arange(8)[:, None]


@pytest.mark.parametrize("birth", ["b=Sign(rows)", "b=Floor(rows)", "c=Greater(rows,half);b=Cast[to=float](c)"])
def test_a_sum_or_product_of_whole_numbers_is_held_up_to_its_index(birth: str) -> None:
    assert "h" in kept(f"{birth};h=MatMul(b,powers);y=Cast[to=int](h)", half=0.5, powers=POWERS)


def test_running_counts_that_are_compared_and_ids_made_of_one_hot_rows_are_held() -> None:
    text = "f=Cast[to=float](seen);c=CumSum(f,zero);y=Less(c,limit)"
    assert "c" in kept(text, {"limit": ("N",)}, zero=np.array(0))
    text = "o=OneHot(ids,eight,values);i=MatMul(o,numbers);at=Cast[to=int](i);y=Gather(table,at)"
    numbers = np.arange(8.0)[:, None]
    assert "i" in kept(text, eight=np.array(8), values=np.array([0.0, 1.0]), numbers=numbers)
