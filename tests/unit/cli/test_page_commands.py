"""`--html` of convert and report: what is written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from amp_rewrite.cli import program
from unit.cli.test_cli import files, folder, model, run

__all__ = ["folder", "model"]


def drawn(page: str) -> dict[str, object]:
    """Everything that a page holds as data."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', Path(page).read_text("utf-8"))
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_a_conversion_is_drawn_on_a_page_and_json_holds_what_it_shows(model: str) -> None:
    done = run(model, "--json", "--html", "net.html", "--report", "net.json")

    assert (done.exit_code, done.stderr) == (0, "wrote net.html\nwrote net.float16.onnx\n")
    shown = json.loads(done.stdout)
    assert shown.pop("figures") == drawn("net.html")
    assert shown == json.loads(Path("net.json").read_text("utf-8"))


def test_a_report_with_the_suffix_of_a_page_is_one(model: str) -> None:
    done = run(model, "-q", "--dry-run", "--report", "net.html", "--json")
    assert (done.exit_code, set(drawn("net.html"))) == (0, {"summary", "graph"})
    assert "figures" not in json.loads(done.stdout)


def test_an_inventory_and_a_report_in_a_file_are_drawn(model: str) -> None:
    done = run("report", model, "--html", "net.html")
    assert (done.exit_code, done.stderr) == (0, "wrote net.html\n")
    assert drawn("net.html")["summary"]["work"]["flops"] > 0  # type: ignore[index]

    run(model, "-q", "--dry-run", "--report", "report.json")
    assert run("report", "report.json", "--html", "report.html").exit_code == 0
    assert drawn("report.html")["graph"]["rows"] > 0  # type: ignore[index]


@pytest.mark.parametrize("command", [["convert"], ["report"]])
@pytest.mark.parametrize(
    ("file", "fact"),
    [
        ("old.html", "old.html exists; name another page, or replace it with --overwrite"),
        ("net.onnx", "cannot write a page to net.onnx: browsers know pages by their suffix; name an .html file"),
        ("away/net.html", None),
    ],
)
def test_a_page_is_refused_before_the_work(model: str, command: list[str], file: str, fact: str | None) -> None:
    Path("old.html").write_text("old")
    before = files()

    done = run(*command, model, "--html", file)

    if fact is None:  # folders of outputs are made
        assert done.exit_code == 0 and drawn(file)
    else:
        assert (done.exit_code, done.stderr) == (2, f"error: {fact}\n")
        assert files() == before
    assert Path("old.html").read_text() == "old"


def test_a_page_is_colored_by_errors_that_locate_found(model: str) -> None:
    run("report", model, "--json", "--html", "net.html")
    rows = drawn("net.html")["graph"]["rows"]  # type: ignore[index]
    names = [row["name"] for row in json.loads(run("report", model, "--json").stdout)["rows"]]
    kinds = [row["op"] for row in json.loads(run("report", model, "--json").stdout)["rows"]]
    own = [0.75, 0.25, "nan", *[None] * rows][:rows]
    located = [{"op": name, "kind": kind, "own": e} for name, kind, e in zip(names, kinds, own, strict=True)]
    Path("located.json").write_text(json.dumps({"rows": located}))

    done = run("report", model, "--html", "net.html", "--overwrite", "--errors", "located.json")

    assert (done.exit_code, done.stderr) == (0, "wrote net.html\n")
    assert drawn("net.html")["graph"]["errors"] == [0.75, 0.25, 1.0, *[None] * rows][:rows]  # type: ignore[index]
    assert run("report", model, "--errors", "located.json").exit_code == 2


def test_errors_of_another_model_color_no_page(model: str) -> None:
    Path("located.json").write_text(json.dumps({"rows": [{"op": "elsewhere", "kind": "Add", "own": 1.0}]}))
    done = run("report", model, "--html", "net.html", "--errors", "located.json")
    assert done.exit_code == 2 and "give the errors of this model" in done.stderr and not Path("net.html").exists()


def test_json_beside_a_page_holds_all_that_is_drawn(model: str) -> None:
    assert run(model, "-o", "low.onnx").exit_code == 0
    done = run("diff", model, "low.onnx", "--format", "json", "--html", "diff.html")
    assert json.loads(done.stdout)["figures"] == drawn("diff.html")
    measured = run("verify", model, "low.onnx", "--random", "--tolerance", "1", "--depth", "--json", "--html", "v.html")
    assert json.loads(measured.stdout)["figures"] == drawn("v.html") and drawn("v.html").keys() == {"outputs", "text"}


def test_a_page_is_replaced_where_that_is_asked_for(model: str) -> None:
    Path("old.html").write_text("old")
    assert run("report", model, "--html", "old.html", "--overwrite").exit_code == 0
    assert drawn("old.html")
    assert not [name for name in files() if name.endswith(".tmp")]


def test_a_page_may_go_to_stdout(model: str) -> None:
    done = run("report", model, "--html", "-")
    assert done.exit_code == 0
    assert done.stdout.startswith("<!doctype html>") and done.stdout.endswith("</html>\n")
    assert run("report", model, "--html", "-", "--json").exit_code == 2


def test_a_page_in_the_place_of_a_model_is_named_as_one(model: str) -> None:
    run("report", model, "--html", "net.html")
    done = run("report", "net.html")
    fact = "net.html is a web page, not an ONNX model; name the model that it shows, or its JSON report"
    assert (done.exit_code, done.stderr) == (2, f"error: {fact}\n")


@pytest.mark.parametrize("command", [("report",), ("convert", "--report"), ("convert", "--html")])
def test_a_link_in_a_circle_is_no_other_file(model: str, command: tuple[str, ...]) -> None:
    try:
        Path("circle.html").symlink_to("circle.html")
    except OSError:
        pytest.skip("the system makes no links")
    name, option = command if len(command) > 1 else (*command, "--html")
    done = run(name, model, option, "circle.html")
    assert done.exit_code == 0, done.output
    assert Path("circle.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_page_that_a_device_refuses_is_told_with_the_fate_of_the_model(model: str) -> None:
    done = run("convert", model, "-o", "out.onnx", "--html", "/dev/full")
    assert done.exit_code == 2
    assert "cannot write /dev/full" in done.stderr and "out.onnx is written, the report is not" in done.stderr


def test_a_page_on_stdout_is_utf_8_whatever_the_terminal_is(model: str) -> None:
    Path(model).rename("größe.onnx")
    done = CliRunner(charset="latin-1").invoke(program, ["report", "größe.onnx", "--html", "-"])
    assert "größe" in done.stdout_bytes.decode("utf-8")
