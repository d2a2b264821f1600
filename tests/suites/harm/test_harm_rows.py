"""Rows of the benchmark of harm: what they judge, that they are kept, and the page that is made of them."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from amp_rewrite import DType
from support.paths import imported

TEXT = (
    '<ir_version: 8, opset_import: ["": 17]> g (float[4,16] x) => (float[4,16] y) { a = MatMul (x, w)  y = Relu (a) }'
)


harm, harm_page = (imported(f"benchmarks.harm.{name}") for name in ("harm", "harm_page"))


def row(*errors: tuple[float, float, float], **more: Any) -> Any:
    """A row of float16 with errors (ours, A, B) of the batches."""
    names = [f"batch{at}" for at in range(len(errors))]
    ways = {
        way: dict(zip(names, found, strict=True))
        for way, found in zip(("ours", "A", "B"), zip(*errors, strict=True), strict=True)
    }
    return harm.Judged("m", 2e-2, ways, **more)


def test_a_row_shows_the_batch_where_a_reference_is_right() -> None:
    assert row((0.01, 0.5, 0.5)).judgement == "right"
    found = row((0.9, 0.8, 0.7), (0.03, 0.01, 0.01), (0.0, 0.0, 0.0))
    assert (found.batch, found.judgement) == ("batch1", "harmed: B, A right")
    assert row((np.inf, 0.01, np.inf)).judgement == "harmed: A right"
    assert row((np.nan, 0.01, 0.5)).judgement == "harmed: A right"
    assert row((0.9, 0.8, 0.7)).judgement == "wrong, as both references"


def test_rows_are_kept_and_measured_again_only_when_asked(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((16, 16)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "m.npz", x=rng.standard_normal((4, 16)).astype(np.float32))
    given = argparse.Namespace(
        to=[DType.FLOAT16, DType.BFLOAT16], again=False, peers=None, autocast=None, before=None, limit=100.0, memory=8.0
    )
    harm.measured(tmp_path / "m.onnx", given)
    for to, least in ((DType.FLOAT16, 1e-6), (DType.BFLOAT16, 1e-4)):
        (found,) = harm.rows(tmp_path, to)
        assert (found.judgement, found.parameters, found.inputs, found.size.casts) == ("right", 256, {"x": [4, 16]}, 2)
        assert all(least < found.shown(way) < found.limit for way in ("ours", "A", "B"))
    kept = harm.row_file(tmp_path / "m.onnx", DType.FLOAT16)
    said = {**json.loads(kept.read_text("utf-8")), "limit": 1e-9}
    kept.write_text(json.dumps(said), encoding="utf-8")
    harm.measured(tmp_path / "m.onnx", given)
    assert json.loads(kept.read_text("utf-8")) == said


def test_the_page_is_that_of_the_rows() -> None:
    results = json.loads(harm_page.RESULTS.read_text("utf-8"))
    assert harm_page.PAGE.read_text("utf-8") == harm_page.page(results)
