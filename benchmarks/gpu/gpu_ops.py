"""Single float16 ops on a provider: their errors, those of the emulation, and the share of equal results.

The cases are those of the WebGPU tests, and recurrent ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from suites.webgpu.op_cases import CASES, OpCase

Row = dict[str, Any]
Array = np.ndarray[Any, Any]
STEPS, BATCH, INPUT, HIDDEN = 12, 4, 32, 24


@dataclass(frozen=True, slots=True)
class Recurrent(OpCase):
    """A recurrent op, with small weights so that its gates do not saturate."""

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """Return normal values for the input, and a quarter of them for the weights, rounded to float16."""
        found = super(Recurrent, self).feeds(seed)
        return {name: array if name == "x0" else array / np.float16(4) for name, array in found.items()}


def _recurrent(op_type: str, gates: int, **attributes: Any) -> Recurrent:
    shapes = ((STEPS, BATCH, INPUT), (1, gates * HIDDEN, INPUT), (1, gates * HIDDEN, HIDDEN))
    return Recurrent(op_type, shapes, attributes={"hidden_size": HIDDEN, **attributes})


RECURRENT = (
    _recurrent("LSTM", 4),
    _recurrent("GRU", 3),
    _recurrent("GRU", 3, linear_before_reset=1),
    _recurrent("RNN", 1),
)


def ops(job: Mapping[str, Any]) -> Row:
    """Run every case on the provider and emulated on the CPU; compare both with float32 on the CPU."""
    cases = [*CASES, *RECURRENT]
    return {"ops": [_compared(case, job["provider"]) for case in (cases[:2] if job["tiny"] else cases)]}


def _compared(case: OpCase, provider: str) -> Row:
    """Return the RMS errors on the device and emulated, and the share of results equal bit for bit."""
    from amp_rewrite import emulate
    from amp_rewrite.runtime.runner import CPU

    feeds = case.feeds()
    wide = {name: array.astype(np.float32) for name, array in feeds.items()}
    try:
        found = _ran(case.model(), feeds, provider)
        right = _ran(case.widened(), wide, CPU)
        twin = _ran(emulate(case.model(), io="float32").to_proto(), wide, CPU)
    except Exception as fault:  # noqa: BLE001  # onnxruntime's errors have no common base class
        return {"case": case.name, "fault": " ".join(f"{type(fault).__name__}: {fault}".split())[:200]}
    apart = [float(np.sqrt(np.mean((side.astype(np.float64) - right) ** 2))) for side in (found, twin)]
    equal = float(np.mean(found == twin.astype(np.float16)))
    return {"case": case.name, "on_device": apart[0], "emulated": apart[1], "equal": equal}


def _ran(model: ModelProto, feeds: Mapping[str, Array], provider: str) -> Array:
    """Return the first output of a run without TF32, with every op on the provider."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if provider.startswith("CPU") else "1")
    chosen: list[Any] = [(provider, {"use_tf32": "0"} if provider.startswith("CUDA") else {})]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=chosen)
    found: Array = session.run(None, dict(feeds))[0]
    return found
