"""Bounds of quantized ops: integers lie in the range of their type, so what is dequantized is bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.elementwise import added, integers
from amp_rewrite.decide.bounds.linear import RowBounds, product
from amp_rewrite.decide.bounds.state import Ball, State, box, unknown
from amp_rewrite.decide.bounds.weights import BLOCK, PART, Part
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.op_classes import DEQUANTIZES, QUANTIZES
from amp_rewrite.ir.view import ValueId, View

_WIDEST = 1 << 14
_LEVELS = 255.0
"""Steps of an integer of 8 bits."""


def _quantize(context: OpContext) -> Sequence[State]:
    """Bound QuantizeLinear with one scale: integers within the type, and within what is read."""
    kind = context.dtype
    whole = integers(kind)
    if whole is None:
        return [unknown(f"{context.op.kind} to an unknown type")]
    x, scale = context.at(0), context.at(1)
    zero = context.at(2) if context.has(2) else box(0.0, 0.0)
    if not x.known or scale.lo.size > 1 or zero.lo.size > 1 or not float(scale.lo.min()) > 0:
        return [whole]
    # A low type rounds the quotient, which may be an integer further for each unit of it.
    least, most = float(scale.lo.min()), float(scale.hi.max())
    ends = [end / s for end in (x.hull().lo, x.hull().hi) for s in (least, most)]
    slack = 1 + 4 * context.arithmetic.unit * max(map(abs, map(float, ends)))
    low = max(float(whole.lo), math.floor(float(min(ends)) + float(zero.lo.min()) - slack))
    high = min(float(whole.hi), math.ceil(float(max(ends)) + float(zero.hi.max()) + slack))
    return [replace(box(min(low, high), max(low, high), "nearest integers"), whole=True)]


def _dequantize(context: OpContext) -> State:
    """Bound DequantizeLinear: (x − zero) · scale, of one scale, or the extremes of several."""
    x, scale = context.at(0), context.at(1).hull()
    x = x if x.known else integers(context.view.dtype(context.op.inputs[0])) or x
    zero = context.at(2).hull() if context.has(2) else box(0.0, 0.0)
    if context.has(2) and not zero.known:
        zero = integers(context.view.dtype(context.op.inputs[2])) or zero
    if not (x.known and scale.known and zero.known):
        return unknown("a scale or an integer that is not bounded")
    about = x.hull()
    steps = about.lo - zero.hi, about.hi - zero.lo
    ends = [step * s for step in steps for s in (scale.lo, scale.hi)]
    slack = 2 * context.arithmetic.unit
    low, high = np.minimum.reduce(ends), np.maximum.reduce(ends)
    return box(low - slack * abs(low), high + slack * abs(high), "(integers − zero) · scale")


def _dynamic(context: OpContext) -> Sequence[State]:
    """Bound DynamicQuantizeLinear: integers of 8 bits, a scale, and the zero point.

    Of a tensor of zeros onnxruntime gives the scale 1. The bound leaves that out: what it multiplies is 0 then.
    """
    x, byte = context.at(0).hull(), replace(box(0.0, _LEVELS, "the range of uint8"), whole=True)
    width = np.maximum(x.hi, 0.0) - np.minimum(x.lo, 0.0)
    scale = box(0.0, width / _LEVELS * (1 + 4 * context.arithmetic.unit), "the range of x / 255")
    return [byte, scale if x.known else unknown("a scale of numbers that are not bounded"), byte]


def _integer_product(context: OpContext) -> State:
    """Bound MatMulInteger and ConvInteger: Σ (a − zero)·(b − zero), without any rounding."""
    a, b = (_centered(context, slot) for slot in (0, 1))
    shape = context.shape(1)
    if a is None or b is None or shape is None:
        return unknown("integers of unknown type")
    sizes = shape[-2:-1] if context.op.kind == "MatMulInteger" else shape[1:]
    if not all(isinstance(n, int) for n in sizes):
        return unknown("a sum of unknown length")
    terms = math.prod(int(n) for n in sizes if isinstance(n, int))
    total = terms * b
    weights = context.numbers(1)
    if weights is not None and (not context.has(3) or context.numbers(3) is not None):
        zero = context.numbers(3)
        axes = -2 if context.op.kind == "MatMulInteger" else tuple(range(1, weights.ndim))
        centered = weights.astype(np.float64)
        if zero is not None:
            shaped = zero.astype(np.float64).reshape(-1, *[1] * (weights.ndim - 1)) if axes != -2 else zero
            centered = centered - (zero if zero.size == 1 else shaped)
        total = float(np.abs(centered).sum(axis=axes).max(initial=0.0))
    most = a * total
    return replace(box(-most, most, f"{terms} terms of integers"), whole=True)


def _centered(context: OpContext, slot: int) -> float | None:
    """Return the largest difference of an integer operand from its zero point."""
    held = integers(context.view.dtype(context.op.inputs[slot]))
    if held is None:
        return None
    zero = context.numbers(slot + 2)
    if not context.has(slot + 2):
        return held.absmax
    if zero is None:
        return float(held.hi - held.lo)
    return float(max(np.max(held.hi - zero.astype(np.float64)), np.max(zero.astype(np.float64) - held.lo)))


# -- weights of a few bits -------------------------------------------------------------------------------


def _few_bits(context: OpContext) -> State:
    """Bound MatMulNBits: a product with weights that are dequantized block by block."""
    rows, columns = context.integer("K", 0), context.integer("N", 0)
    bits, block = context.integer("bits", 4), context.integer("block_size", 0)
    packed, scales = context.numbers(1), context.numbers(2)
    if packed is None or scales is None or bits not in (2, 4, 8) or block < 1 or not columns or context.has(4):
        return unknown("quantized weights that are not constant, or in an unusual form")
    zeros = context.numbers(3) if context.has(3) else None
    if context.has(3) and zeros is None:
        return unknown("zero points that are not constant")
    x = _coarse(context.at(0)) if context.integer("accuracy_level", 0) == 4 else context.at(0)
    bounded = RowBounds.of(x, rows)
    if bounded is None:
        return unknown("a product of numbers that are not bounded")
    twice = replace(context.arithmetic, unit=4 * context.arithmetic.unit)  # scale and product are rounded as well
    weights = _blocks(packed, scales, zeros, (rows, columns, bits, block))
    made = product(bounded, weights, columns, twice, blocks=context.is_read and columns <= _WIDEST)
    state = replace(made, why="‖x‖·‖w‖ (Cauchy–Schwarz), or |x|·|w|")
    return added(context, state, context.at(5)) if context.has(5) else state


def _coarse(x: State) -> State:
    """Return the state of numbers that a kernel rounds to 8 bits, in blocks."""
    if not x.known:
        return x
    step = x.absmax / 127
    ball = x.ball
    if ball is not None:
        about = ball.zeroed()
        ball = Ball(about.axes, about.sizes, about.radius + step * math.sqrt(math.prod(about.sizes)))
    return box(x.lo - step, x.hi + step, x.why, ball)


def _blocks(packed: Array, scales: Array, zeros: Array | None, form: tuple[int, int, int, int]) -> Iterator[Part]:
    """Yield the columns of a dequantized matrix of the form (rows, columns, bits, block), some at a time."""
    rows, columns, bits, block = form
    count = -(-rows // block)
    stored, scale = packed.reshape(columns, -1), scales.reshape(columns, count).astype(np.float64)
    middle = float(2 ** (bits - 1))
    zero = np.full((columns, count), middle)
    if zeros is not None:
        exact = zeros.dtype.kind == "f" or (bits == 8 and zeros.size == columns * count)
        plain = zeros.reshape(columns, -1)
        zero = plain.astype(np.float64) if exact else _unpacked(plain, bits)[:, :count].astype(np.float64)
    lines = max(BLOCK, PART // max(rows, 1) // BLOCK * BLOCK)
    for at in range(0, columns, lines):
        part = slice(at, at + lines)
        numbers = _unpacked(stored[part], bits).reshape(-1, count, block).astype(np.float64)
        values = (numbers - zero[part, :, None]) * scale[part, :, None]
        yield Part(0, at, values.reshape(len(values), -1)[:, :rows].T)


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the numbers in bytes, the lowest bits first."""
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(len(packed), -1)


def dequantized(view: View, value: ValueId | None) -> tuple[Array, Array, Array | None, int, int] | None:
    """Return integers, scale, zero point, axis and block size of a constant matrix that is dequantized; else None."""
    op = view.producer(value, *DEQUANTIZES)
    if op is None:
        return None
    numbers, scale = view.array(op.inputs[0]), view.array(op.inputs[1])
    zero = view.array(op.inputs[2]) if len(op.inputs) > 2 and op.inputs[2] is not None else None
    if numbers is None or scale is None or (len(op.inputs) > 2 and op.inputs[2] is not None and zero is None):
        return None
    if numbers.ndim != 2:
        return None
    stated = {a.name: a.i for a in op.node.attribute}
    return numbers, scale, zero, int(stated.get("axis", 1)) % 2, int(stated.get("block_size", 0))


def dequantized_parts(held: tuple[Array, Array, Array | None, int, int], *, turned: bool) -> Iterator[Part]:
    """Yield the rows of a dequantized matrix, or its columns if it is read turned."""
    numbers, scale, zero, axis, block = held
    stored = numbers.shape[1]
    lines = max(BLOCK, PART // max(stored, 1) // BLOCK * BLOCK)
    for at in range(0, len(numbers), lines):
        values = numbers[at : at + lines].astype(np.float64)
        if zero is not None:
            values = values - _lined(zero, numbers.shape, axis, block, slice(at, at + lines))
        values = values * _lined(scale, numbers.shape, axis, block, slice(at, at + lines))
        yield Part(0, at, values.T) if turned else Part(at, 0, values)


def _lined(factor: Array, shape: tuple[int, ...], axis: int, block: int, rows: slice) -> Array:
    """Return scales or zero points for some rows of a matrix."""
    wide = factor.astype(np.float64)
    if wide.size == 1:
        return wide.reshape(1, 1)
    if wide.ndim == 1:
        return wide[rows, None] if axis == 0 else wide[None, :]
    wide = np.repeat(wide, block, axis=axis)[: shape[0], : shape[1]] if block else wide
    return wide[rows]


TABLE: Table = {
    **dict.fromkeys(QUANTIZES, _quantize),
    **dict.fromkeys(DEQUANTIZES, _dequantize),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), _integer_product),
    "DynamicQuantizeLinear": _dynamic,
    "com.microsoft::MatMulNBits": _few_bits,
}
