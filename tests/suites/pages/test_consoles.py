"""Commands and Python shown in docs/: each page runs, and its output is compared with what it shows."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from support.paths import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(?:console|python)$", re.MULTILINE)


def tool(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return import_module(name)


pages = tool("run_pages")
SHOWN = [page for page in pages.pages() if FENCE.search(page.read_text("utf-8"))]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_a_page_does_what_it_shows(page: Path) -> None:
    ran, unrun = pages.run(page, light=True)
    assert ran + unrun == len(FENCE.findall(page.read_text("utf-8")))


def test_the_tutorials_run_whole() -> None:
    assert len(SHOWN) > 20
    for page in (DOCS / "tutorial").glob("*.md"):
        assert not [block for block in pages.blocks(page.read_text("utf-8")) if block.unrun]


def test_no_command_is_shown_in_a_block_that_nothing_runs() -> None:
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    command = re.compile(r"^\s*(\$ |amp-rewrite |python -m |pip |make )", re.MULTILINE)
    shown = [(page.name, *block) for page in pages.pages() for block in fence.findall(page.read_text("utf-8"))]
    assert [page for page, language, text in shown if language != "console" and command.search(text)] == []
    assert {language for _, language, _ in shown} <= {"", "console", "python", "toml", "yaml", "js"}


def test_a_mark_is_that_of_the_next_block_alone() -> None:
    text = "<!-- not run: a -->\n```console\n$ x\n```\n\n<!-- needs: b -->\nwords\n```python\ny\n```\n```text\nz\n```\n"
    first, second = pages.blocks(text)
    assert (first.kind, first.unrun, second.kind, second.unrun, second.needs) == ("console", "a", "python", "", "")


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ amp-rewrite lists Softmax\nnothing\n```\n",
        "```console\n$ amp-rewrite missing.onnx\n```\n",
        "```console\n$ python missing.py | cat\n```\n",
        "```python\nassert False\n```\n",
        "<!-- setup\nrm -rf\n-->\n",
    ],
    ids=["output", "exit code", "pipe", "python", "setup"],
)
def test_a_page_that_does_not_do_what_it_shows_is_seen(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    with pytest.raises(pages.PageError, match=r"^page\.md:1: "):
        pages.run(page)


def test_an_output_that_differs_is_seen() -> None:
    assert pages.matches("a\n…\nd…\n", "a\nb\nc\nde\n")
    assert not pages.matches("a\n…\nd\n", "a\nb\nc\nde\n")
    assert not pages.matches("a\n", "a\nb\n")


def test_pictures_show_what_commands_print() -> None:
    """But for the fingerprint of the lists, which each new entry changes; `make pictures` draws them."""
    module = tool("build_pictures")
    for name in module.STORIES:
        shown = (DOCS / "pictures" / f"{name}.svg").read_text("utf-8")
        assert unmarked(shown) == unmarked(module.picture(name))


def unmarked(text: str) -> str:
    return re.sub(r"(?<=\()[0-9a-f]{12}(?=\))|(?<=yaml:)\d+", "", text)
