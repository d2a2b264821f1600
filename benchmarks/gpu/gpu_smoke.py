"""A product and a convolution in half on the GPU, with their numbers checked: prints SMOKE OK, or what is wrong."""

from __future__ import annotations

import os
import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from amp_rewrite.runtime.gpu import hardware
from amp_rewrite.runtime.runner import unloaded_library

MODEL = """<ir_version: 10, opset_import: ["": 20]> smoke (float16[2, 64, 32, 32] x, float16[64, 64, 3, 3] w,
  float16[32, 16] m) => (float16[2, 64, 32, 16] y) { c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = MatMul (c, m) }"""
SHAPES = {"x": ((2, 64, 32, 32), 1.0), "w": ((64, 64, 3, 3), 0.05), "m": ((32, 16), 0.2)}
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
NEAR = 5e-3


def smoke() -> str:
    """Return "" if the GPU gives the numbers of the CPU, else what it gives."""
    random = np.random.default_rng(0)
    fed = {k: random.normal(0, spread, shape).astype(np.float16) for k, (shape, spread) in SHAPES.items()}
    options = ort.SessionOptions()
    options.log_severity_level = 1 if os.environ.get("SMOKE_LOUD") else 3
    half = onnx.parser.parse_model(MODEL).SerializeToString()
    providers = [(CUDA, {"use_tf32": "0"}), CPU]
    session = ort.InferenceSession(half, options, providers=providers, enable_fallback=0)
    if session.get_providers()[0] != CUDA:
        return f"the CUDA provider did not open, only {', '.join(session.get_providers())}"
    got = session.run(None, fed)[0].astype(np.float32)
    whole = onnx.parser.parse_model(MODEL.replace("float16", "float")).SerializeToString()
    wanted = ort.InferenceSession(whole, providers=[CPU]).run(None, {k: v.astype(np.float32) for k, v in fed.items()})[
        0
    ]
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    return "" if error < NEAR else f"an error of {error:.1e}, where half precision has less than {NEAR}"


def main() -> None:
    found = hardware()
    print(f"onnxruntime {ort.__version__} of {ort.__file__}, onnx {onnx.__version__}, Python {sys.version.split()[0]}")
    print(", ".join(map(str, found.gpus)) or found.absence, f"CUDA {found.cuda}", sep="; ")
    if missing := unloaded_library():
        print(f"not found: {missing}")
    try:
        said = smoke()
    except Exception as fault:  # noqa: BLE001  # onnxruntime's errors share no base class
        said = " ".join(f"{type(fault).__name__}: {fault}".split())[:600]
    print(f"SMOKE FAILED: {said}" if said else "SMOKE OK")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
