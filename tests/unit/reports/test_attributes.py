"""Attributes of rows: which count, and how they are spelled."""

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
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report_builder import counting, spell_type

HEAD = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "ai.onnx.ml" : 3, "own" : 1]>'
FLOAT, INT8 = make_tensor_type_proto(1, None), make_tensor_type_proto(3, None)


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
            {"offset": "a list", "scale": "a list"},
        ),
    ],
)
def test_attributes_count_unless_they_place_state_a_type_or_are_the_default(node: str, counted: dict[str, str]) -> None:
    op = View.of(Model.load(parse_model(f"{HEAD} g (float[2,4] x) => (y) {{ {node} }}"))).ops[-1]
    assert counting(op.domain, op.signature, op.node.attribute) == counted


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
    assert counting("own", None, node.attribute) == {"a": spelled}


def test_a_sparse_tensor_counts_and_graphs_by_their_rows() -> None:
    sparse = make_sparse_tensor(make_tensor("v", 1, [1], [2.0]), make_tensor("i", 7, [1], [0]), [3])
    node = make_node(
        "F", [], [], domain="own", a=sparse, b=parse_model(f"{HEAD} g (float x) => (y) {{ y = Neg (x) }}").graph
    )
    assert counting("own", None, node.attribute) == {"a": "sparse_tensor"}
