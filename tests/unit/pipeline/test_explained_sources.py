"""What `explain` takes: models, which it converts, and results and reports, which it reads as they are."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import onnx.parser
import pytest

import amp_rewrite
from amp_rewrite.errors import PolicyError

TEXT = """<ir_version: 10, opset_import: ["": 20]> g (float[4,8] x, float[8,8] w) => (float[4,8] y) {
    [product] h = MatMul (x, w)  [soft] y = Softmax (h) }"""


@pytest.fixture
def converted() -> amp_rewrite.Converted:
    return amp_rewrite.convert(onnx.parser.parse_model(TEXT))


@pytest.mark.parametrize("form", ["result", "report", "file"])
def test_a_conversion_that_is_done_is_explained_as_it_is(
    form: str, converted: amp_rewrite.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object, **__: object) -> None:
        raise AssertionError("it is converted already")

    monkeypatch.setattr(import_module("amp_rewrite.pipeline.explain"), "convert", convert)
    (tmp_path / "report.json").write_text(converted.report.to_json(), "utf-8")
    source: Any = {"result": converted, "report": converted.report, "file": tmp_path / "report.json"}[form]
    assert [chain.rows[0].op for chain in amp_rewrite.explain(source, ["soft", "product"]).chains] == [
        "Softmax",
        "MatMul",
    ]
    with pytest.raises(PolicyError, match=r"^level: the conversion is done; leave the options out"):
        amp_rewrite.explain(source, "soft", level="lower-all")


def test_a_model_is_converted_with_the_options() -> None:
    model = onnx.parser.parse_model(TEXT)
    for keep, dtype in (([], "float16"), (["product"], "float32")):
        assert amp_rewrite.explain(model, "product", keep=keep).chains[0].rows[0].dtype == dtype
