"""The GPU suite, without a GPU: its road on the CPU provider, its pages, and what it does with rows that fail."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from amp_rewrite.runtime.runner import CPU, CUDA, cuda_opens
from support.paths import ROOT
from support.stub import folder as stub_folder

SUITE = (str(ROOT / "benchmarks" / "run.py"), "gpu")


@pytest.fixture(scope="module")
def suite() -> Iterator[ModuleType]:
    """The module benchmarks/gpu/gpu.py."""
    sys.path.insert(0, str(ROOT))
    try:
        yield import_module("benchmarks.gpu.gpu")
    finally:
        sys.path.remove(str(ROOT))


def run(out: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *SUITE, "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_the_whole_road_runs_on_the_cpu_and_a_second_run_repeats_nothing(tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--tiny", "--models", "dense")
    first = run(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    told = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    rows = {job["name"]: job["row"] for job in told["rows"]}
    faults = {name for name, row in rows.items() if "fault" in row}
    # onnxruntime's CPU provider has no bfloat16 kernels.
    assert {name for name in rows if "bfloat16" in name} == faults, faults
    assert {job["kind"] for job in told["rows"]} == {"export", "latency", "training", "emulation", "fit"}
    assert rows["latency dense amp-rewrite float16"]["low"] == [3, 3]
    assert told["machine"]["provider"] == CPU and told["machine"]["tiny"]
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "no time means anything" in page and "CPU: half precision is slower here" in page
    second = run(tmp_path, *words)
    assert [line for line in second.stdout.splitlines() if line[0].isdigit()] == []


def test_where_the_time_is_up_the_page_says_what_is_not_yet_measured(tmp_path: Path) -> None:
    done = run(tmp_path, "--provider", "cpu", "--tiny", "--models", "dense", "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert "- not yet measured: export dense, latency dense amp-rewrite float16" in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(cuda_opens(), reason="a CUDA provider opens here")
def test_without_a_gpu_nothing_is_measured_and_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    said = (
        "no CUDA provider opens here, so nothing was measured; `amp-rewrite doctor` says what is missing, and"
        " --provider cpu --tiny goes the same road"
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, said)
    assert not (tmp_path / "gpu.md").exists()


def arguments(**given: Any) -> argparse.Namespace:
    standard = {"cache": "c", "provider": "cuda", "tiny": False, "rounds": 1, "warm": 1}
    return argparse.Namespace(**{**standard, "peers": "python", "autocast": None, "models": None, **given})


def test_every_job_has_a_name_of_its_own_and_float16_of_all_models_comes_first(suite: ModuleType) -> None:
    jobs = list(suite.jobs(arguments(autocast="python")))
    names = [job["name"] for job in jobs]
    assert len(names) == len(set(names))
    models = list(suite.gpu_models.MODELS)
    assert names[: 2 * len(models)] == [
        name for model in models for name in (f"export {model}", f"latency {model} amp-rewrite float16")
    ]
    ways = {job["way"] for job in jobs if job["kind"] == "latency"}
    assert ways == set(suite.gpu_models.WAYS)
    assert {job["model"] for job in jobs if job.get("way") == "torch half"} == set(models) - {
        "digits_cnn",
        "digits_vit",
        "dense",
    }
    assert {job["kind"] for job in jobs} == set(suite.LIMITS)


def test_without_an_interpreter_for_it_autocast_is_left_out(suite: ModuleType) -> None:
    assert not [job for job in suite.jobs(arguments()) if job.get("way") == "modelopt AutoCast"]


def of_rows(suite: ModuleType, out: Path, seconds: float = 60) -> Any:
    about = {"device": "d", "date": "2026-01-01", "driver": "1", "cuda": "13.0", "provider": CUDA, "tiny": False}
    machine = {"cpu": "c", "cores": 1, "system": "s", "python": "3", "versions": {"onnx": "1"}}
    return suite.Suite(out, {**about, **machine}, time.monotonic() + seconds)


def test_a_row_that_fails_says_why_and_the_next_one_runs(suite: ModuleType, tmp_path: Path) -> None:
    shared = {"cache": str(tmp_path), "tiny": True, "kind": "export"}
    jobs = [{**shared, "name": "a", "model": "none"}, {**shared, "name": "b", "model": "dense"}]
    made = of_rows(suite, tmp_path)
    made.run(jobs)
    assert made.row(jobs[0]) == {"fault": "'none'"}
    assert list(made.row(jobs[1])) == ["bytes"]
    assert "- a: 'none'" in (tmp_path / "gpu.md").read_text("utf-8").splitlines()


def test_a_row_of_another_machine_version_or_setting_is_measured_anew(suite: ModuleType, tmp_path: Path) -> None:
    job = {"name": "a", "kind": "export", "model": "dense", "cache": str(tmp_path), "tiny": True}
    made = of_rows(suite, tmp_path)
    made.run([job])
    assert made.row(job) is not None
    assert made.row({**job, "tiny": False}) is None
    for change in ({"device": "another"}, {"driver": "2"}, {"versions": {"onnx": "2"}}):
        assert suite.Suite(tmp_path, {**made.about, **change}, made.deadline).row(job) is None


def test_half_a_row_is_none(suite: ModuleType, tmp_path: Path) -> None:
    job = {"name": "a", "kind": "export", "model": "dense", "cache": str(tmp_path), "tiny": True}
    made = of_rows(suite, tmp_path)
    made.run([job])
    (tmp_path / "rows" / "a.row.json").write_text('{"bytes": 1')
    assert made.row(job) is None


def test_small_models_do_not_stand_for_real_ones_in_a_later_run(tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--models", "dense", "--kinds", "export", "--rounds", "1", "--warm", "1")
    sizes = []
    for tiny in (("--tiny",), ()):
        done = run(tmp_path, *words, *tiny)
        assert done.returncode == 0, done.stderr
        sizes.append(json.loads((tmp_path / "gpu.json").read_text("utf-8"))["rows"][0]["row"]["bytes"])
    assert sizes[0] < 10**5 < 10**7 < sizes[1]


def test_an_interrupt_ends_the_row_too_and_keeps_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, *SUITE, "--out", str(tmp_path), "--provider", "cpu", "--tiny", "--models", "dense"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what runs behind
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, preexec_fn=heard, **streams) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("1/"):
            pass
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert said.splitlines()[-1] == (
        f"interrupted; what was measured by now stays in {tmp_path}, and the same command goes on"
    )
    assert (tmp_path / "rows" / "export_dense.row.json").exists()


def test_a_peer_that_does_not_start_is_named(suite: ModuleType, tmp_path: Path) -> None:
    way = suite.gpu_models.WAYS["onnxruntime.transformers float16"]
    with pytest.raises(LookupError) as error:
        way("dense", tmp_path / "a.onnx", tmp_path, {"peers": "/no/python"})
    assert str(error.value) == "/no/python, which --peers names, does not start: No such file or directory"


def test_a_row_whose_process_dies_says_so(suite: ModuleType, tmp_path: Path) -> None:
    job = {"name": "a", "kind": "export", "model": "dense", "cache": str(tmp_path / "missing"), "tiny": True}
    made = of_rows(suite, tmp_path)
    made.run([job])
    assert made.row(job)["fault"].startswith("its process ended with 1: FileNotFoundError")


def test_a_row_that_takes_too_long_is_stopped_with_its_children(suite: ModuleType, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    assert suite.ended(["sh", "-c", f"sleep 60 & echo $! > {noted}; wait"], 1.0) == (None, "")
    child = int(noted.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("its child still runs")


def test_a_command_ends_with_its_code_and_its_last_words(suite: ModuleType) -> None:
    assert suite.ended(["sh", "-c", "echo a >&2; echo b >&2; exit 3"], 60) == (3, "b")


# -- pages -------------------------------------------------------------------------------------------


def timing(ms: float) -> dict[str, float]:
    return {"runs": 1, "median": ms / 1e3, "p5": ms / 1e3, "p95": ms / 1e3}


def entry(name: str, ms: float, memory: int | None, **factors: float) -> dict[str, Any]:
    found = {key.replace("_", " "): {"factor": f, "low": f - 0.1, "high": f + 0.1} for key, f in factors.items()}
    return {"name": name, "latency": timing(ms), "copies": timing(2 * ms), "speed_ups": found, "memory": memory}


def test_the_page_compares_with_float32_and_with_tf32(suite: ModuleType, tmp_path: Path) -> None:
    entries = [
        entry("float32", 4.0, 100, float32=1, float32_with_TF32=0.5),
        entry("float32 with TF32", 2.0, 100, float32=2, float32_with_TF32=1),
        entry("way", 1.0, 60, float32=4, float32_with_TF32=2),
    ]
    row = {
        "batch": 8,
        "bench": {"entries": entries, "changed": []},
        "error": {"l2": 1e-3, "largest": 2e-3, "nonfinite": 0},
        "low": [3, 4],
    }
    (line,) = suite.gpu_tables._latencies([{"kind": "latency", "model": "m", "way": "w", "row": row}])[-1:]
    assert line == (
        "| m | 8 | w | 3 of 4 | 1 | 125 | 4.00× (3.90–4.10) | 2.00× (1.90–2.10) | 2 | 4 | 2 | 60 % | 1.0e-03 | 2.0e-03"
        " | 0 |"
    )


def test_the_emulation_that_errs_least_like_the_device_comes_first(suite: ModuleType) -> None:
    def row(ratio: float | None) -> dict[str, Any]:
        side = {"l2": 1e-3, "largest": 1e-3, "nonfinite": 0}
        return {"on_device": side, "emulated": side, "apart": side, "ratio": ratio}

    jobs = [
        {"kind": "emulation", "model": name, "to": "float16", "row": row(ratio)}
        for name, ratio in {"near": 1.1, "far": 0.2, "none": None, "some": 3.0}.items()
    ]
    lines = suite.gpu_tables._emulated(jobs)[6:]
    assert [line.split()[1] for line in lines] == ["far", "some", "near", "none"]


def test_errors_are_relative_and_count_what_is_not_finite(suite: ModuleType) -> None:
    from benchmarks.gpu import gpu_rows

    a = [np.array([3.0, 4.0]), np.array([[0.0, 10.0]])]
    b = [np.array([3.0, 5.0]), np.array([[0.0, np.inf]])]
    assert gpu_rows.error(a, b) == {"l2": 0.2, "largest": 0.25, "nonfinite": 1}
    assert gpu_rows.error(a, a) == {"l2": 0.0, "largest": 0.0, "nonfinite": 0}
    assert gpu_rows.error(a, b[:1]) == {"l2": None, "largest": None, "nonfinite": None}


# -- what the CPU cannot show ----------------------------------------------------------------------------


@pytest.mark.stub
def test_the_cuda_provider_takes_all_options_that_a_benchmark_gives_it(tmp_path: Path) -> None:
    """On stand-ins for the CUDA libraries, which compute nothing: what opens and is bound is real, no number is."""
    libraries, reason = stub_folder()
    if libraries is None:
        pytest.skip(reason)
    done = run(tmp_path, "--tiny", "--models", "dense", "--kinds", "latency", LD_LIBRARY_PATH=str(libraries))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    rows = {job["name"]: job["row"] for job in told["rows"]}
    for to in ("float16", "bfloat16"):
        found = rows[f"latency dense amp-rewrite {to}"]["bench"]
        assert [e["name"] for e in found["entries"]] == ["float32", "float32 with TF32", f"amp-rewrite {to}"]
    profiled = rows["latency dense amp-rewrite float16"]["bench"]["changed"][0]["ops"]
    assert {op["after"]["provider"] for op in profiled if op["after"]} == {CUDA}


# -- with PyTorch ----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_module_is_exported_with_more_rows_in_float32_and_in_half(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    import onnx

    models = suite.gpu_models

    def small() -> Any:
        return models.zoo.Built(torch.nn.Linear(3, 2).eval(), {"x": torch.arange(6.0).reshape(2, 3)})

    monkeypatch.setitem(models.zoo.ZOO, "unet", small)
    monkeypatch.setattr(models, "MODELS", {"unet": models.Made(5, models.of_zoo)})
    source = models.made("unet", tmp_path, tiny=False)
    assert models.batch_of(source.with_suffix(".npz"))["x"].tolist() == [[0, 1, 2], [3, 4, 5]] * 2 + [[0, 1, 2]]
    half = models.by_torch("unet", source, tmp_path, {})
    types = [{t.data_type for t in onnx.load(file).graph.initializer} for file in (source, half)]
    assert types == [{onnx.TensorProto.FLOAT}, {onnx.TensorProto.FLOAT16}]


@pytest.mark.torch
@pytest.mark.transformers
@pytest.mark.parametrize("name", ["resnet50", "vit_base", "whisper_small_encoder", "unet"])
def test_a_module_of_the_zoo_computes_in_half_throughout(suite: ModuleType, name: str) -> None:
    """Without numbers: those that look at numbers in between (BERT, GPT-2, Llama) cannot be asked so."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.device("meta"):
        built = suite.gpu_models.zoo.ZOO[name]()
        inputs = [t.half() if t.is_floating_point() else t for t in built.inputs.values()]
        found = built.module.half()(*inputs)
    assert (found[0] if isinstance(found, tuple) else found).dtype == torch.float16
