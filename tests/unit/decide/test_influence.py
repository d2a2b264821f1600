"""Influence of large constants: what bounds it, and that it spares no proof which would find something."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from amp_rewrite.decide.bounds.analysis import sure_magnitudes
from amp_rewrite.decide.bounds.influence import influence
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.bound_graphs import random_graph
from support.shifting import with_outliers

MASK = {"x": (2, 4), "m": (2, 4)}


def sizes(text: str, constants: Mapping[str, object]) -> dict[str, float]:
    model = cases.build(text, ["y"], shapes=MASK, constants=constants)
    view = View.of(Model.load(model))
    return {view.value_name(v): size for v, size in influence(view).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s=Add(x,c);y=Softmax(s)", {"s": 100.0}),
        ("s=Add(x,c);t=Add(s,c);y=Relu(t)", {"s": 100.0, "t": 200.0, "y": 200.0}),
        ("s=Mul(x,c);y=Sigmoid(s)", {"s": math.inf}),
        ("s=Div(x,c);y=Relu(s)", {}),
        ("s=Div(c,x);y=Relu(s)", {"s": math.inf, "y": math.inf}),
        ("s=Mul(x,x);y=Relu(s)", {}),
    ],
)
def test_sums_add_products_have_no_limit_and_activations_end_it(text: str, expected: Mapping[str, float]) -> None:
    assert sizes(text, {"c": -100.0}) == expected


def test_numbers_below_sixteen_have_none() -> None:
    assert sizes("y=Mul(x,c)", {"c": 15.0}) == {}


@pytest.mark.parametrize("factor", [4e3, 3e5])
def test_every_value_that_outliers_are_proved_to_drive_out_of_the_type_is_foretold(factor: float) -> None:
    proved = 0
    for seed in range(40):
        view = View.of(Model.load(with_outliers(random_graph(seed), seed, places=3, factor=factor)))
        foretold = influence(view)
        beyond = {v for v, size in sure_magnitudes(view).items() if size > DType.FLOAT16.max}
        missed = [view.value_name(v) for v in beyond if foretold.get(v, 0.0) <= DType.FLOAT16.max]
        assert not missed, (seed, missed)
        proved += len(beyond)
    assert proved > 5
