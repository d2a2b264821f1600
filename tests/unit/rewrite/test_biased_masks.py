"""A mask that carries a bias: the bias is added to the scores, the mask selects, and no bit changes in float32."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.attention_masks import select_biased
from amp_rewrite.rewrite.replace import run_round
from amp_rewrite.rewrite.replacement import Context

LOWEST = "-3.4028234663852886e38"
WEIGHTS = f"<float least = {{{LOWEST}}}, float zero = {{0}}, float mild = {{-9}}, float[1] least1 = {{{LOWEST}}}>"
WHERE = "mask = Where (seen, bias, least)"
SHOWN = np.array([[True, True, False], [False, False, False], [True, True, True]])


def model(mask: str = WHERE, rest: str = "z = Add (a, mask)  y = Softmax (z)", opset: int = 18) -> ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[3,3] x, float[3,3] table, bool[3,3] seen) => (float[3,3] y) {WEIGHTS} {{
        a = MatMul (x, x)
        bias = MatMul (table, x)
        {mask}
        {rest}
    }}""")


def selected(proto: ModelProto) -> View:
    return run_round(View.of(Model.load(proto)), (select_biased,), Context(DType.FLOAT16))[0]


def kinds(view: View) -> str:
    return " ".join(op.kind for op in view.ops)


def run(proto: ModelProto) -> NDArray[np.float32]:
    ort = pytest.importorskip("onnxruntime")
    x = np.array([[4, 0.5, -3], [1.25, 3, 0.75], [-2, 6, 3]], np.float32)
    feed = {"x": x, "table": np.flipud(x) / 3, "seen": SHOWN}
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(None, feed)[0]
    return found


@pytest.mark.parametrize(
    "proto",
    [
        model(),
        model("mask = Where (seen, bias, least1)"),
        model("hidden = Not (seen)  mask = Where (hidden, least, bias)"),
        model(rest="z = Add (mask, a)  y = Softmax (z)"),
        model(rest="z = Add (a, mask)  y = LogSoftmax (z)"),
    ],
)
def test_the_bias_is_added_and_the_mask_selects_to_the_same_bits(proto: ModelProto) -> None:
    view = selected(proto)
    assert kinds(view).replace("Not ", "") in ("MatMul MatMul Add Where Softmax", "MatMul MatMul Add Where LogSoftmax")
    assert run(view.model.proto).tobytes() == run(proto).tobytes()


def test_in_float16_a_row_that_is_masked_throughout_is_as_even_as_in_float32() -> None:
    converted = amp_rewrite.convert(model(rest="z = Add (a, mask)  p = Softmax (z)  y = MatMul (p, x)"))
    assert {row.dtype for row in converted.report.rows} == {"float16"}
    found = run(amp_rewrite.emulate(amp_rewrite.convert(model(), lower=["op=Softmax"]).model).to_proto())
    assert found[1].tolist() == [np.float16(1 / 3)] * 3
    assert np.abs(found - run(model())).max() <= 0.03  # scores up to 64 are rounded by up to 2⁻⁵


@pytest.mark.parametrize(
    "proto",
    [
        model("mask = Where (seen, bias, mild)"),
        model("mask = Where (seen, zero, least)"),
        model(rest="z = Add (a, mask)  y = Relu (z)"),
        model(rest="z = Add (mask, mask)  y = Softmax (z)"),
        model(rest="b = Where (seen, a, least)  z = Add (b, mask)  y = Softmax (z)"),
    ],
    ids=["a mask that fits", "a mask without a bias", "no softmax", "a mask added to itself", "scores masked before"],
)
def test_anything_else_is_left_alone(proto: ModelProto) -> None:
    view = View.of(Model.load(proto))
    assert list(select_biased(view, Context(DType.FLOAT16))) == []


def test_a_mask_that_is_read_elsewhere_stays_and_serves_every_sum() -> None:
    rest = "z = Add (a, mask)  s = Softmax (z)  w = Add (s, mask)  p = Softmax (w)  y = Add (p, mask)"
    assert kinds(selected(model(rest=rest))) == "MatMul MatMul Where Add Where Softmax Add Where Softmax Add"


def test_a_sum_in_a_body_is_left_alone_where_the_mask_stands_outside() -> None:
    rest = """flag = ReduceMax <keepdims = 0> (counted)  yes = Cast <to = 9> (flag)
        y = If (yes) <then_branch = t () => (float[3,3] p) { z = Add (a, mask)  p = Softmax (z) },
                      else_branch = e () => (float[3,3] q) { q = Identity (a) }>"""
    view = View.of(Model.load(model(WHERE + "  counted = Cast <to = 6> (seen)", rest)))
    assert list(select_biased(view, Context(DType.FLOAT16))) == []


def test_the_report_names_the_mask_and_a_second_conversion_finds_none() -> None:
    once = amp_rewrite.convert(model(rest="z = Add (a, mask)  p = Softmax (z)  y = MatMul (p, x)"))
    assert [finding.subject for finding in once.report.findings if finding.kind == "selected"] == ["mask"]
    again = amp_rewrite.convert(once.model)
    assert again.report.findings == ()
    assert again.model == once.model


def test_scores_that_a_mask_has_selected_already_take_another_mask_as_in_float32() -> None:
    """Of a row that is masked throughout what both hide is −inf, and what one hides is not."""
    causal = "tri = Constant <value = bool[3,3] {1, 0, 0, 1, 1, 0, 1, 1, 1}> ()  b = Where (tri, a, least)"
    proto = model("mask = Where (seen, zero, least)", f"{causal}  z = Add (b, mask)  y = Softmax (z)")
    wanted = run(proto)
    assert wanted[1].tolist() == [0.5, 0.5, 0]
    found = run(amp_rewrite.emulate(amp_rewrite.convert(proto).model).to_proto())
    assert found[1].tolist() == [0.5, 0.5, 0]
