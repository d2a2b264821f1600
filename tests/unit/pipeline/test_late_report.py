"""The report of a conversion is made when it is first read."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array

from amp_rewrite import convert

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,3] x) => (float[3,5] y) { a = MatMul (x, w) b = Reshape (a, shape) y = Relu (b) }"""


def saved(path: Path) -> Path:
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.append(from_array(np.ones((3, 5), np.float32), "w"))
    model.graph.initializer.append(from_array(np.array([-1, 5]), "shape"))
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return path


def test_it_says_the_same_once_the_source_is_overwritten(tmp_path: Path) -> None:
    expected = convert(saved(tmp_path / "net.onnx")).report
    converted = convert(tmp_path / "net.onnx")
    converted.save(tmp_path / "net.onnx", overwrite=True)
    assert converted.report == expected


def test_it_is_made_once() -> None:
    model = onnx.parser.parse_model(TEXT.replace("y = Relu (b)", "y = Relu (a)").replace("b = Reshape (a, shape)", ""))
    model.graph.initializer.append(from_array(np.ones((3, 5), np.float32), "w"))
    converted = convert(model)
    assert "report" not in vars(converted)
    assert converted.report is converted.report
