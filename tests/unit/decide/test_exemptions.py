"""Denied ops that are harmless where they stand, tables of weights as roots, and their near twins."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper

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


MAPS = {"x": (1, 4, 8, 8), "w": (4, 4, 1, 1), "v": (4, 4)}
AVERAGE = "a=Conv(x,w);m=ReduceMean[axes={axes}](a);"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (AVERAGE.format(axes="2 3") + "b=Conv(m,w)", "float16"),
        (AVERAGE.format(axes="-1 -2") + "f=Flatten(m);b=Gemm(f,v)", "float16"),
        (AVERAGE.format(axes="1 2") + "b=Conv(m,u)", "float16"),
        (AVERAGE.format(axes="2 3") + "n=Add(a,m);b=Conv(n,w)", "float16"),
        (AVERAGE.format(axes="2 3") + "s=Sub(a,m);b=Conv(s,w)", "float32"),
        ("a=Conv(x,w);p=Mul(a,a);m=ReduceMean[axes=2 3](p);b=Conv(m,w)", "float32"),
        (AVERAGE.format(axes="2 3") + "r=Reshape(m,one);s=Sub(a,r);b=Conv(s,w)", "float32"),
        ("a=Conv(x,w);g=Mul(a,x);m=ReduceMean[axes=-1](g);n=Mul(a,m);b=Conv(n,w)", "float32"),
        ("a=Conv(x,w);g=Mul(a,x);m=ReduceMean[axes=2](g);n=Mul(a,m);b=Conv(n,w)", "float16"),
        ("a=Conv(x,w);p=Pow(a,two);m=ReduceMean[axes=2 3](p);b=Conv(m,w)", "float32"),
    ],
)
def test_a_mean_is_lowered_that_is_neither_subtracted_nor_a_variance(text: str, held: str) -> None:
    shapes = {**MAPS, "u": (4, 1, 1, 1)}
    last = text.split(";")[-1].split("=")[0]
    constants = {"one": np.array([1, 4, 1, 1]), "two": 2.0}
    proto = cases.build(text, [last], shapes=shapes, constants=constants)
    assert dtype(amp_rewrite.convert(proto), "m") == held


@pytest.mark.parametrize(
    ("size", "to", "held"), [(64, "float16", "float16"), (65, "float16", "float32"), (65, "bfloat16", "bfloat16")]
)
def test_the_sum_behind_a_mean_has_to_fit(size: int, to: str, held: str) -> None:
    """4096 numbers may be 16 on the average, more of them less: the sum is stored before it is divided."""
    text = "a=MatMul(x,u);m=ReduceMean[axes=2 3](a);f=Flatten(m);b=MatMul(f,v)"
    proto = cases.build(text, ["b"], shapes={**MAPS, "x": (1, 4, size, 64), "u": (64, 64)})
    assert dtype(amp_rewrite.convert(proto, to=to), "m") == held


@pytest.mark.parametrize(("tokens", "held"), [(256, "float16"), (257, "float32")])
def test_of_a_stream_fewer_numbers_are_averaged_than_of_maps_that_are_pooled(tokens: int, held: str) -> None:
    text = "a=MatMul(x,u);m=ReduceMean[axes=1](a);n=Add(a,m);b=MatMul(n,u)"
    proto = cases.build(text, ["b"], shapes={"x": (1, tokens, 8), "u": (8, 8)})
    assert dtype(amp_rewrite.convert(proto), "m") == held


SQUARE = "a=MatMul(x,w);p=Pow(a,two);"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("y=MatMul(p,w)", "float16"),  # a squared ReLU, but for the Relu
        ("r=Relu(p);y=MatMul(r,w)", "float16"),
        ("s=ReduceSum(p);y=Mul(w,s)", "float32"),
        ("s=ReduceMean(p);y=Mul(w,s)", "float32"),
        ("t=Transpose[perm=1 0](p);s=ReduceSum(t);y=Mul(w,s)", "float32"),
        ("s=Sqrt(p);y=MatMul(s,w)", "float32"),
        ("s=Div(x,p);y=MatMul(s,w)", "float32"),
    ],
)
def test_a_square_is_lowered_unless_a_sum_root_or_divisor_reads_it(text: str, held: str) -> None:
    proto = cases.build(SQUARE + text, ["y"], constants={"two": 2.0})
    assert dtype(amp_rewrite.convert(proto), "p") == held


def dtype_of_sum(shape: tuple[int | str, ...], axes: str, made: str = "v = Relu (a)") -> str:
    """The type of a ReduceSum of a value of this shape, between two products."""
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    g (float[N,8] x, float[8,64] w, float[M,5] u) => (float[K,5] y) <int64[{axes.count(",") + 1}] axes = {{{axes}}}> {{
        a = MatMul (x, w)
        {made}
        s = ReduceSum <keepdims = 1> (v, axes)
        y = MatMul (s, u)
    }}"""
    model = onnx.parser.parse_model(text)
    if shape:
        model.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, shape))
    return next(row.dtype for row in amp_rewrite.convert(model).report.rows if row.op == "ReduceSum")


@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [
        (("N", 8), "1", "float16"),
        ((2, 4), "0, 1", "float16"),
        (("N", 9), "1", "float32"),
        (("N", 8), "0", "float32"),
        ((), "1", "float32"),
    ],
)
def test_a_sum_is_small_if_at_most_eight_terms_are_stated(shape: tuple[int | str, ...], axes: str, dtype: str) -> None:
    assert dtype_of_sum(shape, axes) == dtype


@pytest.mark.parametrize("made", ["v = Mul (a, a)", "two = Constant <value_float = 2.0> ()  v = Pow (a, two)"])
def test_a_sum_of_squares_is_not(made: str) -> None:
    assert dtype_of_sum(("N", 4), "1", made) == "float32"
