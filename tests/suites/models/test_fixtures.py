"""Models that real exporters wrote: each converts, loads, keeps its outputs, and leaves the GPU no poorer.

`models/README.md` says what the models are.
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
    """The stored arrays of one part, "input" or "output", by value name."""
    with np.load(MODELS / f"{name}.npz") as stored:
        return {key.removeprefix(f"{part}/"): stored[key] for key in stored.files if key.startswith(f"{part}/")}


@functools.cache
def converted(name: str, low: DType) -> onnx.ModelProto:
    """The model converted at default options, all its data inline. Shared between tests: never change it."""
    model = amp_rewrite.convert(source(name), to=low.spelling).model
    onnx.load_external_data_for_model(model, str(MODELS))
    return model


def compute_types(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(op, element type of its first operand) of each compute op, bodies included."""
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
    """How many ops follow one another at most: each may round once. A body counts as one pass."""
    reached = dict(depth)
    for node in graph.node:
        start = max((reached.get(value, 0) for value in node.input), default=0)
        inner = [longest_chain(a.g, reached) for a in node.attribute if a.HasField("g")]
        reached.update(dict.fromkeys(node.output, max([start + 1, *inner])))
    return max(reached.values(), default=0)


def tolerance(name: str, reference: np.ndarray[Any, Any], low: DType) -> float:
    """How far an output of a converted model may be off, absolutely.

    Each rounding is off by eps/2 of its value at most. Over n of them in a row the errors add up like a random
    walk, lambda * sqrt(n) * eps/2 (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    SIAM J. Sci. Comput. 41, 2019). With lambda = 2, models that were lowered as a whole stay below it by a
    factor of 3 and more on a CPU. Relative to the largest output, not to each element: sums cancel.
    """
    return float(2 * np.sqrt(longest_chain(onnx.load(source(name)).graph, {})) * low.eps / 2 * np.abs(reference).max())


@both_types
@every_fixture
def test_a_converted_model_passes_the_full_checker(name: str, low: DType) -> None:
    onnx.checker.check_model(converted(name, low), full_check=True)


@every_fixture
def test_every_compute_op_is_lowered_to_float16(name: str) -> None:
    model = onnx.shape_inference.infer_shapes(converted(name, DType.FLOAT16), strict_mode=True)
    kept = [op for op, kind in compute_types(model.graph, {}) if kind != DType.FLOAT16.code]
    assert kept == []


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
    """On a CPU onnxruntime runs most float16 ops in float32 and hides roundings between them: this bounds the
    error of weights, casts and a wrong rewrite, and is only a lower bound of what a GPU would show."""
    # Its NchwcTransformer may crash on float16 LSTM -> Transpose -> Reshape, on the CPU provider alone.
    level = "BASIC" if name.startswith("lstm") else "ALL"
    inputs = batch(name, "input")
    outputs = objections.run(converted(name, DType.FLOAT16), inputs, level)
    # A must-fail twin: the outputs of other inputs are out of bounds.
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
    """Both hold the same float32 ops, so to the bit; at BASIC, since fusions may differ."""
    model = onnx.load(source(name))
    half = amp_rewrite.convert(model, level="unsafe-force-all", safety="none", target="onnx").model
    whole = amp_rewrite.convert(half, keep=["*"], lists=[{"base": "empty"}], target="onnx").model
    typed = onnx.shape_inference.infer_shapes(whole, strict_mode=True)
    assert {kind for _, kind in compute_types(typed.graph, {})} & {low.code for low in LOW} == set()
    wide = amp_rewrite.emulate(half, rounding=False, io="float32").to_proto()
    expected, found = (objections.run(made, batch(name, "input"), "BASIC") for made in (wide, whole))
    for left, right in zip(expected, found, strict=True):
        np.testing.assert_array_equal(right, left)


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.parametrize("name", corpus.KINDS)
def test_a_converted_model_opens_on_cuda_with_no_more_host_work(name: str, tmp_path: Path, cuda_stub: Path) -> None:
    """By kind of op, since inlining gives new names; what the float32 model has on the host is in the README."""
    paths = [source(name)]
    for low in LOW:
        paths.append(tmp_path / f"{low.spelling}.onnx")
        onnx.save(converted(name, low), paths[-1])
    before, *placed = stub.placements(paths)
    for low, after in zip(LOW, placed, strict=True):
        assert "error" not in after, after
        added = Counter(node.split()[0] for node in after["cpu_float"])
        added -= Counter(node.split()[0] for node in before["cpu_float"])
        # A number that the runtime computes from shapes on the host is cast there too, before it travels.
        result = amp_rewrite.convert(source(name), to=low.spelling)
        hosted = {op.id for op in constant_ops(result.view)}
        added -= Counter(Cast=sum(result.view.values[cast.value].producer in hosted for cast in result.plan.casts))
        assert (dict(added), after["cpu_unknown"]) == ({}, [])
        assert after["memcpy"] <= before["memcpy"]


@pytest.mark.stub
def test_the_stub_reports_a_float_op_on_the_host(tmp_path: Path, cuda_stub: Path) -> None:
    """A must-fail twin: CUDA has no kernel for Tan, and the runtime says nothing about it."""
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
    told = [p.name for p in MODELS.glob("*.onnx*") for mark in marks if mark in p.read_bytes()]
    assert told == []
