"""Forms of data and sources for every function, and the lazy report of a conversion."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import amp_rewrite
from amp_rewrite import FeedError, PolicyError, bench, calibrate, convert, locate, repair, verify
from amp_rewrite.settings.option import Data

NET = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] y)'
    f" <float[8, 8] w = {{{', '.join(['0.5'] * 64)}}}> {{ y = MatMul (x, w) }}"
)
X = np.full((2, 8), 1e5, np.float32)  # the product is beyond float16


def test_a_conversion_with_data_keeps_overflowing_ops_in_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X)
    assert [row.dtype for row in convert(NET).report.rows] == ["float16"]
    guarded = convert(NET, data=X, shift="none")
    assert [row.dtype for row in guarded.report.rows] == ["float32"]
    again = convert(NET, ranges=calibrate(NET, X), shift="none")
    assert guarded.report == again.report
    from_file = convert(NET, data=tmp_path / "d.npz", shift="none")
    assert [row.dtype for row in from_file.report.rows] == ["float32"]
    assert [row.dtype for row in convert(NET, data=X / 1e5).report.rows] == ["float16"]
    with pytest.raises(PolicyError, match="data= and ranges= both provide ranges; leave one out"):
        convert(NET, data=X, ranges=calibrate(NET, X))


RUNS: dict[str, Callable[[Data], object]] = {
    "calibrate": lambda data: calibrate(NET, data).batches,
    "verify": lambda data: verify(NET, NET, data, rtol=1).fed.batches,
    "locate": lambda data: locate(NET, NET, data).fed.batches,
    "repair": lambda data: repair(NET, data, rtol=1).ranges.batches,
    "convert": lambda data: len(convert(NET, data=data).report.findings) and 2,
    "bench": lambda data: bench([NET], data, rounds=3, memory=False).rounds - 1,
}


@pytest.mark.parametrize("function", RUNS)
def test_generators_tuples_and_functions_are_accepted_everywhere(function: str) -> None:
    for data in ((X + i for i in range(2)), [(X,), (X, X)], lambda: iter([{"x": X}, X]), [X, {"x": X.tolist()}]):
        assert RUNS[function](data) == 2


@pytest.mark.parametrize("function", RUNS)
def test_other_data_are_refused_everywhere(function: str) -> None:
    with pytest.raises(FeedError, match=r"^cannot feed int; give a path, an array, a mapping"):
        RUNS[function](7)  # type: ignore[arg-type]


TEXT = """<ir_version: 10, opset_import: ["": 20]> g (float[4,8] x, float[8,8] w) => (float[4,8] y) {
    [product] h = MatMul (x, w)  [soft] y = Softmax (h) }"""


@pytest.fixture
def converted() -> amp_rewrite.Converted:
    return amp_rewrite.convert(onnx.parser.parse_model(TEXT))


@pytest.mark.parametrize("form", ["result", "report", "file"])
def test_a_finished_conversion_is_explained_from_its_result(
    form: str, converted: amp_rewrite.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object, **__: object) -> None:
        raise AssertionError("it is converted already")

    monkeypatch.setattr(import_module("amp_rewrite.pipeline.convert"), "convert", convert)
    (tmp_path / "report.json").write_text(converted.report.to_json(), "utf-8")
    source: Any = {"result": converted, "report": converted.report, "file": tmp_path / "report.json"}[form]
    assert [chain.rows[0].op for chain in amp_rewrite.explain(source, ["soft", "product"]).chains] == [
        "Softmax",
        "MatMul",
    ]
    with pytest.raises(PolicyError, match=r"^level: the conversion is done; leave the options out"):
        amp_rewrite.explain(source, "soft", level="lower-all")


def test_a_model_is_converted_with_the_given_options() -> None:
    model = onnx.parser.parse_model(TEXT)
    for keep, dtype in (([], "float16"), (["product"], "float32")):
        assert amp_rewrite.explain(model, "product", keep=keep).chains[0].rows[0].dtype == dtype


# -- the lazy report -----------------------------------------------------------------------------------------

RESHAPED = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,3] x) => (float[3,5] y) { a = MatMul (x, w) b = Reshape (a, shape) y = Relu (b) }"""


def saved(path: Path) -> Path:
    model = onnx.parser.parse_model(RESHAPED)
    model.graph.initializer.append(from_array(np.ones((3, 5), np.float32), "w"))
    model.graph.initializer.append(from_array(np.array([-1, 5]), "shape"))
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return path


def test_the_explanation_survives_overwriting_the_source(tmp_path: Path) -> None:
    expected = convert(saved(tmp_path / "net.onnx")).report
    converted = convert(tmp_path / "net.onnx")
    converted.save(tmp_path / "net.onnx", overwrite=True)
    assert converted.report == expected


def test_the_explanation_is_computed_once() -> None:
    converted = convert(NET)
    assert "report" not in vars(converted)
    assert converted.report is converted.report
