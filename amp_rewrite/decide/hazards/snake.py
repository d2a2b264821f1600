"""The snake activation, x + sin²(a·x)/a, of vocoders and audio codecs (Ziyin et al. 2020), written out.

Its sine is no position's. The slope of sin² is at most 1, so that an argument off by a·x·ε moves sin²/a by x·ε: as much
as the sum with x rounds anyway. Near the largest number of the type a·x would overflow first, if a is not small.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from amp_rewrite.ir.dataflow import computes_float32, first_input_of, only_reader, trail
from amp_rewrite.ir.op_classes import SQUARES
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_MOST = 16.0
"""Of a: x up to 4094 has an angle that fits float16."""
_MOST_GAIN = 4.0
"""Of a times the factor behind the square, which is 1 in a snake, and learned apart in its beta form."""


def snakes(view: View) -> dict[OpId, OpId]:
    """The sines of snakes, each with the op that squares it; a's and the factor's constants known and moderate."""
    found: dict[OpId, OpId] = {}
    for sine in (op for op in view.ops if op.kind == "Sin" and computes_float32(view, op)):
        square = _square(view, sine)
        scaled = _scaled(view, square) if square is not None else ()
        if square is not None and any(_sums(view, sine, product, factor) for product, factor in scaled):
            found[sine.id] = square.id
    return found


def _square(view: View, sine: Op) -> Op | None:
    """The op that alone reads a sine, and squares it."""
    op = only_reader(view, sine.outputs[0], repeated=True, captured=True)
    if op is None or op.kind not in SQUARES:
        return None
    if op.kind == "Mul":
        return op if op.inputs[0] == op.inputs[1] else None
    exponent = _constant(view, op.inputs[1])
    return op if exponent is not None and bool((view.model.array(exponent) == 2).all()) else None


def _scaled(view: View, square: Op) -> Iterator[tuple[Op, ValueId]]:
    """The product that alone reads a square, and its constant factor."""
    product = only_reader(view, square.outputs[0], repeated=True, captured=True)
    for value in product.inputs if product is not None and product.kind == "Mul" else ():
        if product is not None and value is not None and _constant(view, value) is not None:
            yield product, value


def _sums(view: View, sine: Op, scaled: Op, factor: ValueId) -> bool:
    """Whether a scaled square is added to what the sine's angle is a constant multiple of."""
    angle, total = view.producer(sine.inputs[0]), only_reader(view, scaled.outputs[0], repeated=True, captured=True)
    if angle is None or angle.kind != "Mul" or total is None or total.kind != "Add":
        return False
    for slope, x in (angle.inputs, angle.inputs[::-1]):
        tensor, inverse = _constant(view, slope), _constant(view, factor)
        if tensor is not None and inverse is not None and x in total.inputs:
            a, b = np.abs(view.model.array(tensor)), np.abs(view.model.array(inverse))
            return bool(a.max() <= _MOST and a.size == b.size and (a.ravel() * b.ravel()).max() <= _MOST_GAIN)
    return False


def _constant(view: View, value: ValueId | None) -> TensorProto | None:
    """The constant that a value is, or is an Identity of: exporters share equal weights so."""
    _, source = trail(view, value, first_input_of(("Identity",)))
    return view.constant(source)
