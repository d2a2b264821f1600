"""Tensors whose bytes lie in files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import tensors
from amp_rewrite.files.casting import cast
from amp_rewrite.files.model import Model, baked, scaled
from amp_rewrite.files.tensors import Source, Sources, is_stub, payload
from unit.files.test_casting import edges

NO_MODEL = Model(onnx.ModelProto())


def stub(folder: Path, values: np.ndarray, *, skip: int = 8) -> TensorProto:
    """A stub whose bytes lie in a file of their own, after `skip` others."""
    tensor = numpy_helper.from_array(values, "w")
    file = folder / "w.bin"
    file.write_bytes(b"\xff" * skip + tensor.raw_data)
    kind = tensors.dtype(tensor)
    place = Source(str(file), skip, len(tensor.raw_data), kind, tensors.stamp(file.stat()))
    tensors.make_stub(tensor, place)
    return tensor


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int64", "bool", "complex64", ml_dtypes.float8_e5m2]
)
def test_a_stub_reads_as_what_it_was(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    with Sources() as sources:
        found = tensors.array(stub(tmp_path, values), sources)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_packed_values_read_as_what_they_were(tmp_path, dtype):
    values = np.array([1, 2, 3, 4, 5], dtype)
    tensor = stub(tmp_path, values)
    with Sources() as sources:
        np.testing.assert_array_equal(tensors.array(tensor, sources), values)
        assert [c.tolist() for c in tensors.chunks(tensor, 2, sources)] == [[1, 2], [3, 4], [5]]
        assert tensors.materialized(tensor, sources) == numpy_helper.from_array(values, "w")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (2, 4)])
def test_chunks_cover_the_tensor_in_order(tmp_path, shape):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for tensor in (stub(tmp_path, values), numpy_helper.from_array(values)):
        with Sources() as sources:
            found = list(tensors.chunks(tensor, 3, sources))
            assert tensors.array(tensor, sources).shape == shape
        assert all(0 < c.size <= 3 for c in found)
        np.testing.assert_array_equal(np.concatenate([np.empty(0), *found]), values.ravel())


@pytest.mark.parametrize("to", [DType.FLOAT16, DType.BFLOAT16])
def test_baking_a_stub_and_baking_values_in_memory_give_the_same_values(tmp_path, to):
    values = edges(to)
    lazy = stub(tmp_path, values)
    lazy.doc_string = "kept"
    eager = numpy_helper.from_array(values, "w")
    with Sources() as sources:
        first = baked(lazy, to, name="v", model=NO_MODEL)
        second = baked(eager, to, name="v", model=NO_MODEL)
        assert tensors.is_stub(first) and not tensors.is_stub(second)
        assert (first.name, first.data_type, first.doc_string) == ("v", to.code, "kept")
        assert tensors.nbytes(first) == tensors.nbytes(second) == 2 * values.size
        np.testing.assert_array_equal(
            tensors.array(first, sources).view("u2"), numpy_helper.to_array(second).view("u2")
        )
        assert b"".join(map(bytes, tensors.payload(first, sources))) == second.raw_data


def test_a_file_that_changed_since_is_not_read(tmp_path):
    tensor = stub(tmp_path, np.ones(4, np.float32))
    other = tmp_path / "other"
    other.write_bytes(bytes(24))
    other.replace(tmp_path / "w.bin")
    with Sources() as sources, pytest.raises(ModelError, match=r"w\.bin has changed since .*; load it again"):
        tensors.array(tensor, sources)


def test_external_data_that_nobody_resolved_is_refused():
    tensor = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    with Sources() as sources, pytest.raises(ModelError, match="tensor 'w' has external data that was not resolved"):
        tensors.array(tensor, sources)


def test_values_that_do_not_fill_their_dims_are_an_error():
    tensor = TensorProto(name="w", data_type=1, dims=[3], raw_data=bytes(8))
    with Sources() as sources, pytest.raises(ModelError, match="tensor 'w' cannot be read"):
        tensors.array(tensor, sources)


@pytest.mark.parametrize("stored", [np.float32, np.float16])
@pytest.mark.parametrize("to", [DType.FLOAT, DType.FLOAT16, DType.BFLOAT16])
def test_a_scaled_stub_reads_as_its_values_times_a_power_of_two(tmp_path: Path, stored: type, to: DType) -> None:
    values = (np.random.default_rng(0).standard_normal((300, 1000)) * 1e4).astype(stored)
    tensor = numpy_helper.from_array(values, "w")
    graph = helper.make_graph(
        [helper.make_node("Shape", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [2])],
        [tensor],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, ir_version=10), path)
    model = Model.load(path)
    stub = model.proto.graph.initializer[0]
    wide = baked(stub, DType.FLOAT, model=model)
    scaled_twice = scaled(scaled(wide, 1, name="a", model=model), 2, name="b", model=model)
    low = baked(scaled_twice, to, model=model)
    wanted = cast(values.astype(np.float32) / 8, to)
    assert is_stub(low) and low.name == "b"
    assert np.array_equal(model.array(low), wanted)
    with Sources() as sources:
        assert b"".join(map(bytes, payload(low, sources))) == wanted.tobytes()
    assert model.fit(scaled_twice, DType.FLOAT16).absmax == np.abs(values.astype(np.float32)).max() / 8
    model.proto.graph.initializer[0].CopyFrom(low)
    model.proto.graph.initializer[0].name = "w"
    for external in (False, True):
        model.save(tmp_path / "saved.onnx", external_data=external, overwrite=True)
        saved = Model.load(tmp_path / "saved.onnx")
        assert np.array_equal(saved.array(saved.proto.graph.initializer[0]), wanted)
