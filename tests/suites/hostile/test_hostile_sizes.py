"""Models of a few bytes that ask for much: functions that double, constants, dims, and kernels."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from suites.fuzz.cage import Cage
from suites.hostile.given import attempt, converting

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits of the cage are Linux's")

HEAD = '<ir_version: 10, opset_import: ["" : 21, "l" : 1]>'


# -- functions --------------------------------------------------------------------------------------------------


def calling(levels: int, calls: int, body: str = "c = Relu (a)") -> ModelProto:
    """A model of functions that each call the next one so many times."""
    chain = [" ".join(f"b{k} = l.f{i + 1} (a)" for k in range(calls)) + " c = Identity (b0)" for i in range(levels)]
    chain.append(body)
    functions = "".join(
        f'<opset_import: ["" : 21, "l" : 1], domain: "l"> f{i} (a) => (c) {{ {b} }}\n' for i, b in enumerate(chain)
    )
    return onnx.parser.parse_model(f"{HEAD} g (float[2,4] x) => (float[2,4] y) {{ y = l.f0 (x) }}\n{functions}")


def test_functions_that_double_thirty_times_are_refused(cage: Cage, tmp_path: Path) -> None:
    model = calling(30, 2)
    assert model.ByteSize() < 5000

    outcome = converting(cage, tmp_path, model)
    assert outcome.refused and "inlined, are" in outcome.err and outcome.seconds < 5


def test_a_large_constant_in_a_function_called_often_is_refused() -> None:
    model = calling(4, 20)
    constant = model.functions[-1].node.add(op_type="Constant", output=["k"]).attribute.add(name="value", type=4)
    constant.t.CopyFrom(TensorProto(data_type=1, dims=[3000], raw_data=bytes(12_000)))

    with pytest.raises(ModelError, match="inlined, are"):
        Model.load(model)
    Model.load(calling(3, 20))


# -- constants --------------------------------------------------------------------------------------------------

VAST = "{1000000, 64000}"
FOLDED = {
    "ConstantOfShape": f"s = Constant <value = int64[2] {VAST}> () h = ConstantOfShape (s)",
    "Tile": f"r = Constant <value = int64[2] {VAST}> () h = Tile (w, r)",
    "Pad": "p = Constant <value = int64[4] {1000000, 0, 0, 64000}> () h = Pad (w, p)",
    "OneHot": "d = Constant <value_int = 1000000000> () v = Constant <value_floats = [0., 1.]> () h = OneHot (i, d, v)",
    "Concat": f"h = Concat <axis = 0> ({', '.join(['big'] * 2000)})",
    "Gather": "h = Gather (big, i)",
    "a product of columns and rows": "a = Add (col, row) h = Add (a, deep)",
    "StringConcat, doubling": 's0 = Constant <value_strings = ["aaaaaaaa"]> ()'
    + "".join(f" s{k + 1} = StringConcat (s{k}, s{k})" for k in range(40))
    + " e = Equal (s40, s0) h = Cast <to = 1> (e)",
    "RegexFullMatch": f's = Constant <value_strings = ["{"a" * 40}!"]> ()'
    + ' m = RegexFullMatch <pattern = "(a+)+b"> (s) h = Cast <to = 1> (m)',
    "HannWindow": "n = Constant <value_int = 1000000000000> () h = HannWindow (n)",
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_what_constants_would_make_is_computed_only_if_it_is_small(cage: Cage, tmp_path: Path, name: str) -> None:
    weights = "float one = {1}, float[1,1] w = {1}, int64[3] i = {0, 0, 0}, float[64,64] big"
    weights += ", float[64,1,1] col, float[1,64,1] row, float[1,1,64] deep"
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[?,?] x) => (float[?,?] y) <{weights}> {{ {FOLDED[name]} k = Add (h, w) y = Add (x, k) }}"
    )
    for stated in model.graph.value_info:
        dims = [d.dim_value for d in stated.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(dims, np.float32), stated.name))
    del model.graph.value_info[:]
    # A check runs the model, which makes these constants.
    outcome = converting(cage, tmp_path, model, "--target", "onnx", "--set", "level=lower-all", "--no-check")

    assert outcome.seconds < 8


# -- dims -------------------------------------------------------------------------------------------------------


def with_dims(dims: list[int], place: str) -> ModelProto:
    """A small model in which one value states these dims."""
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {{1,2,3,4}}> {{ h = MatMul (x, w) y = Relu (h) }}"
    )
    if place == "large weight":
        model.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=dims, raw_data=bytes(20_000)))
    else:
        formal = model.graph.input[0] if place == "input" else None
        if formal is None:
            formal = model.graph.value_info.add(name="h")
            formal.type.tensor_type.elem_type = 1
        formal.type.tensor_type.ClearField("shape")
        formal.type.tensor_type.shape.SetInParent()
        for dim in dims:
            formal.type.tensor_type.shape.dim.add(dim_value=dim)
    return model


DIMS = {
    "300 of 2^62": [2**62] * 300,
    "65 of 1": [1] * 65,
    "none between huge ones": [2**62, 0, 2**62],
    "least": [-(2**63), 2],
}


@pytest.mark.parametrize("place", ["input", "value", "large weight"])
@pytest.mark.parametrize("name", DIMS)
def test_dims_that_no_value_has_are_refused_or_not_believed(cage: Cage, tmp_path: Path, name: str, place: str) -> None:
    model = with_dims(DIMS[name], place)
    converting(cage, tmp_path, model, "--opset", "auto", "--fuse", "contrib", "--target", "tensorrt")
    if place == "value":  # other commands read shapes as a conversion does
        attempt(cage, tmp_path, "report", "m.onnx", "--json")
        if name == "300 of 2^62":
            attempt(cage, tmp_path, "doctor", "m.onnx")
