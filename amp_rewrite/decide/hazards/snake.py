"""The snake activation, x + sin²(a·x)/a, of vocoders and audio codecs (Ziyin et al. 2020), written out.

Its sine is not a position's. The slope of sin² is at most 1, so that an argument off by a·x·ε moves sin²/a by x·ε: as
much as the sum with x rounds anyway. Near the largest number of the type a·x would overflow first, if a is not small.
"""

from __future__ import annotations

from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.patterns.activations import SNAKE
from amp_rewrite.ir.patterns.match import Match, Search, behind_casts
from amp_rewrite.ir.view import OpId, View

_MOST = 16.0
"""Of a: x up to 4094 has an angle that fits float16."""
_MOST_GAIN = 4.0
"""Of a times the factor behind the square, which is 1 in a snake, and learned apart in its beta form."""
_SNAKES = Search.of(SNAKE)


def snakes(view: View) -> dict[OpId, OpId]:
    """Return the sines of snakes, each with the op that squares it; a and the factor are known and moderate."""
    found: dict[OpId, OpId] = {}
    for sine in (op for op in view.ops if op.kind in _SNAKES.after and computes_float32(view, op)):
        match = _SNAKES.direct(view, sine)
        square = view.producer(match.values["square"]) if match is not None else None
        if match is not None and square is not None and _moderate(view, match):
            found[sine.id] = square.id
    return found


def _moderate(view: View, match: Match) -> bool:
    tensors = [view.constant(behind_casts(view, match.values[name])[0]) for name in ("slope", "factor")]
    a, b = (abs(view.model.array(tensor)) for tensor in tensors if tensor is not None)
    return bool(a.max() <= _MOST and a.size == b.size and (a.ravel() * b.ravel()).max() <= _MOST_GAIN)
