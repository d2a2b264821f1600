"""Parts of a benchmark by themselves: devices, candidates and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_rewrite.deploy.bench import child
from amp_rewrite.deploy.bench.bench import candidates
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import CPU, CUDA
from unit.deploy.test_bench import FULL, HALF, X, parsed

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
    monkeypatch.setattr(child, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(child, "hardware", lambda: machine)
    monkeypatch.setattr(child, "offered_device", lambda _: offered)
    monkeypatch.setattr(child.os, "sched_getaffinity", {0: {0, 1, 5}}.__getitem__, raising=False)
    assert child.device_name(provider) == name


def test_the_memory_of_a_process_is_its_status_in_kilobytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_STATUS", tmp_path / "status")
    assert child.resident() == 0
    (tmp_path / "status").write_text("VmHWM:\t   300 kB\nVmRSS:\t  200 kB\nVmSwap:\t 7 kB\n")
    assert (child.resident(), child.resident(peak=True)) == (200 << 10, 300 << 10)


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
