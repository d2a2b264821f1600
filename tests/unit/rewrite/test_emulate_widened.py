"""The widened twin: a mixed model as if its low types were float32, the reference of one that is half already."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper
from onnx.reference import ReferenceEvaluator

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.emulate import emulate
from suites.models.test_fixtures import FIXTURES, batch, source, tolerance
from support.objections import graphs, run
from unit.rewrite.test_emulate import (
    both_types,
    has_low,
    kinds,
    parsed,
    twin,
)


def widened(model: object, io: str = "float32") -> ModelProto:
    """The widened twin, which must be a valid model of unique names."""
    return twin(model, io=io, rounding=False)


def as_float32(
    text: str, feeds: Mapping[str, object], low: DType, functions: str = "", **options: object
) -> ModelProto:
    """The widened twin of a model written with LOW for its low type; equal to the model written with float."""
    low_model = parsed(text.replace("LOW", low.onnx_name), functions.replace("LOW", low.onnx_name), **options)
    wide_model = parsed(text.replace("LOW", "float"), functions.replace("LOW", "float"), **options)
    found = widened(low_model)
    assert not has_low(found)
    assert [kind for kind in kinds(found) if kind.startswith("Cast→")] == []
    expected = ReferenceEvaluator(wide_model).run(None, dict(feeds))
    for level in ("BASIC", "ALL"):
        for mine, right in zip(run(found, feeds, level), expected, strict=True):
            np.testing.assert_array_equal(mine, right)
    return found


# -- nothing is rounded --------------------------------------------------------------------------------


@both_types
def test_what_would_overflow_or_lose_digits_does_not(low: DType) -> None:
    found = as_float32(
        "g (LOW[3, 4] x) => (LOW[3, 4] y) { e = Mul (x, x) \n y = Mul (e, e) }",
        {"x": np.float32([[1 + 2.0**-20, 300, 1e-5, 1e9]] * 3)},
        low,
    )
    assert kinds(found) == ["Mul", "Mul"]


@both_types
def test_casts_between_float32_and_low_types_become_identities(low: DType) -> None:
    model = parsed(f"""g (float[2] x, {low.onnx_name}[2] h) => (float[2] y, int64[2] n, float[2] z, float[2] d) {{
        a = Cast <to = {low.code}> (x)
        y = Cast <to = 1> (a)
        n = Cast <to = 7> (a)
        l = CastLike (x, h)
        z = CastLike (l, x)
        i = Cast <to = {low.code}> (n)
        e = Cast <to = 11> (i)
        k = Cast <to = {low.code}> (e)
        d = Cast <to = 1> (k)
    }}""")
    found = widened(model)
    assert kinds(found) == [
        *("Identity", "Identity", "Cast→int64", "Identity", "Identity"),
        *("Cast→float32", "Cast→float64", "Cast→float32", "Identity"),
    ]
    x = np.float32([0.1, 4097.9])
    y, n, z, d = run(found, {"x": x, "h": x})
    for array in (y, z):
        np.testing.assert_array_equal(array, x)
    np.testing.assert_array_equal(n, x.astype(np.int64))
    np.testing.assert_array_equal(d, np.trunc(x))


@both_types
def test_weights_are_those_that_the_model_holds(low: DType, tmp_path: Path) -> None:
    weight = np.random.default_rng(3).standard_normal((96, 96)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 96])],
        [helper.make_tensor_value_info("y", 1, [1, 96])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 22)]), tmp_path / "m.onnx")
    converted = amp_rewrite.convert(tmp_path / "m.onnx", to=low.spelling)
    converted.save(tmp_path / "low.onnx")
    for source_ in (converted.result, tmp_path / "low.onnx"):
        emulate(source_, rounding=False).save(tmp_path / "twin.onnx", overwrite=True)
        (held,) = onnx.load(tmp_path / "twin.onnx").graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(held), weight.astype(low.numpy).astype(np.float32))


def test_a_model_without_low_types_comes_back_as_it_was() -> None:
    model = parsed(
        "g (float[2] x, int64[2] n) => (float[2] y, double[2] z) { y = Cast <to = 1> (x) \n z = Cast <to = 11> (n) }"
    )
    assert emulate(model, rounding=False).proto.SerializeToString() == model.SerializeToString()


# -- edges ---------------------------------------------------------------------------------------------


def test_what_stands_behind_a_kept_output_is_not_rounded() -> None:
    model = parsed("""g (float16[2] x) => (float16[2] y, float[2] z, float16[2] w) <float16[2] w = {15872, 16640}> {
        y = Mul (x, x)
        d = Div (y, x)
        z = Cast <to = 1> (d)
    }""")
    x = np.float16([300, 2])
    with np.errstate(over="ignore"):
        y, z, w = run(widened(model, "numpy"), {"x": x})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(z, np.float32([300, 2]))
    np.testing.assert_array_equal(w, np.float16([1.5, 2.5]))


# -- bodies, functions, containers ---------------------------------------------------------------------


# -- whole models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "low"), tuple(zip(FIXTURES, cycle((DType.FLOAT16, DType.BFLOAT16)), strict=False)))
def test_a_converted_model_widened_is_near_the_original(name: str, low: DType, tmp_path: Path) -> None:
    """Only its weights are rounded, so it keeps within the bound of one that rounds everywhere."""
    amp_rewrite.convert(source(name), to=low.spelling).save(tmp_path / "low.onnx")
    stored = batch(name, "input")
    expected = list(batch(name, "output").values())
    found = run(widened(tmp_path / "low.onnx"), stored)
    for mine, right in zip(found, expected, strict=True):
        if np.issubdtype(right.dtype, np.floating):
            assert np.abs(mine - right).max() <= tolerance(name, right, low)
    assert [
        node for graph in graphs(widened(tmp_path / "low.onnx").graph) for node in graph.node if _to_low(node)
    ] == []


def _to_low(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(DType(a.i).low for a in node.attribute if a.name == "to")
