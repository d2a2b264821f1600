"""Pages of convert and report: what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unit.cli.test_cli import files, folder, model, run

__all__ = ["folder", "model"]


def drawn(page: str) -> dict[str, object]:
    """Everything that a page holds as data."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', Path(page).read_text("utf-8"))
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_a_report_with_the_suffix_of_a_page_is_one(model: str) -> None:
    done = run(model, "--json", "--report", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\nwrote net.float16.onnx\n")
    assert set(drawn("net.html")) == {"summary", "graph"}
    assert json.loads(done.stdout)["model"]["to"] == "float16"


def test_an_inventory_and_a_report_in_a_file_are_drawn(model: str) -> None:
    done = run("report", model, "-o", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\n")
    assert drawn("net.html")["summary"]["totals"]["ops"] > 0  # type: ignore[index]

    run(model, "-q", "--dry-run", "--report", "report.json")
    assert run("report", "report.json", "-o", "report.html").exit_code == 0
    assert drawn("report.html")["graph"]["rows"] > 0  # type: ignore[index]


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
        assert done.exit_code == 0 and drawn(file)
    else:
        assert (done.exit_code, done.stderr) == (2, f"error: {fact}\n")
        assert files() == before
    assert Path("old.html").read_text() == "old"
