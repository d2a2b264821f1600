"""Rotary position embeddings, written out: x·cos θ + y·sin θ, where y is x with its halves turned, one of them negated.

|x cos θ + y sin θ| ≤ √(x² + y²) by Cauchy–Schwarz, since the squares of cosine and sine sum to 1. If both halves have
the same angles, each pair is rotated, and the norm stays. The angle is one number for both: it is float32 wherever the
safety rule for angles is on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide.bounds.arithmetic import RoundingModel
from amp_rewrite.decide.bounds.state import Ball, Sizes, State, box, fit, lengths
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import casts_floats, number, trail
from amp_rewrite.ir.op_classes import MOVES, PERIODIC, SUMS
from amp_rewrite.ir.shapes.symbolic import Dim
from amp_rewrite.ir.view import Op, ValueId, View

Dims = Callable[[ValueId | None], Sizes]
_LARGEST = 1 << 40
_MOVED = MOVES | {"Gather", "Slice"}
_MOST_NUMBERS = 1 << 22
_ROUNDINGS = 8
"""More than the roundings of cosine, sine, both products and of the factors that scale them add."""


class Rotation(NamedTuple):
    """`x` and `y` as above, a factor of both, and True if pairs of `x` are rotated."""

    x: ValueId
    y: ValueId
    factor: float
    pairs: bool


class _Wave(NamedTuple):
    kind: str
    angle: ValueId
    moves: tuple[tuple[str, tuple[object, ...]], ...]
    factor: float


def rotation(view: View, op: Op, dims: Dims) -> Rotation | None:
    """Return the rotation that an Add computes; None for other ops."""
    if op.kind not in SUMS or len(op.inputs) != 2:
        return None
    left, right = (_turned(view, value) for value in op.inputs[:2])
    if left is None or right is None:
        return _by_tables(view, op, dims)
    (x, first), (y, second) = left, right
    waves = {first.kind, second.kind} == PERIODIC
    if not waves or (first.angle, first.moves, first.factor) != (second.angle, second.moves, second.factor):
        return None
    if first.kind == "Sin":
        x, y = y, x
    pairs = op.kind == "Add" and _is_turn(view, y, x, dims) and _doubled(view, first.angle, dims)
    return Rotation(x, y, first.factor, pairs)


def _by_tables(view: View, op: Op, dims: Dims) -> Rotation | None:
    """Return a rotation by cosines and sines that are constants."""
    sides: list[tuple[ValueId, Array]] = []
    for product in (view.producer(value, "Mul") for value in op.inputs[:2]):
        slots = (0, 1) if product is not None else ()
        for slot in slots:
            assert product is not None
            table, other = view.constant(product.inputs[slot]), product.inputs[1 - slot]
            if table is not None and other is not None and 1 < math.prod(table.dims) <= _MOST_NUMBERS:
                sides.append((other, view.model.array(table).astype(np.float64)))
                break
    if len(sides) != 2 or sides[0][1].shape != sides[1][1].shape:
        return None
    factor = float(np.sqrt(np.square(sides[0][1]) + np.square(sides[1][1])).max())
    turned = [_is_turn(view, sides[i][0], sides[1 - i][0], dims) for i in (0, 1)]
    alike = all(_is_doubled(table) for _, table in sides)
    x, y = (sides[1], sides[0]) if turned[0] else (sides[0], sides[1])
    return Rotation(x[0], y[0], factor, op.kind == "Add" and any(turned) and alike) if factor < math.inf else None


def _is_doubled(table: Array) -> bool:
    half = table.shape[-1] // 2 if table.ndim else 0
    return 2 * half == table.shape[-1] and np.array_equal(table[..., :half], table[..., half:]) if half else False


def rotated(found: Rotation, x: State, y: State, shape: Sizes, arithmetic: RoundingModel) -> State | None:
    """Return the state of a rotation; None if its operands are unknown."""
    if x.fills or y.fills or not (x.known and y.known) or not fit(x, y):
        return None
    slack = found.factor * (1 + _ROUNDINGS * arithmetic.unit)
    most = np.hypot(x.size, y.size) * slack + 4 * arithmetic.least
    ball, own = None, x.ball
    if own is not None and own.axes == (-1,) and lengths(shape, own.axes) == own.sizes:
        about = own.zeroed()
        more = 4 * arithmetic.least * float(own.sizes[0])
        if found.pairs:
            ball = Ball(own.axes, own.sizes, about.radius * slack + more)
            most = np.minimum(most, ball.radius)
        elif y.ball is not None and (y.ball.axes, y.ball.sizes) == (own.axes, own.sizes):
            ball = Ball(own.axes, own.sizes, np.hypot(about.radius, y.ball.zeroed().radius) * slack + more)
    return box(-most, most, "a rotation, √(x² + y²)", ball)


def _turned(view: View, value: ValueId | None) -> tuple[ValueId, _Wave] | None:
    """Return the value and the cosine or sine that a product multiplies."""
    product = view.producer(value)
    if product is None or product.kind != "Mul":
        return None
    for slot in (0, 1):
        wave = _wave(view, product.inputs[slot])
        other = product.inputs[1 - slot]
        if wave is not None and other is not None:
            return other, wave
    return None


def _wave(view: View, value: ValueId | None) -> _Wave | None:
    """Return a cosine or sine behind copies, and products with one number that is not above 1."""
    moves, factor = list[tuple[str, tuple[object, ...]]](), 1.0
    while (op := view.producer(value)) is not None:
        if op.kind in PERIODIC and op.inputs[0] is not None:
            return _Wave(op.kind, op.inputs[0], tuple(moves), factor)
        if op.kind == "Mul":
            scale = next((slot for slot in (0, 1) if number(view, op.inputs[slot]) is not None), None)
            if scale is None:
                return None
            factor *= abs(number(view, op.inputs[scale]) or 0.0)
            value = op.inputs[1 - scale]
            continue
        if op.kind not in _MOVED and not casts_floats(view, op):
            return None
        if not casts_floats(view, op):
            moves.append((op.kind, (op.node.attribute[:] and str(op.node.attribute), *_same(view, op.inputs[1:]))))
        value = op.inputs[0]
    return None


def _same(view: View, values: Sequence[ValueId | None]) -> tuple[object, ...]:
    """Return what tells operands apart: the numbers of constants, other values themselves."""
    return tuple(
        view.array(v).tobytes() if v is not None and view.constant(v) is not None else v  # type: ignore[union-attr]
        for v in values
    )


def _doubled(view: View, angle: ValueId, dims: Dims) -> bool:
    """True for angles that stand twice along the last axis."""
    _, value = trail(view, angle, lambda op: op.inputs[0] if casts_floats(view, op) or op.kind == "Identity" else None)
    op, shape = view.producer(value), dims(value)
    if op is None or op.kind != "Concat" or shape is None or len(op.inputs) != 2 or len(set(op.inputs)) != 1:
        return False
    return int_attribute(op.node, "axis", 0) in (-1, len(shape) - 1)


def _is_turn(view: View, y: ValueId, x: ValueId, dims: Dims) -> bool:
    """True if y is x with the second half, negated, before the first."""
    op, shape = view.producer(y), dims(x)
    if op is None or op.kind != "Concat" or len(op.inputs) != 2 or shape is None or not isinstance(shape[-1], int):
        return False
    if int_attribute(op.node, "axis", 0) not in (-1, len(shape) - 1):
        return False
    negated = view.producer(op.inputs[0])
    if negated is None or negated.kind != "Neg":
        return False
    width = shape[-1]
    halves = (width // 2, width), (0, width // 2)
    parts = negated.inputs[0], op.inputs[1]
    return width % 2 == 0 and all(_half(view, v, x, shape) == ends for v, ends in zip(parts, halves, strict=True))


def _half(view: View, value: ValueId | None, x: ValueId, shape: Sequence[Dim]) -> tuple[int, int] | None:
    """Return the first and last position along the last axis that a value takes of another; None if that is unknown."""
    op, width = view.producer(value), shape[-1]
    if op is None or op.inputs[0] != x or not isinstance(width, int):
        return None
    last = (-1, len(shape) - 1)
    if op.kind == "Split":
        even = len(op.inputs) < 2 or op.inputs[1] is None
        sizes = view.array(op.inputs[1]) if not even else np.full(2, width // 2)
        if len(op.outputs) != 2 or sizes is None or sizes.tolist() != [width // 2] * 2:
            return None
        stated = int_attribute(op.node, "axis", 0)
        slot = op.outputs.index(value)
        return (slot * width // 2, (slot + 1) * width // 2) if stated in last else None
    if op.kind != "Slice" or len(op.inputs) < 4:
        return None
    numbers = [view.array(v) if v is not None else None for v in op.inputs[1:5]]
    if any(n is None or n.size != 1 for n in numbers[:3]) or (len(op.inputs) > 4 and numbers[3] is None):
        return None
    start, end, axis, *step = (int(n.item()) for n in numbers if n is not None)
    if axis not in last or step not in ([], [1]) or abs(start) > _LARGEST:
        return None
    start, end = (n + width if n < 0 else n for n in (start, end))
    return min(max(start, 0), width), min(max(end, 0), width)
