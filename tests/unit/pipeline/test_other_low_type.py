"""Models of one low type that are converted to the other: through float32, under the same rules."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from support.corpus import exported

OTHER = {"float16": "bfloat16", "bfloat16": "float16"}
NAMES = ("examples/models/digits_cnn.onnx", "tests/models/bert_dynamo20.onnx", "tests/models/gpt2_ts17.onnx")


def text(body: str, *, low: str = "bfloat16", held: str = "", opset: int = 22) -> ModelProto:
    """A model of a low type; `w` and `v` are its weights."""
    head = f'<ir_version: 10, opset_import: ["": {opset}]>'
    proto = onnx.parser.parse_model(f"{head} g ({low}[8,8] x) => ({low}[8,8] y) <{held}> {{ {body} }}")
    code = DType.parse(low).code
    for name, top in (("w", 1.0), ("v", 1e5)):
        values = np.linspace(-top, top, 64, dtype=np.float32)
        proto.graph.initializer.append(onnx.helper.make_tensor(name, code, (8, 8), values.tolist()))
    return proto


def types(model: object) -> Counter[str]:
    """How many values have each floating type."""
    dtypes = (stated.dtype for stated in View.of(Model.load(model)).types if stated is not None)
    return Counter(dtype.spelling for dtype in dtypes if dtype is not None and dtype.floating)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", OTHER)
def test_it_is_lowered_as_far_as_the_float32_model(name: str, to: str) -> None:
    source = exported(name)
    half = convert(source, to=OTHER[to], opset=22).model
    result, direct = convert(half, to=to), convert(source, to=to, opset=22)
    assert result.report.totals.compute_lowered == result.report.totals.compute_ops
    assert result.report.totals.compute_lowered == direct.report.totals.compute_lowered > 0
    assert OTHER[to] not in types(result.model)
    assert f"100 % of FLOPs in {to}: " in result.report.text()
    (finding,) = (finding for finding in result.report.findings if finding.kind == "widened")
    assert f"ops compute in {OTHER[to]}" in finding.message


def test_inputs_and_outputs_keep_their_type_unless_asked_otherwise() -> None:
    model = text("a = MatMul (x, w)  y = MatMul (a, w)")
    kept, low = (convert(model, to="float16", io=io).model.graph for io in (None, "low"))
    edges = [[v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)] for graph in (kept, low)]
    assert edges == [[TensorProto.BFLOAT16] * 2, [TensorProto.FLOAT16] * 2]
    assert [sum(node.op_type == "Cast" for node in graph.node) for graph in (kept, low)] == [2, 0]
    wide = convert(model, to="float16", io=["x=float32", "out:low"]).model.graph
    assert [v.type.tensor_type.elem_type for v in (*wide.input, *wide.output)] == [
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
    ]
    unchanged = convert(model, to="float16", io=["low", "keep"]).model.graph
    assert unchanged.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16


def test_what_is_not_lowered_becomes_float32() -> None:
    result = convert(text("a = Softmax (x)  y = Exp (a)"), to="float16")
    assert types(result.model) == {"bfloat16": 2, "float32": 5}  # two of them weights that are not read
    assert [finding.kind for finding in result.report.findings] == ["widened"]
    assert {row.dtype for row in result.report.rows if row.op == "Exp"} == {"float32"}
