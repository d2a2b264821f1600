"""Risky questions to the NVIDIA driver and to onnxruntime, each asked in another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amp_rewrite.errors import MachineError
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.installation import described, devices, has_provider, onnxruntime, registered
from amp_rewrite.runtime.runner import CUDA, cuda_opens, unloaded_library

_HOME = str(Path(__file__).parents[2])
_SECONDS = 300.0  # for a process that opens a tiny model, or starts the driver of eight GPUs


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line of a program able to import this package; -P: and nothing from the current folder."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]


def apart(program: str, *arguments: str, subject: str = "onnxruntime", seconds: float = _SECONDS) -> str:
    """Run a program in a process of its own and return its output. MachineError, about `subject`, if it fails."""
    words = command(program, *arguments)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as cause:
        raise MachineError(f"{subject} did not answer in {seconds:.0f} seconds") from cause
    if done.returncode < 0:
        name = signal.strsignal(-done.returncode)
        raise MachineError(f"{subject} ended the process with signal {-done.returncode} ({name})")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise MachineError(f"{subject} cannot be asked, the process ended with {done.returncode}: {last[:300]}")
    return done.stdout


def probe() -> dict[str, Any]:
    """Describe this onnxruntime as JSON. A broken installation may crash the process; use a subprocess."""
    ort = onnxruntime()
    cuda = getattr(ort, "cuda_version", None) or None
    return {
        "version": ort.__version__,
        "cuda": cuda,
        "opens": has_provider(CUDA) and cuda_opens(),
        "unloaded": unloaded_library() if cuda else None,
        "plugins": [
            {**asdict(plugin), "devices": [described(d) for name in plugin.providers for d in devices(ort, name)]}
            for plugin in registered(ort)
        ],
    }


Asked = Mapping[str, Any]
"""Answer of `probe`, or `{"failure": …}` if the query failed."""


def asked() -> Asked:
    """Query onnxruntime about itself in another process."""
    return _answer("probes", "probe", "onnxruntime")


def machine_asked() -> Hardware:
    """Query the GPUs of this machine in another process; a crash or a hang counts as a missing driver."""
    answer = _answer("gpu", "hardware", "the NVIDIA driver")
    if failure := answer.get("failure"):
        return Hardware(absence=f"{failure}; restart the machine, or install the driver anew")
    gpus = tuple(Gpu(gpu["name"], (*gpu["capability"],), gpu["memory"]) for gpu in answer["gpus"])
    return Hardware(gpus, answer["cuda"] and (*answer["cuda"],), answer["absence"])


def _answer(module: str, function: str, subject: str) -> Asked:
    program = (
        f"import json; from dataclasses import asdict; from amp_rewrite.runtime.{module} import {function};"
        f" print(json.dumps({function}(), default=asdict))"
    )
    try:
        answer: Asked = json.loads(apart(program, subject=subject).splitlines()[-1])
    except MachineError as failure:
        return {"failure": str(failure)}
    return answer
