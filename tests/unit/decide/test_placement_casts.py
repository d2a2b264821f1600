"""How many Casts a conversion leaves: none that does nothing, and no more than other converters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert


def casts(model: ModelProto | Path) -> Counter[str]:
    """The Casts of a model, bodies included, by what they do."""
    view = View.of(Model.load(model))
    ends = (
        (view.dtype(v) for v in (op.inputs[0], op.outputs[0]) if v is not None) for op in view.ops if op.kind == "Cast"
    )
    return Counter(" → ".join(dtype.spelling if dtype else "?" for dtype in pair) for pair in ends)


def copies(model: ModelProto | Path) -> dict[str, int]:
    """The Casts that do nothing."""
    pairs = ((what.split(" → "), count) for what, count in casts(model).items())
    return {" ".join(what): count for what, count in pairs if what[0] == what[1]}


def folded(result: Converted) -> list[tuple[str, str, str]]:
    return [(c.value, c.from_, c.to) for c in result.report.casts if c.origin == "folded"]


COPYING = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] x, int64[2] i, bool[8,8] m, float[8,8] w)'
    " => (float[8,8] y, int64[2] j, float[2,8] z) {"
    " xc = Cast <to = 1> (x) a = MatMul (x, w)"
    " i1 = Cast <to = 7> (i) i2 = Cast <to = 7> (i1) z = Gather (x, i2) j = Cast <to = 7> (i2)"
    " mc = Cast <to = 9> (m) y = Where (mc, a, xc) }"
)


def test_casts_to_the_type_that_a_value_has_are_left_out_and_the_report_names_them() -> None:
    result = convert(onnx.parser.parse_model(COPYING))
    assert copies(result.model) == {}
    assert folded(result) == [
        ("x", "float32", "float32"),
        ("i", "int64", "int64"),
        ("i1", "int64", "int64"),
        ("i2", "int64", "int64"),
        ("m", "bool", "bool"),
    ]
    reads = {node.output[0]: (node.op_type, list(node.input)) for node in result.model.graph.node}
    assert reads["z"] == ("Gather", ["x", "i"])
    assert reads["j"] == ("Identity", ["i"])  # an output keeps its name
    assert reads["y"] == ("Where", ["m", "a_float32", "x"])


def test_a_cast_whose_source_has_another_type_stays() -> None:
    """A must-fail twin: one that truncates, one that counts, one of a type that nobody knows."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[8,8] x, float[8,8] w)'
        " => (float[8,8] y, int64[8,8] n)"
        "{ a = MatMul (x, w) t = Cast <to = 6> (x) n = Cast <to = 7> (t) f = Cast <to = 1> (t)"
        " u = own.F (x) v = Cast <to = 1> (u) s = Add (f, v) y = Add (s, a) }"
    )
    model = onnx.parser.parse_model(text)
    before, after = casts(model), casts(convert(model).model)
    assert before - after == Counter()


ATTENTION = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[8,8] x, float[8,8] w) => ({OUTPUTS})'
    "{{ a = MatMul (x, w) s = Softmax (a) {CASTS} y = MatMul (q, w) {MORE} }}"
)


@pytest.mark.parametrize("chain", ["p = Cast <to = 1> (s) q = Cast <to = 1> (p)", "{0} r = Cast <to = 1> (p) {1} (r)"])
def test_casts_that_widen_and_narrow_again_go(chain: str) -> None:
    """PyTorch writes two of them around the dropout of every attention: float32 to float32, then float16 and back."""
    given = chain.format("p = Cast <to = 1> (s)", "q = Cast <to = 1>")
    result = convert(onnx.parser.parse_model(ATTENTION.format(OUTPUTS="float[8,8] y", CASTS=given, MORE="")))
    assert casts(result.model) == {"float32 → float16": 2, "float16 → float32": 1}
    reads = {node.output[0]: list(node.input) for node in result.model.graph.node}
    assert reads["y_float16"] == ["s", "w_float16"]
    assert len(folded(result)) == given.count("Cast")


def test_a_widening_cast_goes_that_only_a_folded_cast_reads() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float16[8,8] x, float16[8,8] w, float[8,8] v)'
        " => (float16[8,8] y, float[8,8] z) { a = MatMul (x, w) p = Cast <to = 1> (a) q = Cast <to = 10> (p)"
        " y = MatMul (q, w) z = MatMul (v, v) }"
    )
    result = convert(onnx.parser.parse_model(text))
    assert casts(result.model) == {"float32 → float16": 1, "float16 → float32": 1}
    assert folded(result) == [("a", "float16", "float32"), ("p", "float32", "float16")]


def test_a_cast_through_a_narrower_type_rounds_and_stays() -> None:
    """A must-fail twin: bfloat16 holds fewer digits than float16, and no whole number holds a fraction."""
    for code in (16, 7):
        text = ATTENTION.format(
            OUTPUTS="float[8,8] y", CASTS=f"p = Cast <to = {code}> (s) q = Cast <to = 1> (p)", MORE=""
        )
        model = onnx.parser.parse_model(text)
        assert casts(convert(model).model).total() == 5
        assert folded(convert(model)) == []


SCALED = (
    '<ir_version: 10, opset_import: ["" : 21]> g (float[4,8] x, float[2] fed) => (float[4,2] y)'
    " <float[8,2] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[2,2] v = {1,2,3,4}, float[2] scale = {0.5,0.25}>"
    " { a = MatMul (x, w) b = MatMul (a, v) s = SCALE y = Sum (a, b, s) }"
)


@pytest.mark.parametrize(("scale", "more"), [("Identity (scale)", 0), ("Identity (fed)", 1)])
def test_a_copied_weight_is_a_weight_where_low_values_meet_at_the_end(scale: str, more: int) -> None:
    """TorchScript hands a weight that two layers share to the second one through an Identity; an input takes a Cast."""
    result = convert(onnx.parser.parse_model(SCALED.replace("SCALE", scale)))
    assert casts(result.model) == {"float32 → float16": 1 + more, "float16 → float32": 1}
    assert {row.dtype for row in result.report.rows if row.op != "Identity"} == {"float16"}


NORM = (
    '<ir_version: 10, opset_import: ["" : OPSET]> g (float[1,4,6,6] x) => (float[1,4,6,6] y)'
    " <float[4,4,1,1] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>"
    " { s = Constant <value = float[4] {1,1,1,1}> () b = Constant <value = float[4] {0,0,0,0}> ()"
    " c = Conv (x, w) n = GroupNormalization <num_groups = 2STASH> (c, s, b) y = Conv (n, w) }"
)


def normed(opset: int, stash: int | None = None) -> ModelProto:
    stated = "" if stash is None else f", stash_type = {stash}"
    model = onnx.parser.parse_model(NORM.replace("OPSET", str(opset)).replace("STASH", stated))
    for node in model.graph.node:
        node.name = node.output[0]  # the stub's answers are by name
    return model


@pytest.mark.parametrize(("stash", "low"), [(None, True), (1, True), (10, False), (16, False)])
def test_a_group_norm_whose_body_casts_to_float32_by_itself_needs_no_casts(stash: int | None, low: bool) -> None:
    result = convert(normed(21, stash))
    assert casts(result.model) == {"float32 → float16": 1 + (not low), "float16 → float32": 1 + (not low)}
