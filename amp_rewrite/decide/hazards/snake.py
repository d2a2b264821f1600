"""The snake activation, x + sin²(a·x)/a, of vocoders and audio codecs (Ziyin et al. 2020), written out.

Its sine is not that of a position. The slope of sin² is at most 1, so an argument off by a·x·ε moves sin²/a by x·ε,
which is the rounding error of the sum with x. With a large a, a·x would overflow before x does.
"""

from __future__ import annotations

from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.patterns.activations import SNAKE
from amp_rewrite.ir.patterns.match import Match, Search, behind_casts
from amp_rewrite.ir.view import OpId, View

_MOST = 16.0
"""Largest a: for x up to 4094 the argument a·x fits float16."""
_MOST_GAIN = 4.0
"""Largest product of a and the factor behind the square: 1 in a snake, but the beta form learns both."""
_SNAKES = Search.of(SNAKE)


def snakes(view: View) -> dict[OpId, OpId]:
    """Return the sines of snakes whose a and factor are constant and moderate, each with the op that squares it."""
    squares: dict[OpId, OpId] = {}
    for sine in (op for op in view.ops if op.kind in _SNAKES.after and computes_float32(view, op)):
        match = _SNAKES.direct(view, sine)
        square = view.producer(match.values["square"]) if match is not None else None
        if match is not None and square is not None and _moderate(view, match):
            squares[sine.id] = square.id
    return squares


def _moderate(view: View, match: Match) -> bool:
    arrays = (view.array(behind_casts(view, match.values[name])[0]) for name in ("slope", "factor"))
    a, b = (abs(array) for array in arrays if array is not None)
    return bool(a.max() <= _MOST and a.size == b.size and (a.ravel() * b.ravel()).max() <= _MOST_GAIN)
