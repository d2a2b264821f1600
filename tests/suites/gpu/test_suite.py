"""The GPU measurement, without a GPU: its road on the CPU provider and its pages."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.runtime.runner import CPU, CUDA, cuda_opens
from benchmarks.gpu import (
    gpu,
    gpu_beside,
    gpu_kernels,
    gpu_make,
    gpu_models,
    gpu_tables,
    gpu_trials,
    gpu_turns,
    skeleton,
    skeleton_files,
)
from suites.gpu.conftest import RUN, SMALL, benchmark
from support.commands import run
from support.fusing import outputs_of

KINDS = ("latency", "training")
"""Kinds that need neither a GPU nor PyTorch; ops and their emulation have tests of their own."""


def measure(models: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, RUN, "gpu", "--models", models, "--out", out, *words)


def rows_of(out: Path) -> dict[str, Any]:
    return {job["name"]: job["row"] for job in json.loads((out / "gpu.json").read_text("utf-8"))["rows"]}


@pytest.mark.slow
def test_the_whole_road_runs_on_the_cpu_and_a_second_run_repeats_nothing(grown: Path, tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--tiny", "--kinds", *KINDS)
    first = measure(grown, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    rows = rows_of(tmp_path)
    # onnxruntime's CPU provider has no bfloat16 kernels; what was not asked for has no row.
    made = {name: row for name, row in rows.items() if row}
    assert {name for name, row in made.items() if "fault" in row} == {name for name in made if "bfloat16" in name}
    assert {name.split()[0] for name in made} == set(KINDS)
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
    second = measure(grown, tmp_path, *words)
    assert [line for line in second.stdout.splitlines() if line[0].isdigit()] == []


@pytest.mark.skipif(cuda_opens(), reason="a CUDA provider opens here")
def test_without_a_gpu_nothing_is_measured_and_it_says_so(grown: Path, tmp_path: Path) -> None:
    done = measure(grown, tmp_path / "out")
    said = (
        "no CUDA provider opens here, so nothing was measured; `amp-rewrite doctor` says what is missing, and"
        " --provider cpu --tiny goes the same road"
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, said)
    assert not (tmp_path / "out").exists()


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


def test_a_kernel_that_became_the_columns_of_a_product_is_drawn_again() -> None:
    how = {"k": {"shape": [40, 3, 8, 8], "mean": 0.0, "std": 1.0}}
    columns = skeleton.drawn("k", **how["k"]).reshape(40, -1).T.astype(np.float16)  # type: ignore[arg-type]
    recipe = skeleton.Sources(how).recipe(np.ascontiguousarray(columns))
    assert recipe is not None
    np.testing.assert_array_equal(skeleton.grown(recipe, skeleton.Sources(how).arrays, ()), columns)
    assert skeleton.Sources(how).recipe(np.ascontiguousarray(columns[::-1])) is None


def test_what_the_checkout_holds_is_not_packed_again(skeletons: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.tar.xz", tmp_path / "rest.tar.xz"
    skeleton_files.pack(skeletons, SMALL, whole)
    skeleton_files.pack(skeletons, SMALL, rest, whole)
    skeleton_files.unpack(rest, tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []
    skeleton_files.pack(skeletons, SMALL, rest, tmp_path / "missing.tar.xz")
    assert rest.read_bytes() == whole.read_bytes()


# -- what ten minutes are for --------------------------------------------------------------------------


def road_of(skeletons: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """The rows and the page behind a pack of skeletons, by the plan for a GPU."""
    pack, out = folder / "pack", folder / "out"
    benchmark("gpu_pack", skeletons, "--out", pack, "--no-runtime")
    places = ("--pack", pack, "--dest", folder / "dest", "--models", folder / "models", "--out", out)
    benchmark("gpu_remote", "setup", "gpu", *places, "--", "--provider", "cpu", "--tiny", "--plan")
    return rows_of(out), (out / "gpu.md").read_text("utf-8")


def test_a_pack_becomes_a_table_without_a_gpu(skeletons: Path, tmp_path: Path) -> None:
    rows, page = road_of(skeletons, tmp_path)
    assert [name for name, row in rows.items() if "time" in row] == [f"beside {SMALL}"]
    assert f"| {SMALL} | plain command |" in page


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.transformers
def test_pytorch_computes_what_the_model_of_the_skeleton_does(tmp_path: Path) -> None:
    from benchmarks.gpu import gpu_grow

    name = "resnet50_one"
    skeleton_files.unpack(gpu_make.kept(name), tmp_path)
    gpu_grow.grow(tmp_path, tmp_path, name)
    batch = gpu_models.batch_of(tmp_path / f"{name}.npz")
    wanted = outputs_of(onnx.load(tmp_path / f"{name}.float32.onnx"), batch)
    made = gpu_beside.made_of({"models": str(tmp_path), "model": name})
    found = made.module.eval()(*made.tensors.values()).detach().numpy()
    assert gpu_turns.error(wanted, [found])["l2"] < 1e-5


@pytest.mark.torch
@pytest.mark.transformers
def test_a_module_has_the_weights_that_its_skeleton_tells_and_no_others_drawn() -> None:
    from benchmarks.gpu import gpu_builds

    plain = gpu_builds.Module.of("mlp_tiny")
    sources = {"0.weight": plain.drawn["0.weight"] | {"std": 1.0}}
    state = gpu_builds.Module.of("mlp_tiny", sources).module.state_dict()
    assert np.array_equal(state["0.weight"].numpy(), skeleton.drawn("0.weight", **sources["0.weight"]))
    assert not state["2.bias"].any()
    assert plain.module.state_dict()["2.bias"].any()


@pytest.mark.torch
@pytest.mark.transformers
def test_convolutions_of_pytorch_run_with_channels_last_too() -> None:
    import torch

    from benchmarks.gpu import gpu_builds
    from benchmarks.shared.zoo import Built

    images = {"image": torch.randn(2, 3, 8, 8)}
    made = gpu_builds.Module(Built(torch.nn.Conv2d(3, 4, 3), images))
    plain = gpu_beside.placed(made, CPU)
    last = plain.laid("channels last")
    assert plain.images and plain.laid("") is plain
    laid = (*last.tensors, last.module.model.weight)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in laid)
    assert plain.tensors[0].is_contiguous() and plain.module.model.weight.is_contiguous()
    found = []
    for ready in (plain, last):
        run, outputs = gpu_beside._module(ready, None)
        run()
        found += outputs()
    assert found[0].dtype == np.float32
    np.testing.assert_allclose(found[1], found[0], atol=1e-2)


@pytest.mark.torch
@pytest.mark.transformers
def test_pytorch_attends_by_its_kernels_for_half_and_without_a_mask_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit import modeling_vit

    from benchmarks.gpu import gpu_builds
    from benchmarks.shared.zoo import Built, _Wrapped

    name = "create_bidirectional_mask"
    if hasattr(modeling_vit, name):
        monkeypatch.setattr(modeling_vit, name, getattr(modeling_vit, name))  # it is replaced below
    seen: list[tuple[Any, Any]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def listening(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> Any:
        seen.append((query.dtype, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", listening)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32)
    built = Built(
        _Wrapped.of(ViTForImageClassification(config), ("pixel_values",), "logits"),
        {"pixel_values": torch.randn(1, 3, 32, 32)},
    )
    gpu_builds._fuse_attention(built)
    gpu_beside._module(gpu_beside.placed(gpu_builds.Module(built), CPU), None)[0]()
    assert seen == [(torch.float16, None)] * 2


def test_the_plan_begins_with_what_matters_most(grown: Path, tmp_path: Path) -> None:
    models = folder_of([*gpu_models.REAL, SMALL], tmp_path, grown)
    names = [job["name"] for job in gpu.planned(list(gpu.jobs(arguments(models))))]
    assert len(names) == len(set(names)) == 1 + len(gpu_trials.TRIALS) + len(gpu_models.REAL) + 1
    assert [names[0], names[-1]] == ["kernels gpt2", f"beside {SMALL}"]


ODD = "g (float16[1,5,8] x) => (float16[1,5,3] y) <float16[1,1,8] b = {1,2,3,4,5,6,7,8}, float16[8,3] w = {WORDS},"
ODD += " float16[8,5] zeros_5 = {ZEROS}, int64[1] first = {0}, int64[1] end = {3}, int64[1] last = {-1}> {"
ODD += (
    "s = Add (x, b)  q = Neg (s)  v = Abs (s)  h = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1>"
)
ODD += " (s, q, v)  c = Concat <axis = 1> (w, zeros_5)  p = MatMul (h, c)  y = Slice (p, first, end, last) }"


@pytest.mark.parametrize("edit", [gpu_trials.flat_biases, gpu_trials.stated_masks, gpu_trials.odd_columns])
def test_a_trial_takes_a_rewrite_back_and_changes_no_result(edit: gpu_trials.Edit) -> None:
    text = ODD.replace("WORDS", ", ".join(["1"] * 24)).replace("ZEROS", ", ".join(["0"] * 40))
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> {text}')
    feed = {"x": np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float16)}
    (wanted,) = outputs_of(model, feed)
    assert edit(model) == 1
    np.testing.assert_allclose(outputs_of(model, feed)[0], wanted, atol=0.05)


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
