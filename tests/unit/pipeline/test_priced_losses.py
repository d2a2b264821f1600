"""Ops that stay float32 for the errors that they would add, and ranges of values times powers of two."""

from __future__ import annotations

import math

import numpy as np

from amp_rewrite.decide.placement.tradeoff import RoundingLoss
from amp_rewrite.evidence.ranges import Range
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.shift_regions import _scaled
from amp_rewrite.runtime.roofline import ROOFS
from amp_rewrite.settings.request import Request
from support.cases import build


def test_an_op_is_float32_if_its_error_costs_more_than_its_time() -> None:
    chain = ";".join(f"v{i + 1}=MatMul(v{i},w)" for i in range(4))
    draft = Draft.of(
        build(chain, ["v4"], shapes={"v0": (4096, 512)}, constants={"w": np.eye(512)}), Request.of(target="onnx")
    )
    trade = draft.traded((), ROOFS["A100"], islands=True)
    second = next(vertex for vertex in trade.positions if vertex[0] == 1)
    assert trade.high((), 1.0) == frozenset()
    assert trade.high([RoundingLoss(1.0, second, None)], 0.0) == frozenset()
    for error, price in ((math.inf, 1.0), (1.0, 1e9)):
        assert second in trade.high([RoundingLoss(error, second, None)], price)


def test_a_range_times_a_power_of_two_overflows_only_where_its_largest_number_does() -> None:
    known = Range(count=100, absmax=2.0**17, absmin=1.0, overflow=3, flushed=2, subnormal=20)
    assert _scaled(known, 1).overflow == 3
    small = _scaled(known, 3)
    assert (small.absmax, small.absmin, small.overflow) == (2.0**14, 0.125, 0)
    assert (small.flushed, small.subnormal) == (16, 100)
