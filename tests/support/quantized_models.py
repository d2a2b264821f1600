"""Models that onnxruntime's own quantizer wrote, and the ops that onnxruntime runs of a model."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto

from support.paths import ROOT

Feeds = dict[str, np.ndarray]
INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "MatMulNBits")
"""How the names of integer kernels begin."""


def batches(path: Path, count: int = 2) -> list[Feeds]:
    """Inputs of a model of `tests/models`, or of one that reads digits."""
    beside = path.with_suffix(".npz")
    if beside.exists():
        arrays = np.load(beside)
        return [{name[6:]: arrays[name] for name in arrays.files if name.startswith("input/")}]
    name = onnx.load(path).graph.input[0].name
    digits = np.load(ROOT / "examples" / "models" / "digits_test.npz")
    images = next(array for array in (digits[key] for key in digits.files) if array.ndim > 1).astype(np.float32)
    return [{name: images[16 * i : 16 * (i + 1)]} for i in range(count)]


def quantize_static(path: Path, folder: Path, **options: object) -> ModelProto:
    """The model with quantizers around its ops, as `onnxruntime.quantization.quantize_static` writes it."""
    out = folder / f"{path.stem}.onnx"
    quantize_to(path, out, batches(path), **options)
    return onnx.load(out)


def quantize_to(path: Path, out: Path, feeds: list[Feeds], **options: object) -> None:
    """Write a model with quantizers around its ops, calibrated on feeds."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: Iterator[Feeds]) -> None:
            self.feeds = feeds

        def get_next(self) -> Feeds | None:
            return next(self.feeds, None)

    quantization.quantize_static(path, out, Reader(iter(feeds)), **options)


def opened(model: ModelProto, folder: Path, level: str = "ALL") -> tuple[onnxruntime.InferenceSession, ModelProto]:
    """A session on the CPU, and the model as its optimizer left it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, onnx.load(folder / "optimized.onnx")


def runs(model: ModelProto, folder: Path) -> Counter[str]:
    """The ops that onnxruntime's CPU provider makes of a model, counted by type."""
    return Counter(node.op_type for node in opened(model, folder)[1].graph.node)


def run_and_count(model: ModelProto, feeds: Feeds, folder: Path) -> tuple[list[np.ndarray], Counter[str]]:
    """The outputs of a model, and what `runs` says of it."""
    session, optimized = opened(model, folder)
    read = {value.name: feeds[value.name] for value in session.get_inputs()}
    return session.run(None, read), Counter(node.op_type for node in optimized.graph.node)


def integer_kernels(ops: Counter[str]) -> dict[str, int]:
    """Those of the ops that compute on integers."""
    return {op: count for op, count in sorted(ops.items()) if op.startswith(INTEGER)}
