"""The protobuf wire format: skipping, refusing and writing fields."""

import io

import onnx
import pytest
from onnx import parser

from amp_rewrite.errors import ModelError
from amp_rewrite.files import wire

TEXT = """
<ir_version: 10, opset_import: ["" : 17], producer_name: "text", metadata_props: ["k": "v"]>
g (float[2,3] x, bool c) => (float[2,3] y) <float[3] w = {1, 2, 3}> {
  a = Mul (x, w)
  y = If (c) <
    then_branch = t () => (float[2,3] p) <float[3] v = {4, 5, 6}> { p = Add (a, v) },
    else_branch = e () => (float[2,3] q) { k = Constant <value = float[3] {7, 8, 9}> ()  q = Add (a, k) }
  >
}
"""


def small() -> onnx.ModelProto:
    model: onnx.ModelProto = parser.parse_model(TEXT)
    for tensor in wire.tensors(model):
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return model


def never(tensor: onnx.TensorProto, offset: int, length: int) -> bool:
    return False


def light(content: bytes, threshold: int = 0) -> bytes:
    return wire.lightened(io.BytesIO(content), len(content), threshold, never, "m.onnx")


def test_every_field_that_leads_to_a_tensor_is_in_a_table():
    known = (*wire.DENSE, onnx.SparseTensorProto, onnx.TensorProto)
    for message, fields in wire.DENSE.items():
        for field in message.DESCRIPTOR.fields:
            if field.message_type is None:
                continue
            child = field.message_type.name
            if child in {kind.DESCRIPTOR.name for kind in known}:
                assert field.name in (*fields, *wire.SPARSE.get(message, ())), (message, field.name)


def test_heavy_tensors_are_omitted_at_every_depth_with_their_locations():
    content = small().SerializeToString()
    places: list[bytes] = []

    def stub(tensor: onnx.TensorProto, offset: int, length: int) -> bool:
        assert not tensor.raw_data
        places.append(content[offset : offset + length])
        return True

    found = wire.lightened(io.BytesIO(content), len(content), 4, stub, "m.onnx")
    expected = small()
    heavy = []
    for tensor in wire.tensors(expected):
        heavy.append(tensor.raw_data)
        tensor.ClearField("raw_data")
    assert onnx.ModelProto.FromString(found) == expected
    assert sorted(places) == sorted(heavy)


def test_graph_parts_split_over_two_fields_are_merged_as_in_protobuf():
    model = small()
    first, second = onnx.ModelProto(), onnx.ModelProto()
    first.CopyFrom(model)
    del first.graph.initializer[:]
    second.graph.initializer.extend(model.graph.initializer)
    content = first.SerializeToString() + second.SerializeToString()
    assert onnx.ModelProto.FromString(light(content)) == model


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"\x3a\x05abc", "field 7 runs 2 bytes past the end"),
        (b"\x08", "a varint does not end"),
        (b"\x08" + b"\xff" * 11, "a varint does not end"),
        (b"\x09abc", "field 1 runs 5 bytes past the end"),
        (b"\x38\x01", "field graph of ModelProto has wire type 0"),
        (b"\x0b\x0c", "cannot be read"),
        (b"\x3a\x03\x2a\x05a", "field 5 runs 4 bytes past the end"),
        (b"\x3a\x04\x2a\x02\x48\x01", "field raw_data of TensorProto has wire type 0"),
    ],
)
def test_malformed_protobuf_is_refused_with_its_position(content, fact):
    with pytest.raises(ModelError, match=rf"^m\.onnx is not an ONNX model, or .* \(byte \d+ of {len(content)}: {fact}"):
        light(content)


@pytest.mark.parametrize("text", [b"QQ", b"\xffQ"])
def test_pieces_match_protobufs_output(text):
    model = small()
    model.graph.doc_string = "QQ"
    content = model.SerializeToString(deterministic=True).replace(b"QQ", text)
    found = wire.pieces(onnx.ModelProto.FromString(content), lambda tensor: [tensor.SerializeToString()])
    assert b"".join(found) == content


def test_fields_unknown_to_onnx_are_preserved():
    unknown = b"\xc0\x3e\x01\xc1\x3e" + bytes(8) + b"\xc5\x3e" + bytes(4) + wire.head(1001, 2) + b"hi"
    model = onnx.ModelProto.FromString(small().SerializeToString() + unknown)
    found = b"".join(wire.pieces(model, lambda tensor: [tensor.SerializeToString()]))
    assert found.endswith(unknown)
    assert onnx.ModelProto.FromString(found) == model


@pytest.mark.parametrize(
    ("kind", "value"),
    [(0, b"\x05"), (0, b"\xff" * 9 + b"\x01"), (1, b"12345678"), (2, b"\x03abc"), (2, b"\x83\x00abc"), (5, b"1234")],
)
def test_fields_of_every_wire_type_are_skipped(kind: int, value: bytes) -> None:
    field, content = bytes([200 << 3 & 0x7F | kind | 0x80, 200 >> 4]) + value, small().SerializeToString()
    assert light(field + content) == field + content
    with pytest.raises(ModelError, match=r"bytes past the end|does not end"):
        light(content + field[:-1])
