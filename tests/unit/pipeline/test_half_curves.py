"""The float32 twin of which a half model's curve is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from amp_rewrite.dtypes import DType
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.pareto import _in_float32
from amp_rewrite.settings.request import Request
from support.half_models import half

MIXED = half("a = MatMul (x, w)  y = Relu (a)  b = Cast <to = 1> (a)  z = Exp (b)",
             outputs="float16[8,8] y, float[8,8] z")  # fmt: skip


@pytest.mark.parametrize("io", [None, "out:z=float16", ("out:z=float16",)])
def test_low_inputs_and_outputs_stay_low_and_others_are_as_asked(io: Any) -> None:
    twin = _in_float32(Draft.of(MIXED, Request.of(io=io)))
    assert twin.widened and not twin.view.low_types
    low = {twin.view.value_name(value) for value, dtype in twin.io.items() if dtype is DType.FLOAT16}
    assert low == ({"x", "y"} if io is None else {"x", "y", "z"})


def test_a_float32_model_is_its_own_twin() -> None:
    draft = Draft.of(half("y = Relu (x)", "float[8,8] x", "float[8,8] y"), Request.of())
    assert _in_float32(draft) is draft
