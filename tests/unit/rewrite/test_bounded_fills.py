"""Fills of constant masks, bounded: the same softmax to the bit, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.attention_masks import shrink_score_constants
from amp_rewrite.rewrite.replacement import Context, run_round
from support import cases
from support.fusing import kinds, outputs_of

SEEN = np.tri(8, dtype=bool)
RNG = np.random.default_rng(0)
FEEDS = {name: RNG.standard_normal((2, 8, 8)).astype(np.float32) * 4 for name in ("q", "k")}
ADDED = "s=MatMul(q,k);b=Add(s,mask);y=Softmax(b)"
SELECTED = "s=MatMul(q,k);m=Where(seen,zero,fill);b=Add(m,s);y=Softmax(b)"
SCALED = "s=MatMul(q,k);h=Mul(s,half);a=Sub(one,shown);m=Mul(a,fill);b=Add(h,m);y=Softmax(b)"
NUMBERS = {"seen": SEEN, "shown": np.where(SEEN, 1.0, 0.0), "half": 0.5, "one": 1.0, "zero": 0.0}
FILLS = (-40000.0, -3.4e38)


def mask(fill: float, shown: Any = 0.0) -> dict[str, Any]:
    return {"mask": np.where(SEEN, shown, fill)}


def model(text: str, constants: dict[str, Any], outputs: str = "y", **options: Any) -> ModelProto:
    named = {name: value for name, value in constants.items() if name in text}
    shapes = {"q": (2, 8, 8), "k": (2, 8, 8), "other": (8, 8), "v": (2, 8, 8)}
    return cases.build(text, outputs.split(), shapes=shapes, constants=named, **options)


def bounded(proto: ModelProto, to: DType = DType.FLOAT16) -> ModelProto:
    return run_round(View.of(Model.load(proto)), (shrink_score_constants,), Context(to))[0].model.to_proto()


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("text", [ADDED, SELECTED, SCALED])
def test_a_single_fill_is_bounded_and_no_bit_of_a_float32_result_changes(text: str, fill: float) -> None:
    proto = model(text, {**NUMBERS, **mask(fill), "fill": fill})
    after = bounded(proto)
    (stored,) = (t for t in after.graph.initializer if t.name.endswith("_bounded"))
    assert onnx.numpy_helper.to_array(stored).tolist() == np.where(SEEN, 0.0, -16376.0).tolist()
    assert outputs_of(after, FEEDS)[0].tobytes() == outputs_of(proto, FEEDS)[0].tobytes()


def test_sum_and_softmax_are_low_with_no_cast_and_no_selection_between() -> None:
    proto = model(f"{ADDED};z=MatMul(y,v)", mask(-1e9), "z")
    converted = amp_rewrite.convert(proto)
    assert [row.dtype for row in converted.report.rows] == ["float16"] * 4
    assert [kind for kind in kinds(converted.model) if kind != "Cast"] == ["MatMul", "Add", "Softmax", "MatMul"]
    assert [f.subject for f in converted.report.findings if f.kind == "selected"] == ["mask"]
    assert amp_rewrite.convert(converted.model).model == converted.model


@pytest.mark.parametrize(
    ("text", "constants", "options"),
    [
        (ADDED, mask(-1e4), {}),  # in range
        (ADDED, mask(-1e9), {"to": DType.BFLOAT16}),  # the same
        (ADDED, mask(-np.inf), {}),
        (ADDED, {"mask": np.where(np.tri(8, k=-1), 0, -1e9)}, {}),  # a row shows no key
        (ADDED, mask(-1e9), {"opset": 12}),
        (ADDED, mask(-1e9), {"outputs": "y b"}),
        (ADDED.replace("Softmax", "LogSoftmax"), mask(-1e9), {}),
        (ADDED.replace("y=", "t=Mul(b,half);y=").replace("(b)", "(t)"), {**NUMBERS, **mask(-1e9)}, {}),  # scaled
        (ADDED.replace("y=", "t=Add(b,mask);y=").replace("x(b)", "x(t)"), mask(-1e9), {}),  # added twice
        (ADDED.replace("y=", "t=Add(b,other);y=").replace("x(b)", "x(t)"), mask(-1e9), {}),  # perhaps a mask
        (
            ADDED.replace("y=", "t=Where(seen,b,fill);y=").replace("x(b)", "x(t)"),
            {**NUMBERS, **mask(-1e9), "fill": -1e9},
            {},
        ),
        (SCALED, {**NUMBERS, "shown": np.zeros((8, 8)), "fill": -1e9}, {}),
    ],
)
def test_other_sums_are_left_alone(text: str, constants: dict[str, Any], options: dict[str, Any]) -> None:
    to = options.pop("to", DType.FLOAT16)
    proto = model(text, constants, **options)
    assert bounded(proto, to).SerializeToString() == proto.SerializeToString()
