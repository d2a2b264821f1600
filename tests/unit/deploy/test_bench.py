"""Timing models side by side: the statistics, the sizes of batches, profiles, memory, and the whole on the CPU."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite import AmpRewriteError, Model, ModelError, PolicyError
from amp_rewrite.deploy import measurement as child
from amp_rewrite.deploy.benchmark import (
    BenchEntry,
    Benchmark,
    OpChanges,
    SpeedUp,
    Timing,
    interleaved,
    runs_per_round,
    speed_up,
    warm_up,
)
from amp_rewrite.deploy.measurement import (
    BenchJob,
    GpuMemory,
    JobResult,
    OpChange,
    OpTime,
    apart,
    changes,
    outcome_of,
    read_profile,
)
from amp_rewrite.deploy.timing import candidates, distinct_names
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import CPU, CUDA, cuda_opens

HEAD = '<ir_version: 10, opset_import: ["": 20]> '
FULL = HEAD + "g (float[n, 3] x) => (float[n, 3] y) <float a = {300}> { [up] p = Mul (x, a) [down] y = Neg (p) }"
# 300 as float16's bits
HALF = HEAD + (
    "g (float[n, 3] x) => (float[n, 3] y) <float16 a = {23728}>"
    " { h = Cast <to = 10> (x) [up] p = Mul (h, a) [down] q = Neg (p) y = Cast <to = 1> (q) }"
)
X = np.ones((2, 3), np.float32)

on_cpu = pytest.mark.skipif(cuda_opens(), reason="says what happens where no CUDA provider opens")


def parsed(text: str) -> Model:
    return Model.load(onnx.parser.parse_model(text))


class Clock:
    """Time that passes only in calls."""

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


def test_in_each_round_all_take_turns_and_another_one_begins() -> None:
    clock, log = Clock(), []
    calls = {"a": clock.taking(1, log), "b": clock.taking(2, log), "c": clock.taking(3, log)}
    seconds = interleaved(calls, rounds=4, runs=1, clock=clock)
    assert log == [1, 2, 3, 2, 3, 1, 3, 1, 2, 1, 2, 3]
    assert {name: taken.tolist() for name, taken in seconds.items()} == {
        "a": [[1.0]] * 4,
        "b": [[2.0]] * 4,
        "c": [[3.0]] * 4,
    }


def test_rounds_are_paired_so_that_an_unpaired_order_widens_the_interval() -> None:
    slowing = np.array([[1.0], [2.0], [4.0], [8.0]])
    found = speed_up(3 * slowing[::-1], slowing)
    assert found.low is not None and found.high is not None
    assert found.low < 1.5 and found.high > 6


def test_the_interval_of_a_speed_up_holds_the_truth_in_about_95_of_100_cases() -> None:
    random = np.random.default_rng(5)
    held = 0
    for case in range(200):
        a, b = (np.exp(random.normal(0, 0.1, (20, 1))) for _ in range(2))
        found = speed_up(2 * a, b, seed=case)
        assert found.low is not None and found.high is not None
        held += found.low <= 2 <= found.high
    # A percentile interval of 20 rounds covers a little less than its 95 %; 200 cases give ± 4 at two deviations.
    assert 0.88 <= held / 200 <= 0.99


def test_a_round_is_as_many_runs_as_take_50_ms_of_the_slowest() -> None:
    assert [runs_per_round(x) for x in ([0.001, 0.005], [1.0], [1e-6], [0.0])] == [10, 1, 50, 50]


def test_warming_up_runs_at_least_once_and_tells_the_fastest() -> None:
    clock, log = Clock(), []
    steps = iter([5.0, 2.0, 3.0])

    def call() -> None:
        log.append(1)
        clock.now += next(steps)

    assert warm_up(call, 3, clock) == 2.0
    assert len(log) == 3
    assert warm_up(clock.taking(7), 0, clock) == 7.0


# -- memory ------------------------------------------------------------------------------------------


class Driver:
    """libcuda, as far as memory goes: 100 bytes, of which fewer are free each time."""

    def __init__(self, refuses: str = "", lacks: str = "") -> None:
        self.free, self.stack, self.refuses, self.lacks = 100, 0, refuses, lacks

    def __call__(self, name: str) -> Driver:
        assert name in ("libcuda.so.1", "nvcuda.dll")
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.refuses:
                return 999
            assert 0 in arguments or name not in ("cuInit", "cuDeviceGet")  # no flags, and the first GPU
            self.stack += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            if name == "cuMemGetInfo_v2":
                assert self.stack == 1
                self.free -= 10
                for pointer, value in zip(arguments, (self.free, 100), strict=True):
                    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t))[0] = value
            return 0

        return call


def test_the_memory_in_use_on_a_gpu_is_what_the_driver_says_is_not_free() -> None:
    driver = Driver()
    memory = GpuMemory(load=driver)
    assert (memory.used(), memory.used(), driver.stack) == (10, 20, 0)


@pytest.mark.parametrize("refused", ["cuInit", "cuMemGetInfo_v2"])
def test_a_driver_that_refuses_is_named(refused: str) -> None:
    with pytest.raises(OSError, match=f"^the NVIDIA driver refused {refused} with error 999$"):
        GpuMemory(load=Driver(refused)).used()
    with pytest.raises(OSError, match=f"^the NVIDIA driver here has no {refused}; update it$"):
        GpuMemory(load=Driver(lacks=refused)).used()


def test_a_process_of_its_own_weighs_a_model_and_a_larger_one_more(tmp_path: Path) -> None:
    text = HEAD + "g (float[n, 1000] x) => (float[n, 1000] y) { p = Exp (x) q = Exp (p) y = Neg (q) }"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    small, large = (
        apart(tmp_path / "m.onnx", {"x": np.zeros((rows, 1000), np.float32)}, CPU).memory for rows in (1, 5000)
    )
    assert small is not None and large is not None
    assert large - small > 5000 * 1000 * 4  # its output alone


def test_a_process_that_cannot_run_the_model_says_why(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(FULL), tmp_path / "m.onnx")
    outcome = apart(tmp_path / "m.onnx", {"x": np.zeros((1, 4), np.float32)}, CPU)
    assert outcome == JobResult(fault="input 'x' of batch 0 has the shape [1, 4]; the input takes [n, 3]")
    assert apart(tmp_path / "none.onnx", {"x": X}, CPU).fault.startswith("cannot read")


def test_a_process_that_dies_is_an_outcome_not_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(onnx.parser.parse_model(FULL), tmp_path / "m.onnx")
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho out of memory >&2\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(dying))
    assert apart(tmp_path / "m.onnx", {"x": X}, CPU).fault == "its process ended with signal 9: out of memory"


# -- profiles ----------------------------------------------------------------------------------------


def event(name: str, ts: int, dur: int, op: str = "Mul", dtype: str = "float") -> dict[str, object]:
    args = {"op_name": op, "provider": CPU, "output_type_shape": [{dtype: [2]}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": args}


def run_of(ts: int) -> dict[str, object]:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": 99, "args": {}}


def written(folder: Path, *events: dict[str, object]) -> Path:
    file = folder / "profile.json"
    file.write_text(json.dumps(events), encoding="utf-8")
    return file


def test_the_time_of_an_op_is_its_median_over_runs_of_which_the_first_do_not_count(tmp_path: Path) -> None:
    runs = [run_of(100 * i) for i in range(4)]
    ops = [event("up", 100 * i + 1, dur) for i, dur in enumerate((90, 3, 1000, 5))]
    looped = [event("in", ts, 2, "Neg", "float16") for ts in (120, 130, 220, 230, 320, 330)]
    file = written(tmp_path, *runs, *ops, *looped)
    found = read_profile(file, skip=1)
    assert [replace(op, seconds=round(op.seconds, 12)) for op in found] == [
        OpTime("up", "Mul", CPU, "float32", 5e-6),
        OpTime("in", "Neg", CPU, "float16", 4e-6),
    ]


def test_a_profile_of_too_few_runs_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^profile.json holds 1 runs, and 3 do not count; run the model more often$"):
        read_profile(written(tmp_path, run_of(0)), skip=3)
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(
        ModelError, match=r"^profile.json is not a profile of onnxruntime: .*; profile the model again$"
    ):
        read_profile(tmp_path / "profile.json")
    with pytest.raises(ModelError, match="is not a profile of onnxruntime"):
        read_profile(written(tmp_path, {"ts": 1}))


def op(name: str, seconds: float, kind: str = "Mul", dtype: str = "float32", provider: str = CPU) -> OpTime:
    return OpTime(name, kind, provider, dtype, seconds)


def test_ops_are_paired_by_name_and_type_and_the_largest_slowdown_comes_first() -> None:
    before = [op("same", 1), op("gone", 1.5), op("faster", 3), op("renamed", 1, "Neg")]
    after = [op("faster", 1), op("new", 1), op("same", 9), op("renamed", 1, "Exp")]
    assert changes(before, after) == (
        OpChange(before[0], after[2]),
        OpChange(None, after[1]),
        OpChange(None, after[3]),
        OpChange(before[3], None),
        OpChange(before[1], None),
        OpChange(before[2], after[0]),
    )


def test_the_profile_that_onnxruntime_writes_is_read(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(FULL), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    outcome = outcome_of(BenchJob(str(tmp_path / "m.onnx"), str(tmp_path / "x.npz"), CPU, profile=True), tmp_path)
    assert [(op.name, op.op, op.place, op.dtype) for op in outcome.ops] == [
        ("up", "Mul", "CPU", "float32"),
        ("down", "Neg", "CPU", "float32"),
    ]
    assert outcome.fault == ""


# -- the whole ---------------------------------------------------------------------------------------


def test_models_side_by_side_give_an_entry_each_with_all_that_was_asked_for() -> None:
    seen: list[tuple[str, int, int]] = []
    found = _small(progress=lambda *at: seen.append(at), memory=True)
    full, half = found.entries
    assert [entry.name for entry in found.entries] == ["model 0", "model 1"]
    assert (full.types, half.types) == ((), ("float16",))
    assert [entry.latency.runs for entry in found.entries] == [6, 6]
    assert all(0 < e.latency.p5 <= e.latency.median <= e.latency.p95 for e in found.entries)
    assert full.speed_ups == {"model 0": SpeedUp(1.0, 1.0, 1.0)}
    assert list(half.speed_ups) == ["model 0"]
    assert all(entry.memory is not None and entry.memory > 0 for entry in found.entries)
    (changed,) = found.changed
    paired = {(c.before.op, c.before.name) for c in changed.ops if c.before}
    assert changed.name == "model 1" and paired == {("Mul", "up"), ("Neg", "down")}
    # A Cast may take less than the clock tells.
    assert {c.after.op for c in changed.ops if c.before is None and c.after is not None} <= {"Cast"}
    assert found.fed == "the arrays given: x [2, 3]"
    assert found.notes == (
        "CPU: half precision is slower here; onnxruntime computes most of it in float32, between Casts",
    )
    stages = [stage for stage, done, total in seen if done == total]
    assert stages == ["latency", "latency with copies", "memory and ops"]


def _small(**more: Any) -> Benchmark:
    given = {"provider": CPU, "rounds": 2, "runs": 3, "threads": 1}
    return amp_rewrite.bench([parsed(FULL), parsed(HALF)], {"x": X}, **{**given, "memory": False, **more})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rounds": 0}, "rounds=0 is too small; give at least 1"),
        ({"runs": 0}, "runs=0 is too small; give at least 1"),
        ({"provider": "Nonsense"}, "this onnxruntime has no provider 'Nonsense'; use one of "),
        ({"provider": ""}, "this onnxruntime has no provider ''; use one of "),
        ({"threads": 1025}, "threads=1025 is too many; give at most 1024, or leave it out for one per core"),
        ({"rounds": 10**6, "runs": 11}, "1000000 rounds of 11 runs are more than 10000000 runs; give fewer"),
    ],
)
def test_what_cannot_be_measured_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        _small(**more)
    assert str(caught.value).startswith(message)


def test_numbers_that_are_none_are_told() -> None:
    log = HEAD + "g (float[n, 3] x) => (float[n, 3] y, int64[n, 3] z) { y = Log (x)  z = Cast <to = 7> (x) }"
    given = np.array([[1, -1, 0]], np.float32)
    found = amp_rewrite.bench([parsed(log)], {"x": given}, provider=CPU, rounds=1, runs=1, memory=False)
    assert found.notes == ("model 0 gives NaN or infinity for 2 of 3 numbers; `amp-rewrite verify` compares",)


@on_cpu
def test_a_provider_that_does_not_open_is_an_error_not_a_run_elsewhere() -> None:
    with pytest.raises(AmpRewriteError) as caught:
        _small(provider=CUDA)
    assert re.match(
        r"(model 0: CUDAExecutionProvider does not open|model 0: onnxruntime cannot open|this onnxruntime has no)",
        str(caught.value),
    )


def test_models_are_called_by_file_by_path_or_by_number() -> None:
    assert distinct_names(["a/m.onnx", "b/n.onnx"]) == ["m.onnx", "n.onnx"]
    assert distinct_names(["a/m.onnx", "b/m.onnx"]) == ["a/m.onnx", "b/m.onnx"]
    assert distinct_names(["m.onnx", "m.onnx", "m.onnx"]) == ["m.onnx", "m.onnx (2)", "m.onnx (3)"]
    assert distinct_names([b"", b""]) == ["model 0", "model 1"]


# -- what people and machines read ---------------------------------------------------------------------

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
        BenchEntry("a.onnx", (), False, TIMES[0], TIMES[0], {"a.onnx": SpeedUp(1, 1, 1)}, 3_000_000),
        BenchEntry(
            "b.onnx",
            ("float16",),
            False,
            TIMES[1],
            TIMES[1],
            {"a.onnx": SpeedUp(2, 1.9, 2.1)},
            2_000_000,
        ),
    ),
    changed=(
        OpChanges(
            "b.onnx",
            (
                OpChange(None, op("c", 3e-6, "Cast", "float16", CUDA)),
                OpChange(op("t", 1e-6, "Tan", "float32", CUDA), op("t", 2e-6, "Tan", "float16", CPU)),
                OpChange(op("m", 9e-6, "MatMul"), op("m", 4e-6, "MatMul")),
            ),
        ),
    ),
    notes=("a note",),
)
TEXT = """\
a.onnx, b.onnx
  runs on   CUDAExecutionProvider
  device    Some GPU, compute capability 9.0, driver 1.2; amp-rewrite 0, onnxruntime-gpu 1
  data      d.npz: x [2, 3]
  measured  20 rounds of 2 runs of each, taking turns, after 10 to warm up

  latency, ms  median   p5  p95  with copies          vs a.onnx  peak memory
  a.onnx            2  1.9  2.5            2                  -       3.0 MB
  b.onnx            1  0.9  1.2            1  2.00× (1.90–2.10)       2.0 MB

b.onnx: where time went
  slower ops, µs a run  op    before  after  difference
  c                     Cast       -    3.0        +3.0  new
  t                     Tan      1.0    2.0        +1.0  float32 → float16, CUDA → CPU

note: a note
"""


def test_people_read_latencies_throughput_memory_and_ops() -> None:
    assert RESULT.text() == TEXT
    assert RESULT.baselines == ("a.onnx",)


def test_machines_read_all_of_it() -> None:
    told = json.loads(RESULT.to_json())
    assert told["schema"] == 1
    assert told["entries"][1]["speed_ups"] == {"a.onnx": {"factor": 2, "low": 1.9, "high": 2.1}}
    assert told["changed"][0]["ops"][0]["before"] is None
    assert set(told) == {"schema", *Benchmark.__dataclass_fields__}


# -- parts of a benchmark by themselves --


GPU = Gpu("Some GPU", (9, 0))


@pytest.mark.parametrize(
    ("provider", "offered", "machine", "name"),
    [
        (CUDA, "", Hardware((GPU,), (13, 2)), "Some GPU, compute capability 9.0, driver of CUDA 13.2"),
        (CUDA, "", Hardware((GPU,)), "Some GPU, compute capability 9.0"),
        (CUDA, "", Hardware(), "Some CPU, 3 cores"),
        (CPU, "", Hardware((GPU,), (13, 2)), "Some CPU, 3 cores"),
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
    monkeypatch.setattr(child, "_opened", lambda *_: None)
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
