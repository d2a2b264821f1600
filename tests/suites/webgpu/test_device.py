"""Float16 on a WebGPU device: its arithmetic, its emulation, and models converted for it."""

from collections.abc import Collection, Iterator

import numpy as np
import pytest

import amp_rewrite
from amp_rewrite.files.model import Model
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import CPU, WEBGPU
from amp_rewrite.settings.choices import Target
from suites.webgpu.measure import FACTOR, LEAST, fixtures, floats_on_cpu, model_row, op_row, whole
from suites.webgpu.op_cases import CASES, OpCase
from suites.webgpu.worker import BOUND, Device

pytestmark = pytest.mark.webgpu

FIXTURES = {name: (path, feeds) for name, path, feeds in fixtures()}
HOLDS_BODIES = {"If", "Loop", "Scan", "SequenceMap"}
# One model of each kind; make webgpu-page runs all of them.
EVERY_KIND = ("llama_ts16", "lstm_ts13", "unet_ts15")


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """Start the device's process; skip the test if there is no device."""
    started = Device()
    if started.absence is not None:
        started.close()
        pytest.skip(started.absence)
    yield started
    started.close()


def test_products_on_the_device_accumulate_in_float16(device: Device) -> None:
    case = OpCase("MatMul", ((8, 4096), (4096, 8)), shift=1.0)
    feeds = case.feeds()
    reply = device.run(case.model(), feeds)
    assert reply["assignment"] == {WEBGPU: {"MatMul": 1}}
    exact = feeds["x0"].astype(np.float64) @ feeds["x1"].astype(np.float64)
    assert np.abs(reply["outputs"]["y"] - exact).max() / np.abs(exact).max() > 5e-3


def test_a_mean_of_4096_twenties_is_infinite_on_the_device_and_emulated(device: Device) -> None:
    case = OpCase("ReduceMean", ((1, 4096),), ints=[[1]])
    feeds = {"x0": np.full((1, 4096), 20, np.float16)}
    found = device.run(case.model(), feeds)["outputs"]["y"]
    twin = whole(emulate(case.model(), io="float32"))
    emulated = device.run(twin, {"x0": feeds["x0"].astype(np.float32)}, CPU)["outputs"]["y"]
    assert np.isinf(found).all() and np.isinf(emulated).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_ops_error_on_the_device_is_near_the_emulated_one(device: Device, case: OpCase) -> None:
    row = op_row(device, case)
    assert row["on_device"]
    assert LEAST * row["emulated"] <= row["device"] <= row["factor"] * row["emulated"]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_fixture_converted_for_the_device_is_close_to_float32_and_to_its_emulation(device: Device, name: str) -> None:
    path, feeds = FIXTURES[name]
    expected = list(device.run(whole(Model.load(path)), feeds, CPU)["outputs"].values())
    row = model_row(device, path, feeds, expected)
    assert row["device"] <= min(BOUND, FACTOR * row["emulated"])


@pytest.mark.parametrize("name", FIXTURES)
def test_no_float_op_with_a_kernel_runs_on_the_cpu(device: Device, name: str) -> None:
    """Opening a session shows it; none is run."""
    proto = whole(amp_rewrite.convert(FIXTURES[name][0], target="webgpu").result)
    assert without_reason(View.of(Model.load(proto)), device.opened(proto)["on_cpu"]) == set()


def without_reason(view: View, on_cpu: Collection[str]) -> set[str]:
    """Return the float ops on the CPU with a kernel in the provider's table."""
    kernels = Target.WEBGPU.kernels
    assert kernels is not None
    served = {
        op.kind
        for op in view.ops
        if op.signature is not None and kernels.has(op.domain, op.op_type, op.signature.since)
    }
    return (floats_on_cpu(view, on_cpu) & served) - HOLDS_BODIES - CASTS


@pytest.mark.parametrize(
    ("emulate", "candidate"), [(None, f"float16 on {WEBGPU}"), (True, f"float16 emulated as on CUDA on {CPU}")]
)
def test_verify_runs_a_model_for_the_device_there_or_emulates_it(
    device: Device, emulate: bool | None, candidate: str
) -> None:
    path, feeds = FIXTURES["digits_cnn"]
    verdict = device.ask(("verified", str(path), "webgpu", feeds, emulate))
    assert verdict == {"ok": True, "reference": f"float32 on {CPU}", "candidate": candidate}


def test_a_model_for_another_target_is_not_run_on_the_device(device: Device) -> None:
    path, feeds = FIXTURES["digits_cnn"]
    verdict = device.ask(("verified", str(path), "ort-cuda", feeds, None))
    assert WEBGPU not in verdict["candidate"]
