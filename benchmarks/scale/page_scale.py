"""Size of report pages, and the time to build and to open them.

    python benchmarks/run.py page_scale [--ops 1000 10000 100000] [--bert]

Chains of ops in layers are converted, and BERT-base with --bert, exported by PyTorch in both ways. The page of the
conversion, and that of its difference from the model, are built in Python and opened in a headless Chromium,
which tells when it painted first and when its scripts were done.
Needs `pip install playwright` and a Chromium, and for --bert torch and transformers.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.shared import measure

if TYPE_CHECKING:
    from amp_rewrite.reports.result import Result

KINDS = ("MatMul", "Add", "Relu", "MatMul", "Softmax", "Add", "Exp", "MatMul", "Mul", "Tanh")
_RUNS = 3
_PAINTED = """new Promise((done) => new PerformanceObserver((list) => {
    const paints = list.getEntriesByName("first-contentful-paint");
    if (paints.length) done(paints[0].startTime);
}).observe({type: "paint", buffered: true}))"""


@dataclass(frozen=True, slots=True)
class Point:
    """One page: of which model and how many rows, its bytes, and seconds; those of opening are the best of three."""

    model: str
    rows: int
    size: int
    building: float
    painted: float
    loaded: float
    unfolding: float


def layered(count: int, path: Path) -> None:
    """Write a chain of ops in layers of ten, fifty layers in a stage."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = []
    for i in range(count):
        kind, read = KINDS[i % len(KINDS)], f"v{i}"
        inputs = {"MatMul": [read, "w"], "Add": [read, read], "Mul": [read, read]}.get(kind, [read])
        name = f"/net/stage.{i // 500}/layer.{i // 10}/{kind}_{i % 10}"
        nodes.append(helper.make_node(kind, inputs, [f"v{i + 1}"], name=name))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (8, 8)) for name in ("v0", f"v{count}")]
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "layered", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def bert(path: Path, *, dynamo: bool) -> None:
    """Write BERT-base as one of PyTorch's exporters does."""
    import torch

    from benchmarks.shared.zoo import bert

    built = bert()
    arguments = tuple(built.inputs.values())
    more = {} if dynamo else {"opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(built.module, arguments, str(path), input_names=list(built.inputs), dynamo=dynamo, **more)


def models(counts: list[int], with_bert: bool, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the models, each with its name."""
    for count in counts:
        path = folder / f"layers_{count}.onnx"
        measure.apart(layered, count, path)
        yield f"{count} ops", path
    for dynamo in (False, True) if with_bert else ():
        name = f"BERT-base, {'torch.export' if dynamo else 'TorchScript'}"
        path = folder / f"bert_{dynamo}.onnx"
        bert(path, dynamo=dynamo)
        yield name, path


def measured(name: str, path: Path, browser: object) -> Iterator[Point]:
    """Yield the measurements of two pages: of a model's conversion, and of its difference from the model."""
    import amp_rewrite

    converted = amp_rewrite.convert(path)
    rows = len(converted.report.rows)
    yield _page_of(name, rows, path, converted, browser)
    yield _page_of(f"{name}: difference", rows, path, amp_rewrite.diff(path, converted), browser)


def _page_of(name: str, rows: int, path: Path, result: Result, browser: object) -> Point:
    start = time.perf_counter()
    html = result.to_html()
    building = time.perf_counter() - start
    page_file = path.with_suffix(".html")
    page_file.write_text(html, encoding="utf-8")
    opened = [_opened(page_file, browser) for _ in range(_RUNS)]
    best = [min(times) for times in zip(*opened, strict=True)]
    return Point(name, rows, len(html.encode()), building, *best)


def _opened(path: Path, browser: object) -> tuple[float, float, float]:
    """Return the seconds until a page was painted, until its scripts were done, and those of unfolding all scopes."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})  # type: ignore[attr-defined]
    page.goto(path.as_uri())
    painted = page.evaluate(_PAINTED)
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    start = time.perf_counter()
    page.get_by_role("button", name="Unfold all scopes").click()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    unfolding = time.perf_counter() - start
    page.close()
    return painted / 1000, loaded / 1000, unfolding


def table(points: list[Point]) -> list[str]:
    """The lines of the results' table."""
    head = ["model", "rows", "page", "built in", "first paint", "scripts done", "unfold all"]
    return measure.markdown(
        head,
        [
            (
                p.model,
                p.rows,
                f"{p.size / 1e6:.2f} MB",
                f"{p.building:.2f} s",
                f"{p.painted:.2f} s",
                f"{p.loaded:.2f} s",
                f"{p.unfolding:.2f} s",
            )
            for p in points
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--bert", action="store_true", help="BERT-base, too; needs torch and transformers")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is not installed")
    points = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, path in models(given.ops, given.bert, Path(folder)):
            for point in measured(name, path, browser):
                points.append(point)
                print(point, flush=True)
            if not given.dry_run:
                measure.write("page_scale", measure.machine(), points, table(points))
        browser.close()


if __name__ == "__main__":
    main()
