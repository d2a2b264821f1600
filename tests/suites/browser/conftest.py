"""Pages in a headless Chromium: their errors, requests, dialogs and content."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDE, NARROW = 1400, 390
"""Widths of a desktop and of a phone."""


@dataclass
class Visit:
    """An open page with its console errors, requested addresses and dialogs."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    @property
    def quiet(self) -> bool:
        """True if the page reported no error, opened no dialog and requested only itself."""
        return not self.errors and not self.dialogs and len(self.requests) == 1


Visiting = Callable[..., Visit]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium; skip the test without Chromium or Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, tmp_path: Path) -> Iterator[Visiting]:
    """Yield a function that opens a page from a file."""
    contexts = []

    def opened(html: str | Path, *, width: int = WIDE, dark: bool = False) -> Visit:
        path = html if isinstance(html, Path) else tmp_path / f"page_{len(contexts)}.html"
        if not isinstance(html, Path):
            path.write_text(html, encoding="utf-8")
        scheme = "dark" if dark else "light"
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        visit = Visit(context.new_page())
        visit.page.on("console", lambda line: visit.errors.append(line.text) if line.type == "error" else None)
        visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
        visit.page.on("request", lambda request: visit.requests.append(request.url))
        visit.page.on("dialog", lambda dialog: (visit.dialogs.append(dialog.message), dialog.dismiss()))
        visit.page.goto(path.as_uri())
        return visit

    yield opened
    for context in contexts:
        context.close()
