"""States that move by many small steps, running sums and means that are written as products, and their near twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

STEP = "f{t}=MatMul(x{s},w);t{t}=Tanh(f{t});d{t}=Mul(t{t},h);x{t}=Add(x{s},d{t})"

EIGHTH = np.full((8, 8), 1 / 8)
FAINT = np.tri(8)
FAINT[3, 1] = 0.5


def holds(
    step: str = STEP, steps: int = 4, h: object = 0.01, shapes: dict[str, tuple[int, ...]] | None = None
) -> set[str]:
    """The first results of the ops held of as many steps, which end in a product."""
    text = ";".join(step.format(t=t, s=t - 1 or "") for t in range(1, steps + 1))
    constants = {} if h is None else {"h": h}
    model = cases.build(f"{text};y=MatMul(x{steps},w)", ["y"], constants=constants, shapes=shapes)
    return set(held(View.of(Model.load(model))))


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        STEP.replace("Add(x{s},d{t})", "Add(d{t},x{s})"),
        STEP.replace("Add", "Sub"),
        STEP.replace("x{t}=Add(x{s},d{t})", "c{t}=Identity(x{s});x{t}=Add(c{t},d{t})"),
    ],
)
def test_four_steps_in_a_row_are_held(step: str) -> None:
    assert {"x1", "x2", "x3", "x4"} <= holds(step)
    assert {"x1", "x2", "x3", "x4", "x5", "x6"} <= holds(step, steps=6)
    assert holds(step, steps=3) == set()


def test_a_quotient_by_a_large_number_is_a_small_step() -> None:
    step = STEP.replace("Mul(t{t},h)", "Div(t{t},h)")
    assert holds(step, h=100.0) == {"x1", "x2", "x3", "x4"}
    assert holds(step, h=2.0) == set()


def test_a_number_that_is_fed_counts_as_small_and_a_large_one_does_not() -> None:
    assert holds(h=None, shapes={"h": (1,)}) >= {"x1", "x2", "x3", "x4"}
    assert holds(h=0.5) == set()


@pytest.mark.parametrize("h", [np.linspace(0.005, 0.015, 8), np.zeros(())])
def test_a_layer_scale_and_zero_are_left_alone(h: object) -> None:
    assert holds(h=h) == set()


def test_steps_without_a_product_are_left_alone() -> None:
    assert holds(STEP.replace("MatMul(x{s},w)", "Exp(x{s})")) == set()


def test_steps_of_different_states_are_no_row() -> None:
    text = ";".join(f"s{t}=MatMul(x,w{t});f{t}=MatMul(x,w);d{t}=Mul(f{t},h);x{t}=Add(s{t},d{t})" for t in range(1, 5))
    constants = {"h": 0.01, "w": np.eye(8), **{f"w{t}": np.eye(8) for t in range(1, 5)}}
    model = cases.build(f"{text};y=Sum(x1,x2,x3,x4)", ["y"], constants=constants)
    assert held(View.of(Model.load(model))) == {}


def of_matrix(text: str, m: Any, outputs: str = "y") -> set[str]:
    return set(held(View.of(Model.load(cases.build(text, outputs.split(), constants={"m": m})))))


@pytest.mark.parametrize("product", ["y=MatMul(x,m)", "y=Gemm(m,x)"])
@pytest.mark.parametrize("matrix", [np.tri(8), np.tri(8).T, EIGHTH])
def test_a_triangle_of_ones_and_a_matrix_of_1_over_n_are_held(product: str, matrix: Any) -> None:
    assert of_matrix(product, matrix) == {"y"}


@pytest.mark.parametrize("matrix", [np.full((8, 1), 1 / 8), np.full((8, 5), 1 / 8)])
def test_a_mean_may_have_any_number_of_results(matrix: Any) -> None:
    assert of_matrix("y=MatMul(x,m)", matrix) == {"y"}


@pytest.mark.parametrize(
    "matrix",
    [
        np.ones((8, 1)),  # a sum
        np.eye(8),
        np.tri(8) * 0.5,
        FAINT,
        np.tri(8, k=1),
        np.random.default_rng(0).standard_normal((8, 8)),
    ],
)
def test_other_matrices_are_weights(matrix: Any) -> None:
    assert of_matrix("y=MatMul(x,m)", matrix) == set()


def test_a_triangle_that_masks_is_left_alone() -> None:
    assert of_matrix("s=MatMul(x,w);y=Mul(s,m)", np.tri(8)) == set()


@pytest.mark.parametrize("behind", ["y=MatMul(s,w)", "t=Transpose[perm=1 0](s);y=MatMul(w,t)"])
def test_a_sum_that_products_alone_read_is_gray(behind: str) -> None:
    assert of_matrix(f"s=MatMul(x,m);{behind}", np.tri(8)) == set()
    assert of_matrix(f"s=MatMul(x,m);{behind}", np.tri(8), outputs="y s") == {"s"}
    assert "s" in of_matrix(f"s=MatMul(x,m);{behind};z=Sub(s,w)", np.tri(8), outputs="y z")
