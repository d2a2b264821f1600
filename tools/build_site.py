"""Build the documentation site: `make docs` writes build/site, `make site` serves it and rebuilds it after changes.

Zensical reads the stage, build/docs: a copy of docs/ and a few other pages, with links to other files in the repository
replaced by their text. docs/README.md lists the pages for the navigation and llms.txt. A page that neither it nor the
README.md of a listed folder contains is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from check_site import faults

ROOT = Path(__file__).resolve().parent.parent
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
NAVIGATION = ".nav.md"
"""The navigation file in the stage, as in zensical.toml; a name with a leading dot is not a page."""
EXTRA_PAGES = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SKILL.md"),
    *("benchmarks/README.md", "benchmarks/results/*.md"),
)
"""The site's pages outside docs/."""
LINK = re.compile(
    r"(?P<code>(?P<tick>`+)[^`].*?(?P=tick)(?!`))|(?P<text>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<to>[^)\s]+)\)"
)
ENTRY = re.compile(r"- \[(?P<title>[^\]]+)\]\((?P<path>[^)#]+\.md)\)(?P<words>.*(?:\n  .*)*)")
NOT_RUN = re.compile(r"<!-- not run: (.*?) -->")
SETUP = re.compile(r"<!-- setup\n.*?-->\n*", re.DOTALL)


class SiteError(Exception):
    """An error in a page; the message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A page in the list of pages: its title, its path in the stage, and a description."""

    title: str
    path: str
    words: str = ""
    children: tuple[Entry, ...] = ()


def sources() -> dict[str, Path]:
    """Return the source files by their paths in the stage."""
    own = {path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*") if path.is_file()}
    extra = [path for pattern in EXTRA_PAGES for path in sorted(ROOT.glob(pattern))]
    return own | {path.relative_to(ROOT).as_posix(): path for path in extra}


def staged(source: Path, files: dict[str, Path]) -> str:
    """Return a page's text with links that are valid in the stage; raise SiteError for a broken link."""
    places = {path: name for name, path in files.items()}
    try:
        text = source.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SiteError(f"{source.relative_to(ROOT)} is not UTF-8: {error.reason}") from error
    if fault := misread(text):
        raise SiteError(f"{source.relative_to(ROOT)} {fault}")
    text = NOT_RUN.sub(r"*Not run for this page: \1.*\n", SETUP.sub("", text))
    if not re.search("^# ", text, re.MULTILINE):
        text = f"# {source.stem.replace('_', ' ').capitalize()}\n\n{text}"
    return unescaped(mapped(text, lambda words, to: moved(source, words, to, places)))


def misread(text: str) -> str:
    """Return a fault in a page's display that does not fail the build; "" if there is none."""
    fence, lines = "", []
    for line in text.splitlines():
        mark = re.match(r"(?:[ >]*)(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip(" >`~"):
            fence = ""
        elif not fence:
            lines.append(line)
    if fence:
        return f"has a block {fence} without an end"
    prose = re.sub("<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)
    if not prose.strip():
        return "is empty"
    heads = re.findall(r"^(#+) +(.+?)\s*$", prose, re.MULTILINE)
    titles = [head for level, head in heads if level == "#"]
    if len(titles) > 1:
        return f"has several titles: {', '.join(titles)}"
    words = [head for _, head in heads]  # headings that differ only in case are names in code
    if twice := next((head for head in words if words.count(head) > 1), None):
        return f"has the heading {twice!r} twice, so that links to it are ambiguous"
    bare_prose = re.sub(r"(`+)[^`].*?\1", "", prose, flags=re.DOTALL)
    if bare := re.search(r"<[\w./-]+\.md(?:#[\w-]*)?>", bare_prose):
        return f"names {bare[0]}, which is not a link; write [words](page.md)"
    defined = {label.lower() for label in re.findall(r"^ {0,3}\[([^\]]+)\]:", bare_prose, re.MULTILINE)}
    for shown, label in re.findall(r"(?<![\\\]])\[([^\[\]]+)\]\[([^\[\]]*)\]", bare_prose):
        if (label or shown).lower() not in defined:
            return f"refers to [{label or shown}], which it does not define"
    return ""


def unescaped(text: str) -> str:
    """Unescape pipes in code in tables for Zensical; GitHub needs a backslash."""

    def bare(match: re.Match[str]) -> str:
        return match[0].replace("\\|", "|") if match["code"] else match[0]

    return re.sub(r"^\|.*$", lambda row: LINK.sub(bare, row[0]), text, flags=re.MULTILINE)


def mapped(text: str, change: Callable[[str, str], str]) -> str:
    """Replace each link outside code with the result of `change` for its bracketed text and target."""

    def changed(match: re.Match[str]) -> str:
        return match[0] if match["code"] else change(match["text"], match["to"])

    return "".join(part if fenced else LINK.sub(changed, part) for fenced, part in parts(text))


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """Split a text at fenced blocks; yield True with each block, and False with each other part."""
    for number, part in enumerate(re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)):
        yield number % 2 == 1, part


def moved(source: Path, words: str, to: str, places: dict[Path, str]) -> str:
    """Return a link as valid in the stage; for a file outside the stage, its text and path."""
    if re.match(r"[a-z]+:|#", to):
        return f"{words}({to})"
    name, mark, anchor = to.partition("#")
    target = Path(os.path.normpath(source.parent / name))
    if not target.is_relative_to(ROOT) or not target.exists():
        raise SiteError(f"{source.relative_to(ROOT)} links to {to}, which does not exist")
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8")):
        raise SiteError(f"{source.relative_to(ROOT)} links to {to}, which has no such heading")
    if target in places:
        here = PurePosixPath(places[source]).parent
        return f"{words}({os.path.relpath(places[target], here).replace(os.sep, '/')}{mark}{anchor})"
    path = target.relative_to(ROOT).as_posix()
    return words[1:-1] if target.suffix and target.name in words else f"{words[1:-1]} (`{path}`)"


def anchors(text: str) -> set[str]:
    """Return a page's anchors: GitHub's for its headings, and explicit ones."""
    heads = re.findall(r"^#+ (.+)$", "".join(part for fenced, part in parts(text) if not fenced), re.MULTILINE)
    return {slug(head) for head in heads} | set(re.findall(r'<a (?:name|id)="([^"]+)"', text))


def slug(head: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-")


def navigation(stage: Path) -> dict[str, list[Entry]]:
    """Return the pages by section of docs/README.md; raise SiteError for unlisted pages."""
    sections: dict[str, list[Entry]] = {}
    for section in re.split(r"^## ", (stage / "README.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        sections[head.strip()] = [entry(stage, match) for match in ENTRY.finditer(body)]
    named = ["README.md", *(page.path for pages in sections.values() for top in pages for page in (top, *top.children))]
    if twice := sorted({path for path in named if named.count(path) > 1}):
        raise SiteError(f"docs/README.md lists these pages twice: {', '.join(twice)}")
    staged_pages = {path.relative_to(stage).as_posix() for path in stage.rglob("*.md")} - {NAVIGATION}
    if missing := sorted(staged_pages - set(named)):
        raise SiteError(f"docs/README.md does not list these pages: {', '.join(missing)}")
    return sections


def entry(stage: Path, match: re.Match[str]) -> Entry:
    """Return a listed page; the README.md of a folder gets its listed pages as children."""
    path, words = match["path"], " ".join(match["words"].removeprefix(":").split())
    children = ()
    if PurePosixPath(path).name == "README.md":
        folder = PurePosixPath(path).parent
        links = [found["to"] for found in LINK.finditer((stage / path).read_text("utf-8")) if found["to"]]
        below = [os.path.normpath(folder / to.partition("#")[0]) for to in links if ":" not in to]
        pages = [at for at in dict.fromkeys(below) if at.endswith(".md") and at.startswith(f"{folder}/") and at != path]
        children = tuple(Entry(title(stage / at), at) for at in pages)
    return Entry(match["title"], path, words, children)


def title(page: Path) -> str:
    """Return the first heading of a page as plain text."""
    found = re.search(r"^# (.+)$", page.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SiteError(f"{page.name} has no title")
    return re.sub(r"`|\\(?=[^a-zA-Z0-9\s])", "", found[1])


def summary(sections: dict[str, list[Entry]]) -> str:
    """Return the navigation as a nested list."""
    lines = ["- [Documentation](README.md)"]
    for head, pages in sections.items():
        lines.append(f"- {head}")
        for page in pages:
            if page.children:
                lines += [f"    - {page.title}", f"        - [All]({page.path})"]
                lines += [f"        - [{escaped(child.title)}]({child.path})" for child in page.children]
            else:
                lines.append(f"    - [{escaped(page.title)}]({page.path})")
    return "\n".join(lines) + "\n"


def escaped(words: str) -> str:
    """Return a title as Markdown text."""
    return re.sub(r"([\[\]*_<>\\])", r"\\\1", words)


def llms(sections: dict[str, list[Entry]]) -> str:
    """Return llms.txt, with a description of the project and of each page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [f"# {project['name']}", "", f"> {project['description']}"]
    for head, pages in sections.items():
        lines += ["", f"## {head}", ""]
        for page in pages:
            words = page.words.strip()
            lines.append(f"- [{page.title}]({page.path})" + (f": {words}" if words else ""))
    return "\n".join(lines) + "\n"


def stage() -> dict[str, list[Entry]]:
    """Write build/docs and its navigation, without touching unchanged files, and return the sections."""
    files = sources()
    for path in [path for path in STAGE.rglob("*") if path.is_file()]:
        if path.relative_to(STAGE).as_posix() not in {*files, NAVIGATION}:
            path.unlink()
    for name, path in files.items():
        if path.suffix.lower() in (".md", ".markdown") and path.suffix != ".md":
            raise SiteError(f"{path.relative_to(ROOT)} would not become a page; name it with .md")
        put(name, staged(path, files).encode() if path.suffix == ".md" else path.read_bytes())
    sections = navigation(STAGE)
    put(NAVIGATION, summary(sections).encode())
    return sections


def put(name: str, data: bytes) -> None:
    """Write a file to the stage if it is new or has changed."""
    path = STAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)


_MERGED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def build() -> list[str]:
    """Write build/site, and return its faults."""
    sections = stage()
    shutil.rmtree(SITE, ignore_errors=True)
    done = subprocess.run(zensical("build", "--clean", "--strict"), cwd=ROOT, check=False, text=True, **_MERGED)
    output = done.stdout.partition("Traceback (most recent call last)")[0].rstrip()
    print(output)
    if done.returncode:
        raise SiteError(f"Zensical failed with exit code {done.returncode}; see its output above")
    pages = ["README.md", *(page.path for top in sections.values() for one in top for page in (one, *one.children))]
    for path in pages:
        (SITE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STAGE / path, SITE / path)
    (SITE / "llms.txt").write_text(llms(sections), "utf-8")
    whole = "\n\n".join(f"<!-- {path} -->\n\n{(STAGE / path).read_text('utf-8').strip()}" for path in pages)
    (SITE / "llms-full.txt").write_text(whole + "\n", "utf-8")
    return faults(SITE)


def zensical(*words: str) -> list[str]:
    """Return a Zensical command for the running interpreter."""
    return [sys.executable, "-m", "zensical", *words]


def serve(port: int) -> None:
    """Serve the site, and update the stage when a page changes."""
    stage()
    with subprocess.Popen(zensical("serve", "--dev-addr", f"localhost:{port}"), cwd=ROOT) as server:
        seen = changed = times()
        while server.poll() is None:
            time.sleep(1)
            changed = times()
            if changed != seen:
                seen = changed
                try:
                    stage()
                except SiteError as error:
                    print(f"error: {error}", file=sys.stderr)


def times() -> dict[str, int]:
    """Return the modification times of the source files."""
    return {name: path.stat().st_mtime_ns for name, path in sources().items()}


def main() -> None:
    """Build the site, or serve it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site and follow changes")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    try:
        if options.serve:
            serve(options.port)
            return
        found = build()
    except SiteError as error:
        sys.exit(f"error: {error}")
    for fault in found:
        print(fault, file=sys.stderr)
    if found:
        sys.exit(f"error: the site has {len(found)} fault{'s' * (len(found) > 1)}")
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
