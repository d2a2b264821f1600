"""Rows of the catalogue beyond one model in memory: files, memory, value ranges, messages."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.errors import ModelError
from amp_rewrite.pipeline.convert import convert
from suites.catalogue.case import (
    SQUARE,
    WRONG,
    Case,
    converted,
    every,
    naive_fails,
    of_numbers,
    of_result,
    rounded,
    table,
)
from suites.catalogue.naive import naive
from support import corpus, objections
from support.paths import ROOT, TESTS
from support.quantized_models import runs

PIECES = next(case for case in table("silent_constants") if case.row == 56)
FUSED = replace(PIECES, name="a LayerNormalization in pieces", fails="to its own type", lowers="", casts=None)

# -- 29: sparse weights ------------------------------------------------------------------------------


def test_a_sparse_weight_takes_the_type_of_its_reader() -> None:
    model = corpus.with_sparse_weight()
    result = convert(model)
    assert result.report.totals.compute_lowered > 0
    onnx.checker.check_model(result.model)  # not in full: onnx's shape inference does not see sparse weights
    assert objections.of_loading(result.model) == []
    feeds = {"x": np.full([d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim], 0.2, np.float32)}
    assert objections.of_outputs(objections.run(model, feeds), rounded(result.model, feeds), bound=2**-6) == []


def test_naive_conversion_forgets_the_sparse_weight() -> None:
    assert any("bound to different types" in text for text in objections.of_loading(naive(corpus.with_sparse_weight())))


# -- 30, 36: external weights -------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Write a chain of 8 products with external weights of 16 MiB each."""
    return _chain(tmp_path / "model.onnx", 2048, 8)


def _chain(path: Path, size: int, count: int) -> Path:
    names = [f"w{i}" for i in range(count)]
    nodes = [helper.make_node("MatMul", [f"a{i}" if i else "x", name], [f"a{i + 1}"]) for i, name in enumerate(names)]
    edges = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name in ("x", f"a{count}")]
    weights = [numpy_helper.from_array(np.eye(size, dtype=np.float32) * (i + 1) / 4, n) for i, n in enumerate(names)]
    graph = helper.make_graph(nodes, "chain", edges[:1], edges[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_weights_in_another_file_are_converted_with_the_model(tmp_path: Path) -> None:
    path = _chain(tmp_path / "model.onnx", 8, 3)
    (tmp_path / "half").mkdir()
    convert(path).save(tmp_path / "half" / "model.onnx")
    feeds = {"x": np.full((1, 8), 0.2, np.float32)}
    after = onnx.load(tmp_path / "half" / "model.onnx")
    assert {t.data_type for t in after.graph.initializer} == {TensorProto.FLOAT16}
    assert objections.of_outputs(objections.run(onnx.load(path), feeds), rounded(after, feeds), bound=2**-6) == []


def test_a_model_with_missing_weights_is_refused(tmp_path: Path) -> None:
    path = _chain(tmp_path / "model.onnx", 8, 3)
    bare = onnx.load(path, load_external_data=False)
    with pytest.raises(ModelError, match="its folder is unknown; load it from its path, or pass the folder"):
        convert(bare).model  # noqa: B018
    assert objections.of_loading(convert(bare, folder=tmp_path).model) == []


def test_naive_conversion_changes_the_type_but_not_the_bytes(tmp_path: Path) -> None:
    bare = onnx.load(_chain(tmp_path / "model.onnx", 8, 3), load_external_data=False)
    with pytest.raises((OSError, ValueError, onnx.checker.ValidationError)):
        naive(bare)


MEASURE = """
import re, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
def peak():  # of only this process: ru_maxrss includes the parent's peak
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
{prepare}
before = peak()
{act}
print(peak() - before)
"""
OURS = MEASURE.format(
    prepare="from amp_rewrite.pipeline.convert import convert\nconvert(sys.argv[1] + '/small/model.onnx')",
    act="convert(sys.argv[1] + '/model.onnx').save(sys.argv[1] + '/half.onnx')",
)
NAIVE = MEASURE.format(
    prepare="import onnx\nfrom suites.catalogue.naive import naive\n"
    "naive(onnx.load(sys.argv[1] + '/small/model.onnx'))",
    act="onnx.save(naive(onnx.load(sys.argv[1] + '/model.onnx')), sys.argv[1] + '/half.onnx')",
)


def megabytes(script: str, folder: Path) -> int:
    """Return the growth of a process's peak memory in a conversion."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(ROOT), str(TESTS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_model_only_in_naive_conversion(outside: Path) -> None:
    """The model has 128 MiB, its largest weight 16 MiB; the limit is three of those, doubled for buffers."""
    folder = outside.parent
    (folder / "small").mkdir()
    _chain(folder / "small" / "model.onnx", 8, 3)
    assert megabytes(OURS, folder) < 96
    (folder / "half.onnx").unlink()
    assert megabytes(NAIVE, folder) > 128


# -- 31: half already ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_ops_already_in_half_precision_stay_unchanged(to: str) -> None:
    once = convert(FUSED.model(), to=to).model
    twice = convert(once, to=to)
    assert twice.plan.empty
    assert twice.model.SerializeToString() == once.SerializeToString()


# -- 43: overflows visible only in data ----------------------------------------------------------------

RANGES = (
    Case(
        43,
        "scores beyond the range, before a softmax",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            s = Softmax (a)
            y = MatMul (s, w2)
        }""",
        weights={"w": np.eye(8) * 400, "w2": (8, 8)},
        feeds={"x": np.linspace(180, 200, 64).reshape(8, 8)},
        fails=WRONG,
        options={"keep": ["op=MatMul,feeds=Softmax", "op=Softmax"]},
    ),
    Case(
        43,
        "a convolution that overflows",
        """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
            a = Conv (x, w)
            s = Mul (a, small)
            y = Conv (s, w2)
        }""",
        weights={"w": np.full((2, 2, 1, 1), 300), "w2": (2, 2, 1, 1), "small": [1e-4]},
        feeds={"x": np.full((1, 2, 4, 4), 200)},
        fails=WRONG,
        options={"keep": ["op=Conv,feeds=Mul", "op=Mul"]},
    ),
    Case(
        43,
        "a residual stream that grows",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            r = Add (a, a)
            s = Add (r, r)
            n = LayerNormalization (s, scale)
            y = MatMul (n, w2)
        }""",
        weights={"w": np.eye(8), "w2": (8, 8), "scale": np.ones(8)},
        feeds={"x": np.linspace(15000, 30000, 64).reshape(8, 8)},
        fails=WRONG,
        options={"keep": ["op=Add", "op=LayerNormalization"]},
    ),
    Case(
        43,
        "a cube inside an activation that no pattern knows",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            q = Mul (a, a)
            c = Mul (q, a)
            m = Abs (c)
            s = Add (m, one)
            t = Div (c, s)
            y = MatMul (t, w2)
        }""",
        weights={"w": np.eye(8) * 50, "w2": (8, 8), "one": [1.0]},
        feeds={"x": np.vstack([np.ones((4, 8)), -np.ones((4, 8))])},
        fails=WRONG,
        options={"keep": ["op=Mul", "op=Abs", "op=Add", "op=Div"]},
    ),
    Case(
        39,
        "an instance norm of small changes on a large offset from a convolution",
        """g (float[1,2,8,8] x) => (float[1,2,8,8] y) {
            a = Conv (x, w)
            n = InstanceNormalization (a, scale, bias)
            y = Conv (n, w2)
        }""",
        weights={
            "w": np.reshape([[1, 3000], [-1, 3000]], (2, 2, 1, 1)),
            "w2": (2, 2, 1, 1),
            "scale": np.ones(2),
            "bias": np.zeros(2),
        },
        feeds={"x": np.stack([np.random.default_rng(0).uniform(-0.5, 0.5, (8, 8)), np.ones((8, 8))])[None]},
        fails=WRONG,
        options={"keep": ["op=Conv,feeds=InstanceNormalization", "op=InstanceNormalization"]},
    ),
)


@every(RANGES)
def test_an_overflow_visible_only_in_data_is_cured_by_keep(case: Case) -> None:
    """Graphs and constants look harmless, so the ops are lowered."""
    assert of_numbers(case, convert(case.model()).model) != []
    result = converted(case)
    assert of_result(case, result.model) == []
    assert result.report.totals.compute_lowered > 0


@every(RANGES)
def test_naive_conversion_fails_where_only_data_shows_it(case: Case) -> None:
    assert naive_fails(case)


@every([case for case in RANGES if case.row == 43])
def test_bfloat16_cures_an_overflow_without_keep(case: Case) -> None:
    after = convert(case.model(), to="bfloat16", target="onnx").model
    assert [text for text in of_numbers(case, after) if "finite" in text] == []


# -- 53, 57: findings ----------------------------------------------------------------------------------


def test_a_convolution_names_the_opset_that_bfloat16_needs() -> None:
    text = "g (float[1,1,4,4] x) => (float[1,1,4,4] y) { y = Conv (x, w) }"
    case = Case(57, "", text, weights={"w": (1, 1, 1, 1)}, fails="", options={"to": "bfloat16"})
    share, finding = converted(case).report.findings
    assert (finding.kind, finding.subject) == ("schema_gate", "Conv")
    assert share.kind == "mostly_float32"
    assert "schema_gate keeps 100%" in share.message and "opset 22" in share.message


# -- 55: half on a CPU -----------------------------------------------------------------------------------


def test_the_command_line_warns_that_half_precision_is_for_gpus() -> None:
    words = " ".join(CliRunner().invoke(program, ["convert", "--help"]).output.split())
    assert "For GPUs: half precision is slow on a CPU" in words


def test_a_session_on_a_cpu_runs_the_float32_model_and_says_why() -> None:
    with pytest.warns(UserWarning, match="on a CPU, float16 is slower, not faster"):
        session = amp_rewrite.Session(
            FUSED.model(), policy="mixed_float16", providers=["CPUExecutionProvider"], cache=None
        )
    assert not session.converted


# -- 56: fusions ---------------------------------------------------------------------------------------


def test_the_runtime_still_fuses_a_decomposed_norm(tmp_path: Path) -> None:
    assert "LayerNormalization" in runs(converted(FUSED).model, tmp_path)


def test_naive_conversion_prevents_fusion_of_the_norm(tmp_path: Path) -> None:
    model = FUSED.model()
    for node in model.graph.node:
        node.name = node.output[0]  # without names they collide, which is another row
    model = naive(model, ("Pow", "ReduceMean"))
    assert "LayerNormalization" not in runs(model, tmp_path)


# -- 59: integer kernels --------------------------------------------------------------------------------

QUANTIZED = Case(
    59,
    "a product between quantizers",
    """g (float[8,8] x) => (float[8,8] y) <float scale = {0.01}, uint8 zero = {128}, int8[8,8] k, int8 none = {0}> {
        a = MatMul (x, w)
        q = QuantizeLinear (a, scale, zero)
        d = DequantizeLinear (q, scale, zero)
        e = DequantizeLinear (k, scale, none)
        p = MatMul (d, e)
        r = QuantizeLinear (p, scale, zero)
        f = DequantizeLinear (r, scale, zero)
        y = MatMul (f, w2)
    }""",
    fails="",
    weights=SQUARE,
    opset=21,
)


def quantized() -> ModelProto:
    """Return the model of the case with its int8 weight."""
    model = QUANTIZED.model()
    others = [tensor for tensor in model.graph.initializer if tensor.name != "k"]
    del model.graph.initializer[:]
    codes = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
    model.graph.initializer.extend([*others, numpy_helper.from_array(codes, "k")])
    return model


def test_the_runtime_still_fuses_a_quantized_product_into_an_integer_op(tmp_path: Path) -> None:
    result = convert(quantized())
    assert result.report.totals.compute_lowered == 2
    assert "QLinearMatMul" in runs(quantized(), tmp_path) & runs(result.model, tmp_path)


def test_naive_conversion_loses_the_integer_op(tmp_path: Path) -> None:
    assert "QLinearMatMul" not in runs(naive(quantized()), tmp_path)


# -- 60: models of the other low type ---------------------------------------------------------------------


def of_type(model: ModelProto, dtype: int) -> list[str]:
    """Return the products of a model with a weight of this type."""
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == dtype}
    return [node.op_type for node in model.graph.node if weights.intersection(node.input)]


def test_a_bfloat16_model_becomes_float16() -> None:
    model = convert(FUSED.model(), to="bfloat16").model
    result = convert(model, to="float16")
    assert of_type(result.model, TensorProto.BFLOAT16) == []
    assert of_type(result.model, TensorProto.FLOAT16) == of_type(model, TensorProto.BFLOAT16) != []
    assert objections.of_loading(result.model) == []


def test_naive_conversion_mixes_the_two_low_types() -> None:
    model = naive(convert(FUSED.model(), to="bfloat16").model)
    assert any("bound to different types" in text for text in objections.of_loading(model))
