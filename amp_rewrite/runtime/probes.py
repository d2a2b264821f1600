"""Queries of the NVIDIA driver and onnxruntime, each in a separate process in case of a crash."""

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
from amp_rewrite.runtime.installation import describe, devices, has_provider, onnxruntime, register_plugins
from amp_rewrite.runtime.runner import CUDA, cuda_works, library_load_error

_HOME = str(Path(__file__).parents[2])
_TIMEOUT = 300.0  # seconds, to open a tiny model or to initialize the driver of eight GPUs


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line for a program with access to this package, but not to the current folder (-P)."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]


def in_subprocess(program: str, *arguments: str, subject: str = "onnxruntime", seconds: float = _TIMEOUT) -> str:
    """Run a program in a subprocess and return its output; MachineError about `subject` if it fails."""
    line = command(program, *arguments)
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as cause:
        raise MachineError(f"{subject} did not answer within {seconds:.0f} seconds") from cause
    if done.returncode < 0:
        name = signal.strsignal(-done.returncode)
        raise MachineError(f"{subject} crashed with signal {-done.returncode} ({name})")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise MachineError(f"{subject} did not answer: the process exited with code {done.returncode}: {last[:300]}")
    return done.stdout


def probe() -> dict[str, Any]:
    """Describe the installed onnxruntime as JSON. A broken installation may crash the process; use a subprocess."""
    ort = onnxruntime()
    cuda = getattr(ort, "cuda_version", None) or None
    return {
        "version": ort.__version__,
        "cuda": cuda,
        "opens": has_provider(CUDA) and cuda_works(),
        "unloaded": library_load_error() if cuda else None,
        "plugins": [
            {**asdict(plugin), "devices": [describe(d) for name in plugin.providers for d in devices(ort, name)]}
            for plugin in register_plugins(ort)
        ],
    }


Answer = Mapping[str, Any]
"""The result of `probe`, or `{"failure": …}` if the query failed."""


def query_onnxruntime() -> Answer:
    """Run `probe` in a subprocess."""
    return _answer("probes", "probe", "onnxruntime")


def query_hardware() -> Hardware:
    """Query the GPUs of this machine in a subprocess; a crash or a hang counts as a missing driver."""
    answer = _answer("gpu", "hardware", "the NVIDIA driver")
    if failure := answer.get("failure"):
        return Hardware(unavailable_reason=f"{failure}; restart the machine, or reinstall the driver")
    gpus = tuple(Gpu(gpu["name"], (*gpu["capability"],), gpu["memory"]) for gpu in answer["gpus"])
    return Hardware(gpus, answer["cuda"] and (*answer["cuda"],), answer["unavailable_reason"])


def _answer(module: str, function: str, subject: str) -> Answer:
    program = (
        f"import json; from dataclasses import asdict; from amp_rewrite.runtime.{module} import {function};"
        f" print(json.dumps({function}(), default=asdict))"
    )
    try:
        answer: Answer = json.loads(in_subprocess(program, subject=subject).splitlines()[-1])
    except MachineError as failure:
        return {"failure": str(failure)}
    return answer
