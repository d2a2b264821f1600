"""Sums in float16, written out by the emulation: bit for bit those of a device that adds up so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from amp_rewrite import ModelError, PolicyError, emulate
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.device_arithmetic.low_op import LowOp
from amp_rewrite.rewrite.device_arithmetic.norms import batch_norm
from amp_rewrite.runtime.runner import Runner
from suites.webgpu.op_cases import CASES, OpCase

Arrays = Mapping[str, np.ndarray[Any, Any]]


def half(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float16).astype(np.float64)


def emulated(model: onnx.ModelProto, feeds: Arrays, **how: Any) -> np.ndarray[Any, Any]:
    twin = emulate(model, io="float32", **how)
    wide = {name: array.astype(np.float32) for name, array in feeds.items()}
    results = Runner.open(twin).run(wide)
    return np.asarray(next(iter(results.values())), np.float64)


def one_after_another(x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    total = np.zeros((x.shape[0], w.shape[1]))
    for k in range(x.shape[1]):
        total = half(total + half(x[:, k : k + 1].astype(np.float64) * w[k : k + 1]))
    return total


def test_a_product_adds_one_rounded_term_after_another() -> None:
    case = OpCase("MatMul", ((5, 300), (300, 7)))
    feeds = case.feeds()
    expected = one_after_another(feeds["x0"], feeds["x1"])
    assert np.array_equal(emulated(case.model(), feeds, accumulate="float16"), expected)
    assert not np.array_equal(emulated(case.model(), feeds), expected)


@pytest.mark.parametrize(("left", "right"), [((40,), (40, 6)), ((6, 40), (40,)), ((40,), (40,))])
def test_products_of_vectors_keep_their_shape(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    case = OpCase("MatMul", (left, right))
    feeds = case.feeds()
    wide = one_after_another(feeds["x0"].reshape(-1, 40), feeds["x1"].reshape(40, -1))
    found = emulated(case.model(), feeds, target="webgpu")
    assert np.array_equal(found, wide.reshape(np.matmul(feeds["x0"], feeds["x1"]).shape))


@pytest.mark.parametrize("length", [1, 2, 33, 64, 65, 500])
def test_a_reduction_adds_up_in_64_lanes_and_then_in_halves(length: int) -> None:
    case = OpCase("ReduceSum", ((3, length),), ints=[[1]])
    feeds = case.feeds()
    lanes = np.zeros((3, 64))
    for k in range(length):
        lanes[:, k % 64] = half(lanes[:, k % 64] + feeds["x0"][:, k])
    lanes = lanes[:, : min(length, 64)]
    while lanes.shape[1] > 1:
        rest, half_ = -(-lanes.shape[1] // 2), lanes.shape[1] // 2
        lanes = np.concatenate([half(lanes[:, :half_] + lanes[:, rest:]), lanes[:, half_:rest]], axis=1)
    assert np.array_equal(emulated(case.model(), feeds, target="webgpu"), lanes)


def test_a_reduction_of_a_free_length_gives_what_the_known_length_gives() -> None:
    case = OpCase("ReduceMean", ((3, 200),), ints=[[1]], shift=1.0)
    free = case.model()
    for dim in free.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_param = f"d{dim.dim_value}"
    found = [emulated(model, case.feeds(), target="webgpu") for model in (free, case.model())]
    assert np.array_equal(*found)


def test_a_long_mean_overflows_inside() -> None:
    case = OpCase("ReduceMean", ((1, 4096),), ints=[[1]])
    feeds = {"x0": np.full((1, 4096), 20, np.float16)}
    assert np.isinf(emulated(case.model(), feeds, target="webgpu")).all()
    assert (emulated(case.model(), feeds, accumulate="float32") == 20).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_op_stays_near_float32_and_in_float16(case: OpCase) -> None:
    feeds = case.feeds()
    found = emulated(case.model(), feeds, accumulate="float16")
    expected = emulated(case.widened(), feeds)
    assert found.shape == expected.shape
    assert np.array_equal(found, half(found))
    subnormal = 2.0**-24  # the product of many factors below 1 is 0 in float16
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max() + subnormal


def test_outputs_that_stay_float16_and_are_read_have_both_types() -> None:
    text = '<ir_version: 9, opset_import: ["": 17]> g (float16[2,8] x) => (float16[2,2] y, float16[2,2] z)'
    model = onnx.parser.parse_model(f"{text} {{ t = Transpose (x) y = MatMul (x, t) z = Neg (y) }}")
    x = np.linspace(-3, 3, 16).astype(np.float16).reshape(2, 8)
    results = Runner.open(emulate(model, target="webgpu")).run({"x": x})
    assert [np.asarray(value).dtype for value in results.values()] == [np.float16, np.float16]
    assert np.array_equal(np.asarray(results["y"]), -np.asarray(results["z"]))
    assert np.array_equal(np.asarray(results["y"], np.float64), one_after_another(x, x.T))


def test_ops_in_a_branch_are_written_out_too() -> None:
    text = """<ir_version: 9, opset_import: ["": 17]> g (float16[4,64] x, bool c) => (float16[4,4] y)
    { t = Transpose (x) y = If (c) <then_branch = a () => (float16[4,4] p) { p = MatMul (x, t) },
      else_branch = b () => (float16[4,4] q) { m = MatMul (x, t) q = Neg (m) }> }"""
    x = np.linspace(-3, 3, 256).astype(np.float16).reshape(4, 64)
    twin = emulate(onnx.parser.parse_model(text), io="float32", target="webgpu")
    found = Runner.open(twin).run({"x": x.astype(np.float32), "c": np.array(True)})["y"]
    assert np.array_equal(np.asarray(found, np.float64), one_after_another(x, x.T))


def test_an_op_of_unknown_rank_stays_float32_inside() -> None:
    text = '<ir_version: 9, opset_import: ["": 17]> g (float16 x, float16 w) => (float16 y) { y = MatMul (x, w) }'
    model = onnx.parser.parse_model(text)
    for formal in (*model.graph.input, *model.graph.output):
        formal.type.tensor_type.ClearField("shape")
    twin = emulate(model, io="float32", target="webgpu").to_proto()
    assert "Scan" not in {node.op_type for node in twin.graph.node}


def test_sums_of_bfloat16_stay_float32_inside() -> None:
    text = '<ir_version: 9, opset_import: ["": 17]> g (bfloat16[2,40] x, bfloat16[40,2] w) => (bfloat16[2,2] y)'
    twin = emulate(onnx.parser.parse_model(f"{text} {{ y = MatMul (x, w) }}"), accumulate="float16").to_proto()
    assert "Scan" not in {node.op_type for node in twin.graph.node}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"accumulate": "float8"}, "unknown value 'float8' for accumulate; use float32 or float16"),
        ({"accumulate": "float16", "target": "ort-cuda"}, "ort-cuda accumulates in float32"),
        ({"target": "vulkan"}, "unknown value 'vulkan' for target"),
    ],
)
def test_words_that_contradict_are_refused(how: dict[str, str], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        emulate(OpCase("Exp", ((2,),)).model(), **how)


def test_an_opset_without_scan_is_refused_with_the_way_out() -> None:
    text = '<ir_version: 3, opset_import: ["": 8]> g (float16[2,3] x) => (float16[2,3] y) { y = Exp (x) }'
    with pytest.raises(ModelError, match=r"opset 8.*from opset 9 on; convert it with --opset"):
        emulate(onnx.parser.parse_model(text), target="webgpu")


def test_float32_sums_of_the_target_are_those_of_no_target() -> None:
    model = OpCase("MatMul", ((5, 30), (30, 7))).model()
    twins = [emulate(model, **how).to_proto() for how in ({}, {"accumulate": "float32", "target": "webgpu"})]
    assert twins[0] == twins[1]
    assert emulate(Model.load(model), target="ort-cuda").to_proto() == twins[0]


@pytest.mark.parametrize(("rank", "training", "outputs"), [(None, 0, 1), (4, 1, 1), (4, 0, 3)])
def test_a_batch_normalization_in_training_is_not_written_out(rank: int | None, training: int, outputs: int) -> None:
    node = onnx.helper.make_node("BatchNormalization", list("xsbmv"), list("yuw")[:outputs], training_mode=training)
    op: Any = None  # the recipe does not read it
    shape = None if rank is None else (2,) * rank
    builder: Any = None  # nothing is written
    assert batch_norm(builder, LowOp(op, node, (shape,), ())) is None
