"""Float16 ops with rounding inside CUDA's kernels: the emulation compared with an H200 (tests/golden/cuda_*)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper

from amp_rewrite import emulate
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner
from benchmarks.gpu.gpu_ops import RECURRENT
from suites.webgpu.op_cases import CASES, OpCase
from support.rounded_once import rounded_once

GOLDEN = Path(__file__).parents[2] / "golden"
MEASURED: Mapping[str, float] = json.loads((GOLDEN / "cuda_ops.json").read_text(encoding="utf-8"))["rms"]
BLOCKS = "ReduceSum 500×18"
"""The device adds blocks of rows as they finish, so each run has a different error."""

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]


def run(model: onnx.ModelProto | Model, feeds: Arrays) -> Mapping[str, Array]:
    results = Runner.open(model if isinstance(model, Model) else Model.load(model)).run(feeds)
    return {name: np.asarray(value) for name, value in results.items()}


def emulated(model: onnx.ModelProto, feeds: Arrays) -> Mapping[str, Array]:
    return run(emulate(model, io="float32"), widened(feeds))


def once(model: onnx.ModelProto, feeds: Arrays) -> Mapping[str, Array]:
    return run(rounded_once(model, io="float32"), widened(feeds))


def widened(feeds: Arrays) -> Arrays:
    return {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in feeds.items()}


def half(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float16).astype(np.float64)


BY_NAME = {case.name: case for case in (*CASES, *RECURRENT)}


@pytest.mark.parametrize("name", MEASURED)
def test_the_emulated_error_matches_the_device(name: str) -> None:
    case = BY_NAME[name]
    feeds = case.feeds()
    exact, actual = (
        next(iter(r.values())) for r in (run(case.widened(), widened(feeds)), emulated(case.model(), feeds))
    )
    error = float(np.sqrt(np.mean((actual.astype(np.float64) - exact) ** 2)))
    assert len(MEASURED) == 60
    if name == BLOCKS:
        assert MEASURED[name] <= error <= 1.5 * MEASURED[name]
    else:
        assert error == pytest.approx(MEASURED[name], rel=1e-3)


def cell(op_type: str, steps: int = 2, slots: Sequence[str] = "xwrb", **attributes: Any) -> onnx.ModelProto:
    """Return a layer with 24 units and 32 features; `slots` are its inputs: input, weights, bias, lengths, states."""
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[op_type], 24
    shapes = {"x": (steps, 4, 32), "w": (count, gates * hidden, 32), "r": (count, gates * hidden, hidden)}
    shapes |= {"b": (count, 2 * gates * hidden), "l": (4,), **dict.fromkeys("hc", (count, 4, hidden))}
    if op_type == "GRU":
        attributes = {"linear_before_reset": 1, **attributes}
    results = ["Y", "Y_h", *(["Y_c"] if op_type == "LSTM" else [])]
    node = helper.make_node(op_type, [s if s != "-" else "" for s in slots], results, hidden_size=hidden, **attributes)
    types = {name: TensorProto.INT32 if name == "l" else TensorProto.FLOAT16 for name in shapes}
    inputs = [helper.make_tensor_value_info(s, types[s], shapes[s]) for s in slots if s != "-"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in results]
    graph = helper.make_graph([node], "layer", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


CELLS = ("LSTM", "GRU", "RNN")


@pytest.mark.parametrize("op_type", CELLS)
def test_a_recurrent_op_matches_the_device_bit_for_bit(op_type: str) -> None:
    with np.load(GOLDEN / "cuda_recurrent.npz") as stored:
        arrays = {name.partition("/")[2]: stored[name] for name in stored.files if name.startswith(op_type)}
    results = emulated(cell(op_type), {name: arrays[name] for name in "xwrb"})
    assert set(results) == arrays.keys() - set("xwrb")
    for name, values in results.items():
        assert np.array_equal(values, arrays[name].astype(np.float32))


@pytest.mark.parametrize("op_type", CELLS)
def test_two_directions_equal_two_layers(op_type: str) -> None:
    both = cell(op_type, steps=3, direction="bidirectional")
    rng = np.random.default_rng(0)
    shapes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in both.graph.input}
    feeds = {name: (rng.standard_normal(shape) / 4).astype(np.float16) for name, shape in shapes.items()}
    halves = [{n: a if n == "x" else a[i : i + 1] for n, a in feeds.items()} for i in range(2)]
    single = [
        emulated(cell(op_type, steps=3, direction=w), h) for w, h in zip(("forward", "reverse"), halves, strict=True)
    ]
    for name, values in emulated(both, feeds).items():
        assert np.array_equal(values, np.concatenate([one[name] for one in single], axis=1 if name == "Y" else 0))


def by_blocks(x: Array, blocks: int, height: int) -> Array:
    """Sum rows: exactly within a block, then the blocks in float16, the last one first."""
    owner = np.arange(len(x)) // height % blocks
    total = np.zeros(x.shape[1])
    for block in range(blocks)[::-1]:
        total = half(total + half(x[owner == block].astype(np.float64).sum(0)))
    return total


@pytest.mark.parametrize(
    ("shape", "axes", "blocks", "height"),
    [((500, 18), [0], 7, 16), ((2, 250, 3, 6), [0, 1], 7, 16), ((4096, 1), [0], 2, 512), ((1, 600, 40), [1], 9, 16)],
)
def test_leading_axes_are_summed_by_blocks(shape: tuple[int, ...], axes: list[int], blocks: int, height: int) -> None:
    case = OpCase("ReduceSum", (shape,), ints=[axes], attributes={"keepdims": 0})
    feeds = case.feeds()
    rows = int(np.prod([shape[axis] for axis in axes]))
    expected = by_blocks(feeds["x0"].reshape(rows, -1), blocks, height)
    actual = emulated(case.model(), feeds)["y"]
    assert np.array_equal(actual.ravel(), expected)
    mean = OpCase("ReduceMean", (shape,), ints=[axes])
    divided = emulated(mean.model(), mean.feeds())["y"]
    assert divided.ndim == len(shape)
    assert np.array_equal(divided.ravel(), half(expected / rows))


def test_the_sum_of_a_long_mean_overflows() -> None:
    feeds = {"x0": np.full((1, 4096), 20, np.float16)}
    case = OpCase("ReduceMean", ((1, 4096),), ints=[[1]])
    assert np.isinf(emulated(case.model(), feeds)["y"]).all()
    assert (once(case.model(), feeds)["y"] == 20).all()


def test_a_mean_of_free_length_equals_one_of_known_length() -> None:
    case = OpCase("ReduceMean", ((3, 200),), ints=[[1]], shift=1.0)
    symbolic = case.model()
    for dim in symbolic.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_param = f"d{dim.dim_value}"
    assert np.array_equal(emulated(symbolic, case.feeds())["y"], emulated(case.model(), case.feeds())["y"])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_run_shows_how_an_instance_norm_of_free_batch_rounds(samples: int) -> None:
    case = OpCase("InstanceNormalization", ((samples, 6, 15, 15), (6,), (6,)), shift=1.0)
    symbolic, feeds = case.model(), case.feeds()
    symbolic.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    actual, rounded_at_end = emulated(symbolic, feeds)["y"], once(symbolic, feeds)["y"]
    assert np.array_equal(actual, emulated(case.model(), feeds)["y"])
    assert np.array_equal(actual, rounded_at_end) == (samples == 1)


def reduced(op_type: str, shape: tuple[int, ...], axes: Sequence[int], *, ranked: bool = True) -> onnx.ModelProto:
    model = OpCase(op_type, (shape,), ints=[axes]).model()
    for formal in (*model.graph.input, *model.graph.output) if not ranked else ():
        formal.type.tensor_type.ClearField("shape")
    return model


def of_text(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')


@pytest.mark.parametrize(
    "model",
    [
        cell("GRU", linear_before_reset=0),
        cell("LSTM", slots="xwrbl"),  # lengths
        cell("LSTM", clip=1.0),
        cell("RNN", activations=["Relu"]),
        reduced("ReduceMean", (4, 5, 6), [0, 2]),
        reduced("ReduceMean", (4, 1, 6), [1]),
        reduced("ReduceSum", (20, 700), [1]),
        reduced("ReduceSum", (20, 18), [0]),
        OpCase("InstanceNormalization", ((1, 6, 5, 5), (6,), (6,))).model(),
        OpCase("Conv", ((1, 3, 8, 8), (4, 3, 3, 3))).model(),
        of_text("g (float16 x) => (float16 y) { y = CumSum (x, a) }".replace("float16 x", "float16[n] x, int64 a")),
        of_text("g (bfloat16[4,64] x) => (bfloat16[4,1] y) { y = ReduceMean <axes = [1]> (x) }"),
        of_text("g (float16[4,64] x) => (float16[4,1] y) { y = ReduceMean <axes = [1]> (x) }", opset=8),
        reduced("ReduceMean", (4, 5), [1], ranked=False),
        of_text("g (float16[4,64] x, float16[64,8] w) => (float16[4,8] z) { y = MatMul (x, w) z = Softmax (y) }"),
    ],
    ids=lambda model: model.graph.node[0].op_type,
)
def test_other_ops_compute_in_float32(model: onnx.ModelProto) -> None:
    twins = [make(model).to_proto().SerializeToString() for make in (emulate, rounded_once)]
    assert twins[0] == twins[1]
