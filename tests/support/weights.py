"""Models with weights of a chosen size, and external data in odd layouts."""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper, parser

from amp_rewrite.files import wire
from amp_rewrite.files.protos import clone

# 64 x 64 float32 is 16 KiB: just not heavy; 65 x 64 is.
TEXT = """
<ir_version: 10, opset_import: ["" : 21, "own" : 1], producer_name: "by hand", metadata_props: ["k": "v"]>
main (float[2,65] x, bool c) => (float[P,N,M] y) {
  a = MatMul (x, heavy)
  r = Reshape (a, shape)
  f = own.F (r)
  b = MatMul (f, tied)
  y = If (c) <
    then_branch = t () => (float[A,B,C] p) { p = MatMul (b, body) },
    else_branch = e () => (float[D,E,F] q) { k = Constant () q = MatMul (b, k) }
  >
}
<domain: "own", opset_import: ["" : 21]>
F (u) => (v) { k = Constant () v = Mul (u, k) }
"""


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model() -> ModelProto:
    """Build a model with heavy and light tensors in every kind of place, and with details that are easily lost."""
    out: ModelProto = parser.parse_model(TEXT)
    shape = numpy_helper.from_array(np.array([2, -1]), "shape")
    heavy = numpy_helper.from_array(values(65, 64), "heavy")
    heavy.doc_string = "the heavy one"
    heavy.metadata_props.add(key="layer", value="0")
    light = numpy_helper.from_array(values(4), "light")
    packed = onnx.helper.make_tensor("packed", TensorProto.INT4, [3], [1, -2, 3])
    words = onnx.helper.make_tensor("words", TensorProto.STRING, [2], [b"a", b"b" * 40_000])
    typed = onnx.helper.make_tensor("typed", TensorProto.FLOAT, [5000], [0.5] * 5000)
    big = numpy_helper.from_array(values(600, 600, seed=1), "big")  # more than 1 MiB
    tied = numpy_helper.from_array(values(64, 65, seed=2), "tied")
    out.graph.initializer.extend([shape, heavy, light, packed, words, typed, big, tied])
    then, other = (a.g for a in out.graph.node[-1].attribute)
    then.initializer.append(numpy_helper.from_array(values(65, 65, seed=3), "body"))
    constant(other.node[0], values(65, 70, seed=4))
    constant(out.functions[0].node[0], values(80, 1, 64, seed=5))
    sparse = out.graph.sparse_initializer.add(dims=[10_000])
    sparse.values.CopyFrom(numpy_helper.from_array(values(5000), "sparse"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(5000)))
    training = out.training_info.add()
    training.initialization.name = "training"
    training.initialization.initializer.append(numpy_helper.from_array(values(90, 90, seed=6), "moment"))
    out.graph.quantization_annotation.add(tensor_name="x")
    return out


def constant(node: onnx.NodeProto, value: np.ndarray) -> None:
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(numpy_helper.from_array(value))


def one(tensor: TensorProto) -> ModelProto:
    """Build a model with `tensor` as its only initializer."""
    out: ModelProto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Identity (x) }'
    )
    out.graph.initializer.append(tensor)
    return out


def external(tensor: TensorProto, location: str, **entries: object) -> None:
    """Declare the tensor's bytes external."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))


def scatter(proto: ModelProto, path: Path) -> None:
    """Save a model with tensors in several files, at odd offsets, one without offset and length."""
    files = {name: bytearray(b"head") for name in ("a.bin", "sub/b.bin")}
    for index, tensor in enumerate(wire.tensors(proto)):
        if not tensor.HasField("raw_data"):
            continue
        name = list(files)[index % 2]
        offset = len(files[name])
        files[name] += tensor.raw_data + b"gap"
        external(tensor, name, offset=offset, length=len(tensor.raw_data))
    lone = proto.graph.initializer.add(name="lone", data_type=TensorProto.FLOAT, dims=[70, 70])
    external(lone, "lone.bin")
    (path.parent / "sub").mkdir()
    (path.parent / "lone.bin").write_bytes(values(70, 70).tobytes())
    for name, content in files.items():
        (path.parent / name).write_bytes(content)
    path.write_bytes(proto.SerializeToString())


def plain(proto: ModelProto) -> ModelProto:
    """Copy a model without the locations of its tensors, and with float32 in raw form."""
    out = clone(proto)
    for tensor in wire.tensors(out):
        tensor.ClearField("data_location")
        if tensor.float_data:
            tensor.raw_data = np.array(tensor.float_data, np.float32).tobytes()
            tensor.ClearField("float_data")
    return out
