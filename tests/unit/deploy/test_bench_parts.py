"""Parts of a benchmark by themselves: devices, candidates and memory by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite import PolicyError
from amp_rewrite.deploy.bench import child, device
from amp_rewrite.deploy.bench.batches import BatchAxis
from amp_rewrite.deploy.bench.candidate import candidates
from amp_rewrite.deploy.bench.child import JobResult
from amp_rewrite.deploy.bench.entry import BatchTiming, BenchEntry
from amp_rewrite.deploy.bench.memory import with_memory
from amp_rewrite.deploy.doctor.check import ADVICE, FINDING, OK, UNKNOWN
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import CPU, CUDA
from unit.deploy.test_bench import FULL, HALF, TIMES, X, _small, parsed

GPU = Gpu("Some GPU", (9, 0))


@pytest.mark.parametrize(
    ("provider", "offered", "machine", "name"),
    [
        (CUDA, "", Hardware((GPU,), driver="1.2"), "Some GPU, compute capability 9.0, driver 1.2"),
        (CUDA, "", Hardware((GPU,)), "Some GPU, compute capability 9.0, driver unknown"),
        (CUDA, "", Hardware(), "Some CPU, 3 cores"),
        (CPU, "", Hardware((GPU,), driver="1.2"), "Some CPU, 3 cores"),
        ("WebGPU", "an adapter", Hardware((GPU,)), "an adapter (WebGPU)"),
    ],
)
def test_a_device_is_the_gpu_of_the_provider_or_the_processor(
    provider: str, offered: str, machine: Hardware, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: x\nmodel name\t: Some CPU\nmodel name\t: Another\n")
    monkeypatch.setattr(device, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(device, "hardware", lambda: machine)
    monkeypatch.setattr(device, "offered_device", lambda _: offered)
    monkeypatch.setattr(device.os, "sched_getaffinity", {0: {0, 1, 5}}.__getitem__, raising=False)
    assert device.device_name(provider) == name


def test_the_memory_of_a_process_is_its_status_in_kilobytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_STATUS", tmp_path / "status")
    assert device.resident() == 0
    (tmp_path / "status").write_text("VmHWM:\t   300 kB\nVmRSS:\t  200 kB\nVmSwap:\t 7 kB\n")
    assert (device.resident(), device.resident(peak=True)) == (200 << 10, 300 << 10)


class OfGpu:
    """The memory in use on a GPU, before and after a model ran."""

    used = staticmethod(iter((70, 100, 100, 70)).__next__)


def test_a_model_weighs_what_is_in_use_beyond_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = {False: 1000, True: 1500}
    monkeypatch.setattr(child, "resident", lambda peak=False: in_use[peak])
    monkeypatch.setattr(child, "GpuMemory", OfGpu)
    monkeypatch.setattr(child, "_opened", lambda job: None)
    monkeypatch.setattr(child, "_batch", lambda job: {})
    runs = list[int]()
    monkeypatch.setattr(child, "_run", lambda runner, batch, times: runs.append(times))
    found = [child.outcome_of(child.BenchJob("m", "b", provider), tmp_path).memory for provider in (CPU, CUDA, CUDA)]
    assert (found, runs) == ([500, 30, 0], [2, 2, 2])
    in_use[True] = 0
    assert (
        child.outcome_of(child.BenchJob("m", "b", CPU), tmp_path).fault
        == "this system does not tell how much is in use"
    )


class Holding:
    """A session, which frees its memory on the GPU when it is gone."""

    in_use = 100

    def __init__(self, job: object) -> None:
        Holding.in_use += 64

    def __del__(self) -> None:
        Holding.in_use -= 64

    @classmethod
    def used(cls) -> int:
        return cls.in_use


def test_memory_of_a_gpu_is_read_while_the_session_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GpuMemory", lambda: Holding)
    monkeypatch.setattr(child, "_opened", Holding)
    monkeypatch.setattr(child, "_batch", lambda job: {})
    monkeypatch.setattr(child, "_run", lambda runner, batch, times: None)
    assert (child.outcome_of(child.BenchJob("m", "b", CUDA), tmp_path).memory, Holding.in_use) == (64, 100)


def test_a_float32_model_that_comes_first_is_measured_with_tf32_too_on_cuda(tmp_path: Path) -> None:
    def named(*texts: str, provider: str) -> list[tuple[str, bool, int, tuple[str, ...]]]:
        models = [parsed(text) for text in texts]
        conditions = Conditions(names=("a", "b"), provider=provider, threads=2)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        found = candidates(models, {"x": X}, conditions, folder)
        assert {side.threads for side in found} == {2}
        return [(side.name, side.tf32, side.number, side.types) for side in found]

    half = ("float16",)
    assert named(FULL, HALF, provider=CUDA) == [
        ("a", False, 0, ()),
        ("a with TF32", True, 0, ()),
        ("b", False, 1, half),
    ]
    assert named(HALF, FULL, provider=CUDA) == [("a", False, 0, half), ("b", False, 1, ())]
    assert named(FULL, HALF, provider=CPU) == [("a", False, 0, ()), ("b", False, 1, half)]


def test_memory_is_measured_for_the_batch_and_for_the_sizes_that_run() -> None:
    class Weighed:
        def __init__(self) -> None:
            self.batch = {"x": X}

        def weighed(self, batch: dict[str, np.ndarray]) -> JobResult:
            return JobResult(1000 * len(batch["x"]), fault="" if len(batch["x"]) < 8 else "some fault")

    candidate: Any = Weighed()
    rows = (BatchTiming(4, TIMES[0]), BatchTiming(8, TIMES[1]), BatchTiming(64, fault="too large"))
    entry = BenchEntry("a", (), False, TIMES[0], TIMES[0], {}, sweep=rows)
    found = with_memory(candidate, entry, BatchAxis(None, (("x", 0),)))
    assert (found.memory, found.fault) == (2000, "")
    assert found.sweep == (
        BatchTiming(4, TIMES[0], 4000),
        BatchTiming(8, TIMES[1], 8000, "some fault"),
        BatchTiming(64, fault="too large"),
    )
    assert with_memory(candidate, entry, None).sweep == rows


@pytest.mark.parametrize("name", ["runs", "warm"])
def test_a_count_below_one_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=f"^{name}=0 is too small; give at least 1$"):
        _small(**{name: 0})


def test_states_of_checks_are_those_of_their_json() -> None:
    assert (OK, FINDING, ADVICE, UNKNOWN) == ("ok", "finding", "advice", "unknown")
