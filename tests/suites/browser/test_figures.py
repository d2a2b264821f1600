"""Figures of measured results in a browser: they open without errors, fit, and run no foreign script."""

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.reports.result import Result
from suites.browser.conftest import NARROW, WIDE, Visiting
from support.paths import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]

OUTLIER = ROOT / "examples" / "outlier"
MODEL, DATA = OUTLIER / "model.onnx", OUTLIER / "batches.npz"
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b\u202e\n" + "n" * 5000
KINDS = ("ranges", "locate", "verify", "repair", "diff", "explain", "doctor")


@cache
def results(evil: bool = False) -> dict[str, Result]:
    """Return results of each kind, for a model that overflows in float16 or for one with hostile names."""
    model: Any = MODEL
    with np.load(DATA) as arrays:
        data = dict(arrays)
    if evil:
        model, data = hostile(), {"x": np.ones((2, 8), np.float32)}
    low = amp_rewrite.convert(model)
    return {
        "ranges": amp_rewrite.calibrate(model, data),
        "locate": amp_rewrite.locate(model, low, data),
        "verify": amp_rewrite.verify(model, low, [data, data], tolerance=1e-2),
        "repair": amp_rewrite.repair(model, data, tolerance=1e-2),
        "diff": amp_rewrite.diff(model, low),
        "explain": amp_rewrite.explain(low, "#0"),
        "doctor": amp_rewrite.doctor(model),
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_without_errors_and_fits_a_phone_and_a_desk(visit: Visiting, kind: str) -> None:
    visited = visit(results()[kind].to_html(), dark=True)
    for width in (WIDE, NARROW):
        visited.page.set_viewport_size({"width": width, "height": 900})
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


def test_colors_follow_the_scheme_and_print_keeps_the_marks(visit: Visiting) -> None:
    html = results()["ranges"].to_html()
    fills = []
    for dark in (False, True):
        page = visit(html, dark=dark).page
        fills.append(page.evaluate("getComputedStyle(document.querySelector('rect.band.low')).fill"))
    assert fills[0] != fills[1]
    page.emulate_media(media="print")
    assert page.locator(".chart .rows svg").first.bounding_box()["width"] > 100
