"""Denied ops that are harmless where they stand, tables of weights as roots, and their near twins."""

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.pipeline.conversion import Converted
from support import cases

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


def test_the_cube_in_a_gelu_is_lowered_and_right_where_it_overflows() -> None:
    converted = amp_rewrite.convert(gelu(), fuse="basic")
    assert (dtype(converted, "Pow"), dtype(converted, "Tanh")) == ("float16", "float16")
    points = np.array([0, 1e-3, 0.5, 1, 2, 3, 6, 40, 41, 300, 6e4], np.float32)
    feed = {"x": np.concatenate((points, -points))[:, None] * np.eye(1, 8, dtype=np.float32)}
    twin = amp_rewrite.emulate(converted.model).to_proto()
    found, wanted = (
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for proto in (twin, gelu())
    )
    # Each of the seven roundings is of at most 2⁻¹¹; 1 + tanh is off by as much beside 1, however small it is itself.
    assert (np.abs(found - wanted) <= 7 * 2.0**-11 * np.maximum(np.abs(feed["x"]), np.abs(wanted))).all()


@pytest.mark.parametrize("entry", [{"op": "Pow"}, {"op": "Pow", "need": "place"}])
def test_an_entry_without_this_need_denies_always(entry: dict[str, str]) -> None:
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
def test_a_snake_activation_is_lowered_as_a_whole_and_its_sine_is_no_position(text: str) -> None:
    assert {row.dtype for row in snake(text).report.rows} == {"float16"}


@pytest.mark.parametrize(
    ("text", "slopes", "factors"),
    [
        (SNAKE, SLOPES * 2, 0.5 / SLOPES),  # its angle leaves float16 soon
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
    """Shapes that make rows of so many terms, and one of each row."""
    return {"x": (row, 8), "w": (8, *terms), "u": (1, 5)}


@pytest.mark.parametrize(
    ("text", "op", "shapes", "held"),
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
        # 4096 numbers may be 16 on the average, more of them less: the sum is stored before it is divided.
        (POOLED, "m", {**TALL, "x": (1, 4, 64, 64)}, "float16"),
        (POOLED, "m", TALL, "float32"),
        # Of a stream fewer numbers are averaged than of maps that are pooled.
        (STREAM, "m", {"x": (1, 256, 8)}, "float16"),
        (STREAM, "m", {"x": (1, 257, 8)}, "float32"),
        # A square, unless a sum, a root or a divisor reads it.
        (SQUARE + "b=MatMul(p,w)", "p", {}, "float16"),
        (SQUARE + "r=Relu(p);b=MatMul(r,w)", "p", {}, "float16"),
        (SQUARE + "s=ReduceSum(p);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "s=ReduceMean(p);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "t=Transpose[perm=1 0](p);s=ReduceSum(t);b=Mul(w,s)", "p", {}, "float32"),
        (SQUARE + "s=Sqrt(p);b=MatMul(s,w)", "p", {}, "float32"),
        (SQUARE + "s=Div(x,p);b=MatMul(s,w)", "p", {}, "float32"),
        # A sum of at most eight terms, if they are no squares.
        (SUM, "s", rows(8), "float16"),
        (SUM.replace("last", "both"), "s", rows(4, row=2), "float16"),
        (SUM, "s", rows(9), "float32"),
        (SUM.replace("last", "first").replace("(s,u)", "(s,v)"), "s", {**rows(8), "v": (8, 5)}, "float32"),
        (SUM.replace("Relu(a)", "Mul(a,a)"), "s", rows(4), "float32"),
        (SUM.replace("Relu(a)", "Pow(a,two)"), "s", rows(4), "float32"),
    ],
)
def test_a_mean_a_square_or_a_sum_is_lowered_where_its_readers_need_no_more(
    text: str, op: str, shapes: dict[str, Any], held: str
) -> None:
    constants = {name: np.array(array) for name, array in NUMBERS.items() if name in text}
    proto = cases.build(text, ["b"], shapes=shapes, constants=constants)
    assert dtype(amp_rewrite.convert(proto), op) == held


def test_the_sum_behind_a_mean_fits_bfloat16() -> None:
    assert dtype(amp_rewrite.convert(cases.build(POOLED, ["b"], shapes=TALL), to="bfloat16"), "m") == "bfloat16"
