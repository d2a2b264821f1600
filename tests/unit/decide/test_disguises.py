"""Running sums and means that are written as products, and their near twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import held

EIGHTH = np.full((8, 8), 1 / 8)
FAINT = np.tri(8)
FAINT[3, 1] = 0.5


def holds(text: str, m: Any, outputs: str = "y") -> set[str]:
    return set(held(View.of(Model.load(cases.build(text, outputs.split(), constants={"m": m})))))


@pytest.mark.parametrize("product", ["y=MatMul(x,m)", "y=Gemm(m,x)"])
@pytest.mark.parametrize("matrix", [np.tri(8), np.tri(8).T, EIGHTH])
def test_a_triangle_of_ones_and_a_matrix_of_1_over_n_are_held(product: str, matrix: Any) -> None:
    assert holds(product, matrix) == {"y"}


@pytest.mark.parametrize("matrix", [np.full((8, 1), 1 / 8), np.full((8, 5), 1 / 8)])
def test_a_mean_may_have_any_number_of_results(matrix: Any) -> None:
    assert holds("y=MatMul(x,m)", matrix) == {"y"}


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
    assert holds("y=MatMul(x,m)", matrix) == set()


def test_a_triangle_that_masks_is_left_alone() -> None:
    assert holds("s=MatMul(x,w);y=Mul(s,m)", np.tri(8)) == set()


@pytest.mark.parametrize("behind", ["y=MatMul(s,w)", "t=Transpose[perm=1 0](s);y=MatMul(w,t)"])
def test_a_sum_that_products_alone_read_is_gray(behind: str) -> None:
    assert holds(f"s=MatMul(x,m);{behind}", np.tri(8)) == set()
    assert holds(f"s=MatMul(x,m);{behind}", np.tri(8), outputs="y s") == {"s"}
    assert "s" in holds(f"s=MatMul(x,m);{behind};z=Sub(s,w)", np.tri(8), outputs="y z")
