"""Predictions of the GPU measurement, and the constants that are fitted to measured rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx.parser
import pytest

from benchmarks.gpu import fatbin, gpu_fit, gpu_predicted
from benchmarks.gpu.gpu_predicted import H200, START, Constants, seconds
from benchmarks.gpu.gpu_work import Kernel, kernels, work_of
from suites.gpu.conftest import RUN, SMALL, ran
from support.paths import ROOT

TRUTH = Constants(start=2.6e-6, low=0.55, tf32=0.6, float32=0.8, bandwidth=0.85)
RESULTS = ROOT / "benchmarks" / "results"


def test_the_work_of_a_model_is_that_of_its_batch() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n, 64] x, float[64, 16] w) => (float[n, 16] y)
        <int64[2] shape = {-1, 16}> { h = Cast <to = 10> (x)  v = Cast <to = 10> (w)  m = MatMul (h, v)
        r = Reshape (m, shape)  y = Cast <to = 1> (r) }"""
    )
    assert work_of(model, {"x": [8, 64]}) == [
        Kernel(2.0 * 8 * 64 * 16, 2 * (8 * 64 + 64 * 16 + 8 * 16), True, 1),
        Kernel(0.0, 6 * 64 * 16, False, 1),
        Kernel(0.0, 6 * 8 * 64, False, 1),
        Kernel(0.0, 6 * 8 * 16, True, 1),
    ]


def test_what_constants_make_is_folded_before_a_model_runs() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[8, 2] x) => (float[8, 2] y)
        <float[2] w = {1, 2}> { a = Mul (w, w)  b = Exp (a)  y = Add (x, b) }"""
    assert work_of(onnx.parser.parse_model(text), {}) == [Kernel(0.0, 4 * (16 + 2 + 16), False, 1)]


def test_a_kernel_takes_its_operations_or_its_bytes_and_a_start() -> None:
    product, copy = Kernel(989e9, 1.0, True, 2), Kernel(0.0, 4.8e9, False, 1)
    assert seconds([product], "amp", H200) == pytest.approx(2 * (1e-3 + START))
    assert seconds([copy], "amp", H200) == pytest.approx(1e-3 + START)
    full = Kernel(494.5e9, 1.0, False, 1)
    assert seconds([full], "tf32", H200) == pytest.approx(1e-3 + START)
    assert seconds([full], "float32", H200) == pytest.approx(494.5e9 / 67e12 + START)
    assert seconds([copy], "amp", H200, Constants(bandwidth=0.5)) == pytest.approx(2e-3 + START)
    assert kernels(str(product) + " " + str(full)) == [product, full]


def test_compressed_code_is_not_kept_unread_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert not fatbin.is_unused(b"\0.text.gemm")
    with pytest.raises(fatbin.FormatError, match="pip install zstandard"):
        fatbin.is_unused(fatbin.ZSTANDARD + b".text.moe")


def recorded() -> list[dict[str, Any]]:
    """The rows that are written in the repository."""
    return [row for row in json.loads((RESULTS / "gpu-predicted.json").read_text("utf-8"))["rows"] if "work" in row]


def drawn(truth: Constants, noise: float, outliers: int) -> list[gpu_fit.Point]:
    """Rows as a GPU with these constants would give them: noise, and every so often something quite different."""
    random, found = np.random.default_rng(0), []
    for number, row in enumerate(recorded()):
        work = tuple(kernels(row["work"]))
        factor = float(np.exp(random.normal(0, noise))) * (3 if outliers and number % outliers == 4 else 1)
        found.append(gpu_fit.Point(row["model"], row["way"], work, seconds(work, row["way"], H200, truth) * factor))
    return found


@pytest.mark.parametrize(("noise", "outliers", "near"), [(0.0, 0, 0.01), (0.03, 0, 0.12), (0.03, 9, 0.15)])
@pytest.mark.parametrize("truth", [TRUTH, Constants(1e-6, 0.8, 0.7, 0.9, 0.6)], ids=["slow", "fast"])
def test_the_fit_finds_the_constants_that_rows_were_drawn_from(
    truth: Constants, noise: float, outliers: int, near: float
) -> None:
    fit = gpu_fit.fitted(drawn(truth, noise, outliers), H200)
    assert set(fit.told) == set(gpu_fit.FIELDS)
    for name in gpu_fit.FIELDS:
        assert getattr(fit.constants, name) == pytest.approx(getattr(truth, name), rel=near), name


def test_a_constant_that_no_row_tells_stays_and_is_said() -> None:
    found = [point for point in drawn(TRUTH, 0.0, 0) if point.way not in ("float32", "tf32")]
    fit = gpu_fit.fitted(found, H200)
    assert "tf32" not in fit.told
    assert fit.constants.tf32 == pytest.approx(1.0)
    assert "| tf32 | 1 | no row tells |" in gpu_fit.lines(found, fit, H200)


def test_rows_are_joined_by_model_way_and_code_and_drawn() -> None:
    rows = recorded()
    job = {"kind": "latency", "model": rows[0]["model"], "made_by": rows[0]["tree"]}
    measured = [
        {**job, "row": {"time": {"float32": {"median": 1.0}, "amp": {"median": 0.5}, "unknown": {"median": 9.0}}}},
        {**job, "made_by": "other code", "row": {"time": {"float32": {"median": 1.0}}}},
        {**job, "row": None},
        {**job, "row": {"fault": "it died"}},
        {**job, "kind": "variants", "row": {"time": {"amp": {"median": 0.5}}}},
    ]
    found = gpu_fit.points(rows, measured)
    assert [(point.way, point.measured) for point in found] == [("float32", 1.0), ("amp", 0.5)]
    svg = ElementTree.fromstring(gpu_fit.plot(found, gpu_fit.Fit(TRUTH, (), 0.1), H200))
    assert len(svg.findall(".//{*}title")) == 2


@pytest.mark.slow
def test_a_prediction_has_a_row_for_each_way_and_says_what_is_missing(skeletons: Path) -> None:
    rows = list(gpu_predicted.predicted(skeletons, H200))
    assert {row["way"] for row in rows} == set(gpu_predicted.WAYS)
    found = {row["way"]: row for row in rows}
    assert found["occ"]["fault"] == "not made: no interpreter for it was named; add --peers PYTHON"
    assert (
        found["float32"]["flops"]
        == found["amp"]["flops"]
        == found["amp"]["low"]
        == 2 * 8 * (32 * 64 + 64 * 64 + 64 * 10)
    )
    assert (found["float32"]["low"], found["float32"]["kernels"]) == (0, 8)
    assert found["tf32"]["seconds"] <= found["float32"]["seconds"]
    said = ran("gpu_predicted", skeletons)
    assert f"amp-rewrite: commit {rows[0]['commit']}." in said
    assert "**Predicted, not measured**" in said
    assert f"- {SMALL}, AutoCast: not made: no interpreter for it was named; add --autocast PYTHON" in said


def test_gains_that_are_predicted_within_30_percent_are_counted() -> None:
    work = {"tf32": Kernel(494.5e9, 1.0, False, 1), "amp": Kernel(989e9 / 2, 1.0, True, 1)}
    exact = [gpu_fit.Point("m", way, (kernel,), seconds([kernel], way, H200)) for way, kernel in work.items()]
    far = [gpu_fit.Point("n", p.way, p.work, p.measured * (1.4 if p.way == "amp" else 1)) for p in exact]
    assert gpu_fit.right_gains([*exact, *far], H200, gpu_predicted.SHEET) == (1, 2)


def test_too_few_measured_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text('{"machine": {}, "rows": []}')
    command = [sys.executable, RUN, "gpu_fit", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("only 0 measured rows are predicted, too few for 5 constants")
