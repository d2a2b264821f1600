"""Run commands, draw their output as docs/pictures/*.svg, and capture an HTML page as docs/pictures/page.png.

    make pictures

The page needs Chromium and Playwright (`pip install -e '.[browser]'`).

Each picture shows a series of commands in a temporary folder, on a terminal with 100 columns. Long output is cut to its
first and last lines, with "…" between them.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 100
WINDOW = {"width": 1400, "height": 1800}
DATA = "--data batches.npz --tolerance 1e-2"


@dataclass(frozen=True, slots=True)
class Scene:
    """A command, and how many of its first and last lines of output to show; all by default."""

    words: str
    first: int = 1000
    last: int = 0


STORIES = {
    "terminal": (
        Scene("model.onnx -o fp16.onnx --no-check", 9),
        Scene(f"verify model.onnx fp16.onnx {DATA}", 0, 1),
        Scene("locate model.onnx fp16.onnx --data batches.npz --top 1", 0, 7),
        Scene(f"model.onnx -o mended.onnx {DATA}", 0, 1),
        Scene("explain model.onnx block1_down --data batches.npz --set shift=none"),
    )
}
"""The commands of each picture, without `amp-rewrite`."""

THEME = TerminalTheme(
    (24, 26, 31),
    (215, 218, 224),
    [
        *((60, 64, 72), (224, 108, 117), (152, 195, 121), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 182, 194), (171, 178, 191)),
    ],
)
FRAME = """<svg class="terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""The SVG template of rich, without fonts from the network."""


def ran(words: str, folder: Path) -> str:
    """Return the colored stdout of a command."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AMP_REWRITE_")}
    done = subprocess.run(
        [sys.executable, "-m", "amp_rewrite", *words.split()],
        cwd=folder,
        env=environment | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"amp-rewrite {words}: {done.stderr}")
    return done.stdout


def cut(scene: Scene, output: str) -> list[str]:
    """Return the output's lines to show."""
    lines = output.rstrip("\n").split("\n")
    if len(lines) <= scene.first + scene.last:
        return lines
    tail = lines[len(lines) - scene.last :]
    return [*lines[: scene.first], *(["…"] if scene.first else []), *tail]


def picture(name: str) -> str:
    """Return the SVG for a series of commands."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        shutil.copytree(ROOT / "examples" / "outlier", folder, dirs_exist_ok=True)
        for number, scene in enumerate(STORIES[name]):
            gap = "\n" if number else ""
            console.print(Text(f"{gap}$ amp-rewrite {scene.words}", style="bold"), soft_wrap=True)
            console.print(Text.from_ansi("\n".join(cut(scene, ran(scene.words, folder)))))
    return console.export_svg(title="amp-rewrite", theme=THEME, code_format=FRAME, unique_id=name)


def photograph(target: Path) -> None:
    """Capture a report page with a selected op, in a desktop-sized browser window."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        folder = Path(directory)
        shutil.copytree(ROOT / "examples" / "outlier", folder, dirs_exist_ok=True)
        ran(f"model.onnx -o mended.onnx {DATA} --report page.html", folder)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=WINDOW, color_scheme="light")
        page.goto((folder / "page.html").as_uri())
        search = page.get_by_placeholder("name or type")
        search.fill("block0_variance")
        search.press("Enter")
        page.wait_for_timeout(500)
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=target)
        browser.close()


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in STORIES:
        (PICTURES / f"{name}.svg").write_text(picture(name), "utf-8")
    photograph(PICTURES / "page.png")


if __name__ == "__main__":
    main()
