"""Exported models with recorded inputs and outputs, and the errors of their conversions."""

from pathlib import Path

import numpy as np
import onnx

import amp_rewrite
from amp_rewrite.runtime.runner import Runner
from support.paths import TESTS

BERT, CNN = (TESTS / "models" / f"{name}.onnx" for name in ("bert_ts13", "cnn_ts13"))
FULL, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def recorded(kind: str, model: Path = BERT) -> dict[str, np.ndarray]:
    """Return the recorded arrays of a model: "input" or "output"."""
    with np.load(model.with_suffix(".npz")) as file:
        return {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{kind}/")}


def error_of(converted: onnx.ModelProto, model: Path = BERT) -> float:
    """Return the largest error of a converted model's outputs, each relative to its largest value."""
    found = Runner.open(amp_rewrite.Model.load(converted)).run(recorded("input", model))
    wanted = recorded("output", model)
    return max(float(np.abs(found[n].astype(np.float32) - a).max() / np.abs(a).max()) for n, a in wanted.items())


def weight_types(model: onnx.ModelProto) -> set[int]:
    """Return the floating types of a model's matrices."""
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    return kinds & {FULL, HALF, onnx.TensorProto.BFLOAT16}
