"""Denied ops that are harmless where they stand, tables of weights as roots, and their near twins."""

from __future__ import annotations

import cases
import numpy as np
import onnx.parser
import onnxruntime
import pytest

import amp_rewrite
from amp_rewrite.convert import Converted

GELU = """g (float[N,4] x) => (float[N,4] y)
<float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float half = {0.5}, float k = {0.044715},
 float less = {-0.044715}, float c = {0.797884583}, float one = {1}, float two = {2}, float three = {3}> {
    a = MatMul (x, w)
    h = Mul (half, a)  p = Pow (a, EXPONENT)  q = Mul (p, FACTOR)  i = Add (a, q)  j = Mul (i, c)
    t = Tanh (j)  o = Add (t, one)  r = Mul (h, o)
    y = MatMul (r, w)
}"""


def gelu(exponent: str = "three", factor: str = "k") -> onnx.ModelProto:
    text = GELU.replace("EXPONENT", exponent).replace("FACTOR", factor)
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]>' + text)


def dtype(converted: Converted, op: str) -> str:
    return next(row.dtype for row in converted.report.rows if row.name == op or row.op == op)


def test_the_cube_in_a_gelu_is_lowered_and_right_where_it_overflows() -> None:
    converted = amp_rewrite.convert(gelu())
    assert (dtype(converted, "Pow"), dtype(converted, "Tanh")) == ("float16", "float16")
    points = np.array([0, 1e-3, 0.5, 1, 2, 3, 6, 40, 41, 300, 6e4], np.float32)
    feed = {"x": np.concatenate((points, -points))[:, None] * np.eye(1, 4, dtype=np.float32)}
    twin = amp_rewrite.emulate(converted.model).to_proto()
    found, wanted = (
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for proto in (twin, gelu())
    )
    # Each of the seven roundings is of at most 2⁻¹¹; 1 + tanh is off by as much beside 1, however small it is itself.
    assert (np.abs(found - wanted) <= 7 * 2.0**-11 * np.maximum(np.abs(feed["x"]), np.abs(wanted))).all()


@pytest.mark.parametrize(("exponent", "factor"), [("two", "k"), ("three", "less")])
def test_another_power_or_a_negative_factor_is_no_such_cube(exponent: str, factor: str) -> None:
    assert dtype(amp_rewrite.convert(gelu(exponent, factor)), "Pow") == "float32"


def test_a_cube_outside_of_a_gelu_stays_float32() -> None:
    proto = cases.build("a=MatMul(x,x);p=Pow(a,three);b=MatMul(p,x)", ["b"], constants={"three": 3.0})
    assert dtype(amp_rewrite.convert(proto), "p") == "float32"


MAPS = {"x": (1, 4, 8, 8), "w": (4, 4, 1, 1), "v": (4, 4)}
AVERAGE = "a=Conv(x,w);m=ReduceMean[axes={axes}](a);"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (AVERAGE.format(axes="2 3") + "b=Conv(m,w)", "float16"),
        (AVERAGE.format(axes="-1 -2") + "f=Flatten(m);b=Gemm(f,v)", "float16"),
        (AVERAGE.format(axes="1 2") + "b=Conv(m,u)", "float32"),
        (AVERAGE.format(axes="2 3") + "s=Sub(a,m);b=Conv(s,w)", "float32"),
        ("a=Conv(x,w);p=Mul(a,a);m=ReduceMean[axes=2 3](p);b=Conv(m,w)", "float32"),
        (AVERAGE.format(axes="2 3") + "c=Conv(m,w);b=Exp(m)", "float32"),
    ],
)
def test_a_mean_over_whole_feature_maps_is_lowered_only_where_layers_alone_read_it(text: str, held: str) -> None:
    shapes = {**MAPS, "u": (4, 1, 1, 1)}
    last = text.split(";")[-1].split("=")[0]
    outputs = ("c", "b") if "c=" in text else (last,)
    proto = cases.build(text, outputs, shapes=shapes)
    assert dtype(amp_rewrite.convert(proto), "m") == held


TABLE = "e=Gather(table,i);n=LayerNormalization(e,scale);b=MatMul(n,w)"


def embedded(text: str, largest: float) -> Converted:
    table = np.full((5, 8), 0.5)
    table[1, 2] = largest
    constants = {"table": table, "scale": np.ones(8)}
    types, shapes = {"i": "int"}, {"i": (3,)}
    return amp_rewrite.convert(cases.build(text, ["b"], types=types, shapes=shapes, constants=constants))


def test_what_is_looked_up_in_a_table_of_weights_is_low_from_there_on() -> None:
    found = embedded(TABLE, 1.0)
    assert (dtype(found, "e"), dtype(found, "n")) == ("float16", "float16")
    assert [(cast.value, cast.to) for cast in found.report.casts] == [("w", "float16"), ("b", "float32")]


def test_a_table_that_overflows_and_one_behind_a_denied_op_stay_float32() -> None:
    assert dtype(embedded(TABLE, 1e6), "e") == "float32"
    assert dtype(embedded(TABLE.replace("n=", "d=Exp(e);n=").replace("(e,s", "(d,s"), 1.0), "e") == "float32"


def test_without_safety_rules_paths_start_at_products_alone() -> None:
    proto = cases.build(
        TABLE,
        ["b"],
        types={"i": "int"},
        shapes={"i": (3,)},
        constants={"table": np.ones((5, 8)), "scale": np.ones(8)},
    )
    assert dtype(amp_rewrite.convert(proto, safety="none"), "e") == "float32"
