"""Conversion as an onnx_ir pass and in place: lazy weights, metadata, other passes."""

from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest

import amp_rewrite
from amp_rewrite.errors import ListError, PatternError, PolicyError
from amp_rewrite.files import wire
from amp_rewrite.files.model import Model
from support.paths import TESTS
from support.weights import model as with_weights_everywhere

ir = pytest.importorskip("onnx_ir", reason="needs onnx_ir: pip install onnxscript")
ours = import_module("amp_rewrite.compat.onnx_ir")
MixedPrecision, convert_program, to_ir = ours.MixedPrecision, ours.convert_program, ours.to_ir
Sequential, PassManager = ir.passes.Sequential, ir.passes.PassManager
common = import_module("onnx_ir.passes.common")

VIT = TESTS / "models" / "vit_ts17.onnx"
TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[N,96] x) => (float[N,96] y)
<float[96,96] w> { h = MatMul (x, w)
  s = Softmax (h)
  y = Add (s, s) }"""


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def lazy_model(reads: list[str]) -> object:
    """Build a product with a lazy weight, then a Softmax. `reads` collects the names of weights read."""
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    array = values(96, 96)

    def read() -> object:
        reads.append("w")
        return ir.Tensor(array)

    weight = next(node for node in model.graph if node.op_type == "MatMul").inputs[1]
    weight.const_value = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape((96, 96)), name="w")
    if "w" not in model.graph.initializers:
        model.graph.register_initializer(weight)
    return model


def test_the_pass_and_convert_give_the_same_model() -> None:
    passes = Sequential(common.RemoveUnusedNodesPass(), MixedPrecision(keep=["op=Gemm"]))
    expected = amp_rewrite.convert(VIT, keep=["op=Gemm"], fuse="basic").model
    assert ir.to_proto(passes(ir.load(VIT)).model) == ir.to_proto(ir.from_proto(expected))


def test_weights_are_neither_read_nor_changed_until_the_result_is_saved(tmp_path: Path) -> None:
    reads: list[str] = []
    source = lazy_model(reads)
    half = MixedPrecision()(source).model
    before = len(reads)
    weight = half.graph.initializers[next(iter(half.graph.initializers))].const_value
    assert isinstance(weight, ir.LazyTensor)
    assert weight.dtype == ir.DataType.FLOAT16
    ir.save(half, tmp_path / "half.onnx")
    assert len(reads) == before + 1
    assert source.graph.initializers["w"].const_value.dtype == ir.DataType.FLOAT
    (saved,) = onnx.load(tmp_path / "half.onnx").graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(saved), values(96, 96).astype(np.float16))


def test_metadata_and_unchanged_weights_are_the_source_models_objects() -> None:
    source = lazy_model([])
    result = MixedPrecision(keep=["op=MatMul"])(source)
    assert not result.modified
    assert result.model is not source
    assert result.model.graph.initializers["w"].const_value is source.graph.initializers["w"].const_value
    source = ir.load(VIT)
    node = next(n for n in source.graph.all_nodes() if n.op_type == "MatMul")
    node.metadata_props["layer"] = "encoder.0"
    source.metadata_props["licence"] = "any"
    half = MixedPrecision()(source).model
    assert half.metadata_props["licence"] == "any"
    assert [n.op_type for n in half.graph.all_nodes() if n.metadata_props.get("layer") == "encoder.0"] == ["MatMul"]


def test_tensors_everywhere_and_those_of_callers_are_returned() -> None:
    proto = with_weights_everywhere()
    for tensor in wire.tensors(proto):
        del tensor.metadata_props[:]  # onnx_ir writes those of a TensorProto twice
    source = ir.from_proto(proto)
    assert ir.to_proto(to_ir(Model.load(source))) == ir.to_proto(source)
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "f": 1]>
      g (float[2] x) => (float[2] y) { y = f.shifted <by: tensor = float[2] {1, 2}> (x) }
      <domain: "f", opset_import: ["": 21]> shifted <by> (x) => (y) { c = Constant <value: tensor = @by> ()
        y = Add (x, c) }""")
    assert ir.to_proto(to_ir(Model.load(proto))) == ir.to_proto(ir.from_proto(proto))


def test_an_unknown_value_fails_in_the_constructor_and_other_models_are_refused() -> None:
    with pytest.raises(PolicyError, match="int3"):
        MixedPrecision(to="int3")
    with pytest.raises(ListError):
        MixedPrecision(lists="missing.yaml")
    with pytest.raises(ir.passes.PassError) as caught:
        Sequential(MixedPrecision(keep=["op=Nothing"]))(ir.load(VIT))
    assert isinstance(caught.value.__cause__, PatternError)
    with pytest.raises(PolicyError, match=r"ModelProto is not an ONNXProgram .* use amp_rewrite\.convert"):
        convert_program(onnx.load(VIT))


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # from the exporter
def test_a_program_of_torch_is_converted_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.GELU(), torch.nn.Linear(96, 96)).eval()
    batch = torch.randn(4, 96)
    program = torch.onnx.export(net, (batch,), dynamo=True, verbose=False)
    (before,) = program(batch)
    report = convert_program(program)
    (after,) = program(batch)
    assert {row.dtype for row in report.rows if row.op == "Gemm"} == {"float16"}
    assert after.dtype == before.dtype == torch.float32
    assert 0 < (after - before).abs().max() < 1e-2
    program.save(tmp_path / "half.onnx")
    saved = onnx.load(tmp_path / "half.onnx")
    assert {t.data_type for t in saved.graph.initializer if len(t.dims) == 2} == {onnx.TensorProto.FLOAT16}
    assert net[0].weight.dtype == torch.float32
