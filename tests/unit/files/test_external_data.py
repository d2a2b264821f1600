"""External data: where it may lie, and what must be true of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from support.weights import external, one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("inner/w.bin", "outside.bin"):
        (tmp_path / name).write_bytes(np.arange(8000, dtype=np.float32).tobytes())
    (inner / "link").symlink_to(tmp_path / "outside.bin")
    (inner / "inside").symlink_to("w.bin")
    (inner / "up").symlink_to(tmp_path)
    (inner / "null").symlink_to("/dev/null")
    (inner / "folder").mkdir()
    os.mkfifo(inner / "pipe")
    return inner


def load(
    folder: Path, location: str, dims: tuple[int, ...] = (8000,), kind: int = TensorProto.FLOAT, **entries: object
):
    tensor = TensorProto(name="w", data_type=kind, dims=dims)
    external(tensor, location, **entries)
    (folder / "m.onnx").write_bytes(one(tensor).SerializeToString())
    model = Model.load(folder / "m.onnx")
    return model.array(model.proto.graph.initializer[0])


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "inside"])
def test_a_file_in_the_folder_is_read(folder, location):
    np.testing.assert_array_equal(load(folder, location), np.arange(8000))


def test_offset_and_length_are_obeyed(folder):
    np.testing.assert_array_equal(load(folder, "w.bin", (5000,), offset=400, length=20_000), np.arange(100, 5100))


@pytest.mark.parametrize(
    ("location", "fact"),
    [
        ("/etc/hostname", "leaves the model's folder; put the file there"),
        ("../outside.bin", "leaves the model's folder; put the file there"),
        ("..\\outside.bin", "leaves the model's folder; put the file there"),
        ("C:\\w.bin", "leaves the model's folder; put the file there"),
        ("link", "leaves the model's folder"),
        ("pipe", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("missing.bin", "No such file or directory"),
        ("", "does not name a file"),
        ("w\0bin", "does not name a file"),
    ],
)
def test_a_location_that_leaves_the_folder_or_is_no_file_is_refused(folder, location, fact):
    with pytest.raises(ModelError, match=f"^external data of tensor 'w'.*{fact}"):
        load(folder, location)


@pytest.mark.parametrize(
    ("dims", "entries", "fact"),
    [
        ((9000,), {}, "needs bytes 0 to 36000 of 'w.bin', which has only 32000"),
        ((8000,), {"length": 31_996}, r"is 31996 bytes long, but its dims \[8000\] of float32 need 32000"),
        ((8000,), {"offset": -4}, "has the offset '-4', which is not a byte count"),
        ((8000,), {"length": "9" * 5000}, "has the length"),
        ((-8000,), {}, "has negative dims"),
        ((1 << 62, 1 << 62), {}, "more elements than any file holds"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(folder, dims, entries, fact):
    with pytest.raises(ModelError, match=fact):
        load(folder, "w.bin", dims, **entries)


def test_a_model_behind_a_link_may_have_its_data_beside_the_link_or_beside_the_file(tmp_path, folder):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8000])
    external(tensor, "data")
    (folder / "blob").write_bytes(one(tensor).SerializeToString())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "m.onnx").symlink_to(folder / "blob")
    (snapshot / "data").symlink_to(folder / "w.bin")
    model = Model.load(snapshot / "m.onnx")
    np.testing.assert_array_equal(model.array(model.proto.graph.initializer[0]), np.arange(8000))


def test_external_parts_of_sparse_tensors_are_read_and_checked(folder):
    model = one(numpy_helper.from_array(np.ones(1, np.float32), "v"))
    sparse = model.graph.sparse_initializer.add(dims=[9000])
    sparse.values.CopyFrom(TensorProto(name="s", data_type=TensorProto.FLOAT, dims=[8000]))
    external(sparse.values, "w.bin")
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(8000)))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    found = Model.load(folder / "m.onnx").proto.graph.sparse_initializer[0].values
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(found), np.arange(8000))
    sparse.values.external_data[0].value = "../outside.bin"
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="tensor 's'"):
        Model.load(folder / "m.onnx")


def test_bytes_beside_external_data_are_ignored(folder: Path) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=(8000,), raw_data=bytes(32_000))
    external(tensor, "w.bin")
    (folder / "m.onnx").write_bytes(one(tensor).SerializeToString())
    model = Model.load(folder / "m.onnx")
    (stub,) = model.proto.graph.initializer
    assert stub.raw_data == b""
    np.testing.assert_array_equal(model.array(stub), np.arange(8000, dtype=np.float32))
