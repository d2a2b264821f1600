"""The examples do what they say: they are run here, as their readers would run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from support.paths import ROOT

EXAMPLES = ROOT / "examples"
MODELS = EXAMPLES / "models"
CI = EXAMPLES / "ci"
BASH = shutil.which("bash")
WORKFLOW = yaml.safe_load((CI / "precision.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step["run"] for step in WORKFLOW["jobs"]["precision"]["steps"] if "run" in step}
NEEDS_SHELL = pytest.mark.skipif(BASH is None or shutil.which("git") is None, reason="needs bash and git")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process, stdout and stderr together in stdout; `amp-rewrite` is the one under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AMP_REWRITE")}
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def ran(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command printed that has to succeed."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's network in float32, lowered, and lowered less far: with its Conv ops kept in float32."""
    folder = tmp_path_factory.mktemp("models")
    source = shutil.copy(MODELS / "digits_cnn.onnx", folder / "float32.onnx")
    ran("amp-rewrite", source, "-o", "lowered.onnx", cwd=folder)
    ran("amp-rewrite", source, "-o", "kept.onnx", "--keep", "op=Conv", cwd=folder)
    return {name: folder / f"{name}.onnx" for name in ("float32", "lowered", "kept")}


def committed(folder: Path, **files: Path) -> Path:
    """A new git repository at `folder` with `files` in its only commit."""
    folder.mkdir(parents=True)
    for name, source in files.items():
        shutil.copy(source, folder / f"{name}.onnx")
    ran("git", "init", "--quiet", cwd=folder)
    ran("git", "add", ".", cwd=folder)
    author = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    ran("git", *author, "commit", "--quiet", "--message", "models", cwd=folder)
    return folder


# The models that ship


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn", "digits_vit"])
def test_a_demo_model_is_small_valid_float32_and_does_not_name_its_build_machine(name: str) -> None:
    path = MODELS / f"{name}.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert path.stat().st_size < 1_000_000
    assert {tensor.data_type for tensor in model.graph.initializer} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    text = str(model)
    assert [word for word in ("metadata_props", "doc_string", "site-packages", ".py") if word in text] == []


def test_the_held_out_split_is_what_the_demo_says() -> None:
    with np.load(MODELS / "digits_test.npz") as held_out:
        x, y = held_out["x"], held_out["y"]
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((360, 1, 8, 8), np.float32, (360,), np.int64)
    assert (x.min(), x.max(), set(y.tolist())) == (0.0, 1.0, set(range(10)))


def test_the_demo_prints_the_rows_of_the_readme_and_the_accuracy_of_all_versions() -> None:
    """A tool that is not installed has a dash."""
    printed = ran(sys.executable, EXAMPLES / "demo.py", "llama_outlier", cwd=ROOT)
    shown = cells((ROOT / "README.md").read_text("utf-8"))
    of_readme, of_demo = (next(row for row in rows if row[0].startswith("Llama")) for rows in (shown, cells(printed)))
    assert all(cell in (expected, "–") for cell, expected in zip(of_demo, of_readme, strict=True))
    assert of_demo[-2:] == of_readme[-2:]
    accuracies = [[float(cell.rstrip("%")) for cell in row[2:5]] for row in cells(printed) if row[-1].isdigit()]
    assert len(accuracies) == 3 and min(map(min, accuracies)) > 97
    assert max(max(row) - min(row) for row in accuracies) < 0.1
    assert printed.rstrip().splitlines()[-1].startswith("Low precision ran ")


def cells(text: str) -> list[list[str]]:
    """The rows of all Markdown tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_story_of_a_repair_ends_well() -> None:
    told = ran(sys.executable, EXAMPLES / "repair.py", "offset_norm", cwd=ROOT)
    commands = re.findall(r"(?m)^\$ amp-rewrite (.*)$", told)
    assert len(commands) == 8
    before, located, repaired, after = (told.split(f"$ amp-rewrite {commands[i]}\n")[1] for i in (1, 4, 5, 6))
    assert "failed: output 'y'" in before.split("\n$ ")[0]
    assert re.search(r"the error first jumps at\n.*\n  norm ", located)
    assert "'offset' (Conv) alone adds an error of " in repaired
    assert "\nok: 256 values compared" in after
    assert told.split(f"$ amp-rewrite {commands[7]}\n")[1].startswith("offset (Conv) is float32: repair\n")


def test_the_story_of_a_model_that_is_not_there_says_which_are() -> None:
    done = run(sys.executable, EXAMPLES / "repair.py", "no_such", cwd=ROOT)
    names = "far_rotary, large_logits, llama_outlier, masked_rows, offset_norm, t5_outlier, vae_decoder"
    assert (done.returncode, done.stdout) == (1, f"there is no model 'no_such'; take one of {names}\n")


# The pipelines


@pytest.mark.torch
def test_the_torch_example_runs() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: make extras")
    assert "\nok: " in ran(sys.executable, EXAMPLES / "torch_export.py", cwd=ROOT)


@pytest.mark.torch
@pytest.mark.transformers
def test_the_hugging_face_example_runs() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make extras")
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    assert "\nok: " in ran(sys.executable, EXAMPLES / "huggingface_export.py", cwd=ROOT, HF_HUB_OFFLINE="1")


# Continuous integration


def test_each_command_and_option_that_a_ci_file_uses_exists() -> None:
    scripts = [*STEPS.values(), (CI / "precision-diff.sh").read_text(encoding="utf-8")]
    used: dict[str, set[str]] = {}
    for command, words in re.findall(r"(?m)^\s*amp-rewrite (\w+) (.*)$", "\n".join(scripts)):
        used.setdefault(command, set()).update(re.findall(r"(?<!\S)--[a-z-]+", words))
    assert used == {"report": {"--json"}, "diff": {"--fail-on", "--format"}}
    for command, options in used.items():
        described = ran("amp-rewrite", command, "--help", cwd=ROOT)
        assert [option for option in options if option not in described] == []


def workflow(folder: Path) -> tuple[int, str, str]:
    """Exit code, output and summary of the workflow's own steps, run as GitHub runs them in `folder`."""
    summary = folder / "summary.md"
    summary.touch()
    output = ""
    for name, script in STEPS.items():
        if name == "Install":
            continue
        (folder / "step.sh").write_text(script, encoding="utf-8")
        step = ("bash", "--noprofile", "--norc", "-eo", "pipefail", folder / "step.sh")
        done = run(*step, cwd=folder, GITHUB_STEP_SUMMARY=str(summary))
        output += done.stdout
        if done.returncode:
            return done.returncode, output, summary.read_text(encoding="utf-8")
    return 0, output, summary.read_text(encoding="utf-8")


@NEEDS_SHELL
def test_the_workflow_fails_a_pull_request_that_raises_ops_and_annotates_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    committed(tmp_path / "base", net=models["lowered"], same=models["lowered"])
    committed(tmp_path / "head", net=models["kept"], same=models["lowered"])
    code, output, summary = workflow(tmp_path)
    assert code == 1, output
    assert "::error" in output
    assert "### net.onnx" in summary
    assert "### same.onnx" in summary


@NEEDS_SHELL
def test_the_workflow_passes_a_pull_request_that_keeps_precision_or_adds_a_model(
    models: dict[str, Path], tmp_path: Path
) -> None:
    committed(tmp_path / "base", net=models["lowered"])
    committed(tmp_path / "head", net=models["lowered"], other=models["kept"])
    code, output, _ = workflow(tmp_path)
    assert code == 0, output
    assert "::notice::other.onnx is new" in output


@NEEDS_SHELL
@pytest.mark.parametrize(
    ("before", "after", "code"),
    [("lowered", "lowered", 0), ("lowered", "kept", 1)],
    ids=["the same", "raised"],
)
def test_the_commit_hook_judges_models_and_their_reports_alike(
    models: dict[str, Path], tmp_path: Path, before: str, after: str, code: int
) -> None:
    repository = tmp_path / "repository"
    reports = {name: tmp_path / f"{name}.json" for name in {before, after}}
    for name, report in reports.items():
        report.write_text(ran("amp-rewrite", "report", models[name], "--json", cwd=tmp_path), encoding="utf-8")
    committed(repository, net=models[before])
    shutil.copy(reports[before], repository / "net.onnx.json")
    author = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
    ran("git", "add", ".", cwd=repository)
    ran("git", *author, "commit", "--quiet", "--message", "report", cwd=repository)
    shutil.copy(models[after], repository / "net.onnx")
    shutil.copy(reports[after], repository / "net.onnx.json")
    for name in ("net.onnx", "net.onnx.json"):
        done = run("bash", CI / "precision-diff.sh", name, cwd=repository)
        assert done.returncode == code, done.stdout


@NEEDS_SHELL
def test_the_commit_hook_passes_a_new_file_and_stops_at_one_that_it_cannot_read(
    models: dict[str, Path], tmp_path: Path
) -> None:
    repository = committed(tmp_path / "repository", net=models["lowered"])
    shutil.copy(models["lowered"], repository / "new.onnx")
    assert "new.onnx: new" in ran("bash", CI / "precision-diff.sh", "new.onnx", cwd=repository)
    (repository / "net.onnx").write_bytes(b"not a model")
    assert run("bash", CI / "precision-diff.sh", "net.onnx", cwd=repository).returncode == 2


def test_the_hook_of_the_pre_commit_file_matches_models_and_reports_only() -> None:
    config = yaml.safe_load((CI / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    ((hook,),) = [repo["hooks"] for repo in config["repos"]]
    matched = ["net.onnx", "a/b.onnx", "net.onnx.json"]
    others = ["net.json", "net.onnx.py"]
    assert [name for name in matched + others if re.search(hook["files"], name)] == matched
    assert (CI / Path(hook["entry"].split()[-1]).name).is_file()
