"""Models from onnxruntime's own quantizer, and the ops that onnxruntime runs for a model."""

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
"""Prefixes of the names of integer kernels."""


def batches(path: Path, count: int = 2) -> list[Feeds]:
    """Return inputs for a model of `tests/models` or for a digits classifier."""
    beside = path.with_suffix(".npz")
    if beside.exists():
        arrays = np.load(beside)
        return [{name[6:]: arrays[name] for name in arrays.files if name.startswith("input/")}]
    name = onnx.load(path).graph.input[0].name
    digits = np.load(ROOT / "examples" / "models" / "digits_test.npz")
    images = next(array for array in (digits[key] for key in digits.files) if array.ndim > 1).astype(np.float32)
    return [{name: images[16 * i : 16 * (i + 1)]} for i in range(count)]


def quantize_static(path: Path, folder: Path, **options: object) -> ModelProto:
    """Quantize a model by `onnxruntime.quantization.quantize_static`."""
    out = folder / f"{path.stem}.onnx"
    quantize_to(path, out, batches(path), **options)
    return onnx.load(out)


def quantize_to(path: Path, out: Path, feeds: list[Feeds], **options: object) -> None:
    """Write a quantized model, calibrated on feeds."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: Iterator[Feeds]) -> None:
            self.feeds = feeds

        def get_next(self) -> Feeds | None:
            return next(self.feeds, None)

    quantization.quantize_static(path, out, Reader(iter(feeds)), **options)


def opened(model: ModelProto, folder: Path, level: str = "ALL") -> tuple[onnxruntime.InferenceSession, ModelProto]:
    """Return a session on the CPU and its optimized model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, onnx.load(folder / "optimized.onnx")


def runs(model: ModelProto, folder: Path) -> Counter[str]:
    """Count the ops of a model by type after optimization for the CPU provider."""
    return Counter(node.op_type for node in opened(model, folder)[1].graph.node)


def run_and_count(model: ModelProto, feeds: Feeds, folder: Path) -> tuple[list[np.ndarray], Counter[str]]:
    """Return a model's outputs and the counts of `runs`."""
    session, optimized = opened(model, folder)
    read = {value.name: feeds[value.name] for value in session.get_inputs()}
    return session.run(None, read), Counter(node.op_type for node in optimized.graph.node)


def integer_kernels(ops: Counter[str]) -> dict[str, int]:
    """Select the ops that compute on integers."""
    return {op: count for op, count in sorted(ops.items()) if op.startswith(INTEGER)}
