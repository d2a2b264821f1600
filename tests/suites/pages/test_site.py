"""The documentation site: every page is listed, links work, and faults in built pages are noticed."""

from pathlib import Path

import pytest

from support.paths import ROOT, imported

site = imported("build_site", ROOT / "tools")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a repository with two pages; the first lists the second."""
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "STAGE", tmp_path / "build" / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "p"\ndescription = "d"\n')
    (tmp_path / "docs" / "README.md").write_text(
        "# Docs\n\n## Pages\n\n- [One](one.md): its words,\n  on [two](one.md)\n"
    )
    (tmp_path / "docs" / "one.md").write_text("# One\n\n## Part one\n")
    return tmp_path


def test_every_page_of_this_project_is_listed_and_every_link_leads_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "STAGE", tmp_path)
    sections = site.stage()
    listed = [page for pages in sections.values() for page in pages]
    assert {page.path for page in listed if page.children} >= {"rules/README.md", "failures/README.md"}
    text = site.llms(sections)
    assert all(f"]({page.path})" in text and page.words for page in listed)
    assert "<!-- setup" not in (tmp_path / "how-to" / "repair.md").read_text("utf-8")


def test_a_staged_page_links_only_to_other_pages(folder: Path) -> None:
    (folder / "docs" / "one.md").write_text(
        "# One\n\n<!-- not run: no GPU -->\n[a](../code.py) `[b](c)` [d](README.md#pages) [e](#one) [f](https://g.h)\n\n"
        "| `x\\|y` |\n|---|\n\n```\n[i](j)\n```\n"
    )
    assert {head: [page.title for page in pages] for head, pages in site.stage().items()} == {"Pages": ["One"]}
    assert (folder / "build" / "docs" / "one.md").read_text("utf-8") == (
        "# One\n\n*Not run for this page: no GPU.*\n\n"
        "a (`code.py`) `[b](c)` [d](README.md#pages) [e](#one) [f](https://g.h)\n\n"
        "| `x|y` |\n|---|\n\n```\n[i](j)\n```\n"
    )
    assert (folder / "build" / "docs" / ".nav.md").read_text("utf-8").endswith("- Pages\n    - [One](one.md)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# One\n\n[x](two.md)\n", "links to two.md, which does not exist"),
        ("# One\n\n[x](../../outside.md)\n", "links to ../../outside.md, which does not exist"),
        ("# One\n\n![x](pictures/x.svg)\n", "links to pictures/x.svg, which does not exist"),
        ("# One\n\n[x](README.md#page)\n", "links to README.md#page, which has no such heading"),
        ("# One\n\n## A\n\n## A\n", "has the heading 'A' twice, so that links to it are ambiguous"),
        ("# One\n\n# Two\n", "has several titles: One, Two"),
        ("# One\n\nSee [the page][nowhere].\n", "refers to [nowhere], which it does not define"),
        ("# One\n\n```console\n$ x\n", "has a block ``` without an end"),
        ("", "is empty"),
        ("# One\n\n<two.md>\n", "names <two.md>, which is not a link; write [words](page.md)"),
        ("# One\n\n\udcff\n", "is not UTF-8: invalid start byte"),
    ],
)
def test_a_page_that_renders_differently_is_an_error(folder: Path, text: str, message: str) -> None:
    (folder / "docs" / "one.md").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(site.SiteError) as caught:
        site.stage()
    assert str(caught.value) == f"docs/one.md {message}"


def test_an_unlisted_page_is_an_error(folder: Path) -> None:
    (folder / "docs" / "two.md").write_text("# Two\n")
    with pytest.raises(site.SiteError, match=r"^docs/README.md does not list these pages: two.md$"):
        site.stage()
    (folder / "docs" / "README.md").write_text("## Pages\n\n- [One](one.md)\n- [Two](two.md)\n- [Again](one.md)\n")
    with pytest.raises(site.SiteError, match=r"^docs/README.md lists these pages twice: one.md$"):
        site.stage()


def test_faults_in_a_built_site_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="#top"><a href="#no"><a href="/base/a.html"><a href="b.html"><a href="https://x.y">'
        '<img src="p.png"><img src="data:image/png;base64,"><script src="https://cdn.x/y.js"></script>'
        '<link rel="canonical" href="https://x.y/a.html"><link rel="stylesheet" href="//fonts.x/y.css">'
    )
    assert site.faults(tmp_path, "/base/") == [
        "a.html: the file p.png is missing",
        "a.html: loads https://cdn.x/y.js from another site",
        "a.html: loads //fonts.x/y.css from another site",
        "a.html: the link #no has a missing anchor",
        "a.html: the link b.html is broken",
    ]
