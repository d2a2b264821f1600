"""Bounds of products, attention and recurrent cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from amp_rewrite.decide.bounds.arithmetic import gamma
from amp_rewrite.decide.bounds.context import OpContext, Table
from amp_rewrite.decide.bounds.elementwise import added
from amp_rewrite.decide.bounds.linear import RowBounds, by_size, product
from amp_rewrite.decide.bounds.matrices import multiplied
from amp_rewrite.decide.bounds.quantized import dequantized, dequantized_parts
from amp_rewrite.decide.bounds.reshape import transposed
from amp_rewrite.decide.bounds.state import Ball, Sizes, State, box, join, lengths, reduced, unknown
from amp_rewrite.decide.bounds.uniform_constants import number_throughout
from amp_rewrite.decide.bounds.weights import largest, matrix_of, parts
from amp_rewrite.ir.op_classes import RECURRENT

_WIDEST = 1 << 14
"""Columns up to which blocks are bounded: wider results are logits."""


def _turned(state: State, dims: Sizes) -> tuple[State, Sizes]:
    """Return a state and its shape with the last two axes swapped."""
    if dims is None or len(dims) < 2:
        return state.hull(), None
    order = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    return transposed(state, order, len(dims)), (*dims[:-2], dims[-1], dims[-2])


def _product(context: OpContext, flags: tuple[bool, bool], alpha: float = 1.0) -> State:
    """Return the state of α·a·b, each transposed or not."""
    a, before = context.at(0), context.shape(0)
    if flags[0]:
        a, before = _turned(a, before)
    matrix = matrix_of(context.view, context.op.inputs[1], turned=flags[1])
    number = number_throughout(context.view, context.op.inputs[1])
    b, after = context.at(1), context.shape(1)
    held = dequantized(context.view, context.op.inputs[1]) if matrix is None else None
    if a.total < math.inf and a.along == -1:
        b, after = _turned(b, after) if flags[1] else (b, after)
        state = multiplied(a, b, before, after)
    elif number is not None and after is not None and len(after) >= 2 and (context.spatial or matrix is None):
        state = _uniform(context, a, after[-1 if flags[1] else -2], number)
    elif matrix is not None:
        rows = RowBounds.of(a, matrix.rows)
        if rows is None:
            return unknown("a product of numbers that are not bounded")
        if context.frugal and not rows.narrow:
            state = by_size(rows, largest(context.view, matrix.value), matrix.columns, context.arithmetic)
        else:
            blocks = context.is_read and matrix.columns <= _WIDEST and not context.frugal
            weight = parts(context.view.model, matrix)
            state = product(rows, weight, matrix.columns, context.arithmetic, blocks=blocks)
        state = replace(state, why="‖x‖·‖w‖ (Cauchy–Schwarz), or |x|·|w|")
    elif held is not None and (rows := RowBounds.of(a, held[0].shape[1 if flags[1] else 0])) is not None:
        columns = held[0].shape[0 if flags[1] else 1]
        twice = replace(context.arithmetic, unit=4 * context.arithmetic.unit)  # scales are rounded as well
        blocks = context.is_read and columns <= _WIDEST
        state = product(rows, dequantized_parts(held, turned=flags[1]), columns, twice, blocks=blocks)
        state = replace(state, why="‖x‖·‖w‖ (Cauchy–Schwarz), or |x|·|w|")
    else:
        if flags[1]:
            b, after = _turned(b, after)
        state = multiplied(a, b, before, after)
    return state if alpha == 1.0 else _times(state, alpha)


def _times(state: State, factor: float) -> State:
    """Return the state of a multiple."""
    ends = state.lo * factor, state.hi * factor
    ball = state.ball
    if ball is not None:
        center = None if ball.center is None else ball.center * factor
        blocks = None if ball.blocks is None else ball.blocks * abs(factor)
        ball = Ball(ball.axes, ball.sizes, ball.radius * abs(factor), center, ball.scale, blocks)
    return box(np.minimum(*ends), np.maximum(*ends), state.why, ball)


def _uniform(context: OpContext, a: State, terms: object, number: float) -> State:
    """Bound a product with a matrix of one number: it sums the row."""
    if not isinstance(terms, int) or not a.known:
        return unknown("a product of numbers that are not bounded")
    ends = []
    for end in (a.lo, a.hi, a.size):
        row = end if end.ndim else end.reshape(1)
        ends.append(row.sum(axis=-1, keepdims=True) * (terms if row.shape[-1] == 1 else 1) * number)
    slack = (gamma(terms) + context.arithmetic.unit) * np.abs(ends[2])
    low, high = np.minimum(*ends[:2]) - slack, np.maximum(*ends[:2]) + slack
    return box(low, high, f"sums of {terms} terms, weights {number:g} throughout")


def _fused(context: OpContext) -> State:
    if context.integer("transBatchA", 0) or context.integer("transBatchB", 0):
        return unknown("a product of turned batches")
    return _product(
        context, (bool(context.integer("transA", 0)), bool(context.integer("transB", 0))), context.number("alpha", 1.0)
    )


def _gemm(context: OpContext) -> State:
    flags = bool(context.integer("transA", 0)), bool(context.integer("transB", 0))
    total = _product(context, flags, context.number("alpha", 1.0))
    if not context.has(2):
        return total
    bias = context.at(2)
    beta = context.number("beta", 1.0)
    summed = added(context, total, bias if beta == 1.0 else _times(bias, beta))
    return replace(summed, why=total.why + " + |b|")


# -- attention ---------------------------------------------------------------------------------------


def _mixture(context: OpContext, value: State, dims: Sizes, bias: State | None, *lines: Sizes) -> State:
    """Bound mixtures of the rows of a value, other ones for each head: weights are not negative and sum to 1.

    `lines`: shapes of what else has as many rows as are mixed, or has some of them.
    """
    if not value.known:
        return unknown("attention over values that are not bounded")
    if bias is not None:
        value = added(context, value, bias)
    rank = 4 if dims is None else len(dims)
    if rank not in (3, 4) or (dims is not None and rank == 5):
        return unknown("packed values")
    rows = [lengths(shape, (-2,)) for shape in lines or (dims,)]
    terms = sum(count[0] for count in rows if count) if all(rows) else None
    most = 1 + gamma(terms) + context.arithmetic.unit
    lo = np.minimum(reduced(value.lo, (-2,), np.min), 0.0) * most
    hi = np.maximum(reduced(value.hi, (-2,), np.max), 0.0) * most
    shape = context.result()
    if shape is None or dims is None or shape[-1] != dims[-1] or len(shape) != len(dims):
        hull = box(np.min(lo), np.max(hi))
        return replace(hull, why="a mixture of values, weights sum to 1")
    ball = value.ball
    if ball is not None and ball.axes == (-1,) and (rank == 4 or ball.zeroed().blocks is not None):
        about = ball.zeroed()
        if rank == 4:
            ball = Ball((-1,), ball.sizes, reduced(about.radius, (-2,), np.max) * most)
        else:
            assert about.blocks is not None
            blocks = about.blocks * most
            radius = np.full((1,), math.sqrt(float(np.square(blocks).sum())))
            heads = context.integer("num_heads", context.integer("q_num_heads", 0))
            width = dims[-1]
            fits = isinstance(width, int) and heads and not (width // heads) % (width // blocks.size)
            ball = Ball((-1,), ball.sizes, radius, blocks=blocks) if fits else None
    else:
        ball = None
    return box(lo, hi, "a mixture of values, weights sum to 1", ball)


def _attention(context: OpContext) -> Sequence[State]:
    """Bound Attention: mixtures of the rows of its values and of their cache."""
    key, value, lines = context.at(1).hull(), context.at(2), [context.shape(2)]
    if context.has(5):
        key = join(key, context.at(4).hull(), "a cache continued")
        value = join(value.hull(), context.at(5).hull(), "a cache continued")
        lines.append(context.shape(5))
    return [_mixture(context, value, context.shape(2), None, *lines), key, value.hull(), unknown("scores")]


def _multi_head(context: OpContext) -> Sequence[State]:
    if not context.has(2) or context.has(7):
        return [unknown("attention over packed or cached values")] * len(context.op.outputs)
    bias = None
    if context.has(3):
        width = max(context.at(3).lo.size, 1)
        whole = context.at(3)
        third = whole.lo.reshape(-1).size // 3
        bias = box(whole.lo.reshape(-1)[2 * third :], whole.hi.reshape(-1)[2 * third :]) if width > 1 else whole
    state = _mixture(context, context.at(2), context.shape(2), bias)
    return [state, *[unknown("a cache")] * (len(context.op.outputs) - 1)]


def _grouped(context: OpContext) -> Sequence[State]:
    if not context.has(2):
        return [unknown("attention over packed values")] * len(context.op.outputs)
    value, lines = context.at(2).hull(), [context.shape(2)]
    if context.has(4):
        value = join(value, context.at(4).hull(), value.why)
        lines.append(context.shape(4))
    state = _mixture(context, value, context.shape(2), None, *lines)
    return [state, *[unknown("a cache")] * (len(context.op.outputs) - 1)]


def _packed(context: OpContext) -> Sequence[State]:
    """Bound com.microsoft::Attention: its values are the last third of the columns of x·W + b."""
    sizes = context.integers("qkv_hidden_sizes")
    matrix = matrix_of(context.view, context.op.inputs[1])
    rows = RowBounds.of(context.at(0), matrix.rows) if matrix is not None else None
    if matrix is None or rows is None or context.has(4):
        return [unknown("attention over values that are not bounded")] * len(context.op.outputs)
    state = product(rows, parts(context.view.model, matrix), matrix.columns, context.arithmetic, blocks=False)
    if context.has(2):
        state = added(context, state, context.at(2))
    start = sum(sizes[:2]) if sizes else matrix.columns // 3 * 2
    part = box(state.lo.reshape(-1)[start:], state.hi.reshape(-1)[start:])
    mixed = _mixture(context, part, context.result(), None, context.shape(0))
    return [mixed, *[unknown("a cache")] * (len(context.op.outputs) - 1)]


def _rotated(context: OpContext) -> State:
    """Bound RotaryEmbedding: |x·c − y·s| ≤ √(x² + y²)·√(c² + s²)."""
    x, slots = context.at(0), (2, 3) if context.op.domain else (1, 2)
    cosine, sine = map(context.at, slots)
    if not x.known or not (cosine.known and sine.known):
        return unknown("a rotation by numbers that are not bounded")
    factor = cosine.absmax + sine.absmax
    tables = [numbers for slot in slots if (numbers := context.numbers(slot)) is not None]
    if len(tables) == 2 and tables[0].shape == tables[1].shape:
        radius = np.hypot(*(table.astype(np.float64) for table in tables)).max(initial=0.0)
        factor = min(factor, math.sqrt(2) * float(radius) * (1 + 8 * context.arithmetic.unit))
    if context.integer("rotary_embedding_dim", 0):
        factor = max(factor, 1.0)  # the other numbers stay
    return box(-x.absmax * factor, x.absmax * factor, "a rotation of pairs")


def _recurrent(context: OpContext) -> Sequence[State]:
    """Bound recurrent cells with usual activations: a state is a mean of values of tanh, or a product with them."""
    names = context.op.node.attribute
    usual = {b"sigmoid", b"tanh"}
    stated = [s.lower() for a in names if a.name == "activations" for s in a.strings]
    clip = any(a.name == "clip" for a in names)
    count = len(context.op.outputs)
    gates = stated[::2] if context.op.kind == "GRU" else ()
    if any(s not in usual for s in stated) or clip or any(s != b"sigmoid" for s in gates):
        return [unknown("other activations")] * count
    start = context.at(5) if context.has(5) else box(0.0, 0.0)
    most = max(1.0, start.absmax) if context.op.kind == "GRU" else 1.0
    hidden = box(-most, most, "a state lies in [−1, 1]")
    return [hidden, hidden, unknown("a cell adds up")][:count]


def _einsum(context: OpContext) -> State:
    """Bound an Einsum of two operands by the number of terms."""
    equation = next((a.s.decode() for a in context.op.node.attribute if a.name == "equation"), "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    labels = left.split(",")
    if not arrow or "." in equation or len(labels) != len(context.states):
        return unknown("an Einsum in an unusual spelling")
    sizes: dict[str, object] = {}
    for slot, word in enumerate(labels):
        shape = context.shape(slot)
        if shape is None or len(shape) != len(word):
            return unknown("an Einsum of unknown shapes")
        sizes.update(zip(word, shape, strict=True))
    summed = [sizes[label] for label in sizes if label not in right]
    states = [context.at(slot) for slot in range(len(labels))]
    if any(not s.known for s in states):
        return unknown("a product of numbers that are not bounded")
    known = [n for n in summed if isinstance(n, int)]
    softmax = next((i for i, s in enumerate(states) if s.total < math.inf), None)
    if (
        softmax is not None
        and len(states) == 2
        and [labels[softmax][states[softmax].along]] == [label for label in sizes if label not in right]
    ):
        other = states[1 - softmax]
        most = other.absmax * states[softmax].total * (1 + gamma(known[0] if known else None))
        return box(-most, most, "a mixture, weights sum to 1")
    if len(known) < len(summed):
        return unknown("a sum over an axis of unknown length")
    terms = math.prod(known)
    most = math.prod(s.absmax for s in states) * terms * (1 + gamma(terms))
    return box(-most, most, f"{terms} terms")


TABLE: Table = {
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(("RotaryEmbedding", "com.microsoft::RotaryEmbedding"), _rotated),
    "Attention": _attention,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": lambda context: _product(context, (False, False)),
    "com.microsoft::Attention": _packed,
    "com.microsoft::FusedMatMul": _fused,
    "com.microsoft::GroupQueryAttention": _grouped,
    "com.microsoft::MultiHeadAttention": _multi_head,
}
