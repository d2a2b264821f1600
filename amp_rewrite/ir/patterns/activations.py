"""Softmax and activations, written out: GELU in both forms and its cube, quick GELU, snake."""

from __future__ import annotations

from amp_rewrite.ir.patterns.match import (
    ANCHOR,
    ENTRY,
    Either,
    MadeOf,
    Ops,
    Value,
    X,
    behind_casts,
    constant,
    either,
    op,
    varying,
    weight,
)
from amp_rewrite.ir.view import ValueId, View

_WEIGHT = Value(test=weight)

_EXP = op("Exp", op("Sub", X, op("ReduceMax", X, name=ANCHOR)), name="exp")
SOFTMAX = op("Div", _EXP, op("ReduceSum", _EXP))


def _gated(bell: Ops) -> Either:
    """Return the pattern of x · ½ · (1 + bell), the products in any order, with any numbers."""
    x, one = Value(ENTRY, varying), op("Add", bell, _WEIGHT)
    return either(
        op("Mul|Div", op("Mul", x, one), _WEIGHT),
        op("Mul", x, op("Mul", one, _WEIGHT)),
        op("Mul", op("Mul|Div", x, _WEIGHT, once=True), one),
    )


GELU_ERF = _gated(op("Erf", MadeOf(("Div", "Mul")), name=ANCHOR))
GELU_TANH = _gated(op("Tanh", MadeOf(("Add", "Mul", "Pow")), name=ANCHOR))
CUBIC = op("Add", X, op("Mul", op("Pow", X, Value("exponent"), name=ANCHOR), Value("factor")))
QUICK_GELU = op(
    "Mul", X, op("Sigmoid", either(X, op("Mul|Div", X, Value(test=constant, read=True), name="scaled")), name=ANCHOR)
)


def _two(view: View, value: ValueId) -> bool:
    array = view.array(behind_casts(view, value)[0])
    return array is not None and bool((array == 2).all())


_SINE = op("Sin", op("Mul", X, Value("slope", constant)), name=ANCHOR)
_SQUARE = either(op("Mul", _SINE, _SINE, name="square"), op("Pow", _SINE, Value(test=_two), name="square"))
SNAKE = op("Add", X, op("Mul", _SQUARE, Value("factor", constant)))
