"""Each check of `objections` notices a model with its fault."""

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import objections

CASTS = {
    "to its own type": "y = Cast <to = 1> (x)",
    "to float and back": "h = Cast <to = 10> (x) f = Cast <to = 1> (h) g = Cast <to = 10> (f) y = Cast <to = 1> (g)",
    "2 Casts of 'x' to 10": "a = Cast <to = 10> (x) b = Cast <to = 10> (x) c = Add (a, b) y = Cast <to = 1> (c)",
    "inside the loop": (
        "y = Loop <body = b (int64 i, bool c, float[8,8] s) => (bool co, float[8,8] so)"
        " { co = Identity (c) h = Cast <to = 10> (x) g = Exp (h) f = Cast <to = 1> (g) so = Add (f, s) }> (n, ok, x)"
    ),
}


def model(nodes: str) -> ModelProto:
    inputs = "float[8,8] x, int64 n, bool ok"
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[8,8] y) {{ {nodes} }}'
    )


@pytest.mark.parametrize("words", CASTS)
def test_needless_casts_are_objected_to(words: str) -> None:
    assert any(words in text for text in objections.of_casts(model(CASTS[words])))


def test_a_rounding_pair_and_a_cast_of_a_loop_state_pass() -> None:
    pair = "h = Cast <to = 10> (x) y = Cast <to = 1> (h)"
    state = (
        "y = Loop <body = b (int64 i, bool c, float[8,8] s) => (bool co, float[8,8] so)"
        " { co = Identity (c) h = Cast <to = 10> (s) g = Exp (h) so = Cast <to = 1> (g) }> (n, ok, x)"
    )
    assert objections.of_casts(model(pair)) == objections.of_casts(model(state)) == []


def test_an_invalid_model_is_objected_to() -> None:
    broken = model("h = Cast <to = 10> (x) y = Add (x, h)")
    assert "checker" in objections.of_checker(broken)[0]
    assert len(objections.of_loading(broken)) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.graph.input.reverse(),
        lambda m: m.graph.output[0].ClearField("type"),
        lambda m: setattr(m.graph.input[0], "doc_string", "else"),
        lambda m: setattr(m.graph.output[0], "name", "z"),
        lambda m: m.graph.output[0].metadata_props.add(key="a", value="b"),
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "N"),
    ],
)
def test_a_changed_edge_is_objected_to(change: Callable[[ModelProto], None]) -> None:
    before, after = model("y = Exp (x)"), model("y = Exp (x)")
    change(after)
    assert len(objections.of_io(before, after)) == 1


def test_an_unplanned_type_is_objected_to() -> None:
    before = model("a = Exp (x) y = Exp (a)")
    after = model("a = Cast <to = 10> (x) y = Cast <to = 1> (a)")
    view = View.of(Model.load(before))
    assert objections.of_types(view, Plan(DType.FLOAT16), before) == []
    assert objections.of_types(view, Plan(DType.FLOAT16), after) == ["'a' is float16, planned ['1']"]
    assert objections.of_types(view, Plan(DType.FLOAT16), model("y = Exp (x)")) == ["'a' lost its type"]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([np.float32([1.0, 2.1])], "off by"),
        ([np.float32([1.0, np.nan])], "not finite"),
        ([np.float64([1.0, 2.0])], "float64(2,) instead of float32(2,)"),
        ([np.float32([1.0])], "float32(1,) instead of float32(2,)"),
        ([], "0 outputs instead of 1"),
    ],
)
def test_different_outputs_are_objected_to(after: list[object], words: str) -> None:
    assert words in objections.of_outputs([np.float32([1.0, 2.0])], after, bound=0.01)[0]
