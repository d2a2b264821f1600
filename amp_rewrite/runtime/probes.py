"""Risky questions to the NVIDIA driver and to onnxruntime, each asked in another process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.installation import model_errors, onnxruntime
from amp_rewrite.runtime.plugins import REQUIREMENT, described, devices, has_provider, registered
from amp_rewrite.runtime.runner import CUDA, QUIET, cuda_opens, preload_once, webgpu_absence

_HOME = str(Path(__file__).parents[2])


def command(program: str, *arguments: str) -> list[str]:
    """Return the command line of a program able to import this package; -P: and nothing from the current folder."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_HOME!r}); {program}", *arguments]


def open_plainly(path: str, provider: str, *skip: str) -> None:
    """Open a model file as other programs do, without the ways round hazards; `skip`: optimizers to disable.

    The process may crash; use a subprocess. ModelError for an objection of onnxruntime.
    """
    ort = onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = QUIET
    with model_errors("open"):
        if provider == CUDA:
            preload_once()
        ort.InferenceSession(path, settings, [provider], disabled_optimizers=list(skip), enable_fallback=0)


def probe() -> dict[str, Any]:
    """Describe this onnxruntime as JSON. A broken installation may crash the process; use a subprocess."""
    ort = onnxruntime()
    return {
        "version": ort.__version__,
        "cuda": getattr(ort, "cuda_version", None) or None,
        "providers": ort.get_available_providers(),
        "opens": has_provider(CUDA) and cuda_opens(),
        "plugins": [
            {**asdict(plugin), "devices": [described(d) for name in plugin.providers for d in devices(ort, name)]}
            for plugin in registered(ort)
        ],
    }


def probe_webgpu() -> dict[str, Any]:
    """Describe the WebGPU provider as JSON: its release, None without one, and the reason if it does not open."""
    try:
        release = metadata.version(REQUIREMENT)
    except metadata.PackageNotFoundError:
        release = None
    return {"release": release, "absence": webgpu_absence()}


Asked = Mapping[str, Any]
"""Answer of `runtime.probes.probe`, or `{"failure": …}` if the query failed."""

_OUR_ERROR = "amp_rewrite.errors.MachineError: models run in onnxruntime, and "
_SECONDS = 300.0  # for a process that only opens a tiny model
_DRIVER_SECONDS = 60.0  # for one that starts a driver, which may have to initialize eight GPUs


def machine_asked() -> Hardware:
    """Query the GPUs of this machine in another process; a crash or a hang counts as a missing driver."""
    answer = _answer("gpu", "hardware", "the NVIDIA driver", _DRIVER_SECONDS)
    failure = answer.get("failure", "the NVIDIA driver gave an answer that cannot be read")
    try:
        gpus = tuple(Gpu(gpu["name"], (*gpu["capability"],), gpu["memory"]) for gpu in answer["gpus"])
        cuda = answer["cuda"] and (*answer["cuda"],)
        return Hardware(gpus, cuda, answer["absence"])
    except (KeyError, TypeError):
        return Hardware(absence=f"{failure}; restart the machine, or install the driver anew")


def asked() -> Asked:
    """Query onnxruntime about itself in another process."""
    return _answer("probes", "probe")


def webgpu_asked() -> Asked:
    """Ask the WebGPU provider in a process of its own; `{"failure": …}` if it fails."""
    return _answer("probes", "probe_webgpu", "the WebGPU provider")


def opened(model: Path, provider: str, skip: Sequence[str] = ()) -> str | None:
    """Open a model file in another process, without the optimizers in `skip`; return the failure, None if it opens.

    The failure is a signal that ended the process, or onnxruntime's objection.
    """
    program = "from amp_rewrite.runtime.probes import open_plainly; open_plainly(*sys.argv[1:])"
    done = _done(program, str(model), provider, *skip)
    if isinstance(done, str):
        return done
    return re.sub(r"^amp_rewrite\.errors\.\w+: ", "", _last(done)) if done.returncode else None


def _answer(module: str, function: str, subject: str = "onnxruntime", seconds: float = _SECONDS) -> Asked:
    """Return the result of a function of `runtime` in a process of its own; `{"failure": …}` if it fails."""
    program = (
        f"import json, sys; from dataclasses import asdict; from amp_rewrite.runtime.{module} import {function};"
        f" sys.stdout.write(json.dumps({function}(), default=asdict))"
    )
    done = _done(program, subject=subject, seconds=seconds)
    if isinstance(done, str):
        return {"failure": done}
    if done.returncode:
        last = _last(done)
        if last.startswith(_OUR_ERROR):
            return {"failure": last.removeprefix(_OUR_ERROR).rpartition("; ")[0]}  # the remedy is the caller's
        return {"failure": f"{subject} cannot be queried, the process ended with {done.returncode}: {last}"}
    try:
        answer: Asked = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {"failure": f"{subject} gave an answer that cannot be read"}
    return answer


def _done(
    program: str, *arguments: str, subject: str = "onnxruntime", seconds: float = _SECONDS
) -> subprocess.CompletedProcess[str] | str:
    """Run a program in another process; return the failure of one without an answer, or killed by a signal."""
    words = command(program, *arguments)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"{subject} did not answer in {seconds:.0f} seconds"
    if done.returncode >= 0:
        return done
    try:
        name = signal.Signals(-done.returncode).name
    except ValueError:  # a real-time one
        name = f"signal {-done.returncode}"
    return f"{subject} ended the process ({name})"


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
