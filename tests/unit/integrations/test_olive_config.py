"""`amp-rewrite olive-config`, beside an Olive that is only a configuration; `make integrations` runs the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from amp_rewrite.integrations import olive_config
from support.paths import ROOT


def olive(folder: Path, monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    (folder / "olive").mkdir()
    (folder / "olive" / "__init__.py").write_text("raise AssertionError('it is slow to import')", "utf-8")
    (folder / "olive" / "olive_config.json").write_text(json.dumps(config), "utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_the_configuration_has_the_passes_of_olive_and_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {
        "passes": {"Peephole": {"module_path": "olive.x.Peephole"}},
        "extra_dependencies": {"cpu": ["onnxruntime"]},
    }
    olive(tmp_path, monkeypatch, theirs)
    done = CliRunner().invoke(program, ["olive-config", "-o", str(tmp_path / "made" / "package.json")])
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "made" / "package.json").read_text("utf-8"))
    assert made["extra_dependencies"] == theirs["extra_dependencies"]
    assert made["passes"] == {**theirs["passes"], "AmpRewrite": olive_config.pass_entry()}


def test_the_entry_names_the_class_of_the_pass() -> None:
    entry = json.loads(CliRunner().invoke(program, ["olive-config", "--entry"]).output)
    assert entry == {"AmpRewrite": olive_config.pass_entry()}
    module, _, name = entry["AmpRewrite"]["module_path"].rpartition(".")
    assert f"\nclass {name}(Pass):" in (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")


def test_without_olive_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(olive_config, "find_spec", lambda name: None)
    done = CliRunner().invoke(program, ["olive-config"])
    assert done.exit_code == 2
    assert "Olive is not installed here" in done.output
    assert "--entry" in done.output


def test_an_olive_of_another_form_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    olive(tmp_path, monkeypatch, {"steps": []})
    done = CliRunner().invoke(program, ["olive-config"])
    assert done.exit_code == 2
    assert "olive_config.json has no passes" in done.output
