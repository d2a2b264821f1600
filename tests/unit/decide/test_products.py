"""Products over an axis."""

from __future__ import annotations

import pytest

import amp_rewrite
from amp_rewrite.decide.hazards.proved_overflow import proved_overflow
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import pins_of


def pinned(text: str, to: DType = DType.FLOAT16, types: dict[str, str] | None = None) -> set[str]:
    view = View.of(Model.load(cases.build(text, ["y"], types=types)))
    return {view.ops[pin.op].node.output[0] for pin in pins_of(proved_overflow(view, to), view)}


def test_a_product_over_an_axis_is_pinned_and_a_sum_or_a_product_of_two_is_not() -> None:
    assert pinned("a=Mul(x,x);b=ReduceProd[axes=1](a);y=ReduceMax(b)") == {"b"}


def test_bfloat16_reaches_as_far_as_float32() -> None:
    assert pinned("y=ReduceProd(x)", DType.BFLOAT16) == set()


def test_a_product_of_integers_is_none_of_ours() -> None:
    assert pinned("y=ReduceProd(x)", types={"x": "int"}) == set()


@pytest.mark.parametrize(("safety", "expected"), [("default", "proved_overflow"), ("none", "force_all")])
def test_it_stays_float32_whatever_the_level_while_safety_holds(safety: str, expected: str) -> None:
    proto = cases.build("y=ReduceProd(x)", ["y"])
    report = amp_rewrite.convert(proto, level="unsafe-force-all", safety=safety, target="onnx").report
    assert [row.rule for row in report.rows if row.op.endswith("ReduceProd")] == [expected]
