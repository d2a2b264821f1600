"""Pages of convert and report: what is written, and what is refused."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from unit.cli.test_cli import files, folder, model, run

__all__ = ["folder", "model"]


def text_of(page: str) -> str:
    """The text of a page."""
    html = Path(page).read_text("utf-8")
    assert html.startswith("<!doctype html>")
    return unescape(re.sub("<[^>]*>", "", html.partition("<main")[2].partition("</main>")[0]))


def test_a_page_says_the_next_command_as_the_terminal_does(model: str) -> None:
    Path("in").mkdir()
    Path(model).rename("in/net.onnx")
    done = run("in/net.onnx", "-o", "low.onnx", "--report", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\nwrote low.onnx\n")
    command = done.stdout.rpartition("next: ")[2].rstrip("\n")
    assert command.startswith("amp-rewrite in/net.onnx -o low.onnx --report net.html --data ")
    assert f"next: {command}" in text_of("net.html")


def test_an_inventory_and_a_report_in_a_file_are_drawn(model: str) -> None:
    done = run("report", model, "-o", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\n")
    assert "as it is." in text_of("net.html")

    run(model, "-q", "--dry-run", "--report", "report.json")
    assert run("report", "report.json", "-o", "report.html").exit_code == 0
    assert "in float16." in text_of("report.html")


@pytest.mark.parametrize(("command", "option"), [("convert", "--report"), ("report", "-o")])
@pytest.mark.parametrize(
    ("file", "fact"),
    [
        ("old.html", "old.html exists; name another report, or replace it with --overwrite"),
        (
            "net.onnx",
            "cannot write a report to net.onnx: the suffix tells the format; name a .json or .html file",
        ),
        ("away/net.html", None),
    ],
)
def test_a_page_is_refused_before_the_work(model: str, command: str, option: str, file: str, fact: str | None) -> None:
    Path("old.html").write_text("old")
    before = files()

    done = run(command, model, option, file)

    if fact is None:  # folders of outputs are made
        assert done.exit_code == 0 and text_of(file)
    else:
        assert (done.exit_code, done.stderr) == (2, f"error: {fact}\n")
        assert files() == before
    assert Path("old.html").read_text() == "old"
