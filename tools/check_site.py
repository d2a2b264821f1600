"""Check a built site for broken links, anchors and images: `python tools/check_site.py FOLDER [BASE]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"link": "href", **dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src")}
"""Elements loaded by browsers, with the attribute for the address."""
NOT_LOADED = {"canonical", "alternate", "next", "prev", "edit"}
"""Relations of a <link> not loaded by browsers."""


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
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        loaded = attributes.get(LOADED.get(tag, ""), "")
        if loaded and not set(attributes.get("rel", "").split()) & NOT_LOADED:
            self.fetched.append(loaded)


def read(path: Path) -> Page:
    """Return the anchors and links of a page."""
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def faults(site: Path, base: str = "/") -> list[str]:
    """Return a line for each broken link or anchor, each missing file, and each file loaded from another site.

    `base`: the path where the site is served, the prefix of links from its root.
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
            yield f"loads {at} from another site"
        elif not at.startswith("data:") and not target(path, at).is_file():
            yield f"the file {at} is missing"
    for at in dict.fromkeys(pages[path].links):
        parts = urlsplit(at)
        if parts.scheme or parts.netloc:
            continue
        end = target(path, at)
        if not end.is_file():
            yield f"the link {at} is broken"
        elif parts.fragment and end in pages and unquote(parts.fragment) not in pages[end].anchors:
            yield f"the link {at} has a missing anchor"


def main() -> None:
    """Print the faults of a site, and exit with 1 if there are any."""
    found = faults(Path(sys.argv[1]).resolve(), *sys.argv[2:3])
    print("\n".join(found) or "no faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
