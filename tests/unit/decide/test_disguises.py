"""Running sums and means that are written as products, and their near twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from amp_rewrite.decide.hazards.sums import disguises
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from support import cases
from support.held import pins_of

EIGHTH = np.full((8, 8), 1 / 8)
FAINT = np.tri(8)
FAINT[3, 1] = 0.5


def pinned(text: str, m: Any, outputs: str = "y") -> dict[str, str]:
    view = View.of(Model.load(cases.build(text, outputs.split(), constants={"m": m})))
    return {view.ops[pin.op].node.output[0]: pin.note for pin in pins_of(disguises(view, DType.FLOAT16), view)}


@pytest.mark.parametrize("product", ["y=MatMul(x,m)", "y=MatMul(m,x)", "y=Gemm(m,x)"])
@pytest.mark.parametrize(
    ("matrix", "note"),
    [
        (np.tri(8), "a running sum by a product"),
        (np.tri(8).T, "a running sum by a product"),
        (EIGHTH, "a mean by a product"),
    ],
)
def test_a_triangle_of_ones_and_a_matrix_of_1_over_n_are_pinned(product: str, matrix: Any, note: str) -> None:
    assert pinned(product, matrix) == {"y": note}


@pytest.mark.parametrize("matrix", [np.full((8, 1), 1 / 8), np.full((8, 5), 1 / 8)])
def test_a_mean_counts_the_terms_that_it_sums(matrix: Any) -> None:
    assert pinned("y=MatMul(x,m)", matrix) == {"y": "a mean by a product"}


@pytest.mark.parametrize(
    "matrix",
    [
        np.ones((8, 1)),  # a sum
        np.full((8, 5), 1 / 5),  # 1 over the number of results
        np.eye(8),
        np.tri(8) * 0.5,
        FAINT,
        np.tri(8, k=1),
        np.random.default_rng(0).standard_normal((8, 8)),
    ],
)
def test_other_matrices_are_weights(matrix: Any) -> None:
    assert pinned("y=MatMul(x,m)", matrix) == {}


def test_a_triangle_that_masks_is_left_alone() -> None:
    assert pinned("s=MatMul(x,w);y=Mul(s,m)", np.tri(8)) == {}


@pytest.mark.parametrize("behind", ["y=MatMul(s,w)", "t=Transpose[perm=1 0](s);y=MatMul(w,t)"])
def test_a_sum_that_products_alone_read_is_gray(behind: str) -> None:
    assert pinned(f"s=MatMul(x,m);{behind}", np.tri(8)) == {}
    assert list(pinned(f"s=MatMul(x,m);{behind}", np.tri(8), outputs="y s")) == ["s"]
    assert list(pinned(f"s=MatMul(x,m);{behind};z=Sub(s,x)", np.tri(8), outputs="y z")) == ["s"]
