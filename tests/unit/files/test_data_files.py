"""Data files: named, shared by several models, and gone after an interrupt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files import store
from amp_rewrite.files.model import Model

UNIT = 1 << 16  # bytes; smaller weights are read when a model is loaded
WEIGHTS = {name: np.full(UNIT * size // 4, size, np.float32) for name, size in (("a", 1), ("b", 2), ("c", 3))}


def net(path: Path, *, data: str = "", names: str = "abc") -> Path:
    """Write the sum of weights; with `data`, these are in that file, where `names` does not matter."""
    sums = [helper.make_node("ReduceSum", [name], [f"{name}s"], keepdims=0) for name in names]
    total = helper.make_node("Sum", [f"{name}s" for name in names], ["y"])
    weights = [numpy_helper.from_array(WEIGHTS[name], name) for name in names]
    graph = helper.make_graph([*sums, total], "g", [], [helper.make_tensor_value_info("y", 1, [])], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if data:
        (path.parent / data).write_bytes(b"".join(values.tobytes() for values in WEIGHTS.values()))
        at = dict(zip("abc", (0, UNIT, 3 * UNIT), strict=True))
        for tensor in proto.graph.initializer:
            length = len(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data), ("offset", at[tensor.name]), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    onnx.save_model(proto, path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(path: Path) -> bool:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    return all(np.array_equal(values, WEIGHTS[name]) for name, values in stored.items())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_external_data_gets_the_name_that_is_asked_for(tmp_path: Path, out: Path) -> None:
    Model.load(net(tmp_path / "m.onnx")).save(out / "m_fp16.onnx", external_data="m_fp16.onnx_data")
    assert names(out) == ["m_fp16.onnx", "m_fp16.onnx_data"]
    assert same(out / "m_fp16.onnx")


@pytest.mark.parametrize("name", ["../up", "a/b", "n.onnx", "..", "a\\b"])
def test_a_name_that_is_not_one_of_a_file_beside_the_model_is_refused(tmp_path: Path, out: Path, name: str) -> None:
    with pytest.raises(ModelError, match="is not a name for the weights"):
        Model.load(net(tmp_path / "m.onnx")).save(out / "n.onnx", external_data=name)
    assert names(out) == []


def test_named_data_of_the_replaced_model_is_replaced_with_it(tmp_path: Path, out: Path) -> None:
    model = Model.load(net(tmp_path / "m.onnx"))
    model.save(out / "m.onnx", external_data="m.onnx_data")
    with pytest.raises(ModelError, match="exists"):
        model.save(out / "m.onnx", external_data="m.onnx_data")
    model.save(out / "m.onnx", external_data="m.onnx_data", overwrite=True)
    assert names(out) == ["m.onnx", "m.onnx_data"]
    assert same(out / "m.onnx")


def test_data_that_another_model_reads_is_never_replaced(tmp_path: Path, out: Path) -> None:
    model = Model.load(net(tmp_path / "m.onnx"))
    model.save(out / "one.onnx", external_data="weights.bin")
    before = (out / "weights.bin").stat().st_ino
    with pytest.raises(ModelError, match=r"one\.onnx reads .*weights\.bin"):
        model.save(out / "two.onnx", external_data="weights.bin", overwrite=True)
    assert names(out) == ["one.onnx", "weights.bin"]
    assert (out / "weights.bin").stat().st_ino == before


def test_an_interrupt_leaves_nothing(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun = store._Written.write, []

    def failing(*given) -> None:
        begun.append(given)
        if len(begun) > 1:
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(store._Written, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        Model.load(net(tmp_path / "m.onnx")).save(out / "m.onnx", external_data=True)
    assert names(out) == []
