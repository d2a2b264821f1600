"""Runs one model on onnxruntime's CPU provider in a process of its own: a crash there is a result, not the end.

    python cpu_run.py MODEL.onnx BATCH.npz OUT.npz --level basic|all [--disable OPTIMIZER …]

Feeds `input/NAME` of the batch and writes `output/NAME`. Exits 1 with the runtime's words on stderr if it refuses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as state

LEVELS = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
# onnxruntime's own exceptions share no base class below Exception.
REFUSALS = tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))


def run(model: Path, batch: Path, out: Path, level: str, disabled: list[str]) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(str(model), options, providers=providers, disabled_optimizers=disabled)
    with np.load(batch) as stored:
        feed = {value.name: stored[f"input/{value.name}"] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    outputs = session.run(names, feed)
    np.savez(out, **{f"output/{name}": array for name, array in zip(names, outputs, strict=True)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "batch", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--level", choices=LEVELS, required=True)
    parser.add_argument("--disable", nargs="*", default=[])
    arguments = parser.parse_args()
    try:
        run(arguments.model, arguments.batch, arguments.out, arguments.level, arguments.disable)
    except REFUSALS as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
