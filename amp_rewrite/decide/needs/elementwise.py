"""Facts of elementwise products, quotients and functions, and of norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

from amp_rewrite.decide.needs.facts import INF, NOTHING, Beyond, Fact, Facts, Values, joined, leaves, range_of, union
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.op_classes import SCALINGS
from amp_rewrite.ir.ops import OPS, OpRow, Trait
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, ValueId

FREE = 4096
"""What a free dimension counts as in a number of elements."""
MODERATE = 8.0
"""A factor of at most this size makes no product large."""
_DOUBLE = 1000
"""Doublings that a float holds."""
_LARGEST_EXPONENT = 700
_OF_EXPONENTIALS = 2.0**8
"""Terms of moderate size that an exponential counts for in a sum."""
_NEAR_RANGE = 0.6
"""Share of the range beyond which a product may leave it."""
_SMALL_STEP = 2.0**-4


def fact_of_scaling(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    divides = op.kind == "Div"
    if Trait.DEQUANTIZES in row.traits:
        return _dequantized(facts, op, read)
    fact = joined(read)
    varying, constants = [f for f in read if not f.constant], [f for f in read if f.constant]
    two = len(varying) == 2
    square = two and op.inputs[0] == op.inputs[1]
    fed = fed_numbers(facts, op)
    low, high = _bounds(facts, op, read, square=square)
    wholes = [] if divides else [f.whole for f in read if f.whole is not None]
    small = fact.small
    if two:
        small = any(f.small for f in varying) and all(f.small or f.size <= 1 for f in varying)
        small |= square and bool(fact.sources)
    gate = next((f for f in varying if f.learned and f.low >= 0 and f.high <= 1), None) if two else None
    counts = max((f.grid for f in read if not f.constant or not any(v.learned for v in varying)), default=0.0)
    if counts and not divides:
        counts *= min((f.size for f in constants if not f.grid), default=1.0)
    factors = [f.number for f in constants if f.number]
    levels = fact.levels if any(abs(n) == 1 for n in factors) else frozenset()
    if two:  # a factor near 1 keeps the level of the other
        levels = union(a.levels for a, b in permutations(varying) if b.beside_one)
    return fact._replace(
        low=low,
        high=high,
        whole=math.prod(wholes) if wholes and len(wholes) == len(read) else None,
        small=small,
        grows=fact.grows or (two and not divides and all(f.size > MODERATE for f in varying)),
        near_one=bool(varying) and all(f.near_one for f in varying),
        squares=frozenset((union(map(facts.line, op.operands)),)) if two else fact.squares,
        products=frozenset() if two else fact.products,
        negative=any(f.negative for f in varying) != any(n < 0 for n in factors),
        levels=levels,
        placed=(not two or any(f.whole is not None for f in varying)) and (fact.placed or bool(fact.levels)),
        terms=read[0].terms * _inverse(facts, read[-1]) if divides else math.prod(f.terms for f in read),
        grid=0.0 if two and not fact.whole else counts,
        best=fact.best if counts else 0.0,
        steps=steps_of(facts, op, read),
        run=run_of(read),
        scaled=(fact.scaled ^ fed) if divides else fact.scaled | fed,
        guard=INF,
        beside_one=two and all(f.beside_one for f in varying),
        states=tuple((state, was or (two and fact.beside_one)) for state, was in fact.states),
        beyond=fact.beyond or _scales_away(facts, op, read, low, high),
        gated=1 + max((f.steps for f in varying if f is not gate), default=0)
        if gate is not None and not divides
        else 0,
        small_factor=any(is_single_input(facts, value) for value in op.operands if not divides)
        or (not two and any(abs(1 / n if divides else n) < _SMALL_STEP for n in factors)),
    )


def _inverse(facts: Facts, divisor: Fact) -> float:
    """Return the terms in the inverse of a value: less than 1 for a count, and a sum perhaps beyond the range."""
    count = divisor.whole if divisor.whole is not None and not divisor.constant else 0.0
    terms = max(divisor.terms if divisor.size > facts.limits.most else 1.0, min(count, FREE))
    return 1 / terms if terms > 1 else 1.0


def factor(facts: Facts, op: Op, read: Sequence[Fact]) -> float:
    numbers = [f.number for f in (read[1:] if op.kind == "Div" else read) if f.constant and f.number]
    factor = abs(1 / numbers[0] if op.kind == "Div" else numbers[0]) if len(read) == 2 and numbers else 0.0
    return factor if factor < INF else 0.0


def fed_numbers(facts: Facts, op: Op) -> Values:
    """Operands that are inputs of the model with one number."""
    return frozenset(v for v in map(facts.origin, op.operands) if is_single_input(facts, v))


def is_single_input(facts: Facts, value: ValueId) -> bool:
    """True for an input of the model with one number."""
    shape = shape_of(facts.view, value) if facts.view.values[value].public else None
    return shape is not None and all(size == 1 for size in shape)


def _bounds(facts: Facts, op: Op, read: list[Fact], *, square: bool) -> tuple[float, float]:
    if len(read) != 2:
        return -INF, INF
    a, b = read
    corners: list[float] = []
    if op.kind != "Div":
        corners = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    elif b.number:
        corners = [a.low / b.number, a.high / b.number]
    if not corners or any(map(math.isnan, corners)):
        return (0.0, INF) if square else (-INF, INF)
    return max(0.0, min(corners)) if square else min(corners), max(corners)


def _scales_away(facts: Facts, op: Op, read: list[Fact], low: float, high: float) -> Beyond | None:
    varying = [f for f in read if not f.constant]
    if varying and (why := leaves(facts, low, high)):
        return why
    if any(f.fill for f in read):
        return Beyond("scales a mask beyond the range", mask=True)
    if large := next((f.size for f in read if f.constant and INF > f.size > _NEAR_RANGE * facts.limits.most), 0.0):
        return Beyond(f"computes with {large:g}")
    times = factor(facts, op, read)
    if facts.limits.narrow and times > facts.limits.beside and any(f.learned for f in varying):
        return Beyond(f"makes a product {times:g} times as large")
    return None


def steps_of(facts: Facts, op: Op, read: list[Fact]) -> int:
    """Return the small steps of a recursion so far: a small multiple is added, or a factor near 1 multiplies."""
    scales = op.kind in SCALINGS
    most = max((max(f.steps, 0 if scales or op.kind == "Sub" else f.gated) for f in read), default=0)
    moving = [f for f in read if (f.beside_one if scales else f.learned and f.small_factor)]
    others = [f for f in read if len(moving) > 1 or f not in moving]
    if moving and others:
        most = max(most, 1 + max(f.steps for f in others))
    return most


def _dequantized(facts: Facts, op: Op, read: list[Fact]) -> Fact:
    codes, scale = (*read, NOTHING)[:2]
    zero = facts[op.inputs[2] if len(op.inputs) > 2 else None]
    beyond = too_large(facts, facts.view.dtype(op.inputs[0]), scale, zero)
    return Fact(constant=codes.constant, sources=codes.sources, decoded=True, beyond=beyond)


def too_large(facts: Facts, codes: DType | None, scale: Fact, zero: Fact) -> Beyond | None:
    """Return why the numbers of codes leave the range; None if they do not."""
    low, high = range_of(codes)
    least, most = (zero.low, zero.high) if zero.constant else (0.0, 0.0)
    farthest = max(high - least, most - low)
    if scale.constant:
        return leaves(facts, 0.0, farthest * scale.size)
    wide = codes is not None and "FLOAT8" in codes.name and farthest > facts.limits.most / 2
    return Beyond(f"its codes reach {farthest:g}, and its scale is not known to be small") if wide else None


def fact_of_function(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    kind, fact = op.kind, read[0] if read else NOTHING
    if kind == "Pow" and fact.constant:  # a number to a power is an exponential
        kind, row, fact = "Exp", OPS["Exp"], read[-1]._replace(high=INF)
    if row.whole:
        fact = fact._replace(whole=fact.size)
    kept = _of(fact, row)._replace(bent=fact.learned and "levels" not in row.keeps)
    kept = kept._replace(**{name: getattr(fact, name) for name in row.keeps})
    return _FUNCTIONS[kind](facts, op, fact, kept) if kind in _FUNCTIONS else kept


def _of(fact: Fact, row: OpRow) -> Fact:
    return Fact(
        constant=fact.constant,
        learned=fact.learned,
        sources=fact.sources,
        depth=fact.depth,
        small=row.small,
        near_one=row.near_one,
        nudged=fact.nudged,
    )


def _exponential(facts: Facts, op: Op, fact: Fact, kept: Fact) -> Fact:
    high = math.exp(fact.high) if fact.high < _LARGEST_EXPONENT else INF
    return kept._replace(high=high, small=not fact.peak, terms=1.0 if high < INF else _OF_EXPONENTIALS)


def _magnitude(facts: Facts, op: Op, fact: Fact, kept: Fact) -> Fact:
    squares = frozenset((facts.line(op.operands[0]),)) if fact.transform and fact.products else frozenset()
    return kept._replace(high=fact.size, squares=squares)


def _root(facts: Facts, op: Op, fact: Fact, kept: Fact) -> Fact:
    return kept._replace(low=0.0, guard=math.sqrt(fact.guard))


def _inverted(facts: Facts, op: Op, fact: Fact, kept: Fact) -> Fact:
    least = max(fact.low, fact.guard if fact.guard < INF else 0.0)
    high = 1 / least if least > 0 else INF
    beyond = leaves(facts, 0.0, high) if fact.guard < INF else None
    return kept._replace(terms=_inverse(facts, fact), high=high, beyond=beyond)


def _raised(facts: Facts, op: Op, fact: Fact, kept: Fact) -> Fact:
    exponent = facts[op.inputs[1]].number
    square = exponent == 2
    whole = None
    if fact.whole is not None and exponent and exponent > 0:
        whole = fact.whole**exponent if exponent * math.log2(max(fact.whole, 2.0)) < _DOUBLE else INF
    return kept._replace(
        low=0.0 if square else -INF,
        squares=frozenset((facts.line(op.operands[0]),)) if square else frozenset(),
        grows=fact.size > 1 and (exponent is None or exponent > 1),
        small=fact.small or (square and bool(fact.sources)),
        whole=whole,
        terms=_inverse(facts, fact) if exponent == -1 else 1.0,
    )


_FUNCTIONS: Mapping[str, Callable[[Facts, Op, Fact, Fact], Fact]] = {
    "Abs": _magnitude,
    "Exp": _exponential,
    "Pow": _raised,
    "Reciprocal": _inverted,
    "Sqrt": _root,
}
"""What no column of the table says of a function."""


def fact_of_norm(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    fact = _of(read[0] if read else NOTHING, row)
    if op.kind != "Softmax":
        return fact
    return fact._replace(peak=_rows_of_softmax(facts, op), terms=1 / _row_length(facts, op))


def _rows_of_softmax(facts: Facts, op: Op) -> tuple[int, ...]:
    """Return the axes of its rows, counted from the end if the rank is known: all axes from one on, in old opsets."""
    shape = shape_of(facts.view, op.inputs[0])
    flattens = op.signature is not None and op.signature.since < FIRST_ROW_SOFTMAX
    axis = int_attribute(op.node, "axis", 1 if flattens else -1)
    from_end = axis - len(shape) if shape is not None and axis >= 0 else axis
    return tuple(range(from_end, 0)) if flattens and from_end < 0 else (from_end,)


def _row_length(facts: Facts, op: Op) -> int:
    shape, axis = shape_of(facts.view, op.inputs[0]), int_attribute(op.node, "axis", -1)
    return shape[axis] or FREE if shape is not None and -len(shape) <= axis < len(shape) else FREE


def run_of(read: Sequence[Fact]) -> int:
    """Return the elementwise sums and products in a row since the last layer."""
    deepest = max((f.depth for f in read), default=0)
    return 1 + max((f.run for f in read if f.depth == deepest and not f.constant), default=-1)
