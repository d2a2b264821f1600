"""A shipped model, the inputs beside it, and the error of another model on them."""

from __future__ import annotations

import numpy as np
import onnx

import amp_rewrite
from amp_rewrite.runtime.runner import Runner
from support.paths import TESTS

BERT = TESTS / "models" / "bert_ts13.onnx"
FULL, HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def recorded(kind: str) -> dict[str, np.ndarray]:
    """Return the arrays beside BERT: "input" or "output"."""
    with np.load(BERT.with_suffix(".npz")) as file:
        return {name.partition("/")[2]: file[name] for name in file.files if name.startswith(f"{kind}/")}


def error(outputs: dict[str, np.ndarray]) -> float:
    """Return the largest error of outputs of BERT, relative to the largest value of each."""
    wanted = recorded("output")
    return max(float(np.abs(outputs[n].astype(np.float32) - a).max() / np.abs(a).max()) for n, a in wanted.items())


def error_of(model: onnx.ModelProto) -> float:
    """Return the error of a converted BERT."""
    return error(Runner.open(amp_rewrite.Model.load(model)).run(recorded("input")))


def weight_types(model: onnx.ModelProto) -> set[int]:
    """Return the floating types of the matrices of a model."""
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    return kinds & {FULL, HALF, onnx.TensorProto.BFLOAT16}
