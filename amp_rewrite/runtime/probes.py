"""Questions to the installed onnxruntime whose answer may crash the process: the doctor asks them in another one."""

from __future__ import annotations

import re
from dataclasses import asdict
from importlib import metadata
from typing import Any

from amp_rewrite.errors import ModelError
from amp_rewrite.runtime.installation import onnxruntime
from amp_rewrite.runtime.ort_errors import model_errors
from amp_rewrite.runtime.plugins import described, devices, registered
from amp_rewrite.runtime.registry import schema_row
from amp_rewrite.runtime.runner import (
    CPU,
    CUDA,
    QUIET,
    cuda_opens,
    has_provider,
    preload_once,
    small_model,
    webgpu_absence,
)
from amp_rewrite.runtime.webgpu import REQUIREMENT


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
    """Describe the WebGPU provider as JSON: its release, None without one, and the reason why it does not open."""
    try:
        release = metadata.version(REQUIREMENT)
    except metadata.PackageNotFoundError:
        release = None
    return {"release": release, "absence": webgpu_absence()}


def kernel_registry() -> dict[str, Any]:
    """Return the kernels, schemas and limits of this onnxruntime as JSON (docs/reference/tables.md).

    The process crashes with a segmentation fault if the CUDA or the TensorRT library cannot be loaded.
    """
    if has_provider(CUDA):
        preload_once()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    kernels = [
        {
            "provider": k.provider,
            "domain": k.domain or "ai.onnx",
            "op": k.op_name,
            "versions": list(k.version_range),
            "types": {name: list(allowed) for name, allowed in k.type_constraints.items()},
        }
        for k in state.get_all_opkernel_def()
    ]
    schemas = [schema_row(s) for s in state.get_all_operator_schema() if not s.deprecated]
    return {
        "opset": _limit(r"is till opset (\d+)", opset=10_000),
        "ir": _limit(r"max supported IR version: (\d+)", ir=10_000),
        "kernels": kernels,
        "schemas": schemas,
    }


def _limit(words: str, opset: int = 1, ir: int = 3) -> int | None:
    """Return the number in the objection of this onnxruntime to a model beyond its limits; None without one."""
    ort, model = onnxruntime(), small_model()
    model.opset_import[0].version, model.ir_version = opset, ir
    try:
        with model_errors("open"):
            ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    except ModelError as objection:
        found = re.search(words, str(objection.__cause__))
        return int(found[1]) if found else None
    return None
