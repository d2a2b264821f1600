"""Gradients of Einsum."""

from __future__ import annotations

import pytest

from amp_rewrite import GradientError, gradients
from train.vjp_case import Case, Torch, check_against_differences, check_against_torch, every

SIZES = dict(zip("bhijkl", (2, 3, 3, 4, 2, 5), strict=True))


def einsum(equation: str, *shapes: tuple[int, ...], name: str = "") -> Case:
    """An Einsum of operands a, b, c."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    dims = shapes or [tuple(SIZES[label] for label in term) for term in terms]
    operands = dict(zip("abc", dims, strict=False))
    torch: Torch = lambda t, *operands: t.einsum(equation, *operands)  # noqa: E731
    text = f'y = Einsum <equation = "{equation}"> ({", ".join(operands)})'
    return Case(name or equation, "", operands, text=text, torch=torch)


CASES = (
    einsum("ij,jk->ik"),
    einsum("bij,bjk->bik"),
    einsum("bhij,bhkj->bhik"),
    einsum("ij,kj->ik"),
    einsum("ij , jk -> ki"),
    einsum("ij,jk"),
    einsum("ij,ij->"),
    einsum("i,j->ij"),
    einsum("ij,k->i"),
    einsum("ij->ji"),
    einsum("ij->j"),
    einsum("ij->"),
    einsum("bij,jk,kl->bil"),
    einsum("...ij,jk->...ik", (2, 3, 3, 4), (4, 2)),
    einsum("...ij,...jk->...ik", (2, 1, 3, 4), (1, 5, 4, 2)),
    einsum("...ij,...jk", (2, 3, 4), (2, 4, 2)),
    einsum("ij,jk->ik", (3, 1), (1, 2), name="a sum over one"),
)


@every(CASES)
def test_gradients_are_the_slopes_of_the_loss(case: Case) -> None:
    check_against_differences(case)


@every(case for case in CASES if not case.fixed)
def test_gradients_are_right_where_no_dim_is_known(case: Case) -> None:
    check_against_differences(case, symbolic=True)


@pytest.mark.torch
@every(case for case in CASES if case.torch is not None)
def test_gradients_are_those_of_torch(case: Case) -> None:
    pytest.importorskip("torch")
    check_against_torch(case)


def test_a_diagonal_is_refused() -> None:
    model = einsum("ii->i", (3, 3)).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'Einsum_0' (Einsum): no gradient of a diagonal, and 'ii->i' names an axis of one operand twice"
    )
