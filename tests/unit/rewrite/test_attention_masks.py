"""Masks of the lowest float32 that are added to scores: what is made a selection, and that no number changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.attention.recognize import LOST, OUT_OF_REACH, hides
from amp_rewrite.rewrite.passes.attention_masks import select_masks, shrink_score_constants
from amp_rewrite.rewrite.replacement import Context, run_round

LOWEST = -3.4028234663852886e38
SHOWN = np.array([[True, False, True], [False, False, False], [True, True, True]])
"""The second row is masked throughout."""
WHERE = "mask = Where (seen, zero, least)"
LEFT, RIGHT = np.random.default_rng(3).standard_normal((2, 3, 8)).astype(np.float32) * 4
SCORES = {"x": LEFT, "w": RIGHT.T.copy(), "seen": SHOWN}


def model(made: str = WHERE, reader: str = "y = Softmax (z)", opset: int = 18, **stored: NDArray[Any]) -> ModelProto:
    """The model with its mask made so, or stored."""
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[3,8] x, float[8,3] w, bool[3,3] seen) => (float[3,3] y)
    <float zero = {{0}}, float least = {{{LOWEST}}}, float ten = {{10}}, float fair = {{-1e4}}> {{
        a = MatMul (x, w)
        {"" if "mask" in stored else made}
        z = Add (a, mask)
        {reader}
    }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    return proto


def selected(proto: ModelProto) -> View:
    return run_round(View.of(Model.load(proto)), (select_masks, shrink_score_constants), Context(DType.FLOAT16))[0]


def kinds(view: View) -> str:
    return " ".join(op.op_type for op in view.ops)


def run(proto: ModelProto, feed: Mapping[str, Any] = SCORES) -> NDArray[np.float32]:
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    found: NDArray[np.float32] = session.run(None, {k: v for k, v in feed.items() if k in names})[0]
    return found


LEAST = np.where(SHOWN, np.float32(0), np.float32(LOWEST))
SELECTED = {
    "a Where": model(),
    "a Where the other way round": model("hidden = Not (seen)  mask = Where (hidden, least, zero)"),
    "a constant": model(mask=LEAST),
    "a constant that is broadcast": model(mask=LEAST[1:2]),
    "a Where, before LogSoftmax": model(reader="y = LogSoftmax (z)"),
}


@pytest.mark.parametrize("name", SELECTED)
def test_scores_are_selected_and_no_bit_of_a_float32_result_changes(name: str) -> None:
    view = selected(SELECTED[name])
    assert "Where" in kinds(view)
    assert "Add" not in kinds(view)
    assert run(view.model.proto).tobytes() == run(SELECTED[name]).tobytes()


@pytest.mark.parametrize("name", [name for name in SELECTED if "Log" not in name])
def test_in_float16_a_row_that_is_masked_throughout_is_as_even_as_in_float32(name: str) -> None:
    converted = amp_rewrite.convert(SELECTED[name], lower=["op=Softmax"])
    assert [row.dtype for row in converted.report.rows if row.op in ("Where", "Softmax")] == ["float16"] * 2
    found = run(amp_rewrite.emulate(converted.model).to_proto())
    wanted = run(SELECTED[name])
    assert np.isfinite(found).all()
    assert (wanted[1] == np.float32(1 / 3)).all()
    assert (found == 0).tolist() == (wanted < 2.0**-25).tolist()
    assert np.abs(found - wanted).max() <= 0.03  # scores up to 64 are rounded by up to 2⁻⁵


@pytest.mark.parametrize(
    "proto",
    [
        model("mask = Where (seen, zero, fair)"),
        model("mask = Where (seen, ten, least)"),
        model("mask = Where (seen, least, least)"),
        model("c = Cast <to = 1> (seen)  mask = Mul (c, least)"),
        model(reader="y = Relu (z)"),
        model(mask=np.where(SHOWN, np.float32(1), np.float32(LOWEST))),
        model(mask=np.where(SHOWN, np.float32(0), np.float32(-np.inf))),
        model(mask=np.zeros((3, 3), np.float32)),
        model(mask=np.array([[0, -1e35, LOWEST]], np.float32)),
    ],
)
def test_anything_else_that_is_added_is_left_alone(proto: ModelProto) -> None:
    view = View.of(Model.load(proto))
    assert list(select_masks(view, Context(DType.FLOAT16))) == []


CAUSAL = np.where(np.tri(3, dtype=bool), np.float32(0), np.float32(LOWEST))


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("mask = Where (tri, zero, least)", np.tri(3, dtype=bool)),
        ("mask = Where (tri, least, zero)", ~np.tri(3, dtype=bool)),
    ],
)
def test_a_mask_that_a_constant_condition_chooses_is_a_constant(text: str, condition: NDArray[np.bool_]) -> None:
    proto = model(text, tri=condition)
    view = selected(proto)
    assert kinds(view) == "MatMul Add Softmax"
    assert run(view.model.proto).tobytes() == run(proto).tobytes()
    stored = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in view.model.proto.graph.initializer}
    assert list(stored) == ["ten", "fair", "mask_bounded"]  # what only the mask was made of is gone
    assert stored["mask_bounded"] == np.where(np.tri(3) > 0, 0.0, -16376.0).tolist()


@pytest.mark.parametrize("rows", [SHOWN, np.ones((3, 3), bool)])
def test_a_constant_condition_that_masks_a_row_throughout_or_nothing_selects(rows: NDArray[np.bool_]) -> None:
    assert kinds(selected(model("mask = Where (rows, zero, least)", rows=rows))) == "MatMul Where Softmax"


@pytest.mark.parametrize(
    ("reader", "opset"), [("y = LogSoftmax (z)", 18), ("y = Softmax <axis = 0> (z)", 18), ("y = Softmax (z)", 11)]
)
def test_it_is_a_selection_where_a_row_may_be_masked_or_a_masked_score_is_seen(reader: str, opset: int) -> None:
    assert kinds(selected(model("", reader, opset, mask=CAUSAL))).split()[1] == "Where"


def test_a_sum_that_is_an_output_keeps_its_fill() -> None:
    shown = model(mask=CAUSAL)
    shown.graph.output.insert(0, shown.graph.output[0])
    shown.graph.output[0].name = "z"
    view = selected(shown)
    assert kinds(view).split()[1] == "Where"
    assert run(view.model.proto).tobytes() == run(shown).tobytes()


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (None, False),
        (np.array(True), True),
        (np.array([True, False]), True),
        (np.array([False, False]), False),
        (np.array([[True, False], [False, True]]), True),
        (np.array([[True, True], [False, False]]), False),
    ],
)
def test_a_fill_hides_beside_a_shown_score_or_if_it_is_huge(shown: NDArray[np.bool_] | None, seen: bool) -> None:
    fills = (OUT_OF_REACH / 2, OUT_OF_REACH, LOST / 2, LOST)
    assert [hides(fill, shown) for fill in fills] == [False, seen, seen, True]
