"""Other tools before and after a conversion: the result opens, is accurate and stays float16."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from amp_rewrite import Model, convert
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from support import objections
from support.paths import ROOT
from support.quantized_models import batches, integer_kernels, opened, quantize_to, run_and_count

CNN = ROOT / "examples" / "models" / "digits_cnn.onnx"
FEEDS = batches(CNN)[0]


def onnxslim(model: Path, out: Path) -> None:
    onnx.save(pytest.importorskip("onnxslim").slim(onnx.load(model)), out)


def onnxsim(model: Path, out: Path) -> None:
    simplified, agrees = pytest.importorskip("onnxsim").simplify(onnx.load(model))
    assert agrees
    onnx.save(simplified, out)


def graphsurgeon(model: Path, out: Path) -> None:
    surgeon = pytest.importorskip("onnx_graphsurgeon")
    graph = surgeon.import_onnx(onnx.load(model))
    onnx.save(surgeon.export_onnx(graph.fold_constants().cleanup().toposort()), out)


def onnxscript(model: Path, out: Path) -> None:
    onnx.save(pytest.importorskip("onnxscript.optimizer").optimize(onnx.load(model)), out)


def version_converter(model: Path, out: Path) -> None:
    from onnx.version_converter import convert_version

    loaded = onnx.load(model)
    onnx.save(convert_version(loaded, loaded.opset_import[0].version + 1), out)


def transformers_optimizer(model: Path, out: Path) -> None:
    pytest.importorskip("sympy")
    from onnxruntime.transformers import fusion_options, optimizer

    options = fusion_options.FusionOptions("bert")
    options.enable_nhwc_conv = False  # NhwcConv only has a kernel on CUDA
    optimizer.optimize_model(str(model), "bert", optimization_options=options, opt_level=0).save_model_to_file(str(out))


def session(level: str) -> Callable[[Path, Path], None]:
    return lambda model, out: onnx.save(opened(onnx.load(model), out.parent, level)[1], out)


def quantize_dynamic(model: Path, out: Path) -> None:
    from onnxruntime import quantization

    loaded = onnx.load(model)
    del loaded.graph.value_info[:]  # it transposes weights of Gemm and then rejects their declared shapes
    quantization.quantize_dynamic(loaded, out)


def quantize_static(model: Path, out: Path) -> None:
    quantize_to(model, out, batches(CNN))


def right(model: Path, expected: np.ndarray, slack: float) -> bool:
    """Whether outputs are accurate, on the CPU and emulated."""
    for twin in (Model.load(model), emulate(model, io="float32")):
        (output,) = Runner.open(twin).run(FEEDS).values()
        if np.abs(output - expected).max() > slack + 2e-3 * np.abs(expected).max():
            return False
    return True


def low(model: Path) -> tuple[int, int]:
    totals = report_of(View.of(Model.load(model))).totals
    return totals.compute_lowered, totals.compute_ops


SIMPLIFIERS = [onnxslim, onnxsim, graphsurgeon, onnxscript, version_converter, transformers_optimizer]
QUANTIZERS = [quantize_dynamic, quantize_static]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"{stage}.onnx" for stage in ("other", "half", "both")]


def run(model: Path) -> np.ndarray:
    (output,) = objections.run(onnx.load(model), FEEDS)
    return np.asarray(output)


def assert_right_and_low(both: Path) -> None:
    assert right(both, run(CNN), 0)
    lowered, ops = low(both)
    assert lowered == ops


@pytest.mark.parametrize("tool", [*SIMPLIFIERS, session("BASIC")])
def test_before_the_conversion(tool: Callable[[Path, Path], None], paths: list[Path]) -> None:
    other, _, both = paths
    tool(CNN, other)
    convert(other).save(both)
    assert_right_and_low(both)


@pytest.mark.parametrize("tool", SIMPLIFIERS)
def test_after_the_conversion(tool: Callable[[Path, Path], None], paths: list[Path]) -> None:
    _, half, both = paths
    convert(CNN).save(half)
    tool(half, both)
    assert_right_and_low(both)


@pytest.mark.parametrize("tool", QUANTIZERS)
def test_quantized_before_the_conversion(tool: Callable[[Path, Path], None], paths: list[Path]) -> None:
    """It keeps its integer kernels and results; quantizers do not work after a conversion."""
    other, _, both = paths
    tool(CNN, other)
    convert(other).save(both)
    quantized = run(other)
    assert right(both, quantized, float(np.abs(quantized - run(CNN)).max()))
    integers = [integer_kernels(run_and_count(onnx.load(path), FEEDS, both.parent)[1]) for path in (other, both)]
    assert integers[0] == integers[1] != {}


def test_an_extended_session_before_the_conversion_leaves_ops_without_float16_kernels(paths: list[Path]) -> None:
    other, _, both = paths
    session("EXTENDED")(CNN, other)
    convert(other).save(both)
    assert right(both, run(CNN), 0)
    lowered, ops = low(both)
    assert lowered < ops
