"""The pages in docs/: the Python that they show runs, one page after the other from its first line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.cli.group import COMMANDS
from amp_rewrite.deploy.session import process
from support.paths import ROOT

PAGES = (
    *("how-to/calibration", "concepts/emulation", "how-to/repair", "reference/report", "how-to/session"),
    "tutorial/first_conversion",
)
"""Those with Python for the README's model; the page of training has a test beside those of training."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's model, a batch, a report and a cache of its own in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "state", process.State())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(ROOT / "examples" / "models" / "digits_vit.onnx", tmp_path / "model.onnx")
    np.savez(tmp_path / "batches.npz", image=np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32))
    done = CliRunner().invoke(program, ["model.onnx", "--report", "model.json", "--dry-run"])
    assert done.exit_code == 0, done.output
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is not converted and runs as it is", "ignore:.*opened before the mixed precision")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text("utf-8"), re.S | re.M)
    images = np.load(folder / "batches.npz")["image"]
    names: dict[str, object] = {"amp_rewrite": amp_rewrite, "images": images, "next_images": images}
    for block in shown:
        exec(compile(block, f"{page}.md", "exec"), names)
    assert shown


def command_of(name: str) -> click.Command:
    command = program.get_command(None, name)
    assert command is not None
    return command


def test_no_page_with_python_is_left_out() -> None:
    shown = {
        page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
        if "```python" in page.read_text("utf-8")
    }
    assert shown == {*PAGES, "how-to/training"}


def test_every_link_leads_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
    links = [(page, at) for page in pages for at in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))]
    assert [f"{page.name}: {at}" for page, at in links if not (page.parent / at).exists()] == []
    assert len(links) > 40


def test_the_page_for_those_who_come_from_elsewhere_names_options_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "migrating.md").read_text("utf-8")
    known = {name for option in command_of("convert").params for name in (*option.opts, *option.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert named - known == set()
    assert len(named) > 10


def test_every_option_of_the_command_line_is_named_on_a_page() -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    params = [option for command in map(command_of, COMMANDS) for option in command.params]
    spelled = [(*option.opts, *option.secondary_opts) for option in params if option.opts[0].startswith("-")]
    assert {names for names in spelled if not any(re.search(rf"{name}(?![\w-])", pages) for name in names)} == set()


def test_the_architecture_page_names_only_paths_that_exist() -> None:
    missing, seen = [], 0
    for line in (ROOT / "docs" / "architecture.md").read_text("utf-8").split("\n\n"):
        wing = re.match(r"\*\*`(\w+)`\*\*", line)
        places = [ROOT / "amp_rewrite" / wing[1]] if wing else [ROOT, ROOT / "amp_rewrite"]
        for named in re.findall(r"`([\w./]+(?:\.py|\.json|\.yaml|/))`", line):
            seen += 1
            missing += [] if any((place / named).exists() for place in places) else [named]
    assert (missing, seen > 60) == ([], True)
