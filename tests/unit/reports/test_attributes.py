"""Attributes of rows: which count, how they are spelled, and how finely quantizers scale."""

from __future__ import annotations

from zlib import crc32

import pytest
from onnx import TensorProto, TypeProto
from onnx.helper import (
    make_map_type_proto,
    make_node,
    make_optional_type_proto,
    make_sequence_type_proto,
    make_sparse_tensor,
    make_sparse_tensor_type_proto,
    make_tensor,
    make_tensor_type_proto,
)
from onnx.parser import parse_model

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import Op, View
from amp_rewrite.reports.attributes import counting, granularity, key_of, plain, spell_type

HEAD = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "ai.onnx.ml" : 3, "own" : 1]>'
FLOAT, INT8 = make_tensor_type_proto(1, None), make_tensor_type_proto(3, None)


def _op(node: str, inputs: str = "float[2,4] x", weights: str = "") -> tuple[View, Op]:
    text = f"{HEAD} g ({inputs}) => (y) <{weights}> {{ {node} }}"
    view = View.of(Model.load(parse_model(text)))
    return view, view.ops[-1]


@pytest.mark.parametrize(
    ("node", "counted"),
    [
        ("y = Softmax <axis = 0> (x)", {}),
        ("y = Cast <to = 10> (x)", {}),
        ("y = Cast <to = 10, saturate = 0> (x)", {"saturate": "0"}),
        ("y = Constant <value_float = 1.0> ()", {}),
        ("s = Shape (x) y = ConstantOfShape <value = float {0}> (s)", {}),
        ("y = LayerNormalization <epsilon = 0.00001, stash_type = 1> (x, x)", {}),
        (
            "y = LayerNormalization <epsilon = 0.001, stash_type = 10> (x, x)",
            {"epsilon": "0.001", "stash_type": "float16"},
        ),
        ('y = Gelu <approximate = "none"> (x)', {}),
        ('y = Gelu <approximate = "tanh"> (x)', {"approximate": "tanh"}),
        ("y = own.F <a = 1, b = 0.5, axis = 3> (x)", {"a": "1", "b": "0.5", "axis": "3"}),
        ('y = own.F <a = [1, 2], b = [0.5], c = ["u", "v"]> (x)', {"a": "1, 2", "b": "0.5", "c": "u, v"}),
        ("y = own.F <a = float16 {1}, stash_type = 10> (x)", {"a": "float16", "stash_type": "float16"}),
        ("y = own.F <a = [1, 2, 3, 4, 5, 6, 7, 8]> (x)", {"a": "1, 2, 3, 4, 5, 6, 7, 8"}),
        (
            "y = own.F <a = [1, 2, 3, 4, 5, 6, 7, 8, 9]> (x)",
            {"a": f"9 items {crc32(chr(0).join('123456789').encode()):08x}"},
        ),
        (
            "y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x)",
            {"offset": "a list of float", "scale": "a list of float"},
        ),
    ],
)
def test_attributes_count_unless_they_place_state_a_type_or_are_the_default(node: str, counted: dict[str, str]) -> None:
    _, op = _op(node)
    assert counting(op.domain, op.signature, plain(op.node)) == counted


@pytest.mark.parametrize(
    ("node", "types", "weights", "expected"),
    [
        ("y = QuantizeLinear (x, s)", ("float32", "int8"), "float s = {0.5}", {}),
        ("y = QuantizeLinear (x, s)", ("float32", "int8"), "float[1] s = {0.5}", {}),
        (
            "y = QuantizeLinear <axis = -2> (x, s)",
            ("float32", "int8"),
            "float[2] s = {1, 2}",
            {"y_scale": "per axis", "axis": "-2"},
        ),
        (
            "y = QuantizeLinear (x, s)",
            ("float32", "int16"),
            "float[4] s = {1, 2, 3, 4}",
            {"y_scale": "per axis", "axis": "1"},
        ),
        ("y = QuantizeLinear (x, s)", ("float32", "int32"), "float[4] s = {1, 2, 3, 4}", {}),
        (
            "y = QuantizeLinear <block_size = 2> (x, s)",
            ("float32", "float8e4m3fn"),
            "float[2,2] s = {1, 2, 3, 4}",
            {"y_scale": "per block", "axis": "1"},
        ),
        ("y = QuantizeLinear (x, s, z)", ("float32", "int8"), "float s = {0.5}, int8 z = {0}", {}),
        ("y = QuantizeLinear (x, s, z)", ("float32", "int8"), "float s = {0.5}, int8 z = {3}", {"zero point": "not 0"}),
        (
            "y = own.F (x, s, z)",
            ("float32",),
            "float s = {0.5}, float[2,3] z = {1,2,3,4,5,6}",
            {"constant 1": "scalar", "constant 2": "2×3"},
        ),
        ("y = Add (x, s)", ("float32", "int8"), "float[4] s = {1, 2, 3, 4}", {}),
    ],
)
def test_quantizers_tell_how_finely_they_scale(
    node: str, types: tuple[str, ...], weights: str, expected: dict[str, str]
) -> None:
    view, op = _op(node, weights=weights)
    constants = {slot: view.constant(v) for slot, v in enumerate(op.inputs) if v is not None}
    shapes = {slot: tuple(tensor.dims) for slot, tensor in constants.items() if tensor is not None}
    assert granularity(view, op, plain(op.node), types, shapes) == expected


def test_keys_leave_out_types_and_tell_kinds_attributes_and_weights_apart() -> None:
    def key(kind: str = "F", weights: dict[int, tuple[int, ...]] | None = None, **attributes: int) -> str:
        return key_of(kind, plain(make_node("F", [], [], **attributes)), weights or {})

    typed = dict.fromkeys(("to", "dtype", "output_dtype", "stash_type", "saturate", "output_datatype"), 1)
    assert key(a=1) == key(a=1, **typed) == key(**typed, a=1)
    assert key(a=1, b=2) == key(b=2, a=1)
    different = [key(), key("G"), key(a=1), key(a=2), key(b=1), key(weights={0: (2,)}), key(weights={1: (2,)})]
    assert len({*different, key(weights={0: (3,)}), key(a=1, weights={0: (2,)})}) == len(different) + 2
    assert all(len(one) == 12 for one in different)


@pytest.mark.parametrize(
    ("proto", "spelled"),
    [
        (FLOAT, "float32"),
        (make_tensor_type_proto(99, None), "type 99"),
        (make_sparse_tensor_type_proto(TensorProto.FLOAT16, None), "sparse_tensor(float16)"),
        (make_map_type_proto(TensorProto.INT64, FLOAT), "map(int64, float32)"),
        (make_sequence_type_proto(make_map_type_proto(TensorProto.STRING, INT8)), "seq(map(string, int8))"),
        (make_optional_type_proto(INT8), "optional(int8)"),
        (TypeProto(), "unknown"),
    ],
)
def test_types_are_spelled_in_full(proto: TypeProto, spelled: str) -> None:
    assert spell_type(proto) == spelled
    node = make_node("F", [], [], domain="own", a=proto)
    assert counting("own", None, plain(node)) == {"a": spelled}


def test_a_sparse_tensor_counts_by_its_type_and_graphs_by_their_rows() -> None:
    sparse = make_sparse_tensor(make_tensor("v", 1, [1], [2.0]), make_tensor("i", 7, [1], [0]), [3])
    node = make_node(
        "F", [], [], domain="own", a=sparse, b=parse_model(f"{HEAD} g (float x) => (y) {{ y = Neg (x) }}").graph
    )
    assert counting("own", None, plain(node)) == {"a": "sparse_tensor(float32)"}
