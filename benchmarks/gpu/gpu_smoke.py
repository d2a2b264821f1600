"""Check a product and a convolution in half precision on the GPU; print SMOKE OK or the error."""

from __future__ import annotations

import os
import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from amp_rewrite.runtime.gpu import hardware
from amp_rewrite.runtime.runner import library_load_error

MODEL = """<ir_version: 10, opset_import: ["": 20]> smoke (float16[2, 64, 32, 32] x, float16[64, 64, 3, 3] w,
  float16[32, 16] m) => (float16[2, 64, 32, 16] y) { c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = MatMul (c, m) }"""
SHAPES = {"x": ((2, 64, 32, 32), 1.0), "w": ((64, 64, 3, 3), 0.05), "m": ((32, 16), 0.2)}
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TOLERANCE = 5e-3


def smoke() -> str:
    """Return "" if the GPU's results agree with the CPU's, or else an error."""
    random = np.random.default_rng(0)
    feeds = {k: random.normal(0, spread, shape).astype(np.float16) for k, (shape, spread) in SHAPES.items()}
    options = ort.SessionOptions()
    options.log_severity_level = 1 if os.environ.get("SMOKE_LOUD") else 3
    half = onnx.parser.parse_model(MODEL).SerializeToString()
    providers = [(CUDA, {"use_tf32": "0"}), CPU]
    session = ort.InferenceSession(half, options, providers=providers, enable_fallback=0)
    if session.get_providers()[0] != CUDA:
        return f"the CUDA provider does not work, only {', '.join(session.get_providers())}"
    got = session.run(None, feeds)[0].astype(np.float32)
    single = onnx.parser.parse_model(MODEL.replace("float16", "float")).SerializeToString()
    wide = {name: value.astype(np.float32) for name, value in feeds.items()}
    expected = ort.InferenceSession(single, providers=[CPU]).run(None, wide)[0]
    error = float(np.abs(got - expected).max() / np.abs(expected).max())
    return "" if error < TOLERANCE else f"the error is {error:.1e}; half precision must be below {TOLERANCE}"


def main() -> None:
    found = hardware()
    print(f"onnxruntime {ort.__version__} of {ort.__file__}, onnx {onnx.__version__}, Python {sys.version.split()[0]}")
    print(", ".join(map(str, found.gpus)) or found.unavailable_reason, f"CUDA {found.cuda}", sep="; ")
    if missing := library_load_error():
        print(f"not found: {missing}")
    try:
        failure = smoke()
    except Exception as fault:  # noqa: BLE001  # onnxruntime's errors have no common base class
        failure = " ".join(f"{type(fault).__name__}: {fault}".split())[:600]
    print(f"SMOKE FAILED: {failure}" if failure else "SMOKE OK")
    sys.exit(bool(failure))


if __name__ == "__main__":
    main()
