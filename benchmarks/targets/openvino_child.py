"""Run ONNX models with OpenVINO, as a helper of openvino_hints.py in an interpreter with openvino.

It reads lines of JSON, {"model", "hint", "batch", "out"}, and answers each with a line: the precision used by the
device, or the error. Inputs and outputs are .npz files with arrays by name.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino


def answer(core: openvino.Core, model: str, hint: str, batch: str, out: str) -> dict[str, str]:
    """Compile a model with a precision hint, run it on a batch, and write its outputs."""
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint, "NUM_STREAMS": "1"})
    data = np.load(batch)
    inputs = {name: data[name] for name in data.files}
    results = compiled(inputs)
    arrays = {name: results[port] for port in compiled.outputs for name in port.names}
    np.savez(out, **{name: np.asarray(value, np.float64) for name, value in arrays.items()})
    return {"precision": compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()}


def main() -> None:
    core = openvino.Core()
    about = {"version": openvino.__version__, "device": core.get_property("CPU", "FULL_DEVICE_NAME")}
    about["capabilities"] = " ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        try:
            reply = answer(core, **json.loads(line))
        except RuntimeError as error:  # an error about a model is a result
            reply = {"error": (str(error).strip().splitlines() or [repr(error)])[-1][:160]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
