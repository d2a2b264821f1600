"""Queries of the NVIDIA driver and of onnxruntime, each in a process of its own, because they may crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from amp_rewrite.errors import MachineError
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.subprocess import command

PACKAGES = ("onnxruntime-gpu", "onnxruntime")

Asked = Mapping[str, Any]
"""What `ort.runner.probe` gives, or `{"failure": …}` where asking failed."""

_SECONDS = 300.0  # for a process that only opens a tiny model
_DRIVER_SECONDS = 60.0  # for one that starts a driver, which may have to initialize eight GPUs


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine_asked() -> Hardware:
    """Query the GPUs of this machine in another process; a driver that crashes or hangs counts as missing."""
    program = (
        "import json, sys; from dataclasses import asdict; from amp_rewrite.runtime.gpu import hardware;"
        " sys.stdout.write(json.dumps(asdict(hardware())))"
    )
    code, out, errors = _ran(program, _DRIVER_SECONDS)
    if code is None:
        return Hardware(absence=f"the NVIDIA driver does not answer in {_DRIVER_SECONDS:.0f} seconds; {_ANEW}")
    if code < 0:
        return Hardware(absence=f"the NVIDIA driver ended the process that asked it ({_signal(code)}); {_ANEW}")
    if code:
        said = (errors.strip().splitlines() or ["without a word"])[-1]
        return Hardware(absence=f"the process that was to ask the NVIDIA driver ended with {code}: {said}")
    try:
        return _hardware(json.loads(out[out.index("{") :]))
    except (ValueError, KeyError, TypeError):
        return Hardware(absence=f"what the NVIDIA driver says makes no sense; {_ANEW}")


_ANEW = "restart the machine, or install the driver anew"


def _hardware(told: Mapping[str, Any]) -> Hardware:
    """Return the Hardware from its dictionary."""
    gpus = tuple(Gpu(gpu["name"], (gpu["capability"][0], gpu["capability"][1]), gpu["memory"]) for gpu in told["gpus"])
    cuda = told["cuda"]
    return Hardware(gpus, None if cuda is None else (cuda[0], cuda[1]), told["driver"], told["absence"])


def asked() -> Asked:
    """Query onnxruntime about itself in another process, which may crash."""
    return _of_runner("probe")


def write_kernels(file: Path) -> int:
    """Write the kernel registry of the installed onnxruntime to a new JSON file and return the number of kernels.

    The format is that of `tools/build_tables.py dump`. Raise MachineError if the registry cannot be read here, or the
    file exists.
    """
    if file.exists() or file.is_symlink():
        raise MachineError(f"{file} exists; name a new file")
    if not file.parent.is_dir():
        raise MachineError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    told = _of_runner("kernel_registry")
    if "failure" in told:
        raise MachineError(
            f"the kernel registry cannot be read here: {told['failure']}; it can where the libraries of CUDA and of"
            " TensorRT are installed"
        )
    rows = told["rows"]
    named = (f"{name} {found}" for name in PACKAGES if (found := version(name)) is not None)
    runtime = next(named, None) or f"onnxruntime {asked().get('version', 'of unknown version')}"
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps({"runtime": runtime, "kernels": rows}, indent=0) + "\n", encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
    return len(rows)


def _of_runner(question: str) -> Asked:
    """Return the result of a function of `runtime.runner` in a process of its own; `{"failure": …}` if that fails."""
    code, out, errors = _ran(
        f"import json, sys; from amp_rewrite.runtime.runner import {question}; told = {question}();"
        " sys.stdout.write(json.dumps(told if isinstance(told, dict) else {'rows': told}))",
        _SECONDS,
    )
    if code is None:
        return {"failure": f"onnxruntime did not answer in {_SECONDS:.0f} seconds"}
    if code < 0:
        return {"failure": f"onnxruntime ended the process ({_signal(code)})"}
    if code:
        said = errors.strip().splitlines() or ["it says nothing"]
        return {"failure": f"onnxruntime cannot be imported: {said[-1]}"}
    try:
        found: Asked = json.loads(out[out.index("{") :])
    except ValueError:
        return {"failure": "onnxruntime answered with something else than what was asked"}
    return found


def _ran(program: str, seconds: float) -> tuple[int | None, str, str]:
    """Run a Python program; return exit code, output and errors, or None after a timeout."""
    try:
        done = subprocess.run(command(program), capture_output=True, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout, done.stderr


def _signal(code: int) -> str:
    """Return the name of the signal in an exit code below zero."""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time one
        return f"signal {-code}"
