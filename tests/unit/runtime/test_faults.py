"""Models on which onnxruntime dies or miscomputes: each row of the table, in processes that may die."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.deploy.doctor.check import FINDING, OK
from amp_rewrite.deploy.doctor.checkup import opening
from amp_rewrite.deploy.doctor.isolated import opened
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.faults import CPU, CUDA, FAULTS, avoiding, skipped
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.runtime.subprocess import command

ROWS = {fault.name: fault for fault in FAULTS}
HERE = onnxruntime.__version__
DEADLY = pytest.mark.skipif(not HERE.startswith("1.31."), reason="what dies is known of onnxruntime 1.31 alone")
PRODUCT = "t = Transpose <perm = [1, 0, 2]> (a)  y = MatMul (t, w)"
DYING = {
    "an input": f"a = Identity (x)  {PRODUCT}",
    "a lookup": f"a = Gather (x, i)  {PRODUCT}",
    "a normalization": f"a = LayerNormalization (x, one)  {PRODUCT}",
    "a Cast of a sum in float32": f"f = Cast <to = 1> (x)  g = Add (f, f)  a = Cast <to = 10> (g)  {PRODUCT}",
    "a moved input": f"a = Reshape (x, s)  {PRODUCT}",
    "a sum that is moved": f"b = Add (x, x)  a = Reshape (b, s)  {PRODUCT}",
    "another reader": f"a = Identity (x)  {PRODUCT}  z = Neg (t)",
    "a copy in between": "t = Transpose <perm = [1, 0, 2]> (x)  c = Identity (t)  y = MatMul (c, w)",
    "a product in float32": "t = Transpose <perm = [1, 0, 2]> (x)  c = Cast <to = 1> (t)  y = MatMul (c, v)",
    "batch and matrix": "t = Transpose <perm = [1, 2, 0]> (x)  y = MatMul (t, u)",
}
LIVING = {
    "another axis": "t = Transpose <perm = [0, 2, 1]> (x)  y = MatMul (t, k)",
    "two varying operands": "a = Identity (x)  t = Transpose <perm = [1, 0, 2]> (a)  y = MatMul (t, m)",
    "a sum in float16": f"a = Add (x, x)  {PRODUCT}",
    "a bias behind": "t = Transpose <perm = [1, 0, 2]> (x)  p = MatMul (t, w)  y = Add (p, one)",
    "a Cast behind": """f = Cast <to = 1> (x)  t = Transpose <perm = [1, 0, 2]> (f)  c = Cast <to = 10> (t)
        y = MatMul (c, w)""",
}


def half(body: str) -> ModelProto:
    """A float16 model of x[2,3,4] and m[4,4]; `w`, `v`, `u`, `k` are weights."""
    result = "float" if "v)" in body else "float16"
    more = ", float16[A,B,C] z" if "z = " in body else ""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float16[2,3,4] x, float16[4,4] m, int64[2] i)'
        f" => ({result}[A,B,C] y{more}) <int64[3] s = {{2, 3, 4}}> {{ {body} }}"
    )
    shapes = {"w": (4, 4), "u": (2, 4), "k": (3, 4), "one": (4,)}
    held = [numpy_helper.from_array(np.ones(shape, np.float16), name) for name, shape in shapes.items()]
    proto.graph.initializer.extend([*held, numpy_helper.from_array(np.ones((4, 4), np.float32), "v")])
    return proto


def avoided(proto: ModelProto, providers: Sequence[str] = (CPU,), release: str = "1.31.1") -> list[str]:
    return skipped(Model.load(proto), frozenset(node.op_type for node in proto.graph.node), release, providers)


def saved(proto: ModelProto, folder: Path) -> Path:
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


@DEADLY
@pytest.mark.parametrize("case", DYING)
def test_a_model_that_dies_opens_in_the_way_round(case: str, tmp_path: Path) -> None:
    path, row = saved(half(DYING[case]), tmp_path), ROWS["transposed_product"]
    assert opened(path, CPU) == "onnxruntime ends the process (SIGSEGV)"
    assert opened(path, CPU, row.skip) is None
    assert avoided(half(DYING[case])) == list(row.skip)


@pytest.mark.parametrize("case", LIVING)
def test_a_model_that_lives_is_left_alone(case: str, tmp_path: Path) -> None:
    assert opened(saved(half(LIVING[case]), tmp_path), CPU) is None
    assert avoided(half(LIVING[case])) == []


def test_only_affected_releases_and_providers_are_handled() -> None:
    proto = half(DYING["an input"])
    assert avoided(proto, release="1.22.0") == []
    assert avoided(proto, release="1.32.0") == ["MatmulTransposeFusion"]
    assert avoided(proto, (CUDA, CPU)) == []


def test_a_model_that_is_not_understood_takes_the_way_round() -> None:
    proto = half(DYING["an input"])
    proto.graph.node[0].op_type = "Unheard"
    assert avoided(proto) == ["MatmulTransposeFusion"]


def test_sessions_of_this_package_take_the_way_round(tmp_path: Path) -> None:
    """In a process of its own, so that the tests survive a way round that is none."""
    path = saved(half(DYING["an input"]), tmp_path)
    code = (
        "import numpy as np; from amp_rewrite.files.model import Model; from amp_rewrite.runtime.runner import Runner;"
        f" runner = Runner.open(Model.load({str(path)!r}));"
        " fed = {'x': np.ones((2, 3, 4), np.float16), 'm': np.ones((4, 4), np.float16), 'i': np.zeros(2, np.int64)};"
        " print(runner.run(fed)['y'].sum())"
    )
    done = subprocess.run(command(code), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "96.0")


TAGGER = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,3,8] x) => (float[3,2,8] y) { t = Transpose <perm = [1, 0, 2]> (x)  y = MatMul (t, w) }"""


def tagger() -> ModelProto:
    proto = onnx.parser.parse_model(TAGGER)
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    return proto


def test_a_conversion_reports_the_fault_and_the_way_round() -> None:
    (finding,) = (f for f in amp_rewrite.convert(tagger()).report.findings if f.kind == "runtime_hazard")
    assert "crashes (SIGSEGV)" in finding.message
    assert "disabled_optimizers=['MatmulTransposeFusion']" in finding.message
    for options in ({"to": "bfloat16", "target": "onnx"}, {"keep": ["op=MatMul", "op=Transpose"]}):
        kinds = {f.kind for f in amp_rewrite.convert(tagger(), **options).report.findings}
        assert "runtime_hazard" not in kinds


def test_such_a_model_is_verified(tmp_path: Path) -> None:
    onnx.save(tagger(), tmp_path / "a.onnx")
    amp_rewrite.convert(tagger()).save(tmp_path / "b.onnx")
    code = (
        "import amp_rewrite, numpy as np; data = [{'x': np.ones((2, 3, 8), np.float32)}];"
        f" files = {[str(tmp_path / name) for name in ('a.onnx', 'b.onnx')]!r};"
        " print(amp_rewrite.verify(*files, data=data, rtol=0.1).ok)"
    )
    done = subprocess.run(command(code), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "True")


# -- biases between quantizers -----------------------------------------------------------------------


def biased(bias: float) -> ModelProto:
    """A convolution between quantizers with float16 scales, whose product float16 does not hold."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 19]>
        g (uint8[1,1,4,4] x) => (uint8[1,1,4,4] y)
        <float16 s = {0}, float16 t = {0}, float16 r = {0}, uint8 z = {0}, int8 n = {0}, int8[1,1,1,1] k = {1}> {
            a = DequantizeLinear (x, s, z)  w = DequantizeLinear (k, t, n)
            c = Conv (a, w, b)  y = QuantizeLinear (c, r, z)
        }""")
    for name, value in (("s", 1e-4), ("t", 1e-4), ("r", 0.01)):
        held = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
        held.CopyFrom(numpy_helper.from_array(np.array(value, np.float16), name))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([bias], np.float16), "b"))
    return proto


def codes(proto: ModelProto, skip: Sequence[str] = ()) -> set[int]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=[CPU], disabled_optimizers=list(skip)
    )
    return set(session.run(None, {"x": np.zeros((1, 1, 4, 4), np.uint8)})[0].ravel().tolist())


def test_a_bias_between_quantizers_of_float16_is_computed_as_stated() -> None:
    proto, row = biased(1.0), ROWS["quantized_bias"]
    assert codes(proto, row.skip) == {100}
    if HERE.startswith("1.31."):
        assert codes(proto) != {100}
    assert avoided(proto) == avoided(proto, (CUDA, CPU)) == list(row.skip)
    fed = {"x": np.zeros((1, 1, 4, 4), np.uint8)}
    assert set(Runner.open(Model.load(proto)).run(fed)["y"].ravel().tolist()) == {100}


def test_a_recurrent_model_opens_in_the_way_round(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float16[5,2,4] x) => (float16[A,B,C,D] y) { r, _h = LSTM <hidden_size = 4> (x, W, R)
        y = Transpose <perm = [0, 2, 1, 3]> (r) }""")
    for name in ("W", "R"):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 16, 4), np.float16), name))
    assert avoided(proto) == list(ROWS["recurrent_layout"].skip)
    assert opened(saved(proto, tmp_path), CPU, ROWS["recurrent_layout"].skip) is None


# -- amp-rewrite doctor --open -----------------------------------------------------------------------


@DEADLY
def test_the_doctor_reports_the_signal_and_the_way_round(tmp_path: Path) -> None:
    path = saved(half(DYING["an input"]), tmp_path)
    done = CliRunner().invoke(program, ["doctor", "--open", str(path)])
    assert done.exit_code == 1
    assert "onnxruntime ends the process (SIGSEGV)" in done.stdout
    assert "pass disabled_optimizers=['MatmulTransposeFusion']" in done.stdout


def test_the_doctor_reports_an_objection_of_the_runtime(tmp_path: Path) -> None:
    proto = half(LIVING["a sum in float16"])
    proto.graph.node[0].op_type = "Unheard"
    (check,) = opening(saved(proto, tmp_path), dict).checks
    assert check.state == FINDING and "Unheard" in check.fact
    (check,) = opening(saved(half(LIVING["a sum in float16"]), tmp_path), dict).checks
    assert (check.state, check.fact) == (OK, f"opens with {CPU}")


@pytest.mark.parametrize(
    "words", [["--open"], ["--open", "FILE", "--gpu", "H200"], ["--open", "FILE", "--dimension", "n=2"]]
)
def test_only_a_model_can_be_opened(words: list[str], tmp_path: Path) -> None:
    path = saved(half(LIVING["a sum in float16"]), tmp_path)
    done = CliRunner().invoke(program, ["doctor", *(str(path) if word == "FILE" else word for word in words)])
    assert done.exit_code == 2
    assert "--open only opens a model" in done.output


def test_a_model_that_is_not_there_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a file"):
        opening(tmp_path / "none.onnx", dict)


# -- other releases ------------------------------------------------------------------------------------


NORM = """<ir_version: 8, opset_import: ["": 17]> g (float16[2,8] x, float16[8] one) => (float16[2,8] y)
{ s = Add (x, x)  y = LayerNormalization (s, one) }"""
ALONE = NORM.replace("s = Add (x, x)", "s = Relu (x)")
FUSED = NORM.replace('["": 17', '["": 17, "com.microsoft": 1').partition("{ s")[0]
SUMMED = (
    FUSED + "{ s = Add (x, x)  y = SimplifiedLayerNormalization (s, one) }",
    FUSED + "{ y = com.microsoft.SkipLayerNormalization (x, x, one) }",
    FUSED + "{ y = com.microsoft.SkipSimplifiedLayerNormalization (x, x, one) }",
    NORM.replace('["": 17', '["": 23').replace("LayerN", "RMSN"),
    FUSED.replace("[2,8]", "[1,2,8]").replace("(float16[1,2,8] x", "(float16[4,8] x, int32[1,2] i")
    + "{ y = com.microsoft.EmbedLayerNormalization (i, , x, x, , one, one) }",
)


@pytest.mark.parametrize(
    ("text", "release", "provider", "stated"),
    [
        (NORM, "1.22.0", CUDA, {"enable_skip_layer_norm_strict_mode": "1"}),
        (NORM, "1.27.0", CUDA, {"enable_skip_layer_norm_strict_mode": "1"}),
        *((text, "1.22.0", CUDA, {"enable_skip_layer_norm_strict_mode": "1"}) for text in SUMMED),
        (NORM, "1.28.0", CUDA, {}),
        (NORM, "1.22.0", CPU, {}),
        (ALONE, "1.22.0", CUDA, {}),
        (NORM.replace("float16", "float"), "1.22.0", CUDA, {}),
    ],
)
def test_sessions_set_the_option_that_avoids_a_fault(
    text: str, release: str, provider: str, stated: dict[str, str]
) -> None:
    proto = onnx.parser.parse_model(text)
    kinds = frozenset(node.op_type for node in proto.graph.node)
    assert avoiding(Model(proto), kinds, release, [provider, CPU]) == stated


def test_each_fault_of_another_runtime_or_release_has_a_source_and_a_way_round() -> None:
    for fault in FAULTS:
        assert fault.source.startswith("https://") or fault.provider in (None, CPU)
        assert bool(fault.skip) + bool(fault.options) + fault.keep <= 1
        assert fault.remedy and fault.remedy in fault.finding
        assert fault.until is None or fault.since < fault.until
