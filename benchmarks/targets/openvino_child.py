"""Run ONNX models with OpenVINO: a helper of openvino_hints.py, in an interpreter that has openvino.

Reads lines of JSON, {"model", "hint", "batch", "out"}, and answers each with a line: the precision in which the
device computes, or the error. Inputs and outputs are .npz files, by name.
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
    fed = {name: data[name] for name in data.files}
    results = compiled(fed)
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
            told = answer(core, **json.loads(line))
        except RuntimeError as error:  # its objection to a model is a result
            told = {"error": (str(error).strip().splitlines() or [repr(error)])[-1][:160]}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
