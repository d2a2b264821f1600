"""The WebGPU plugin of onnxruntime: why it has no device, and which nodes it took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amp_rewrite.runtime import plugins as webgpu
from amp_rewrite.runtime.plugins import WEBGPU, absence, assignment, names_on


def node(op_type: str, name: str = "", domain: str = "") -> Any:
    return SimpleNamespace(op_type=op_type, name=name, domain=domain)


def session() -> Any:
    parts = [
        SimpleNamespace(
            ep_name=WEBGPU, get_nodes=lambda: [node("Conv", "a", "com.ms.internal.nhwc"), node("Conv", "b")]
        ),
        SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: [node("Gelu", "c", "com.microsoft")]),
        SimpleNamespace(ep_name=WEBGPU, get_nodes=lambda: [node("Relu", "d")]),
    ]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)


def test_nodes_are_counted_by_provider_and_kind() -> None:
    counts = {WEBGPU: {"Conv": 2, "Relu": 1}, "CPUExecutionProvider": {"com.microsoft::Gelu": 1}}
    assert assignment(session()) == counts
    assert names_on(session(), WEBGPU) == {"a", "b", "d"}


@pytest.mark.parametrize(
    ("spec", "words"), [(None, "is not installed; python -m pip install"), (object(), "finds no GPU")]
)
def test_a_missing_device_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch, spec: object, words: str) -> None:
    monkeypatch.setattr(webgpu, "registered", lambda ort: ())
    monkeypatch.setattr(webgpu, "devices", lambda ort, provider: ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    reason = absence(None)
    assert reason is not None and words in reason


def test_a_device_leaves_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webgpu, "registered", lambda ort: ())
    monkeypatch.setattr(webgpu, "devices", lambda ort, provider: ("device",))
    assert absence(None) is None
