"""Check a built site for broken links, anchors and images: `python tools/check_site.py FOLDER [BASE]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"link": "href", **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")}
"""The elements that a browser loads by itself, with the attribute for the address."""
KEPT = {"canonical", "alternate", "next", "prev", "edit"}
"""The relations of a <link> for which nothing is loaded."""


@dataclass
class Page(HTMLParser):
    """The anchors and links of an HTML page."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record ids and addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = given.get(FETCHED.get(tag, ""), "")
        if loaded and not set(given.get("rel", "").split()) & KEPT:
            self.fetched.append(loaded)


def read(path: Path) -> Page:
    """Return the anchors and links of a page."""
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def faults(site: Path, base: str = "/") -> list[str]:
    """Return a line for each link, anchor and file that a page names and the site lacks, and for each foreign file.

    `base`: the path at which the site is served, with which links from its root begin.
    """
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}

    def target(path: Path, at: str) -> Path:
        """Return the file for an address; for a folder, its index page."""
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
    """Print the faults of a site; exit with 1 if there are any."""
    found = faults(Path(sys.argv[1]).resolve(), *sys.argv[2:3])
    print("\n".join(found) or "no fault")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
