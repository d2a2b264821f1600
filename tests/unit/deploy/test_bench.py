"""Timing models side by side: statistics, batch sizes, profiles, memory, and complete runs on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import MachineError, Model, PolicyError
from amp_rewrite.deploy import benchmark as child
from amp_rewrite.deploy.benchmark import (
    BenchEntry,
    Benchmark,
    SpeedUp,
    Timing,
    candidates,
    gpu_memory,
    interleaved,
    peak_memory,
    runs_per_round,
    speed_up,
)
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import CPU, CUDA

HEAD = '<ir_version: 10, opset_import: ["": 20]> '
FULL = HEAD + "g (float[n, 3] x) => (float[n, 3] y) <float a = {300}> { [up] p = Mul (x, a) [down] y = Neg (p) }"
# 300 as float16's bits
HALF = HEAD + (
    "g (float[n, 3] x) => (float[n, 3] y) <float16 a = {23728}>"
    " { h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Neg (p) y = Cast <to = 1> (q) }"
)
X = np.ones((2, 3), np.float32)


def parsed(text: str) -> Model:
    return Model.load(onnx.parser.parse_model(text))


class Clock:
    """A clock that only advances in calls."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, log: list[float] | None = None) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds
            if log is not None:
                log.append(seconds)

        return call


# -- time --------------------------------------------------------------------------------------------


def test_each_round_runs_every_model_often_enough_to_take_50_ms() -> None:
    clock, log = Clock(), []
    calls = {"a": clock.taking(1, log), "b": clock.taking(2, log), "c": clock.taking(3, log)}
    seconds = interleaved(calls, rounds=4, runs=1, clock=clock)
    assert log == [1, 2, 3, 2, 3, 1, 3, 1, 2, 1, 2, 3]
    assert [(name, times.tolist()) for name, times in seconds.items()] == [
        (n, [[i]] * 4) for i, n in enumerate("abc", 1)
    ]
    assert [runs_per_round(x) for x in ([0.001, 0.005], [1.0], [1e-6], [0.0])] == [10, 1, 50, 50]


def test_the_interval_of_a_speedup_covers_the_truth_in_about_95_of_100_cases() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for case in range(200):
        a, b = (np.exp(random.normal(0, 0.1, (20, 1))) for _ in range(2))
        found = speed_up(2 * a, b, seed=case)
        assert found.low is not None and found.high is not None
        covered += found.low <= 2 <= found.high
    # A percentile interval of 20 rounds covers slightly less than 95%; 200 cases give ± 4 at two deviations.
    assert 0.88 <= covered / 200 <= 0.99


# -- memory ------------------------------------------------------------------------------------------


class Driver:
    """libcuda's memory functions: 90 of 100 bytes are free."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuMemGetInfo_v2":
                for pointer, value in zip(arguments, (90, 100), strict=True):
                    pointer._obj.value = value
            return 999 if name == self.refuses else 0

        return call


def test_memory_is_read_from_the_driver_and_the_process_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_memory(lambda _: Driver()) == 10
    for name in ("cuInit", "cuMemGetInfo_v2"):
        refusing = Driver(name)
        with pytest.raises(MachineError, match=f"^the NVIDIA driver call {name} failed with error 999; "):
            gpu_memory(lambda _, driver=refusing: driver)
    monkeypatch.setattr(child, "_STATUS", tmp_path / "status")
    assert child.resident() == 0
    (tmp_path / "status").write_text("VmHWM:\t   300 kB\nVmRSS:\t  200 kB\nVmSwap:\t 7 kB\n")
    assert (child.resident(), child.resident(peak=True)) == (200 << 10, 300 << 10)


def test_a_separate_process_measures_more_memory_for_a_larger_model(tmp_path: Path) -> None:
    text = HEAD + "g (float[n, 1000] x) => (float[n, 1000] y) { p = Exp (x) q = Exp (p) y = Neg (q) }"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    small, large = (
        peak_memory(tmp_path / "m.onnx", {"x": np.zeros((rows, 1000), np.float32)}, CPU) for rows in (1, 5000)
    )
    assert large - small > 5000 * 1000 * 4  # only its output


def test_a_failing_or_dying_process_reports_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(onnx.parser.parse_model(FULL), tmp_path / "m.onnx")
    with pytest.raises(MachineError, match=r"exited with code 1: .*: input 'x' of batch 0 has the shape \[1, 4\], but"):
        peak_memory(tmp_path / "m.onnx", {"x": np.zeros((1, 4), np.float32)}, CPU)
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    with pytest.raises(MachineError, match=r"^its process crashed with signal 9 \(Killed\)$"):
        peak_memory(tmp_path / "m.onnx", {"x": X}, CPU)


# -- complete runs -----------------------------------------------------------------------------------


def test_models_side_by_side_get_an_entry_each_with_all_requested_fields() -> None:
    seen: list[tuple[str, int, int]] = []
    found = _small(progress=lambda *at: seen.append(at), memory=True)
    full, half = found.entries
    assert [entry.name for entry in found.entries] == ["model 0", "model 1"]
    assert (full.types, half.types) == ((), ("float16",))
    assert {entry.latency.runs for entry in found.entries} == {2 * found.runs}
    assert all(0 < e.latency.p5 <= e.latency.median <= e.latency.p95 for e in found.entries)
    assert full.speed_ups == {"model 0": SpeedUp(1.0, 1.0, 1.0)}
    assert list(half.speed_ups) == ["model 0"]
    assert all(entry.memory is not None and entry.memory > 0 for entry in found.entries)
    assert found.fed == "the arrays given: x [2, 3]"
    assert found.notes == (
        "on a CPU, half precision is slower: onnxruntime computes most ops in float32, between Casts",
    )
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["open sessions", "warm up", "latency", "memory"]


def _small(**more: Any) -> Benchmark:
    options = {"provider": CPU, "rounds": 2, "threads": 1}
    return amp_rewrite.bench([parsed(FULL), parsed(HALF)], {"x": X}, **{**options, "memory": False, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"provider": "Nonsense"}, "this onnxruntime has no provider 'Nonsense'; use one of "),
        ({"provider": ""}, "this onnxruntime has no provider ''; use one of "),
        ({"threads": 1025}, "threads=1025 must be at most 1024; 0 uses one thread per core"),
    ],
)
def test_impossible_measurements_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        _small(**more)
    assert str(caught.value).startswith(message)


def test_the_text_shows_latencies_and_warns_of_missing_numbers() -> None:
    log = HEAD + "g (float[n, 3] x) => (float[n, 3] y, int64[n, 3] z) { y = Log (x)  z = Cast <to = 7> (x) }"
    ids = np.array([[1, -1, 0]], np.float32)
    found = amp_rewrite.bench([parsed(log)], {"x": ids}, provider=CPU, rounds=1, memory=False)
    assert found.notes == ("model 0: 2 of 3 output values are NaN or infinite; run `amp-rewrite verify`",)
    assert RESULT.text() == TEXT
    assert RESULT.baselines == ("a.onnx",)


# -- text and JSON -------------------------------------------------------------------------------------

TIMES = Timing(40, 0.002, 0.0019, 0.0025), Timing(40, 0.001, 0.0009, 0.0012)
RESULT = Benchmark(
    CUDA,
    "Some GPU, compute capability 9.0, driver 1.2",
    {"amp-rewrite": "0", "onnxruntime-gpu": "1"},
    "d.npz: x [2, 3]",
    rounds=20,
    runs=2,
    warm_up=10,
    entries=(
        BenchEntry("a.onnx", (), TIMES[0], {"a.onnx": SpeedUp(1, 1, 1)}, 3_000_000),
        BenchEntry("b.onnx", ("float16",), TIMES[1], {"a.onnx": SpeedUp(2, 1.9, 2.1)}, 2_000_000),
    ),
    notes=("a note",),
)
TEXT = """\
a.onnx, b.onnx
  runs on   CUDAExecutionProvider
  device    Some GPU, compute capability 9.0, driver 1.2; amp-rewrite 0, onnxruntime-gpu 1
  data      d.npz: x [2, 3]
  measured  20 rounds of 2 runs per model, taking turns, after 10 warm-up runs

  latency, ms  median   p5  p95          vs a.onnx  peak memory
  a.onnx            2  1.9  2.5                  -       3.0 MB
  b.onnx            1  0.9  1.2  2.00× (1.90–2.10)       2.0 MB

note: a note
"""


# -- parts of a benchmark --


GPU = Gpu("Some GPU", (9, 0))


@pytest.mark.parametrize(
    ("provider", "offered", "machine", "name"),
    [
        (CUDA, "", Hardware((GPU,), (13, 2)), "Some GPU, compute capability 9.0, driver for CUDA 13.2"),
        (CUDA, "", Hardware((GPU,)), "Some GPU, compute capability 9.0"),
        (CUDA, "", Hardware(), "Some CPU, 3 cores"),
        (CPU, "", Hardware((GPU,), (13, 2)), "Some CPU, 3 cores"),
        ("WebGPU", "an adapter", Hardware((GPU,)), "an adapter (WebGPU)"),
    ],
)
def test_the_device_is_the_providers_gpu_or_the_processor(
    provider: str, offered: str, machine: Hardware, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("vendor_id\t: x\nmodel name\t: Some CPU\nmodel name\t: Another\n")
    monkeypatch.setattr(child, "_CPUS", tmp_path / "cpuinfo")
    monkeypatch.setattr(child, "hardware", lambda: machine)
    monkeypatch.setattr(child, "offered_device", lambda _: offered)
    monkeypatch.setattr(child.os, "sched_getaffinity", {0: {0, 1, 5}}.__getitem__, raising=False)
    assert child.device_name(provider) == name


def test_a_float32_model_in_first_place_is_also_measured_with_tf32_on_cuda(tmp_path: Path) -> None:
    def named(*texts: str, provider: str) -> list[tuple[str, bool, int, tuple[str, ...]]]:
        models = [parsed(text) for text in texts]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        found = candidates(models, {"x": X}, provider, 2, folder)
        assert {side.threads for side in found} == {2}
        return [(side.name, side.tf32, side.number, side.types) for side in found]

    half = ("float16",)
    assert named(FULL, HALF, provider=CUDA) == [
        ("model 0", False, 0, ()),
        ("model 0 with TF32", True, 0, ()),
        ("model 1", False, 1, half),
    ]
    assert named(HALF, FULL, provider=CUDA) == [("model 0", False, 0, half), ("model 1", False, 1, ())]
    assert named(FULL, HALF, provider=CPU) == [("model 0", False, 0, ()), ("model 1", False, 1, half)]
