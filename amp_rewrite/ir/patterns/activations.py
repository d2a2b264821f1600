"""Softmax and activations, written out: GELU in both forms and its cube, quick GELU, snake."""

from __future__ import annotations

from collections.abc import Mapping

from amp_rewrite.ir.dataflow import float32_ops
from amp_rewrite.ir.patterns.match import (
    ANCHOR,
    ENTRY,
    AnyValue,
    Either,
    MadeOf,
    Match,
    Ops,
    Search,
    X,
    behind_casts,
    constant,
    either,
    op,
    varying,
    weight,
)
from amp_rewrite.ir.view import OpId, ValueId, View, once

_WEIGHT = AnyValue(test=weight)

_EXP = op("Exp", op("Sub", X, op("ReduceMax", X, name=ANCHOR)), name="exp")
SOFTMAX = op("Div", _EXP, op("ReduceSum", _EXP))


def _gated(bell: Ops) -> Either:
    """Return the pattern of x · ½ · (1 + bell), the products in any order, with any numbers."""
    x, one = AnyValue(ENTRY, varying), op("Add", bell, _WEIGHT)
    return either(
        op("Mul|Div", op("Mul", x, one), _WEIGHT),
        op("Mul", x, op("Mul", one, _WEIGHT)),
        op("Mul", op("Mul|Div", x, _WEIGHT, once=True), one),
    )


GELU_ERF = _gated(op("Erf", MadeOf(("Div", "Mul")), name=ANCHOR))
GELU_TANH = _gated(op("Tanh", MadeOf(("Add", "Mul", "Pow")), name=ANCHOR))
CUBIC = op("Add", X, op("Mul", op("Pow", X, AnyValue("exponent"), name=ANCHOR), AnyValue("factor")))
QUICK_GELU = op(
    "Mul", X, op("Sigmoid", either(X, op("Mul|Div", X, AnyValue(test=constant), name="scaled")), name=ANCHOR)
)


def _two(view: View, value: ValueId) -> bool:
    array = view.array(behind_casts(view, value)[0])
    return array is not None and bool((array == 2).all())


_SINE = op("Sin", op("Mul", X, AnyValue("slope", constant)), name=ANCHOR)
_SQUARE = either(op("Mul", _SINE, _SINE, name="square"), op("Pow", _SINE, AnyValue(test=_two), name="square"))
SNAKE = op("Add", X, op("Mul", _SQUARE, AnyValue("factor", constant)))

_MOST = 16.0
"""Largest a: for x up to 4094 the argument a·x fits float16."""
_MOST_GAIN = 4.0
"""Largest product of a and the factor behind the square: 1 in a snake, but the beta form learns both."""
_SNAKES = Search.of(SNAKE)
"""Its sine is not that of a position. The slope of sin² is at most 1, so an argument off by a·x·ε moves sin²/a by x·ε,
which is the rounding error of the sum with x. With a large a, a·x would overflow before x does."""


@once
def snakes(view: View) -> Mapping[OpId, OpId]:
    """Return the sines of snakes whose a and factor are constant and moderate, each with the op that squares it."""
    squares: dict[OpId, OpId] = {}
    for sine in float32_ops(view, _SNAKES.after):
        match = _SNAKES.direct(view, sine)
        square = view.producer(match.values["square"]) if match is not None else None
        if match is not None and square is not None and _moderate(view, match):
            squares[sine.id] = square.id
    return squares


def _moderate(view: View, match: Match) -> bool:
    arrays = (view.array(behind_casts(view, match.values[name])[0]) for name in ("slope", "factor"))
    a, b = (abs(array) for array in arrays if array is not None)
    return bool(a.max() <= _MOST and a.size == b.size and (a.ravel() * b.ravel()).max() <= _MOST_GAIN)
