"""Models that crash onnxruntime or give wrong results: each row of the table, in separate processes."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.errors import MachineError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes
from amp_rewrite.runtime.faults import CPU, CUDA, FAULTS, faults_to_avoid
from amp_rewrite.runtime.probes import command, in_subprocess
from amp_rewrite.runtime.runner import Runner
from support.transposed_products import FLOAT, HALF, SIZES, Row, rows, verdicts

ROWS = {fault.name: fault for fault in FAULTS}
HERE = onnxruntime.__version__
AFFECTED_RELEASE = pytest.mark.skipif(not HERE.startswith(("1.31.", "1.32.")), reason="crashes of 1.31 and 1.32")
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="crashes need a forked process")
PRODUCT = "t = Transpose <perm = [1, 0, 2]> (a)  y = MatMul (t, w)"
CRASHING = f"a = Identity (x)  {PRODUCT}"
"""A product that crashes the process."""
WORKING = "t = Transpose <perm = [0, 2, 1]> (x)  y = MatMul (t, k)"
AFFECTED = {
    "merged": "r = Transpose <perm = [0, 2, 1]> (x)  t = Transpose <perm = [2, 0, 1]> (r)  y = MatMul (t, w)",
    "another reader": f"a = Identity (x)  {PRODUCT}  z = Neg (t)",
    "a bias behind": "t = Transpose <perm = [1, 0, 2]> (x)  p = MatMul (t, w)  y = Add (p, one)",
}
UNAFFECTED = {
    "two Casts": "f = Cast <to = 1> (x) t = Transpose <perm = [1, 0, 2]> (f) c = Cast <to = 10> (t) y = MatMul (c, w)",
    "a public Transpose behind a product": "p = MatMul (x, w)  y = Transpose <perm = [1, 0, 2]> (p)",
    "the default order of axes": "t = Transpose (x)  y = MatMul (t, u)",
}


def half(body: str) -> ModelProto:
    """Build a float16 model of x[2,3,4] and m[4,4]; `w`, `v`, `u`, `k` are weights."""
    result = "float" if "v)" in body else "float16"
    more = ", float16[A,B,C] z" if "z = " in body else ""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float16[2,3,4] x, float16[4,4] m, int64[2] i)'
        f" => ({result}[A,B,C] y{more}) <int64[3] s = {{2, 3, 4}}> {{ {body} }}"
    )
    shapes = {"w": (4, 4), "u": (2, 4), "k": (3, 4), "one": (4,)}
    weights = [numpy_helper.from_array(np.ones(shape, np.float16), name) for name, shape in shapes.items()]
    proto.graph.initializer.extend([*weights, numpy_helper.from_array(np.ones((4, 4), np.float32), "v")])
    return proto


def avoided(proto: ModelProto, providers: Sequence[str] = (CPU,), release: str = "1.31.1") -> list[str]:
    kinds = frozenset(n.op_type for n in all_nodes(proto.graph.node))
    return [name for fault in faults_to_avoid(Model.load(proto), kinds, release, providers) for name in fault.skip]


def saved(proto: ModelProto, folder: Path) -> Path:
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


def opens(proto: ModelProto, folder: Path, skip: Sequence[str] = ()) -> bool:
    """Whether a process that opens the file like other programs survives."""
    program = "import onnxruntime as ort; ort.InferenceSession(sys.argv[1], disabled_optimizers=sys.argv[2:])"
    try:
        in_subprocess(program, str(saved(proto, folder)), *skip)
    except MachineError:
        return False
    return True


# -- Transposes before products ------------------------------------------------------------------------


@AFFECTED_RELEASE
@FORKS
def test_the_table_lists_the_models_that_crash(tmp_path: Path) -> None:
    """Only models found by the row crash; some of them open because another fusion of onnxruntime comes first."""
    models = [row.model(HALF) for row in rows()]
    affected = [bool(avoided(model)) for model in models]
    others = [model for model, found in zip(models, affected, strict=True) if not found]
    crashing = [model for model, found in zip(models, affected, strict=True) if found][::8]
    assert len(others) > 150 and len(crashing) > 10
    found = verdicts([*others, *crashing], tmp_path)
    assert set(found[: len(others)]) == {"opens"}
    assert found[len(others) :].count("crashes") > 0.7 * len(crashing)


@FORKS
def test_converted_models_open(tmp_path: Path) -> None:
    """Each row of the table, in float16, and with a float32 product after a float16 Transpose."""
    table = [row for number, row in enumerate(rows()) if avoided(row.model(HALF)) or number % 4 == 0]
    converted = [lowered(row) for row in table]
    parted = [bool(result.plan.parted) for result in converted]
    assert parted == [bool(avoided(row.model(HALF))) for row in table]
    assert set(verdicts([result.model for result in converted], tmp_path)) == {"opens"}


def lowered(row: Row, to: Literal["float16", "bfloat16"] = "float16") -> amp_rewrite.Converted:
    """Convert a row to the low type, except for a product after a Cast."""
    if row.between == "Cast":
        return amp_rewrite.convert(row.model(FLOAT), to=to, lower="op=Transpose", keep="product")
    return amp_rewrite.convert(row.model(FLOAT), to=to, lower=["op=Transpose", "product"])


@pytest.mark.parametrize(
    "row", [Row((1, 0, 2)), Row((1, 2, 3, 0), left=False, between="Cast"), Row((1, 0, 2), inner=True)]
)
def test_a_split_transpose_gives_the_same_numbers(row: Row) -> None:
    shape = SIZES[: len(row.perm)]
    fed = {"x": np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)}
    fed |= {"c": np.array(True)} if row.inner else {}
    result = lowered(row)
    assert result.plan.parted
    low, wide = (Runner.open(Model.load(proto)).run(fed) for proto in (result.model, row.model(FLOAT)))
    for name, expected in wide.items():
        np.testing.assert_allclose(low[name], expected, atol=2e-2)


@pytest.mark.parametrize("case", AFFECTED)
def test_a_product_of_a_transposed_operand_is_found(case: str, tmp_path: Path) -> None:
    row = ROWS["transposed_product"]
    assert opens(half(AFFECTED[case]), tmp_path, row.skip)
    assert avoided(half(AFFECTED[case])) == list(row.skip)


@pytest.mark.parametrize("case", UNAFFECTED)
def test_a_model_that_does_not_crash_is_left_alone(case: str, tmp_path: Path) -> None:
    assert opens(half(UNAFFECTED[case]), tmp_path)
    assert avoided(half(UNAFFECTED[case])) == []


def test_only_affected_products_releases_and_providers_are_handled() -> None:
    cast = Row((1, 0, 2), between="Cast").model(HALF)
    assert avoided(cast, (CUDA, CPU)) == list(ROWS["cast_transpose"].skip)
    assert avoided(Row((1, 0, 2)).model(HALF), (CUDA, CPU)) == []
    proto = half(CRASHING)
    assert avoided(proto, release="1.19.0") == []
    assert avoided(proto, release="1.32.0") == ["MatmulTransposeFusion"]
    assert avoided(proto, (CUDA, CPU)) == []


def test_a_product_in_a_function_is_inlined_for_the_workaround(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float16[2,3,4] x) => (float16[A,B,C] y) { y = own.product (x, w) }
        <domain: "own", opset_import: ["": 17]> product (a, b) => (c) {
            t = Transpose <perm = [1, 0, 2]> (a)  c = MatMul (t, b)
        }""")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float16), "w"))
    assert run_apart(saved(proto, tmp_path), {"x": (2, 3, 4)}) == (0, "96.0")


def run_apart(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Open a model in a process with this package and run it on ones; return its output and exit code."""
    code = (
        "import numpy as np; from amp_rewrite.files.model import Model; from amp_rewrite.runtime.runner import Runner;"
        f" runner = Runner.open(Model.load({str(path)!r}));"
        f" fed = {{name: np.ones(shape, np.float16) for name, shape in {dict(shapes)}.items()}};"
        " fed |= {'i': np.zeros(2, np.int64)} if len(fed) > 1 else {};"
        " print(runner.run(fed)['y'].sum())"
    )
    done = subprocess.run(command(code), capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.strip()


def test_a_half_model_gets_the_fault_and_its_workaround_reported(tmp_path: Path) -> None:
    """By `convert`, which leaves it unchanged, and by `doctor`."""
    result = amp_rewrite.convert(half(CRASHING))
    (finding,) = (f for f in result.report.findings if f.kind == "runtime_hazard")
    assert result.plan.empty and finding.subject == "Transpose_1"
    assert "crash (SIGSEGV)" in finding.message
    assert "disabled_optimizers=['MatmulTransposeFusion']" in finding.message
    done = CliRunner().invoke(program, ["doctor", str(saved(half(CRASHING), tmp_path))])
    assert "disabled_optimizers=['MatmulTransposeFusion']" in done.stdout
    assert "MatmulTransposeFusion" not in str(amp_rewrite.doctor(half(WORKING)))


# -- biases between quantizers -----------------------------------------------------------------------


def biased(bias: float) -> ModelProto:
    """Build a convolution between quantizers with float16 scales, whose product underflows or overflows float16."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 19]>
        g (uint8[1,1,4,4] x) => (uint8[1,1,4,4] y)
        <float16 s = {0}, float16 t = {0}, float16 r = {0}, uint8 z = {0}, int8 n = {0}, int8[1,1,1,1] k = {1}> {
            a = DequantizeLinear (x, s, z)  w = DequantizeLinear (k, t, n)
            c = Conv (a, w, b)  y = QuantizeLinear (c, r, z)
        }""")
    for name, value in (("s", 1e-4), ("t", 1e-4), ("r", 0.01)):
        initializer = next(tensor for tensor in proto.graph.initializer if tensor.name == name)
        initializer.CopyFrom(numpy_helper.from_array(np.array(value, np.float16), name))
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
    ("text", "release", "provider", "options"),
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
    text: str, release: str, provider: str, options: dict[str, str]
) -> None:
    proto = onnx.parser.parse_model(text)
    kinds = frozenset(node.op_type for node in proto.graph.node)
    met = faults_to_avoid(Model(proto), kinds, release, [provider, CPU])
    assert [fault.options for fault in met if fault.options] == ([options] if options else [])


def test_each_fault_of_another_runtime_or_release_has_a_source_and_a_workaround() -> None:
    for fault in FAULTS:
        assert fault.source.startswith("https://") or fault.provider in (None, CPU)
        assert bool(fault.skip) + bool(fault.options) + fault.keep <= 1
        assert fault.remedy and fault.remedy in fault.finding
        assert fault.until is None or fault.since < fault.until


HEAD = '<ir_version: 10, opset_import: ["": {opset}]> g'


def transposed(width: int | str, dtype: str = "float") -> ModelProto:
    return onnx.parser.parse_model(
        f"{HEAD.format(opset=20)} ({dtype}[1, 1, {width}] x, {dtype}[1, 1, 4] w) => ({dtype}[1, 1, m] y)"
        " { y = ConvTranspose <strides = [4]> (x, w) }"
    )


@pytest.mark.parametrize(("width", "kept"), [(512, False), (513, True), ("n", True)])
def test_webgpu_keeps_transposed_convolutions_with_positions_beyond_float16(width: int | str, kept: bool) -> None:
    for target in ("webgpu", "ort-cuda"):
        (row,) = amp_rewrite.convert(transposed(width), target=target).report.rows
        assert (row.rule == "runtime_fault") is (kept and target == "webgpu")
        assert row.dtype == ("float32" if kept and target == "webgpu" else "float16")


@pytest.mark.parametrize(
    ("mode", "opset", "target", "wrong"),
    [
        ("", 20, "tensorrt", True),
        ('<mode = "cubic">', 22, "tensorrt", True),
        ('<mode = "nearest">', 20, "tensorrt", False),
        ("", 16, "tensorrt", False),
        ("", 20, "directml", False),
    ],
)
def test_tensorrt_is_reported_to_read_new_grid_modes_as_nearest(
    mode: str, opset: int, target: Literal["tensorrt", "directml"], wrong: bool
) -> None:
    model = onnx.parser.parse_model(
        f"{HEAD.format(opset=opset)} (float[1, 1, 4, 4] x, float[1, 2, 2, 2] g) => (float[1, 1, 2, 2] y)"
        f" {{ y = GridSample {mode} (x, g) }}"
    )
    messages = [
        f.message for f in amp_rewrite.convert(model, target=target).report.findings if f.kind == "runtime_hazard"
    ]
    assert ["nearest" in message and message.endswith("below 20") for message in messages] == [True] * wrong


def test_directml_is_reported_wrong_in_half_transposed_convolutions() -> None:
    for dtype, target, wrong in (("float16", "directml", 1), ("float", "directml", 1), ("float16", "onnx", 0)):
        report = amp_rewrite.convert(transposed(4, dtype), target=target).report
        assert sum(finding.kind == "runtime_hazard" for finding in report.findings) == wrong
