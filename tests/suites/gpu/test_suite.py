"""The GPU measurement, without a GPU: its road on the CPU provider, its pages, and what it does with rows that fail."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.runtime.runner import CPU, CUDA, cuda_opens
from benchmarks.gpu import gpu, gpu_kernels, gpu_models, gpu_tables, gpu_turns
from suites.gpu.conftest import RUN, SMALL

KINDS = ("latency", "training", "variants", "ops", "emulation", "fit")
"""Kinds that need neither a GPU nor PyTorch."""


def run(models: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RUN, "gpu", "--models", str(models), "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows_of(out: Path) -> dict[str, Any]:
    return {job["name"]: job["row"] for job in json.loads((out / "gpu.json").read_text("utf-8"))["rows"]}


def test_the_whole_road_runs_on_the_cpu_and_a_second_run_repeats_nothing(grown: Path, tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--tiny", "--kinds", *KINDS)
    first = run(grown, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    rows = rows_of(tmp_path)
    # onnxruntime's CPU provider has no bfloat16 kernels; what was not asked for has no row.
    assert {name for name, row in rows.items() if row and "fault" in row} == {
        name for name in rows if "bfloat16" in name
    }
    assert [name.split()[0] for name, row in rows.items() if row is None] == ["ceilings", "kernels", "anchor"]
    assert set(rows[f"latency {SMALL}"]["faults"]) == {
        "torch_half",
        "ort_opt",
        "ort_half",
        "occ",
        "autocast",
        "autocast_all",
        "amp_bf16",
        "amp_bf16_opset",
    }
    told = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert told["machine"]["provider"] == CPU and told["machine"]["tiny"]
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "no time means anything" in page and "CPU: half precision is slower here" in page
    second = run(grown, tmp_path, *words)
    assert [line for line in second.stdout.splitlines() if line[0].isdigit()] == []


def test_where_the_time_is_up_the_page_says_what_is_not_yet_measured(grown: Path, tmp_path: Path) -> None:
    done = run(grown, tmp_path, "--provider", "cpu", "--tiny", "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert f"- not yet measured: ceilings, latency {SMALL}, training" in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(cuda_opens(), reason="a CUDA provider opens here")
def test_without_a_gpu_nothing_is_measured_and_it_says_so(grown: Path, tmp_path: Path) -> None:
    done = run(grown, tmp_path / "out")
    said = (
        "no CUDA provider opens here, so nothing was measured; `amp-rewrite doctor` says what is missing, and"
        " --provider cpu --tiny goes the same road"
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, said)
    assert not (tmp_path / "out").exists()


def test_a_model_that_the_folder_lacks_is_named(grown: Path, tmp_path: Path) -> None:
    done = run(grown, tmp_path / "out", "--provider", "cpu", "--only", "bert_base")
    said = f"no model 'bert_base' in {grown}; there are {SMALL}"
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, said)


def folder_of(names: list[str], folder: Path, grown: Path) -> Path:
    """A folder that says it holds grown models of these names."""
    for name in names:
        shutil.copy(grown / f"{SMALL}.json", folder / f"{name}.json")
    return folder


def arguments(models: Path, **given: Any) -> argparse.Namespace:
    standard = {"models": models, "out": Path("out"), "provider": "cuda", "tiny": False, "rounds": 1, "warm": 1}
    return argparse.Namespace(**{**standard, "queued": 0.0, "only": None, **given})


def test_every_job_has_a_name_of_its_own_and_the_headline_comes_first(grown: Path, tmp_path: Path) -> None:
    models = folder_of(sorted(gpu_models.REAL), tmp_path, grown)
    jobs = list(gpu.jobs(arguments(models)))
    names = [job["name"] for job in jobs]
    assert len(names) == len(set(names))
    assert names[: 1 + len(gpu_models.REAL)] == ["ceilings", *(f"latency {name}" for name in gpu_models.REAL)]
    assert list(dict.fromkeys(job["kind"] for job in jobs)) == list(gpu.LIMITS)
    assert {job.get("model") for job in gpu.jobs(arguments(models, only=["llama"])) if job["kind"] == "kernels"} == {
        "llama"
    }


def of_rows(out: Path, seconds: float = 60) -> Any:
    about = {"device": "d", "date": "2026-01-01", "driver": "1", "cuda": "13.0", "provider": CPU, "tiny": False}
    machine = {"cpu": "c", "cores": 1, "system": "s", "python": "3", "versions": {"onnx": "1"}, "packed": ""}
    return gpu.Suite(out, {**about, **machine}, time.monotonic() + seconds)


def job_of(kind: str, grown: Path, out: Path, **more: Any) -> dict[str, Any]:
    (job,) = (j for j in gpu.jobs(arguments(grown, out=out, provider="cpu", tiny=True)) if j["name"].startswith(kind))
    return {**job, **more}


def test_a_row_that_fails_says_why_and_the_next_one_runs(grown: Path, tmp_path: Path) -> None:
    jobs = [job_of("ceilings", grown, tmp_path), job_of("latency", grown, tmp_path)]
    made = of_rows(tmp_path)
    made.run(jobs)
    assert made.row(jobs[0]) == {"fault": "ceilings are those of a GPU"}
    assert "amp" in made.row(jobs[1])["time"]
    assert "- ceilings: ceilings are those of a GPU" in (tmp_path / "gpu.md").read_text("utf-8").splitlines()


def test_a_row_of_another_machine_version_model_or_setting_is_measured_anew(grown: Path, tmp_path: Path) -> None:
    job = job_of("ceilings", grown, tmp_path)
    made = of_rows(tmp_path)
    made.run([job])
    assert made.row(job) is not None
    assert made.row({**job, "tiny": False}) is None
    assert made.row({**job, "made_by": "other code"}) is None
    for change in ({"device": "another"}, {"driver": "2"}, {"versions": {"onnx": "2"}}):
        assert gpu.Suite(tmp_path, {**made.about, **change}, made.deadline).row(job) is None


def test_half_a_row_is_none(grown: Path, tmp_path: Path) -> None:
    job = job_of("ceilings", grown, tmp_path)
    made = of_rows(tmp_path)
    made.run([job])
    (tmp_path / "rows" / "ceilings.row.json").write_text('{"bytes": 1')
    assert made.row(job) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_cut_keeps_its_rows_and_the_next_one_goes_on(number: int, grown: Path, tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--tiny", "--kinds", "ceilings", "latency", "variants")
    command = [sys.executable, RUN, "gpu", "--models", str(grown), "--out", str(tmp_path), *words]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what runs behind
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, preexec_fn=heard, **streams) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("1/"):
            pass
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, "")
        last = f"interrupted; what was measured by now stays in {tmp_path}, and the same command goes on"
        assert said.splitlines()[-1] == last
    done = run(grown, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    begun = [line.split(":")[0] for line in done.stdout.splitlines() if line[0].isdigit()]
    assert begun and all(not line.startswith("1/") for line in begun)
    assert set(rows_of(tmp_path)[f"variants {SMALL}"]) == {"faults", "rate", "time"}


def test_a_row_whose_process_dies_says_so(grown: Path, tmp_path: Path) -> None:
    job = job_of("latency", grown, tmp_path, models=str(tmp_path / "missing"))
    made = of_rows(tmp_path)
    made.run([job])
    assert made.row(job)["fault"].startswith("its process ended with 1: FileNotFoundError")


def test_a_row_has_its_time_and_the_run_as_a_whole_has_one(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("ceilings", grown, tmp_path)
    monkeypatch.setitem(gpu.LIMITS, "ceilings", 0.1)
    made = of_rows(tmp_path)
    made.run([job])
    assert made.row(job) == {"fault": "stopped after 0 s"}
    (tmp_path / "late").mkdir()
    late = of_rows(tmp_path / "late", gpu.LEAST_SECONDS - 1)  # too late for another row to begin
    late.run([job])
    assert late.row(job) is None


def test_a_row_that_takes_too_long_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pid"

    def late(process: subprocess.Popen[str], timeout: float) -> None:
        """Let the time be up as soon as the child runs."""
        while not (noted.exists() and noted.read_text().endswith("\n")):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", late)
    assert gpu.ended(["sh", "-c", f"sleep 60 & echo $! > {noted}; wait"], 1.0) == (None, "")
    child = int(noted.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("its child still runs")


def test_a_command_ends_with_its_code_and_its_last_words() -> None:
    assert gpu.ended(["sh", "-c", "echo a >&2; echo b >&2; exit 3"], 60) == (3, "b")


# -- turns -------------------------------------------------------------------------------------------


def test_calls_take_turns_and_each_round_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], list[str]()
    monkeypatch.setattr(gpu_turns.time, "perf_counter", lambda: clock[0])

    def call(name: str, seconds: float) -> None:
        order.append(name)
        clock[0] += seconds

    calls = {"slow": partial(call, "slow", 0.06), "fast": partial(call, "fast", 0.02)}
    found = gpu_turns.timed(calls, rounds=2, warm=1, said=lambda: [1000.0, 300.0])
    # A warm run of each; then each first once uncounted, then as often as takes 60 ms, at least twice.
    assert order == ["slow", "fast", *["slow"] * 3, *["fast"] * 4, *["fast"] * 4, *["slow"] * 3]
    assert math.isclose(found["slow"]["median"], 0.06) and math.isclose(found["fast"]["median"], 0.02)
    assert [found[name]["runs"] for name in calls] == [4, 6]
    assert found["fast"]["card"] == [1000.0, 300.0]
    assert np.allclose(gpu_turns.ratio(found["slow"], found["fast"]), 3)


def test_a_ratio_is_paired_by_round() -> None:
    noise = np.array([1.0, 2.0, 4.0, 1.5, 3.0])  # another load in each round, the same for both
    factor, low, high = gpu_turns.ratio({"rounds": list(2 * noise)}, {"rounds": list(noise)})
    assert math.isclose(factor, 2) and math.isclose(low, 2) and math.isclose(high, 2)


def test_errors_are_relative_and_count_what_is_not_finite() -> None:
    a = [np.array([3.0, 4.0]), np.array([[0.0, 10.0]])]
    b = [np.array([3.0, 5.0]), np.array([[0.0, np.inf]])]
    assert gpu_turns.error(a, b) == {"l2": 0.2, "largest": 0.25, "nonfinite": 1, "argmax": 1.0}
    assert gpu_turns.error(a, a) == {"l2": 0.0, "largest": 0.0, "nonfinite": 0, "argmax": 1.0}
    nothing = {"l2": None, "largest": None, "nonfinite": None, "argmax": None}
    assert gpu_turns.error(a, b[:1]) == nothing


def test_kernels_are_grouped_by_what_their_names_say() -> None:
    names = [
        "sm90_xmma_gemm_f16f16_tn",
        "sm80_xmma_gemm_f32f32_tf32f32",
        "void cub::Cast",
        "Memcpy HtoD",
        "nvjet_hsh",
    ]
    events = [{"cat": "kernel", "name": name, "dur": 10.0 * n} for n, name in enumerate(names, 1)]
    events += [{"cat": "kernel", "name": names[0], "dur": 30.0}, {"cat": "cpu_op", "name": "aten::mm", "dur": 1e9}, {}]
    found = gpu_kernels.summary(events, 10)
    assert {group: [round(x, 9) for x in numbers] for group, numbers in found["groups"].items()} == {
        "products low": [0.3, 9.0],
        "products TF32": [0.1, 2.0],
        "Casts": [0.1, 3.0],
        "copies host/device": [0.1, 4.0],
    }
    assert (found["launches"], found["busy_us"]) == (pytest.approx(0.6), pytest.approx(18.0))
    assert found["top"][0] == ["nvjet_hsh", 0.1, 5.0]


# -- pages -------------------------------------------------------------------------------------------


def timing(ms: float) -> dict[str, Any]:
    seconds = ms / 1e3
    return {
        "median": seconds,
        "p5": seconds,
        "p95": seconds,
        "runs": 2,
        "rounds": [seconds],
        "card": [1500.0, 300.0, 40.0],
    }


def recorded(**times: float) -> dict[str, Any]:
    """A row of latencies, as a run leaves it."""
    timings = {way: timing(ms) for way, ms in times.items()}
    bases = [base for base in ("float32", "tf32", "torch_half") if base in timings]
    error = {"l2": 1e-3, "largest": 2e-3, "nonfinite": 0, "argmax": 1.0}
    return {
        "time": timings,
        "ratio": {w: {b: gpu_turns.ratio(timings[b], timings[w]) for b in bases} for w in timings},
        "error": dict.fromkeys(timings, error),
        "memory": {"amp": 60_000_000},
        "faults": {"occ": "not made: a | b"},
        "open": {},
    }


def test_the_tables_of_recorded_rows() -> None:
    job = {"kind": "latency", "name": "latency m", "model": "m", "flops": 2e12}
    rows = [
        {"kind": "ceilings", "name": "ceilings", "row": {"float16": 800.0, "float32": 50.0, "copy": 4.3}},
        {**job, "row": recorded(float32=8.0, tf32=4.0, amp=2.0)},
        {**job, "model": "n", "row": recorded(float32=9.0, tf32=4.0, amp=1.0)},
    ]
    about = {"device": "an H200", "date": "d", "driver": "1", "cuda": "13", "provider": CUDA, "cpu": "c", "cores": 1}
    about |= {
        "system": "s",
        "python": "3",
        "versions": {},
        "tiny": False,
        "packed": "a part alone",
        "card": {"name": "H200"},
    }
    page = gpu_tables.page(about, rows)
    assert "a part alone." in page
    assert "| amp-rewrite | 6.00× (4.00, 2) | 2.83× (2.00, 2) | – |" in page
    assert (
        "| m | amp-rewrite | 2 | 2–2 | 4.00× (4.00–4.00) | 2.00× (2.00–2.00) | – | 1e+03 | 125 % | 60 | 1.0e-03"
        " | 2.0e-03 | 0 | 1.000 | 1500, 300, 40 |"
    ) in page
    assert "| m | onnxconverter-common | not made: a \\| b | – | – | – | – | – | – | – | – | – | – | – | – |" in page
    assert "Products, TFLOP/s: float16 800, float32 50. A copy: 4.30 TB/s." in page
    widths = {line.replace("\\|", "").count("|") for line in page if line.startswith(("| m |", "| n |"))}
    assert widths == {16}
    assert not any("no time here" in line for line in page)
    assert any("no time here means anything" in line for line in gpu_tables.page({**about, "card": {}}, rows))


def test_variants_are_compared_with_the_plain_way() -> None:
    row = {"time": {"amp plain": timing(2.0), "amp graph": timing(1.0)}, "faults": {"tf32 nhwc": "no"}}
    row["rate"] = {"amp plain": {"seconds": 1.5e-3, "joules": 0.5}, "amp graph": {"seconds": 9e-4, "joules": None}}
    lines = gpu_tables._variants([{"kind": "variants", "name": "variants m", "model": "m", "row": row}])
    assert lines[4:] == [
        "| m | amp-rewrite | plain | 2 | 1.00× | 1.5 | 0.5 |",
        "| m | amp-rewrite | graph | 1 | 2.00× | 0.9 | – |",
        "| m | tf32 nhwc | no | – | – | – | – |",
    ]


def test_the_emulation_that_errs_least_like_the_device_comes_first() -> None:
    def row(ratio: float | None) -> dict[str, Any]:
        side = {"l2": 1e-3, "largest": 1e-3, "nonfinite": 0}
        return {"on_device": side, "emulated": side, "apart": side, "ratio": ratio}

    jobs = [
        {"kind": "emulation", "model": name, "to": "float16", "row": row(ratio)}
        for name, ratio in {"near": 1.1, "far": 0.2, "none": None, "some": 3.0}.items()
    ]
    lines = gpu_tables._emulated(jobs)[6:]
    assert [line.split()[1] for line in lines] == ["far", "some", "near", "none"]


# -- with PyTorch ----------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # exporters warn of themselves
def test_a_module_is_exported_in_float32_and_in_half_with_drawn_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    import onnx

    from benchmarks.gpu import skeleton

    model = gpu_models.source("gpt2_step_tiny")
    sources = skeleton.Sources(model.drawn)
    for write, floats in ((model.write, onnx.TensorProto.FLOAT), (model.write_half, onnx.TensorProto.FLOAT16)):
        write(tmp_path / "a.onnx")
        made = onnx.load(tmp_path / "a.onnx")
        assert [v.name for v in made.graph.input] == list(model.inputs)
        large = {t.name: t.data_type for t in made.graph.initializer if np.prod(t.dims) >= skeleton.LEAST}
        recipes = skeleton.strip(made, sources).recipes
        assert set(large.values()) == {floats} and set(recipes) == set(large)


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("name", ["resnet50", "vit_base", "whisper_small_encoder", "unet"])
def test_a_module_of_the_zoo_computes_in_half_throughout(name: str) -> None:
    """Without numbers: those that look at numbers in between (BERT, GPT-2, Llama) cannot be asked so."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.shared import zoo

    with torch.device("meta"):
        built = zoo.ZOO[name]()
        inputs = [t.half() if t.is_floating_point() else t for t in built.inputs.values()]
        found = built.module.half()(*inputs)
    assert (found[0] if isinstance(found, tuple) else found).dtype == torch.float16
