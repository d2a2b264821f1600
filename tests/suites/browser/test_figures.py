"""Figures of measured results, in a browser: they open quietly, hold the numbers of the JSON and run nothing."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.reports.page.page import Page
from amp_rewrite.reports.result import Result
from support.browser import NARROW, WIDE, Visiting
from support.paths import ROOT

pytestmark = pytest.mark.browser

OUTLIER = ROOT / "examples" / "outlier"
MODEL, DATA = OUTLIER / "model.onnx", OUTLIER / "batches.npz"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b\u202e\n" + "n" * 5000
KINDS = ("ranges", "locate", "verify", "repair", "diff", "explain", "doctor")


@cache
def results(evil: bool = False) -> dict[str, Result]:
    """Results of each kind: of a model whose plain conversion gives NaN, or of one with hostile names."""
    model: Any = MODEL
    data: Any = DATA
    if evil:
        model, data = hostile(), {"x": np.ones((2, 8), np.float32)}
    low = amp_rewrite.convert(model)
    return {
        "ranges": amp_rewrite.calibrate(model, data),
        "locate": amp_rewrite.locate(model, low, data, tolerance=1e-2),
        "verify": amp_rewrite.verify(model, low, data, tolerance=1e-2),
        "repair": amp_rewrite.repair(model, data, tolerance=1e-2),
        "diff": amp_rewrite.diff(model, low),
        "explain": amp_rewrite.explain(low, "#0"),
        "doctor": amp_rewrite.doctor(model, gpu="A100"),
    }


def hostile() -> onnx.ModelProto:
    weights = ", ".join(["0.5"] * 64)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] y) <float[8, 8] w = {{{weights}}}>'
        " { a = MatMul (x, w) b = Exp (a) y = MatMul (b, w) }"
    )
    for i, node in enumerate(model.graph.node):
        node.name = f"{EVIL}{i}"
        node.output[0] += EVIL
        node.input[0] += EVIL if i else ""
    model.graph.output[0].name += EVIL
    model.graph.name = EVIL
    return model


def shown(visited: Any) -> Any:
    return json.loads(visited.page.locator("script#data").text_content())


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_without_errors_and_fits_a_phone_and_a_desk(visit: Visiting, kind: str) -> None:
    html = results()[kind].to_html()
    for width, dark in ((WIDE, False), (NARROW, True)):
        visited = visit(html, width=width, dark=dark)
        assert visited.quiet, (visited.errors, visited.requests)
        assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
        small = """[...document.querySelectorAll('.chart svg text')].filter(
            text => text.getBoundingClientRect().height > 0 && text.getBoundingClientRect().height < 10).length"""
        assert visited.page.evaluate(small) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_names_run_nothing_and_break_no_page(visit: Visiting, kind: str) -> None:
    visited = visit(results(evil=True)[kind].to_html(), width=NARROW)
    assert visited.quiet, (visited.errors, visited.requests, visited.dialogs)
    assert visited.page.evaluate("document.images.length") == 0
    assert kind == "doctor" or "<script>alert(1)" in visited.page.locator("main").inner_text()
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= NARROW


def test_the_numbers_of_ranges_are_those_of_their_file(visit: Visiting) -> None:
    ranges = results()["ranges"]
    written = ranges.to_dict()["values"]
    data = shown(visit(ranges.to_html()))["ranges"]
    assert len(data["values"]) == data["seen"] == len(written) - data["left_out"]
    for row in data["values"]:
        assert {name: row[name] for name in written[row["value"]]} == written[row["value"]]
        assert row["headroom"] == pytest.approx(65504 / row["absmax"])


def test_the_scores_are_those_of_the_verdict_with_and_without_an_error(visit: Visiting) -> None:
    for verdict in (results()["verify"], results()["repair"].verdict):  # type: ignore[attr-defined]
        written = verdict.to_dict()
        data = shown(visit(verdict.to_html()))["outputs"]
        assert (data["criterion"], data["limit"]) == (written["criterion"], written["limit"])
        words = ("output", "batch", "score", "ok")
        assert [{word: row[word] for word in words} for row in data["rows"]] == [
            {word: row[word] for word in words} for row in written["rows"]
        ]


def test_a_repair_shows_ranges_and_outputs(visit: Visiting) -> None:
    repaired = results()["repair"]
    written = repaired.to_dict()
    data = shown(visit(repaired.to_html()))
    assert {"ranges", "outputs"} <= data.keys()
    assert data["ranges"]["seen"] == sum(bool(row["absmax"]) for row in written["ranges"]["values"].values())


def test_without_data_a_conversion_has_none_of_these(visit: Visiting) -> None:
    data = shown(visit(amp_rewrite.convert(MODEL).to_html()))
    assert not {"ranges", "outputs", "errors"} & data.keys()


def test_the_changes_are_those_of_the_difference(visit: Visiting) -> None:
    delta = results()["diff"]
    written = delta.to_dict()
    visited = visit(delta.to_html())
    data = shown(visited)
    assert data["changes"]["counts"] == written["counts"]
    assert visited.page.locator("#changes details td").first.is_visible() is (data["changes"]["in_all"] <= 50)


def test_a_result_without_figures_stands_in_words(visit: Visiting) -> None:
    for kind in ("doctor", "explain"):
        result = results()[kind]
        assert result.text().splitlines()[0].strip() in visit(result.to_html()).page.locator("#text pre").inner_text()


def test_numbers_unfold_as_a_table(visit: Visiting) -> None:
    page = visit(results()["ranges"].to_html()).page
    cell = page.locator("#ranges details.numbers td").first
    assert not cell.is_visible()
    page.locator("#ranges details.numbers summary").click()
    assert cell.is_visible()


def test_colors_follow_the_scheme_and_print_keeps_the_marks(visit: Visiting) -> None:
    html = results()["ranges"].to_html()
    fills = []
    for dark in (False, True):
        page = visit(html, dark=dark).page
        fills.append(page.evaluate("getComputedStyle(document.querySelector('rect.band.low')).fill"))
    assert fills[0] != fills[1]
    page.emulate_media(media="print")
    assert page.locator(".chart svg").first.bounding_box()["width"] > 100


def test_a_notebook_shows_the_drawings(visit: Visiting) -> None:
    for kind in ("ranges", "verify", "repair"):
        visited = visit(f"<!doctype html><title>n</title>{results()[kind]._repr_html_()}")
        assert visited.quiet and visited.page.locator(".amp-rewrite figure.chart").count() >= 1


def test_a_notebook_shows_the_words_of_a_result_without_drawings(visit: Visiting) -> None:
    located = results()["locate"]
    visited = visit(f"<!doctype html><title>n</title>{located._repr_html_()}")
    assert visited.quiet and located.brief in visited.page.locator(".amp-rewrite pre").inner_text()


def test_a_page_of_thousands_of_ops_stays_small(visit: Visiting) -> None:
    ranges = results()["ranges"]
    values = {f"{name}/{i}": fit for i in range(60) for name, fit in ranges.values.items()}  # type: ignore[attr-defined]
    many = type(ranges)(**{**{f: getattr(ranges, f) for f in ranges.__slots__}, "values": values})  # type: ignore[arg-type]
    page = Page("many", many.figures())
    assert len(page.to_html()) < 400_000
    data = shown(visit(page.to_html()))["ranges"]
    assert math.isclose(data["values"][0]["absmax"], max(fit.absmax for fit in values.values()))
