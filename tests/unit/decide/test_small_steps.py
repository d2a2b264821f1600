"""States that move by many small steps, and their near twins."""

from __future__ import annotations

import numpy as np
import pytest

from amp_rewrite.decide.hazards.sums import small_steps
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import pins_of

STEP = "f{t}=MatMul(x{s},w);t{t}=Tanh(f{t});d{t}=Mul(t{t},h);x{t}=Add(x{s},d{t})"


def pinned(step: str = STEP, steps: int = 4, h: object = 0.01, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    """The first results of the pinned ops of as many steps, which end in a product."""
    text = ";".join(step.format(t=t, s=t - 1 or "") for t in range(1, steps + 1))
    constants = {} if h is None else {"h": h}
    model = cases.build(f"{text};y=MatMul(x{steps},w)", ["y"], constants=constants, shapes=shapes)
    view = View.of(Model.load(model))
    pins = {pin.op for pin in pins_of(small_steps(view), view)}
    return " ".join(view.ops[op].node.output[0] for op in sorted(pins))


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        STEP.replace("Add(x{s},d{t})", "Add(d{t},x{s})"),
        STEP.replace("Add", "Sub"),
        STEP.replace("x{t}=Add(x{s},d{t})", "c{t}=Identity(x{s});x{t}=Add(c{t},d{t})"),
    ],
)
def test_four_steps_in_a_row_are_pinned(step: str) -> None:
    assert pinned(step) == "x1 x2 x3 x4"
    assert pinned(step, steps=6) == "x1 x2 x3 x4 x5 x6"
    assert pinned(step, steps=3) == ""


def test_a_quotient_by_a_large_number_is_a_small_step() -> None:
    step = STEP.replace("Mul(t{t},h)", "Div(t{t},h)")
    assert pinned(step, h=100.0) == "x1 x2 x3 x4"
    assert pinned(step, h=2.0) == ""


def test_a_number_that_is_fed_counts_as_small_and_a_large_one_does_not() -> None:
    assert pinned(h=None, shapes={"h": (1,)}) == "x1 x2 x3 x4"
    assert pinned(h=0.5) == ""


@pytest.mark.parametrize("h", [np.full(8, 0.01), np.zeros(())])
def test_a_layer_scale_and_zero_are_left_alone(h: object) -> None:
    assert pinned(h=h) == ""


def test_steps_without_a_product_are_left_alone() -> None:
    assert pinned(STEP.replace("MatMul(x{s},w)", "Exp(x{s})")) == ""


def test_steps_of_different_states_are_no_row() -> None:
    text = ";".join(f"f{t}=MatMul(x,w);d{t}=Mul(f{t},h);x{t}=Add(z{t},d{t})" for t in range(1, 5))
    model = cases.build(f"{text};y=Sum(x1,x2,x3,x4)", ["y"], constants={"h": 0.01})
    assert list(small_steps(View.of(Model.load(model)))) == []
