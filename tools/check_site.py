"""Check a built site: `python tools/check_site.py FOLDER [BASE]` names broken links, anchors and images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"link": "href", **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")}
"""Elements that a browser loads by itself, by the attribute that says from where."""
KEPT = {"canonical", "alternate", "next", "prev", "edit"}
"""Relations of a <link> that nothing is loaded for."""


@dataclass
class Page(HTMLParser):
    """What a page of HTML names and links to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down ids and addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = given.get(FETCHED.get(tag, ""), "")
        if loaded and not set(given.get("rel", "").split()) & KEPT:
            self.fetched.append(loaded)


def read(path: Path) -> Page:
    """Return the facts of a page."""
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def faults(site: Path, base: str = "/") -> list[str]:
    """Return a line for each link, anchor and file that a page names and the site lacks, and for each foreign file.

    `base`: the path at which the site is served, with which links from its root begin.
    """
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}

    def target(path: Path, at: str) -> Path:
        """Return the file that an address names: of a folder its index."""
        name = unquote(urlsplit(at).path)
        rooted = site / name.removeprefix(base).lstrip("/") if name.startswith("/") else path.parent / name
        found = (rooted if name else path).resolve()
        return found / "index.html" if found.is_dir() else found

    return [f"{path.relative_to(site)}: {fault}" for path in pages for fault in _of(path, pages, target)]


def _of(path: Path, pages: dict[Path, Page], target: Callable[[Path, str], Path]) -> Iterator[str]:
    for at in pages[path].fetched:
        if urlsplit(at).scheme not in ("", "data") or at.startswith("//"):
            yield f"loads {at} from elsewhere"
        elif not at.startswith("data:") and not target(path, at).is_file():
            yield f"the file {at} is not there"
    for at in dict.fromkeys(pages[path].links):
        parts = urlsplit(at)
        if parts.scheme or parts.netloc:
            continue
        end = target(path, at)
        if not end.is_file():
            yield f"the link {at} leads nowhere"
        elif parts.fragment and end in pages and unquote(parts.fragment) not in pages[end].anchors:
            yield f"the link {at} has an anchor that is not there"


def main() -> None:
    """Print the faults of a site, and exit with 1 if there are any."""
    found = faults(Path(sys.argv[1]).resolve(), *sys.argv[2:3])
    print("\n".join(found) or "no fault")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
