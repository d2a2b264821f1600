"""The doctor for onnxruntime's WebGPU provider."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from amp_rewrite import doctor
from amp_rewrite.deploy import doctor as checkup
from amp_rewrite.deploy.checkup import ADVICE, FINDING, OK, Check, Checkup
from amp_rewrite.runtime.kernels import load_webgpu_kernels
from support.paths import TESTS

RELEASE = load_webgpu_kernels().runtime.rpartition(" ")[2]


def checked(absence: str | None, release: str | None = RELEASE, model: str | None = None) -> dict[str, Check]:
    told: dict[str, str | None] = {"release": release, "absence": absence}
    path = None if model is None else TESTS / "models" / f"{model}.onnx"
    return {check.topic: check for check in asked(told, path).checks}


def asked(told: dict[str, str | None], model: Path | None = None) -> Checkup:
    with patch.object(checkup, "webgpu_asked", lambda: told):
        return doctor(model, target="webgpu")


def test_a_device_that_takes_float16_is_well() -> None:
    checks = checked(None)
    assert {topic: check.state for topic, check in checks.items()} == {"provider": OK, "kernels": OK}
    assert checks["kernels"].fact == f"the kernel table is that of onnxruntime-ep-webgpu {RELEASE}"


def test_a_missing_device_is_a_finding_with_what_to_do() -> None:
    check = checked("onnxruntime-ep-webgpu is not installed; python -m pip install onnxruntime-ep-webgpu", None)[
        "provider"
    ]
    assert check.state == FINDING
    assert check.fact.endswith("does not open: onnxruntime-ep-webgpu is not installed")
    assert check.remedy == "python -m pip install onnxruntime-ep-webgpu"


def test_another_release_of_the_plugin_may_have_other_kernels() -> None:
    check = checked(None, "9.9.9")["kernels"]
    assert check.state == FINDING and "onnxruntime-ep-webgpu 9.9.9 is installed" in check.fact
    assert check.remedy == f"python -m pip install 'onnxruntime-ep-webgpu=={RELEASE}'"


def test_a_provider_that_cannot_be_asked_is_a_finding() -> None:
    (check,) = asked({"failure": "the WebGPU provider ended the process"}).checks
    assert (check.topic, check.state) == ("provider", FINDING)


def test_a_model_has_its_long_sums_and_its_floats_on_the_cpu_named() -> None:
    checks = checked(None, model="gpt2_ts17")
    assert (
        checks["sums"].state == ADVICE and "in float32, since the device accumulates in float16" in checks["sums"].fact
    )
    assert "no webgpu kernel for IsNaN" in checks["placement"].fact
