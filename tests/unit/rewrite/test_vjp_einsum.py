"""Gradients of Einsum."""

from __future__ import annotations

import pytest

from amp_rewrite import GradientError, gradients
from support.train.vjp_case import Case, Torch, judged

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

TestRules = judged(CASES)


def test_a_diagonal_is_refused() -> None:
    model = einsum("ii->i", (3, 3)).model(20)
    with pytest.raises(GradientError) as caught:
        gradients(model, "loss", ["a"])
    assert str(caught.value) == (
        "node 'Einsum_0' (Einsum): no gradient of a diagonal: 'ii->i' repeats an axis of one operand; replace the op"
    )
