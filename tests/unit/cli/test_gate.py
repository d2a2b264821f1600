"""`amp-rewrite gate`: models against those of a commit, on the command line, in pre-commit and in CI scripts."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner, Result
from onnx import numpy_helper

from amp_rewrite.cli.group import program
from support.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
AUTHOR = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
FLOAT16 = '<ir_version: 8, opset_import: ["": 17]> g (float16[n] x) => (float16[n] y) { y = Relu(x) }'
FLOAT32 = FLOAT16.replace("float16", "float")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *AUTHOR, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, message: str) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.parser.parse_model(text), path)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commit a half model in a folder of a repository."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models" / "m.onnx", FLOAT16)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "models")
    return tmp_path


def gate(*words: str) -> Result:
    return CliRunner().invoke(program, ["gate", *words])


def test_an_unchanged_model_passes_and_a_raised_one_fails(repository: Path) -> None:
    assert gate("models/m.onnx").exit_code == 0
    write(repository / "models" / "m.onnx", FLOAT32)
    done = gate("models/m.onnx", "--fail-on", "raised")
    assert done.exit_code == 1
    assert done.stdout.startswith("models/m.onnx: ")
    assert re.search(r"1  Relu +float16 → float32", done.stdout)
    assert "name each op with --verbose" in done.stdout
    assert "name each op" not in gate("models/m.onnx", "-v").stdout
    assert gate("models/m.onnx", "--fail-on", "casts").exit_code == 0


def test_a_new_model_must_only_meet_its_expectations(repository: Path) -> None:
    write(repository / "new.onnx", FLOAT32)
    done = gate("new.onnx", "--expect", "float32 >= 100%")
    assert (done.exit_code, done.stdout) == (0, "new.onnx: new, nothing to compare it with\n")
    done = gate("new.onnx", "models/m.onnx", "--expect", "io = float16")
    assert done.exit_code == 1
    assert len(re.findall(r"failed  io = float16", done.stdout)) == 1
    (repository / "broken.onnx").write_bytes(b"not a model")
    done = gate("broken.onnx", "models/m.onnx")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("broken.onnx") == 1
    assert "models/m.onnx: no difference" in done.stdout


def test_a_report_is_judged_like_its_model(repository: Path) -> None:
    def report() -> None:
        done = CliRunner().invoke(program, ["report", "models/m.onnx", "--json"])
        Path("models/m.onnx.json").write_text(done.stdout, "utf-8")

    report()
    commit(repository, "report")
    assert gate("models/m.onnx.json", "--expect", "io = float16").exit_code == 0
    write(repository / "models" / "m.onnx", FLOAT32)
    report()
    model, text = gate("models/m.onnx"), gate("models/m.onnx.json")
    assert (model.exit_code, text.exit_code) == (1, 1)
    assert re.search(r"1  Relu +float16 → float32", text.stdout)


def test_another_commit_can_be_the_base_and_an_unknown_one_is_named(repository: Path) -> None:
    write(repository / "models" / "m.onnx", FLOAT32)
    commit(repository, "raised")
    assert gate("models/m.onnx").exit_code == 0
    assert gate("models/m.onnx", "--base", "HEAD^").exit_code == 1
    done = gate("models/m.onnx", "--base", "absent")
    assert done.exit_code == 2
    assert "--base absent does not name a commit here; fetch it" in done.stderr
    done = gate("models")
    assert (done.exit_code, done.stderr.partition(";")[0]) == (2, "error: models is a folder")


def test_pages_and_annotations_show_the_difference(repository: Path) -> None:
    write(repository / "models" / "m.onnx", FLOAT32)
    write(repository / "new.onnx", FLOAT32)
    done = gate("models/m.onnx", "new.onnx", "--format", "github", "--pages", "out/pages", "--expect", "io = float16")
    assert done.exit_code == 1
    assert "::group::models/m.onnx\n::error" in done.stdout
    assert "::error::new.onnx: expected io = float16" in done.stdout
    assert [page.name for page in Path("out/pages").iterdir()] == ["models_m.onnx.html"]
    assert gate("models/m.onnx", "--pages", "out/pages").exit_code == 1, "the folder may exist"


def test_external_data_of_the_base_is_read_from_its_commit(repository: Path) -> None:
    weights = '<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(weights)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    onnx.save(model, "e.onnx", save_as_external_data=True, location="e.data", size_threshold=0)
    commit(repository, "external")
    assert gate("e.onnx").stdout == "e.onnx: no difference\n"
    for place in (repository / "absolute.data", "../outside.data"):
        for entry in (strange := onnx.load("e.onnx", load_external_data=False)).graph.initializer[0].external_data:
            entry.value = str(place) if entry.key == "location" else entry.value
        Path("s.onnx").write_bytes(strange.SerializeToString())
        commit(repository, "strange")
        assert gate("s.onnx").exit_code in (0, 2)
        assert not Path("absolute.data").exists()
        assert not Path("../outside.data").exists()


def accepted(repository: Path) -> str:
    """Raise the model, accept the change, and return the text of the acceptance."""
    write(repository / "models" / "m.onnx", FLOAT32)
    assert gate("models/m.onnx").exit_code == 1
    done = gate("models/m.onnx", "--accept")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "  accepted  3 raised (m.onnx.accepted.json)\n" in done.stdout
    return Path("models/m.onnx.accepted.json").read_text("utf-8")


def test_an_accepted_change_passes_until_the_model_changes_further(repository: Path) -> None:
    text = accepted(repository)
    assert json.loads(text)["differences"] == "3 raised"
    done = gate("models/m.onnx")
    assert done.exit_code == 0
    assert "  accepted  3 raised (m.onnx.accepted.json)\n" in done.stdout
    write(repository / "models" / "m.onnx", FLOAT32.replace("Relu", "Tanh"))
    assert gate("models/m.onnx").exit_code == 1


def test_a_failure_names_the_command_that_accepts_it(repository: Path) -> None:
    write(repository / "models" / "m.onnx", FLOAT32)
    done = gate("models/m.onnx", "--expect", "io = float16")
    command = "amp-rewrite gate --accept --expect 'io = float16' -- models/m.onnx"
    message = f"if this change is intended, run {command} and commit models/m.onnx.accepted.json\n"
    assert done.exit_code == 1
    assert done.stdout.endswith(message)
    words = shlex.split(command)[2:]
    assert gate(*words).exit_code == 0
    assert gate(*(word for word in words if word != "--accept")).exit_code == 0
    assert gate("models/m.onnx", "--expect", "casts >= 1").exit_code == 1, "another expectation was not accepted"


def test_a_merged_acceptance_covers_no_later_change_and_can_be_renewed(repository: Path) -> None:
    first = accepted(repository)
    commit(repository, "raised")
    assert "accepted" not in gate("models/m.onnx").stdout
    write(repository / "models" / "m.onnx", FLOAT16)
    commit(repository, "lowered")
    write(repository / "models" / "m.onnx", FLOAT32)
    assert gate("models/m.onnx").exit_code == 1
    assert accepted(repository) != first
    assert gate("models/m.onnx").exit_code == 0
    assert gate("models/m.onnx", "--base", "HEAD^").exit_code == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"differences": 1}', "half"])
def test_a_broken_acceptance_is_named_with_a_remedy(repository: Path, content: str) -> None:
    write(repository / "models" / "m.onnx", FLOAT32)
    Path("models/m.onnx.accepted.json").write_text(content, "utf-8")
    for more in ((), ("--accept",)):
        done = gate("models/m.onnx", *more)
        assert done.exit_code == 2
        assert "m.onnx.accepted.json" in done.stderr
        assert "delete it, and run `amp-rewrite gate --accept` again" in done.stderr


def script(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the action, with this `amp-rewrite` on the path."""
    programs = repository.parent / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "amp-rewrite").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m amp_rewrite "$@"\n')
    (programs / "amp-rewrite").chmod(0o755)
    known = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(repository)}
    command = ["bash", str(ROOT / "ci" / "precision.sh")]
    return subprocess.run(command, cwd=repository, env=known | environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_of_the_action_checks_tracked_models_against_the_base(repository: Path) -> None:
    write(repository / "models" / "m.onnx", FLOAT32)
    commit(repository, "raised")
    more = {"PAGES": "pages", "GITHUB_ACTIONS": "true"}
    done = script(repository, BASE="HEAD^", **more)
    assert done.returncode == 1, done.stderr
    assert "::error" in done.stdout
    assert Path("pages/models_m.onnx.html").is_file()
    done = script(repository, BASE="HEAD", EXPECT="io = float16\n\nfloat32 <= 0")
    assert done.returncode == 1
    assert done.stdout.count("failed") == 2
    done = script(repository, MODELS="*.none")
    assert (done.returncode, done.stdout) == (0, "no tracked file matches *.none\n")


def test_the_hook_and_the_action_pass_their_arguments_to_the_command() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    matched, others = ["net.onnx", "a/b.onnx", "net.onnx.json"], ["net.json", "net.onnx.py"]
    assert [name for name in matched + others if re.search(hook["files"], name)] == matched
    assert hook["entry"] == "amp-rewrite gate"
    command = program.get_command(None, "gate")
    assert command is not None
    names = {name for param in command.params for name in param.opts}
    assert set(hook["args"][::2]) <= names
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    text = (ROOT / "action.yml").read_text("utf-8")
    assert all(f"inputs.{name} " in text or f"inputs.{name}\n" in text for name in action["inputs"])
    steps = {step.get("name", step.get("uses")): step for step in action["runs"]["steps"]}
    read = set(re.findall(r"\$\{?([A-Z_]+)", (ROOT / "ci" / "precision.sh").read_text("utf-8")))
    assert steps["Compare"]["env"].keys() <= read
    assert "$GITHUB_ACTION_PATH" in steps["Install"]["run"]
    template = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text("utf-8"))[".amp-rewrite-precision"]
    assert {"MODELS", "FAIL_ON", "EXPECT", "PAGES"} <= template["variables"].keys() & read
