"""What a process of its own tells about onnxruntime; what may end a process is replaced here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from amp_rewrite.runtime import probes


def test_the_registry_holds_kernels_limits_and_the_schemas_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(
        provider="P", domain="", op_name="Relu", version_range=(14, 2147483647), type_constraints={"T": ["tensor(f)"]}
    )
    monkeypatch.setattr(state, "get_all_opkernel_def", lambda: [kernel])
    registry = probes.kernel_registry()
    assert registry["kernels"] == [
        {
            "provider": "P",
            "domain": "ai.onnx",
            "op": "Relu",
            "versions": [14, 2147483647],
            "types": {"T": ["tensor(f)"]},
        }
    ]
    assert len(registry["schemas"]) == sum(not schema.deprecated for schema in state.get_all_operator_schema()) > 500
    unique = next(row for row in registry["schemas"] if (row["op"], row["since"]) == ("Unique", 11))
    (types,) = unique.pop("types").items()
    assert types[0] == "T" and {"tensor(float)", "tensor(string)"} < set(types[1])
    assert unique == {
        "domain": "ai.onnx",
        "op": "Unique",
        "since": 11,
        "inputs": [["X", "T", "Single"]],
        "outputs": [
            ["Y", "T", "Single"],
            *([name, "tensor(int64)", "Optional"] for name in ("indices", "inverse_indices", "counts")),
        ],
        "attributes": ["axis", "sorted"],
    }
    assert registry["opset"] >= 20 and registry["ir"] >= 9


def test_the_probe_of_webgpu_tells_its_release_and_why_it_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "webgpu_absence", lambda: "no adapter")
    for package, release in (("onnx", probes.metadata.version("onnx")), ("a-package-that-is-not-there", None)):
        monkeypatch.setattr(probes, "REQUIREMENT", package)
        assert probes.probe_webgpu() == {"release": release, "absence": "no adapter"}
