"""The final check of a converted model, and onnxruntime's operators unknown to onnx."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError, ModelError
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.check import check
from support.objections import run
from support.paths import TESTS

index = View.of

PLAIN = "t = Tanh (a)  s = Softmax (t)"
CONTRIB = "t = com.microsoft.QuickGelu (a)  s = Softmax (t)"
BODY = """s = If (flag) <then_branch = e () => (float[8,8] p) { t = Tanh (a)  u = MatMul (t, x)  p = Tanh (u) },
    else_branch = o () => (float[8,8] q) { v = MatMul (a, a)  w = MatMul (v, v)  q = Relu (w) }>"""
LOOP = """n = Constant <value_int = 2> ()
    s = Loop (n, flag, a) <body = b (int64 i, bool c, float[8,8] h) => (bool d, float[8,8] o) {
        d = Identity (c)  t = Tanh (h)  u = MatMul (t, x)  o = Tanh (u) }>"""
OLD = "c = LessOrEqual (a, a)  t = Where (c, a, a)  s = Relu (t)"
TEXTS = {
    "onnx": PLAIN,
    "onnx, of bodies": BODY,
    "onnx, of one body": LOOP,
    "our schemas": CONTRIB,
    "our schemas, of an old opset": OLD,
}


def converted(body: str) -> Converted:
    opset = 12 if body == OLD else 18
    text = f"""<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>
    g (float[8,8] x, bool flag) => (float[8,8] y) {{
        a = MatMul (x, x)
        {body}
        y = MatMul (s, x)
    }}"""
    return convert(onnx.parser.parse_model(text), target="onnx")


@pytest.mark.parametrize("source", TEXTS)
def test_planned_types_pass_by_the_expected_check(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = converted(TEXTS[source])
    indexed = []
    monkeypatch.setattr(View, "of", lambda model: indexed.append(model) or index(model))
    assert check(result.view.model, result.view, result.plan, result.result) == ()
    assert bool(indexed) is source.startswith("our schemas")


@pytest.mark.parametrize("source", TEXTS)
def test_a_value_with_an_unplanned_type_is_refused(source: str) -> None:
    result = converted(TEXTS[source])
    value = next(v for v in sorted(result.plan.retype) if v not in result.plan.rename)
    name, float32 = result.view.value_name(value), {**result.plan.retype, value: DType.FLOAT}
    for plan, subject, mismatch in (
        (replace(result.plan, retype=float32), name, "float16 after the conversion, not float32"),
        (replace(result.plan, rename={value: "gone"}), "gone", "unknown after the conversion, not float16"),
    ):
        with pytest.raises(ConversionError) as caught:
            check(result.view.model, result.view, plan, result.result)
        fact = f"the type of {subject!r} is {mismatch} as planned"
        assert str(caught.value) == f"{fact}; nothing was written; please report this"


TARGETS = ("ort-cuda", "onnx", "tensorrt")


def model(op: str, *, opset: int = 13) -> ModelProto:
    """Return a model with this op between two products."""
    return _parsed(f"a = MatMul (x, w)  n = {op}  y = MatMul (n, w)", opset)


def _parsed(body: str, opset: int = 13, functions: str = "") -> ModelProto:
    head = f'<ir_version: 8, opset_import: ["": {opset}, "own": 1]>'
    initializers = "float[8] s = {1, 2, 3, 4, 1, 2, 3, 4}, float[8] b = {0, 1, 0, 1, 0, 1, 0, 1}, bool yes = {1}"
    text = f"{head} g (float[N,8] x) => (float[N,8] y) <{initializers}> {{ {body} }} {functions}"
    proto = onnx.parser.parse_model(text)
    weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return proto


def outputs(proto: ModelProto) -> np.ndarray:
    return np.asarray(run(proto, {"x": np.linspace(-1, 2, 24, dtype=np.float32).reshape(3, 8)})[0])


@pytest.mark.parametrize(
    "op",
    ["SimplifiedLayerNormalization (a, s)", "LayerNormalization (a, s, b)", "LayerNormalization <axis = -1> (a, s)"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_the_runtimes_own_norms_are_lowered_and_run(op: str, target: str) -> None:
    proto = model(op)
    result = convert(proto, target=target)
    assert {row.dtype for row in result.report.rows} == {"float16"}
    np.testing.assert_allclose(outputs(result.model), outputs(proto), rtol=1e-2, atol=1e-2)
    reported = [finding.subject for finding in result.report.findings if finding.kind == "runtime_only"]
    assert reported == ([op.partition(" ")[0]] if target != "ort-cuda" else [])


NORM = '<domain: "own", opset_import: ["": 13]> norm (a, b) => (n) { n = SimplifiedLayerNormalization (a, b) }'
BRANCHES = """m = MatMul (x, w)  y = If (yes) <
    then_branch = t () => (float[N,8] p) { p = SimplifiedLayerNormalization (m, s) },
    else_branch = e () => (float[N,8] q) { q = LayerNormalization (m, s) }>"""


@pytest.mark.parametrize("fuse", ["basic", "none"])
def test_norms_of_the_runtime_may_be_in_bodies_and_functions(fuse: str) -> None:
    """onnxruntime 1.31.1 crashes on such a function, but the conversion inlines it."""
    called, plain = (f"n = {norm} (x, s)  y = MatMul (n, w)" for norm in ("own.norm", "SimplifiedLayerNormalization"))
    for proto, same in ((_parsed(called, functions=NORM), _parsed(plain)), (_parsed(BRANCHES), _parsed(BRANCHES))):
        result = convert(proto, fuse=fuse)
        assert result.report.totals.compute_lowered == 1
        np.testing.assert_allclose(outputs(result.model), outputs(same), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "op", ["SimplifiedLayerNorm (a, s)", "LayerNormalisation (a, s, b)", "RMSNormalization (a, s)"]
)
def test_an_unregistered_operator_is_refused(op: str) -> None:
    with pytest.raises(ModelError, match=r"does not know the operator .* in ai.onnx opset 13"):
        convert(model(op))


def test_a_file_written_by_the_runtimes_optimizer_is_converted_and_verified(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    source = TESTS / "models" / "t5_ts14.onnx"
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    result = convert(tmp_path / "optimized.onnx")
    assert result.report.totals.compute_lowered > 0
    arrays = np.load(source.with_suffix(".npz"))
    feeds = {key[6:]: arrays[key] for key in arrays.files if key.startswith("input/")}
    assert amp_rewrite.verify(tmp_path / "optimized.onnx", result.model, data=[feeds], rtol=0.1, atol=0.1).ok
