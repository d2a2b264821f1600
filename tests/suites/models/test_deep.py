"""Graphs as deep as Python's stack is not: whatever follows a chain does so without recursion."""

import sys

import onnx

from amp_rewrite.pipeline.convert import convert

DEEP = sys.getrecursionlimit() + 50


def test_casts_that_do_nothing_are_read_past_however_many_follow_each_other() -> None:
    chain = [f"c{i + 1} = Cast <to = 1> (c{i})" for i in range(DEEP)]
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] c0, float[8,8] w) => (float[8,8] y)'
    result = convert(onnx.parser.parse_model(f"{head} {{ {' '.join(chain)} y = MatMul (c{DEEP}, w) }}")).model
    assert [(node.op_type, list(node.input)) for node in result.graph.node] == [
        ("Cast", ["w"]),
        ("Cast", ["c0"]),  # the last one of them, which casts to float16 now
        ("MatMul", [f"c{DEEP}", "w_float16"]),
        ("Cast", ["y_float16"]),
    ]


def test_copies_between_a_transpose_and_a_product_are_read_past() -> None:
    chain = [f"c{i + 1} = Identity (c{i})" for i in range(DEEP)]
    head = '<ir_version: 10, opset_import: ["" : 21]> g (float[2,3,8] x, float[8,8] w) => (float[3,2,8] y)'
    body = f"c0 = Transpose <perm = [1, 0, 2]> (x) {' '.join(chain)} y = MatMul (c{DEEP}, w)"
    report = convert(onnx.parser.parse_model(f"{head} {{ {body} }}")).report
    assert {row.dtype for row in report.rows} == {"float16"}
