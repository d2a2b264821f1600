"""Commands and Python in docs/: each page runs, and its output is compared with the page."""

import re
from pathlib import Path

import pytest

from support.paths import ROOT, imported

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(?:console|python)$", re.MULTILINE)


pages = imported("run_pages", ROOT / "tools")
SHOWN = [page for page in pages.pages() if FENCE.search(page.read_text("utf-8"))]


def test_the_tutorials_run_from_start_to_end() -> None:
    assert len(SHOWN) > 20
    for page in (DOCS / "tutorial").glob("*.md"):
        assert not [block for block in pages.blocks(page.read_text("utf-8")) if block.unrun]


def test_every_block_with_a_command_is_run() -> None:
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    command = re.compile(r"^\s*(\$ |amp-rewrite |python -m |pip |make )", re.MULTILINE)
    shown = [(page.name, *block) for page in pages.pages() for block in fence.findall(page.read_text("utf-8"))]
    assert [page for page, language, text in shown if language != "console" and command.search(text)] == []
    assert {language for _, language, _ in shown} <= {"", "console", "python", "toml", "yaml", "js", "json"}


def test_a_mark_applies_only_to_the_next_block() -> None:
    text = "<!-- not run: a -->\n```console\n$ x\n```\n\n<!-- needs: b -->\nwords\n```python\ny\n```\n```text\nz\n```\n"
    first, second = pages.blocks(text)
    assert (first.kind, first.unrun, second.kind, second.unrun, second.needs) == ("console", "a", "python", "", "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```console\n$ amp-rewrite explain Softmax\nnothing\n```\n", "1: "),
        ("```console\n$ amp-rewrite missing.onnx\n```\n", "1: "),
        ("```console\n$ python missing.py | cat\n```\n", "1: "),
        ("```python\nassert False\n```\n", "1: "),
        ("<!-- setup\nrm -rf\n-->\n", "1: "),
        ("```bash\n$ x\n```\n", "a block of 'bash' does not run"),
        ("- a\n\n  ```console\n  $ x\n  ```\n", "at the margin runs"),
        ("~~~console\n$ x\n~~~\n", "at the margin runs"),
        ("```console\n$ x\n", "the block has no end"),
        ("```console\namp-rewrite x\n```\n", "begins with '$ '"),
        ("<!-- not run:  -->\n```console\n$ x\n```\n", "gives no reason"),
        ("```console\n$ python -c 'import nope' | cat\n```\n", "exit code 1"),
        ("```python\nimport sys; sys.exit()\n```\n", "SystemExit"),
        ("```python\nwhile True: pass\n```\n", "did not end within 0.5 s"),
        ("```console\n$ sleep 60 | cat\n```\n", "did not end within 0.5 s"),
        ("```python\nfrom urllib.request import urlopen; urlopen('https://x.invalid')\n```\n", "asks x.invalid"),
        ("```python\nimport socket; socket.create_connection(('192.0.2.1', 9))\n```\n", "asks 192.0.2.1"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_a_page_with_wrong_or_fake_output_is_noticed(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LIMIT", 0.5 if "within" in fault else 60)
    page = tmp_path / "page.md"
    page.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(pages.PageError, match=f"^page.md:.*{re.escape(fault)}"):
        pages.run(page)


def test_a_different_output_is_noticed() -> None:
    assert pages.matches("a\n…\nd…\n", "a\nb\nc\nde\n")
    assert not pages.matches("a\n…\nd\n", "a\nb\nc\nde\n")
    assert not pages.matches("a\n", "a\nb\n")


def test_pictures_show_the_output_of_commands() -> None:
    """Except for the fingerprint of the lists, which each new entry changes; `make pictures` draws them."""
    module = imported("build_pictures", ROOT / "tools")
    for name in module.STORIES:
        shown = (DOCS / "pictures" / f"{name}.svg").read_text("utf-8")
        assert unmarked(shown) == unmarked(module.picture(name))


def unmarked(text: str) -> str:
    return re.sub(r"(?<=\()[0-9a-f]{12}(?=\))|(?<=yaml:)\d+", "", text)
