"""The GPU measurements run on the CPU provider."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from amp_rewrite.runtime.runner import CPU, cuda_works
from benchmarks.gpu import gpu_beside, gpu_make, gpu_models, gpu_trials, gpu_turns, skeleton, skeleton_files
from suites.gpu.conftest import RUN, SMALL, benchmark
from support.commands import run
from support.fusing import outputs_of

KINDS = ("latency", "training")
"""Kinds that need neither a GPU nor PyTorch; ops and their emulation are tested elsewhere."""


def measure(models: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, RUN, "gpu", "--models", models, "--out", out, *words)


def rows_of(out: Path) -> dict[str, Any]:
    return {job["name"]: job["row"] for job in json.loads((out / "gpu.json").read_text("utf-8"))["rows"]}


@pytest.mark.slow
def test_the_whole_suite_runs_on_the_cpu_and_a_second_run_repeats_nothing(grown: Path, tmp_path: Path) -> None:
    words = ("--provider", "cpu", "--tiny", "--kinds", *KINDS)
    first = measure(grown, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    rows = rows_of(tmp_path)
    # onnxruntime's CPU provider has no bfloat16 kernels; other kinds have no row.
    measured = {name: row for name, row in rows.items() if row}
    faulty = {name for name, row in measured.items() if "fault" in row}
    assert faulty == {name for name in measured if "bfloat16" in name}
    assert {name.split()[0] for name in measured} == set(KINDS)
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
    machine = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["machine"]
    assert machine["provider"] == CPU and machine["tiny"]
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "no time means anything" in page and "CPU: half precision is slower here" in page
    second = measure(grown, tmp_path, *words)
    assert [line for line in second.stdout.splitlines() if line[0].isdigit()] == []


@pytest.mark.skipif(cuda_works(), reason="a CUDA provider opens here")
def test_without_a_gpu_nothing_is_measured_and_a_message_says_so(grown: Path, tmp_path: Path) -> None:
    done = measure(grown, tmp_path / "out")
    message = (
        "onnxruntime's CUDA provider does not work here, so nothing was measured; run `amp-rewrite doctor` for the"
        " reason, or use --provider cpu --tiny for a dry run"
    )
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, message)
    assert not (tmp_path / "out").exists()


def test_files_in_the_checkout_are_not_packed_again(skeletons: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.tar.xz", tmp_path / "rest.tar.xz"
    skeleton_files.pack(skeletons, SMALL, whole)
    skeleton_files.pack(skeletons, SMALL, rest, whole)
    skeleton_files.unpack(rest, tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []
    skeleton_files.pack(skeletons, SMALL, rest, tmp_path / "missing.tar.xz")
    assert rest.read_bytes() == whole.read_bytes()


def measured(skeletons: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """Pack skeletons and run the plan for a GPU; return its rows and page."""
    pack, out = folder / "pack", folder / "out"
    benchmark("gpu_pack", skeletons, "--out", pack, "--no-runtime")
    places = ("--pack", pack, "--dest", folder / "dest", "--models", folder / "models", "--out", out)
    benchmark("gpu_remote", "setup", "gpu", *places, "--", "--provider", "cpu", "--tiny", "--plan")
    return rows_of(out), (out / "gpu.md").read_text("utf-8")


def test_a_pack_is_tabulated_without_a_gpu(skeletons: Path, tmp_path: Path) -> None:
    rows, page = measured(skeletons, tmp_path)
    assert [name for name, row in rows.items() if "time" in row] == [f"beside {SMALL}"]
    assert f"| {SMALL} | plain command |" in page


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.transformers
def test_pytorch_computes_the_same_as_the_skeletons_model(tmp_path: Path) -> None:
    from benchmarks.gpu import gpu_grow

    name = "resnet50_one"
    skeleton_files.unpack(gpu_make.kept(name), tmp_path)
    gpu_grow.grow(tmp_path, tmp_path, name)
    batch = gpu_models.batch_of(tmp_path / f"{name}.npz")
    wanted = outputs_of(onnx.load(tmp_path / f"{name}.float32.onnx"), batch)
    placed = gpu_beside.made_of({"models": str(tmp_path), "model": name})
    found = placed.module.eval()(*placed.tensors.values()).detach().numpy()
    assert gpu_turns.error(wanted, [found])["l2"] < 1e-5


@pytest.mark.torch
@pytest.mark.transformers
def test_a_module_has_exactly_the_skeletons_weights() -> None:
    from benchmarks.gpu import gpu_builds

    plain = gpu_builds.Module.of("mlp_tiny")
    sources = {"0.weight": plain.drawn["0.weight"] | {"std": 1.0}}
    state = gpu_builds.Module.of("mlp_tiny", sources).module.state_dict()
    assert np.array_equal(state["0.weight"].numpy(), skeleton.drawn("0.weight", **sources["0.weight"]))
    assert not state["2.bias"].any()
    assert plain.module.state_dict()["2.bias"].any()


@pytest.mark.torch
@pytest.mark.transformers
def test_pytorch_uses_its_half_precision_attention_without_a_mask_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
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


ODD = "g (float16[1,5,8] x) => (float16[1,5,3] y) <float16[1,1,8] b = {1,2,3,4,5,6,7,8}, float16[8,3] w = {WORDS},"
ODD += " float16[8,5] zeros_5 = {ZEROS}, int64[1] first = {0}, int64[1] end = {3}, int64[1] last = {-1}> {"
ODD += (
    "s = Add (x, b)  q = Neg (s)  v = Abs (s)  h = com.microsoft.MultiHeadAttention <num_heads = 2, unidirectional = 1>"
)
ODD += " (s, q, v)  c = Concat <axis = 1> (w, zeros_5)  p = MatMul (h, c)  y = Slice (p, first, end, last) }"


@pytest.mark.parametrize("edit", [gpu_trials.flat_biases, gpu_trials.stated_masks, gpu_trials.odd_columns])
def test_a_trial_reverts_a_rewrite_without_changing_a_result(edit: gpu_trials.Edit) -> None:
    text = ODD.replace("WORDS", ", ".join(["1"] * 24)).replace("ZEROS", ", ".join(["0"] * 40))
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]> {text}')
    feed = {"x": np.random.default_rng(0).standard_normal((1, 5, 8)).astype(np.float16)}
    (wanted,) = outputs_of(model, feed)
    assert edit(model) == 1
    np.testing.assert_allclose(outputs_of(model, feed)[0], wanted, atol=0.05)
