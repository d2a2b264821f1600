"""Models of real exporters convert, load, keep their outputs and add no host work on CUDA.

`models/README.md` describes the models.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.decide.needs.find import constant_ops
from amp_rewrite.dtypes import DType
from support import corpus, objections, stub
from support.paths import TESTS

MODELS = TESTS / "models"
FIXTURES = sorted(path.stem for path in MODELS.glob("*.onnx"))
LOW = (DType.FLOAT16, DType.BFLOAT16)
COMPUTE = {"Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "LSTM", "MatMul"}

every_fixture = pytest.mark.parametrize("name", FIXTURES)
both_types = pytest.mark.parametrize("low", LOW, ids=lambda t: t.spelling)


def source(name: str) -> Path:
    return MODELS / f"{name}.onnx"


def batch(name: str, part: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the stored arrays of one part, "input" or "output", by value name."""
    with np.load(MODELS / f"{name}.npz") as stored:
        return {key.removeprefix(f"{part}/"): stored[key] for key in stored.files if key.startswith(f"{part}/")}


@functools.cache
def converted(name: str, low: DType) -> onnx.ModelProto:
    """Convert a model with default options and load all its data. The result is shared: never change it."""
    model = amp_rewrite.convert(source(name), to=low.spelling).model
    onnx.load_external_data_for_model(model, str(MODELS))
    return model


def compute_types(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield type and first operand's element type of each compute op, including bodies."""
    types = dict(outer) | {t.name: t.data_type for t in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    for node in graph.node:
        if node.op_type in COMPUTE:
            yield node.op_type, types[node.input[0]]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from compute_types(attribute.g, types)


def longest_chain(graph: onnx.GraphProto, depth: Mapping[str, int]) -> int:
    """Return the length of the longest chain of ops, each of which may round once. A body counts as one pass."""
    reached = dict(depth)
    for node in graph.node:
        start = max((reached.get(value, 0) for value in node.input), default=0)
        inner = [longest_chain(a.g, reached) for a in node.attribute if a.HasField("g")]
        reached.update(dict.fromkeys(node.output, max([start + 1, *inner])))
    return max(reached.values(), default=0)


def tolerance(name: str, reference: np.ndarray[Any, Any], low: DType) -> float:
    """Return the allowed absolute error of a converted model's output.

    Each rounding has an error of at most eps/2 of its value. Over n of them in a row the errors add up like a random
    walk, lambda * sqrt(n) * eps/2 (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
    Sci. Comput. 41, 2019). With lambda = 2, fully lowered models on a CPU stay below it by a factor of 3 or more. It is
    relative to the largest output rather than to each element, because sums cancel.
    """
    return float(2 * np.sqrt(longest_chain(onnx.load(source(name)).graph, {})) * low.eps / 2 * np.abs(reference).max())


@both_types
@every_fixture
def test_a_converted_model_passes_the_full_checker(name: str, low: DType) -> None:
    onnx.checker.check_model(converted(name, low), full_check=True)


@every_fixture
def test_every_compute_op_is_lowered_to_float16(name: str) -> None:
    model = onnx.shape_inference.infer_shapes(converted(name, DType.FLOAT16), strict_mode=True)
    assert [op for op, kind in compute_types(model.graph, {}) if kind != DType.FLOAT16.code] == []


@every_fixture
def test_weights_shrink_and_no_value_is_cast_only_for_its_shape(name: str) -> None:
    result = amp_rewrite.convert(MODELS / f"{name}.onnx")
    assert result.report.totals.weights_after < result.report.totals.weights_before
    readers = {cast.name: [] for cast in result.plan.casts}
    for graph in objections.graphs(result.model.graph):
        for node in graph.node:
            for read in set(node.input) & readers.keys():
                readers[read].append(node.op_type)
    assert [name for name, kinds in readers.items() if kinds and set(kinds) <= {"Shape", "Size"}] == []


@every_fixture
def test_a_float16_model_loads_and_keeps_its_outputs(name: str) -> None:
    """On a CPU onnxruntime runs most float16 ops in float32 without rounding in between.

    The error is therefore only a lower bound of that on a GPU, but it reveals faults in weights, casts and rewrites.
    """
    # The CPU provider's NchwcTransformer may crash on float16 LSTM -> Transpose -> Reshape.
    level = "BASIC" if name.startswith("lstm") else "ALL"
    inputs = batch(name, "input")
    outputs = objections.run(converted(name, DType.FLOAT16), inputs, level)
    # The outputs for other inputs must be out of bounds.
    swapped = {
        key: -2 * array if array.dtype.kind == "f" else np.flip(array, -1) if array.ndim else array
        for key, array in inputs.items()
    }
    wrong = objections.run(onnx.load(source(name)), swapped, "BASIC")
    off = []
    for (key, array), output, other in zip(batch(name, "output").items(), outputs, wrong, strict=True):
        assert output.dtype == array.dtype
        bound = tolerance(name, array, DType.FLOAT16)
        np.testing.assert_allclose(output, array, rtol=0, atol=bound, err_msg=key)
        off.append(np.abs(other - array).max() / bound)
    assert max(off) > 2


@pytest.mark.parametrize("name", corpus.KINDS)
def test_a_half_model_raised_as_a_whole_agrees_with_its_widened_twin(name: str) -> None:
    """Both have the same float32 ops, so outputs are equal; at BASIC, because fusions may differ."""
    model = onnx.load(source(name))
    half = amp_rewrite.convert(model, level="unsafe-force-all", safety="none", target="onnx").model
    whole = amp_rewrite.convert(half, keep=["*"], lists=[{"base": "empty"}], target="onnx").model
    typed = onnx.shape_inference.infer_shapes(whole, strict_mode=True)
    assert {kind for _, kind in compute_types(typed.graph, {})} & {low.code for low in LOW} == set()
    wide = amp_rewrite.emulate(half, rounding=False, io="float32").to_proto()
    expected, found = (objections.run(each, batch(name, "input"), "BASIC") for each in (wide, whole))
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_array_equal(right, left)


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.parametrize("name", corpus.KINDS)
def test_a_converted_model_opens_on_cuda_with_no_more_host_work(name: str, tmp_path: Path, cuda_stub: Path) -> None:
    """By kind of op, because inlining renames ops; the README lists the float32 model's ops on the host."""
    paths = [source(name)]
    for low in LOW:
        paths.append(tmp_path / f"{low.spelling}.onnx")
        onnx.save(converted(name, low), paths[-1])
    before, *placed = stub.placements(paths)
    for low, after in zip(LOW, placed, strict=True):
        assert "error" not in after, after
        added = Counter(node.split()[0] for node in after["cpu_float"])
        added -= Counter(node.split()[0] for node in before["cpu_float"])
        # A number computed from shapes on the host is also cast there.
        result = amp_rewrite.convert(source(name), to=low.spelling)
        hosted = {op.id for op in constant_ops(result.view)}
        added -= Counter(Cast=sum(result.view.values[cast.value].producer in hosted for cast in result.plan.casts))
        assert (dict(added), after["cpu_unknown"]) == ({}, [])
        assert after["memcpy"] <= before["memcpy"]


@pytest.mark.stub
def test_the_stub_reports_a_float_op_on_the_host(tmp_path: Path, cuda_stub: Path) -> None:
    """CUDA has no kernel for Tan, and the runtime does not report it."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float16[2, 3] x, float16[3, 3] w) => (float16[2, 3] y)'
        "{ product = MatMul(x, w)  y = Tan(product) }"
    )
    model.graph.node[1].name = "tangent"
    onnx.save(model, tmp_path / "tan.onnx")
    row = stub.placements([tmp_path / "tan.onnx"])[0]
    assert (row["cpu_float"], row["cuda"] > 0, row["memcpy"] > 0) == (["Tan tangent"], True, True)


def test_no_fixture_reveals_its_build_machine() -> None:
    marks = (b"/home/", b"/root/", b"/tmp/", b"/work/", b"site-packages", b"Traceback")
    assert [p.name for p in MODELS.glob("*.onnx*") for mark in marks if mark in p.read_bytes()] == []
