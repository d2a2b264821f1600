"""How many Casts a conversion leaves: none that does nothing, and no more than other converters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from amp_rewrite.convert import Converted, convert
from amp_rewrite.files.model import Model
from amp_rewrite.view import View

MODELS = Path(__file__).parent / "models"
FIXTURES = sorted(path.stem for path in MODELS.glob("*.onnx"))


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
    '<ir_version: 10, opset_import: ["" : 21]> g (float[4,4] x, int64[2] i, bool[4,4] m, float[4,4] w)'
    " => (float[4,4] y, int64[2] j, float[2,4] z) {"
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


def test_a_model_in_which_nothing_is_lowered_keeps_the_casts_that_do_nothing() -> None:
    model = onnx.parser.parse_model(COPYING)
    assert convert(model, keep=["*"]).model == model


def test_a_cast_whose_source_has_another_type_stays() -> None:
    """A must-fail twin: one that truncates, one that counts, one of a type that nobody knows."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[4,4] x, float[4,4] w)'
        " => (float[4,4] y, int64[4,4] n)"
        "{ a = MatMul (x, w) t = Cast <to = 6> (x) n = Cast <to = 7> (t) f = Cast <to = 1> (t)"
        " u = own.F (x) v = Cast <to = 1> (u) s = Add (f, v) y = Add (s, a) }"
    )
    model = onnx.parser.parse_model(text)
    before, after = casts(model), casts(convert(model).model)
    assert before - after == Counter()


def test_bodies_read_past_a_cast_outside_that_does_nothing() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[4,4] x, int64[4] i, bool c, float[4,4] w)'
        " => (float[4,4] y) { a = MatMul (x, w) k = Cast <to = 7> (i) q = Cast <to = 9> (c)"
        " y = If (q) <then_branch = t () => (float[4,4] p) { p = Gather (a, k) },"
        " else_branch = e () => (float[4,4] r) { h = Cast <to = 7> (k) r = Gather (x, h) }> }"
    )
    result = convert(onnx.parser.parse_model(text))
    assert copies(result.model) == {}
    onnx.checker.check_model(result.model, full_check=True)


@pytest.mark.parametrize("name", FIXTURES)
def test_no_exported_model_keeps_a_cast_that_does_nothing(name: str) -> None:
    assert copies(convert(MODELS / f"{name}.onnx").model) == {}


def test_some_exported_models_have_casts_that_do_nothing() -> None:
    """Had none, the test above would show nothing."""
    found = {name: sum(copies(MODELS / f"{name}.onnx").values()) for name in FIXTURES}
    assert {name: count for name, count in found.items() if count} == {
        "bert_ts13": 5,
        "gpt2_ts17": 1,
        "if_ts13": 1,
        "llama_ts16": 25,
        "t5_ts14": 17,
    }


# -- beside other converters -------------------------------------------------------------------------------


def test_with_the_product_of_a_body_kept_a_loop_takes_two_casts() -> None:
    """As ModelOpt AutoCast 0.47.0 places them, which lowers nothing in bodies. With both lowered there are 4."""
    path = MODELS / "loop_dynamo21.onnx"
    assert sum(casts(convert(path).model).values()) == 4
    kept = convert(path, keep=["node_linear_2"])
    assert casts(kept.model) == {"float32 → float16": 1, "float16 → float32": 1}
