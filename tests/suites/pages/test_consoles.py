"""Commands shown in tutorials: each is run, and its output compared with what the page shows."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from support.paths import ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))


def shown(page: Path) -> list[tuple[str, str]]:
    """The commands of a page, each with the output that stands below it."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)


def matches(expected: str, printed: str) -> bool:
    """True if an output is as shown: a line of "…" stands for any lines, one at the end of a line for its rest."""
    spelled = [
        "(?:.*\n)*?" if line == "…" else f"{re.escape(line.removesuffix('…'))}{'.*' if line.endswith('…') else ''}\n"
        for line in expected.splitlines()
    ]
    return not expected or re.fullmatch("".join(spelled), printed.rstrip("\n") + "\n") is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_print_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for command, expected in shown(page):
        words = shlex.split(command)
        if words[0] == "cp":
            for name in words[1:-1]:
                shutil.copy(ROOT / name, words[-1])
        elif words[0] == "amp-rewrite":
            outcome = CliRunner().invoke(program, words[1:])
            assert outcome.exit_code in (0, 1), outcome.output
            assert matches(expected, outcome.stdout), outcome.stdout
            ran += 1
        else:
            assert words[:2] == ["python", "-c"] and not expected
            exec(compile(words[2], page.name, "exec"), {})
    assert ran > 1


def test_pictures_show_what_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the fingerprint of the lists, which each new entry changes; `make pictures` draws them."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = import_module("build_pictures")
    for name in module.STORIES:
        shown = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text("utf-8")
        assert unmarked(shown) == unmarked(module.picture(name))


def unmarked(text: str) -> str:
    return re.sub(r"(?<=\()[0-9a-f]{12}(?=\))|(?<=yaml:)\d+", "", text)


def test_an_output_that_differs_is_seen() -> None:
    assert matches("a\n…\nd…\n", "a\nb\nc\nde\n")
    assert not matches("a\n…\nd\n", "a\nb\nc\nde\n")
    assert not matches("a\n", "a\nb\n")
