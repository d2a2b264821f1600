"""The kernel table of onnxruntime's WebGPU provider: its registrations, checked on the device.

A registration lists a kernel's types, but the provider may still leave a node to the CPU. So each operator with float
tensors in onnx's node tests is opened between products, in float32 and float16, and types that the device refuses are
left out.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from onnx import ModelProto, TensorProto

from amp_rewrite.ir.schema import signature
from amp_rewrite.runtime.kernels import load_kernels
from amp_rewrite.runtime.runner import WEBGPU
from suites.webgpu.worker import Device, absence
from support.child import Lost
from support.paths import ROOT
from support.retyped import retyped
from support.sandwich import LATEST, sandwiches

sys.path.insert(0, str(ROOT / "tools"))
import build_tables as tables
from registry import table_of

FLOATS = {TensorProto.FLOAT: "tensor(float)", TensorProto.FLOAT16: "tensor(float16)"}
DOMAINS = ("ai.onnx", "com.microsoft")
_PACKAGE = "onnxruntime-ep-webgpu"


def table(device: Device) -> dict[str, Any]:
    """Build the table as JSON; `probed` lists the device's float types by operator and version."""
    if reason := absence():
        raise SystemExit(f"no WebGPU device: {reason}")
    rows = sorted(registrations(), key=lambda row: row[:3])
    return assembled(rows, dict(sorted(probes(device, rows))))


def assembled(rows: Sequence[Row], probed: Mapping[str, Probes]) -> dict[str, Any]:
    """Build the table of these registrations without the refused float types."""
    kernels = []
    for key, first, last, types in rows:
        domain, _, op_type = key.partition("::")
        taken = [found for version, found in probed.get(key, {}).items() if first <= int(version) <= last]
        admitted = {name: sorted(accepted(frozenset(allowed), taken)) for name, allowed in types.items()}
        if all(admitted.values()):
            kernels.append(
                {"provider": WEBGPU, "domain": domain, "op": op_type, "versions": [first, last], "types": admitted}
            )
    runtime = f"{_PACKAGE} {metadata.version(_PACKAGE)}"
    newest = load_kernels()
    dump = {"runtime": runtime, "opset": newest.opset, "ir": newest.ir, "kernels": kernels}
    body = table_of(dump, WEBGPU)
    del body["contrib"]
    head = {
        "schema": tables.SCHEMA,
        "provider": WEBGPU,
        "source": f"get_registered_ep_kernel_defs of {newest.runtime}, probed",
        "date": datetime.date.today().isoformat(),
    }
    return {**head, "probed": probed, **body}


Row = tuple[str, int, int, Mapping[str, list[str]]]
"""A registration: operator, first and last version, allowed types."""


def registrations() -> Iterator[Row]:
    """Yield the provider's registrations."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    for kernel in state.get_registered_ep_kernel_defs(WEBGPU):
        domain = kernel.domain or "ai.onnx"
        if domain in DOMAINS:
            yield f"{domain}::{kernel.op_name}", *kernel.version_range, kernel.type_constraints


def accepted(allowed: frozenset[str], taken: Sequence[Sequence[str]]) -> frozenset[str]:
    """Remove float types that the device accepted in no probe; without any probe, keep all types."""
    refused = frozenset(FLOATS.values()) - {spelled for types in taken for spelled in types}
    return allowed - refused if taken else allowed


Probes = dict[str, list[str]]
"""The device's float types by version of the operator; versions without a suitable test are left out."""


def probes(device: Device, rows: Sequence[Row]) -> Iterator[tuple[str, Probes]]:
    """Probe each operator of the sandwiches at each version with a kernel."""
    for op_type, model in sandwiches().items():
        key, found = f"ai.onnx::{op_type}", Probes()
        for version, opset in versions(op_type):
            if any(k == key and first <= version <= last for k, first, last, _ in rows):
                states = {spelled: takes(device, op_type, model, (opset, code)) for code, spelled in FLOATS.items()}
                if None not in states.values():
                    found[str(version)] = [spelled for spelled, state in states.items() if state]
        if found:
            yield key, found


def versions(op_type: str) -> Iterator[tuple[int, int]]:
    """Yield each version of an operator with its newest opset."""
    opsets: dict[int, int] = {}
    for opset in range(7, LATEST + 1):
        schema = signature("", op_type, opset)
        if schema is not None:
            opsets[schema.since] = opset
    yield from opsets.items()


def takes(device: Device, op_type: str, model: ModelProto, at: tuple[int, int]) -> bool | None:
    """Whether the device accepts the operator at an opset in a float type; None if the runtime refuses the model."""
    typed = retyped(model, at[1])
    typed.opset_import[0].version = at[0]
    typed.ir_version = min(typed.ir_version, 10)
    try:
        reply = device.run(typed)
    except Lost:
        return False
    if "error" in reply:
        return None
    return reply["assignment"].get(WEBGPU, {}).get(op_type, 0) > 0
