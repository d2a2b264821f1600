"""Programs in memory: their tensors are read only when written, and the program stays unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from amp_rewrite import convert
from amp_rewrite.errors import ModelError
from amp_rewrite.files import wire
from amp_rewrite.files.fingerprint import fingerprint
from amp_rewrite.files.model import Model
from amp_rewrite.files.tensors import is_stub
from support.paths import TESTS
from support.weights import external, model, one, values

ir = pytest.importorskip("onnx_ir")

ALLOWANCE = 60_000_000


def supported() -> onnx.ModelProto:
    """Return the model with tensors in every kind of place, written by onnx_ir."""
    proto = model()
    for tensor in wire.tensors(proto):
        del tensor.metadata_props[:]  # onnx_ir writes those of a TensorProto twice
    return ir.to_proto(ir.from_proto(proto))


def program(tensor: object, *more: object) -> object:
    """Return a program that multiplies by a matrix of 65 columns; other tensors are further initializers."""
    out = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 11, opset_import: ["" : 21]> g (float[N,65] x, float[65,64] w) => (float[N,64] y)'
            " { y = MatMul (x, w) }"
        )
    )
    matrix = out.graph.inputs.pop()
    matrix.const_value = tensor
    out.graph.register_initializer(matrix)
    for index, other in enumerate(more):
        out.graph.register_initializer(ir.Value(name=f"more{index}", const_value=other))
    return out


def lazy(function: object, *, cache: bool = False, shape: tuple[int, ...] = (65, 64)) -> object:
    return ir.LazyTensor(function, dtype=ir.DataType.FLOAT, shape=ir.Shape(shape), cache=cache, name="w")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of a process from /proc")
def test_converting_and_saving_a_program_takes_a_fifth_of_its_weights(tmp_path):
    command = [sys.executable, str(TESTS / "support" / "program_memory.py"), "lazy", str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["weights"] > 2e8
    assert found["grown"] <= 0.2 * found["weights"] + ALLOWANCE
    assert found["same"]


@pytest.mark.parametrize("external_data", [False, True])
def test_a_program_and_its_file_give_the_same_bytes(tmp_path, external_data):
    proto = supported()
    onnx.save(proto, tmp_path / "model.onnx")
    for name, source in (("program", ir.from_proto(proto)), ("file", tmp_path / "model.onnx")):
        (tmp_path / name).mkdir()
        convert(source).save(tmp_path / name / "out.onnx", external_data=external_data)
    written, expected = (sorted((tmp_path / name).iterdir()) for name in ("program", "file"))
    assert [f.name for f in written] == [f.name for f in expected]
    assert [f.read_bytes() for f in written] == [f.read_bytes() for f in expected]


def test_heavy_tensors_of_a_program_are_stubs_even_in_bodies_and_functions():
    found = Model.load(ir.from_proto(supported()))
    heavy = [t.name or "constant" for t in wire.tensors(found.proto) if is_stub(t)]
    assert heavy == ["body", "constant", "heavy", "big", "tied", "constant"]
    assert found.to_proto() == supported()
    assert fingerprint(found) == fingerprint(Model.load(supported()))


def test_a_program_of_torch_is_not_serialized():
    class Program:
        model = program(ir.Tensor(values(65, 64)))

        @property
        def model_proto(self) -> onnx.ModelProto:
            raise AssertionError("all weights in one proto")

    assert [t.data_type for t in convert(Program()).model.graph.initializer] == [TensorProto.FLOAT16]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int8", "bool", "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_every_type_and_layout_is_read(dtype, order):
    given = np.asarray(values(3, 50, 7, 300), dtype, order=order)
    found = Model.load(program(ir.Tensor(values(65, 64)), ir.Tensor(given)))
    tensor = found.proto.graph.initializer[1]
    assert is_stub(tensor)
    assert found.to_proto().graph.initializer[1].raw_data == given.tobytes()
    np.testing.assert_array_equal(found.array(tensor).view(np.uint8), np.ascontiguousarray(given).view(np.uint8))
    np.testing.assert_array_equal(np.concatenate(list(found.chunks(tensor, 1000))), given.reshape(-1))


@pytest.mark.torch
def test_a_tensor_without_values_is_named():
    torch = pytest.importorskip("torch")
    with torch._subclasses.fake_tensor.FakeTensorMode():
        weight = torch.empty(65, 64)
    with pytest.raises(ModelError, match=r"tensor 'w' of the program cannot be read: .*export the program again"):
        convert(program(ir.tensor_adapters.TorchTensor(weight, name="w")))


def test_a_lazy_tensor_of_another_size_or_that_fails_is_refused():
    with pytest.raises(ModelError, match="tensor 'w' of the program has 16 bytes, but its shape and type need 16640"):
        convert(program(lazy(lambda: ir.Tensor(np.ones(4, np.float32)))))
    with pytest.raises(ModelError, match="tensor 'w' of the program cannot be read: 'x'; set its values"):
        convert(program(lazy(lambda: {}["x"])))


def test_a_shared_tensor_is_written_once_and_the_program_keeps_its_names(tmp_path):
    shared = ir.Tensor(values(65, 64), name="first")
    source = program(shared, shared)
    found = Model.load(source)
    found.save(tmp_path / "m.onnx", external_data=True)
    (data,) = tmp_path.glob("*.data")
    assert data.stat().st_size == 65 * 64 * 4
    assert shared.name == "first"
    names = [t.name for t in found.proto.graph.initializer]
    assert names == ["w", "more0"]


def test_external_tensors_of_several_folders_are_read_from_their_files(tmp_path):
    tensors = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        proto = one(numpy_helper.from_array(values(65, 64, seed=len(tensors)), "w"))
        external(proto.graph.initializer[0], "w.bin")
        (tmp_path / name / "w.bin").write_bytes(values(65, 64, seed=len(tensors)).tobytes())
        onnx.save_model(proto, tmp_path / name / "m.onnx")
        tensors.append(ir.load(tmp_path / name / "m.onnx").graph.initializers["w"].const_value)
    found = Model.load(program(*tensors))
    for seed, tensor in enumerate(found.proto.graph.initializer):
        np.testing.assert_array_equal(found.array(tensor), values(65, 64, seed=seed))
    assert all(tensor.raw is None for tensor in tensors)
    found = Model.load(program(*tensors), folder=tmp_path / "a")
    np.testing.assert_array_equal(found.array(found.proto.graph.initializer[1]), values(65, 64))


def test_models_that_onnx_ir_cannot_write_are_refused_in_one_line():
    source = program(ir.Tensor(values(65, 64)))
    sparse = ir.Attr("value", ir.AttributeType.SPARSE_TENSOR, object())
    next(iter(source.graph)).attributes["value"] = sparse
    with pytest.raises(
        ModelError, match=r"^onnx_ir cannot convert the program to a ModelProto: [^\n]*Sparse tensors [^\n]*again$"
    ):
        Model.load(source)


def test_the_data_of_a_program_is_never_replaced(tmp_path):
    weight = values(65, 64).tobytes()
    (tmp_path / "w.bin").write_bytes(weight)
    facts = {"shape": ir.Shape([65, 64]), "name": "w", "base_dir": tmp_path}
    tensor = ir.ExternalTensor("w.bin", 0, len(weight), ir.DataType(TensorProto.FLOAT), **facts)
    with pytest.raises(ModelError, match="still reads weights from it; name another"):
        convert(program(tensor)).save(tmp_path / "w.bin", overwrite=True)
    assert (tmp_path / "w.bin").read_bytes() == weight
