"""Copies of a low value for float32 ops: one Cast in front of them, where that is cheaper than one behind each."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from amp_rewrite import Model, View, convert
from amp_rewrite.pipeline.conversion import Converted
from support import objections


def rows(steps: int, *, length: int = 64, turned: bool = False, low: bool = False) -> ModelProto:
    """Rows of a product, added up one by one behind the last product, in float32; `low`: a product reads the first."""
    lines = ["scores = MatMul (x, w)"]
    for t in range(steps):
        lines.append(f"s{t} = Gather <axis = 0> (scores, i{t})")
        lines.append(f"t{t} = {'Transpose' if turned else 'Identity'} (s{t})")
        lines.append(f"a{t} = Sigmoid (t{t})" if not t else f"a{t} = Add (a{t - 1}, t{t})")
    lines.append(f"y = Exp (a{steps - 1})")
    lines += ["z = MatMul (s0, v)"] if low else []
    shape = "32,1" if turned else "1,32"
    ports = f"float[{length},64] x) => (float[{shape}] y{', float[1,16] z' if low else ''}"
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({ports}) {{ {"  ".join(lines)} }}'
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, array in (("w", rng.standard_normal((64, 32))), ("v", rng.standard_normal((32, 16)))):
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32) / 8, name))
    for t in range(steps):
        model.graph.initializer.append(numpy_helper.from_array(np.array([t]), f"i{t}"))
    return model


def casts(converted: Converted) -> int:
    return sum(op.kind == "Cast" for op in View.of(Model.load(converted.model)).ops)


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("steps", [5, 20])
def test_one_cast_stands_in_front_of_copies_that_float32_ops_alone_read(steps: int, turned: bool, to: str) -> None:
    converted = convert(rows(steps, turned=turned), to=to)
    assert casts(converted) == 2
    copies = [row for row in converted.report.rows if row.op in ("Gather", "Transpose")]
    assert {row.dtype for row in copies} == {"float32"}
    assert objections.of_checker(converted.model) == []


def test_a_copy_that_a_product_reads_stays_low() -> None:
    converted = convert(rows(20, low=True))
    kinds = [row.dtype for row in converted.report.rows if row.op == "Gather"]
    assert kinds == ["float16"] + ["float32"] * 19


def test_casts_of_few_rows_are_cheaper_than_that_of_a_large_value() -> None:
    converted = convert(rows(5, length=1 << 20))
    assert {row.dtype for row in converted.report.rows if row.op == "Gather"} == {"float16"}
    assert casts(converted) == 6


HEADS = """<ir_version: 8, opset_import: ["": 17]> g (float[8,64] x) => (float[8,8] y, float[8,2] z)
  <int64[1] start = {0}, int64[1] end = {2}, int64[1] axis = {1}> {
    a = MatMul (x, w)
    b = MatMul (x, v)
    s = Add (a, b)
    corner = Slice (s, start, end, axis)
    c = MatMul (x, u)
    z = Add (corner, c)
    y = Exp (s)
}"""


def test_a_cast_that_stands_in_front_already_serves_a_copy_as_well() -> None:
    model = onnx.parser.parse_model(HEADS)
    for name, width in (("w", 8), ("v", 8), ("u", 2)):
        weight = np.random.default_rng(0).standard_normal((64, width)).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    converted = convert(model)
    types = {row.op: row.dtype for row in converted.report.rows}
    assert (types["Slice"], types["MatMul"], casts(converted)) == ("float32", "float16", 3)
