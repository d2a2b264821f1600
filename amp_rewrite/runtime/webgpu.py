"""onnxruntime's WebGPU provider, which comes as a plugin: a library of its own that a process registers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from amp_rewrite.runtime.plugins import devices, registered

WEBGPU = "WebGpuExecutionProvider"
PACKAGE, REQUIREMENT = "onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu"
_PLAIN = ("", "ai.onnx", "com.ms.internal.nhwc")
"""Domains of ONNX's operators: onnxruntime writes some anew, with channels last, in one of its own."""
ASSIGNMENT = "session.record_ep_graph_assignment_info"
"""Session entry by which onnxruntime remembers the provider of each node."""

Assignment = Mapping[str, Mapping[str, int]]
"""Numbers of nodes by provider and kind of op."""


def absence(ort: Any) -> str | None:
    """Return the reason why the provider has no device here, and what to do; None if it has one."""
    registered(ort)
    if devices(ort, WEBGPU):
        return None
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{REQUIREMENT} is not installed; python -m pip install {REQUIREMENT}"
    return (
        f"{REQUIREMENT} finds no GPU; to accept a Vulkan device in software, set ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1"
    )


def names_on(session: Any, provider: str) -> frozenset[str]:
    """Return the names of the nodes that onnxruntime gave to a provider."""
    parts = session.get_provider_graph_assignment_info()
    return frozenset(node.name for part in parts if part.ep_name == provider for node in part.get_nodes())


def assignment(session: Any) -> Assignment:
    """Return the numbers of nodes by provider and kind of op, as onnxruntime cut the graph. Without those that it
    inserts."""
    counts: dict[str, dict[str, int]] = {}
    for part in session.get_provider_graph_assignment_info():
        kinds = counts.setdefault(part.ep_name, {})
        for node in part.get_nodes():
            kind = node.op_type if node.domain in _PLAIN else f"{node.domain}::{node.op_type}"
            kinds[kind] = kinds.get(kind, 0) + 1
    return counts
