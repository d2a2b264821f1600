"""Which shapes, indices, counts and angles stay float32, and what is left alone beside them."""

import re
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
NUMBERS: dict[str, Any] = {
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
    """The first results of the ops that stay float32, in graph order, in a model in the language of onnx."""
    return list(held(View.of(Model.load(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')))))


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
        (SIZE, "i m r n"),  # up to the integer that it came from
        (PREDICTED, "e u s n"),  # up to the layer
        ("r=Relu(image);s=Reciprocal(given);y=Resize[mode=nearest](r,,s)", "s"),
        ("l=Mul(a,b);y=Range(c,l,a)", "l y"),
        (RANKED.replace("INDEX", "i=ArgMax[axis=1,keepdims=0](s)"), ""),
        (RANKED.replace("INDEX", "i=NonZero(s)"), ""),
        (RANKED.replace("INDEX", "d=Greater(s,half);i=Cast[to=int](d)"), ""),
        ("i=Cast[to=float](ids);d=Div(i,seven);r=Floor(d);j=Cast[to=int](r);y=Gather(table,j)", "i d r j"),
        (PICKED, "p o top"),  # the ranked scores, and nothing of what their places pick
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
def test_what_becomes_a_size_a_place_or_a_count_is_held_and_nothing_else(text: str, expected: str) -> None:
    read = {name: array for name, array in NUMBERS.items() if name in re.findall(r"\w+", text)}
    proto = cases.build(text, ["y"], shapes=SHAPES, types=TYPES, constants=read, opset=18)
    assert " ".join(held(View.of(Model.load(proto)))) == expected


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
