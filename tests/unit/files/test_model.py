"""Loading and saving models: tensors left in files, places of external data, and refusals."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files import tensors, wire
from amp_rewrite.files.casting import Fit, cast
from amp_rewrite.files.model import Model, baked, scaled
from amp_rewrite.files.tensors import Source, Sources, is_stub, payload
from support.weights import external, model, one, plain, scatter, values


@pytest.fixture
def inline(tmp_path: Path) -> Path:
    path = tmp_path / "inline.onnx"
    onnx.save_model(model(), path)
    return path


@pytest.fixture
def scattered(tmp_path: Path) -> Path:
    path = tmp_path / "scattered.onnx"
    scatter(model(), path)
    return path


def heavy(proto: onnx.ModelProto) -> list[str]:
    return [t.name or "constant" for t in wire.tensors(proto) if is_stub(t)]


def tensor(found: Model, name: str) -> onnx.TensorProto:
    return next(t for t in wire.tensors(found.proto) if t.name == name)


def test_only_light_tensors_are_read_from_an_inline_model(inline):
    found = Model.load(inline)
    assert heavy(found.proto) == ["body", "constant", "heavy", "big", "tied", "moment", "constant"]
    assert found.path == inline
    assert found.to_proto() == onnx.load(inline) == model()


def test_only_light_tensors_are_read_from_external_data(scattered):
    found = Model.load(scattered)
    assert heavy(found.proto) == ["body", "constant", "heavy", "big", "tied", "lone", "moment", "constant"]
    assert plain(found.to_proto()) == loaded_by_onnx(scattered)


def loaded_by_onnx(path: Path) -> onnx.ModelProto:
    """Load with onnx.load, including the omitted tensors: of training graphs, and in old versions of functions."""
    out = onnx.load(path)
    for found in wire.tensors(out):
        if is_stub(found):
            onnx.external_data_helper.load_external_data_for_tensor(found, str(path.parent))
            del found.external_data[:]
    return plain(out)


def test_bytes_and_protos_are_used_unchanged(inline):
    proto = onnx.load(inline)
    before = proto.SerializeToString(deterministic=True)
    assert Model.load(inline.read_bytes()).proto == proto
    found = Model.load(proto)
    assert found.proto is proto
    assert found.to_proto() is not proto
    assert proto.SerializeToString(deterministic=True) == before


def test_a_proto_with_external_data_needs_its_folder_and_stays_unchanged(scattered):
    proto = onnx.load(scattered, load_external_data=False)
    before = proto.SerializeToString(deterministic=True)
    for source in (proto, scattered.read_bytes()):
        with pytest.raises(ModelError, match="pass the folder"):
            Model.load(source)
        assert plain(Model.load(source, folder=scattered.parent).to_proto()) == loaded_by_onnx(scattered)
    assert proto.SerializeToString(deterministic=True) == before


def test_a_path_may_have_its_data_in_another_folder(scattered, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    scattered.rename(moved / "m.onnx")
    with pytest.raises(ModelError, match="No such file"):
        Model.load(moved / "m.onnx")
    assert heavy(Model.load(str(moved / "m.onnx"), folder=str(tmp_path)).proto)


def test_fit_and_baked_agree_for_stubs_and_for_memory(inline):
    lazy, eager = Model.load(inline), Model.load(model())
    fits = [m.fit(tensor(m, "big"), DType.FLOAT16) for m in (lazy, eager)]
    assert fits[0] == fits[1] == Fit.of([values(600, 600, seed=1).ravel()], DType.FLOAT16)
    low = [baked(tensor(m, "big"), DType.FLOAT16, name="low", model=m) for m in (lazy, eager)]
    assert [is_stub(t) for t in low] == [True, False]
    expected = values(600, 600, seed=1).astype(np.float16)
    for found in low:
        np.testing.assert_array_equal(lazy.array(found), expected)
        assert lazy.fit(found, DType.FLOAT16).flushed == 0
    with pytest.raises(ModelError, match="tensor 'shape' is int64"):
        lazy.fit(tensor(lazy, "shape"), DType.FLOAT16)


def test_a_model_too_large_for_protobuf_is_not_made_a_proto(tmp_path):
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[600_000_000])
    external(tensor, "sparse.bin")
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.truncate(2_400_000_000)
    onnx.save_model(one(tensor), tmp_path / "m.onnx")
    found = Model.load(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"2400000000 bytes .*; use save\(path\)"):
        found.to_proto()
    with pytest.raises(ModelError, match="more than protobuf can read; use external data"):
        found.save(tmp_path / "out.onnx", external_data=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "sparse.bin"]


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


def load(folder: Path, location: str, dims: tuple[int, ...] = (8000,), raw: bytes = b"", **entries: object):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    external(tensor, location, **entries)
    if raw:
        tensor.raw_data = raw
    (folder / "m.onnx").write_bytes(one(tensor).SerializeToString())
    model = Model.load(folder / "m.onnx")
    assert not model.proto.graph.initializer[0].raw_data
    return model.array(model.proto.graph.initializer[0])


@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "inside"])
def test_a_file_in_the_folder_is_read_from_its_offset(folder, location):
    np.testing.assert_array_equal(load(folder, location), np.arange(8000))
    np.testing.assert_array_equal(load(folder, location, (5000,), offset=400, length=20_000), np.arange(100, 5100))


@pytest.mark.parametrize(
    ("location", "fact"),
    [
        ("/etc/hostname", "which is outside the model's folder; move the file into the folder"),
        ("../outside.bin", "which is outside the model's folder; move the file into the folder"),
        ("..\\outside.bin", "which is outside the model's folder; move the file into the folder"),
        ("C:\\w.bin", "which is outside the model's folder; move the file into the folder"),
        ("link", "links to a file outside the model's folder"),
        ("pipe", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("missing.bin", "No such file or directory"),
        ("", "is not a file name"),
        ("w\0bin", "is not a file name"),
    ],
)
def test_a_location_outside_the_folder_or_without_a_file_is_refused(folder, location, fact):
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
        ((1 << 62, 1 << 62), {}, "more elements than fit into a file"),
    ],
)
def test_external_bytes_of_the_wrong_size_are_refused(folder, dims, entries, fact):
    with pytest.raises(ModelError, match=fact):
        load(folder, "w.bin", dims, **entries)


def test_data_may_be_beside_a_models_link_or_beside_its_target(tmp_path, folder):
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
    np.testing.assert_array_equal(load(folder, "w.bin", raw=bytes(32_000)), np.arange(8000, dtype=np.float32))


def stub(folder: Path, values: np.ndarray, *, skip: int = 8) -> TensorProto:
    """Build a stub with its bytes in a separate file, after `skip` others."""
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
def test_a_stub_reads_like_its_tensor(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    with Sources() as sources:
        found = tensors.array(stub(tmp_path, values), sources)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_packed_values_read_like_their_tensor(tmp_path, dtype):
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


def test_a_file_changed_in_the_meantime_is_not_read(tmp_path):
    tensor = stub(tmp_path, np.ones(4, np.float32))
    other = tmp_path / "other"
    other.write_bytes(bytes(24))
    other.replace(tmp_path / "w.bin")
    with Sources() as sources, pytest.raises(ModelError, match=r"w\.bin has changed since .*; load it again"):
        tensors.array(tensor, sources)


def test_unresolved_external_data_and_too_few_values_are_refused():
    unresolved = TensorProto(name="w", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    unresolved.external_data.add(key="location", value="w.bin")
    short = TensorProto(name="w", data_type=1, dims=[3], raw_data=bytes(8))
    for tensor, words in ((unresolved, "has external data that was not resolved"), (short, "cannot be read")):
        with Sources() as sources, pytest.raises(ModelError, match=f"tensor 'w' {words}"):
            tensors.array(tensor, sources)


@pytest.mark.parametrize("stored", [np.float32, np.float16])
@pytest.mark.parametrize("to", [DType.FLOAT, DType.FLOAT16, DType.BFLOAT16])
def test_a_scaled_stub_reads_as_its_values_times_a_power_of_two(tmp_path: Path, stored: type, to: DType) -> None:
    values = (np.random.default_rng(0).standard_normal((300, 1000)) * 1e4).astype(stored)
    onnx.save(one(numpy_helper.from_array(values, "w")), tmp_path / "m.onnx")
    model = Model.load(tmp_path / "m.onnx")
    wide = baked(model.proto.graph.initializer[0], DType.FLOAT, model=model)
    scaled_twice = scaled(scaled(wide, 1, name="a", model=model), 2, name="b", model=model)
    low = baked(scaled_twice, to, model=model)
    expected = cast(values.astype(np.float32) / 8, to)
    assert is_stub(low) and low.name == "b"
    assert np.array_equal(model.array(low), expected)
    with Sources() as sources:
        assert b"".join(map(bytes, payload(low, sources))) == expected.tobytes()
    assert model.fit(scaled_twice, DType.FLOAT16).absmax == np.abs(values.astype(np.float32)).max() / 8
    model.proto.graph.initializer[0].CopyFrom(low)
    model.proto.graph.initializer[0].name = "w"
    for apart in (False, True):
        model.save(tmp_path / "saved.onnx", external_data=apart, overwrite=True)
        saved = Model.load(tmp_path / "saved.onnx")
        assert np.array_equal(saved.array(saved.proto.graph.initializer[0]), expected)
