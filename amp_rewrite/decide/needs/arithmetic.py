"""Facts of sums, products and quotients: elementwise, along axes, and in matrix products and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import permutations

from amp_rewrite.decide.needs.facts import INF, NOTHING, Beyond, Fact, Facts, Values, joined, leaves, range_of, union
from amp_rewrite.decide.sizes import FREE, summed_labels, terms_of_product
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import orders, outweighs, reduction_axes
from amp_rewrite.ir.op_classes import LAYERS, PRODUCTS, SCALINGS, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import OPS, OpRow, Trait
from amp_rewrite.ir.patterns.scores import MAX_GRID, scored_rows
from amp_rewrite.ir.shapes import combined_elements, shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once

_MODERATE = 8.0
"""Factors up to this size do not make a product large."""
_SMALL_STEP = 2.0**-4
_NEAR_RANGE = 0.6
"""Smallest share of the range for a constant to push a sum or product out of it."""
_MAX_STEP = 2.0**-6
"""Maximum step of a finite difference."""


def fact_of_scaling(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    divides = op.kind == "Div"
    if Trait.DEQUANTIZES in row.traits:
        beyond = too_large(facts, facts.view.dtype(op.inputs[0]), *[facts[v] for v in op.inputs[1:3]])
        return Fact(constant=read[0].constant, sources=read[0].sources, decoded=True, beyond=beyond)
    fact = joined(read)
    varying, constants = [f for f in read if not f.constant], [f for f in read if f.constant]
    two = len(varying) == 2
    square = two and op.inputs[0] == op.inputs[1]
    scalars = scalar_inputs(facts, op)
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
    if two:  # a factor near 1 keeps the level of the other factor
        levels = union(a.levels for a, b in permutations(varying) if b.beside_one)
    return fact._replace(
        low=low,
        high=high,
        whole=math.prod(wholes) if wholes and len(wholes) == len(read) else None,
        small=small,
        grows=fact.grows or (two and not divides and all(f.size > _MODERATE for f in varying)),
        near_one=bool(varying) and all(f.near_one for f in varying),
        squares=frozenset((union(map(facts.line, op.operands)),)) if two else fact.squares,
        products=frozenset() if two else fact.products,
        negative=any(f.negative for f in varying) != any(n < 0 for n in factors),
        levels=levels,
        placed=(not two or any(f.whole is not None for f in varying)) and (fact.placed or bool(fact.levels)),
        terms=read[0].terms * inverse(facts, read[-1]) if divides else math.prod(f.terms for f in read),
        grid=0.0 if two and not fact.whole else counts,
        best=fact.best if counts else 0.0,
        steps=steps_of(facts, op, read),
        run=run_of(read),
        scaled=(fact.scaled ^ scalars) if divides else fact.scaled | scalars,
        guard=INF,
        beside_one=two and all(f.beside_one for f in varying),
        moved=fact.states if two and fact.beside_one else fact.moved,
        beyond=fact.beyond or _scales_away(facts, op, read, low, high),
        gated=1 + max((f.steps for f in varying if f is not gate), default=0)
        if gate is not None and not divides
        else 0,
        small_factor=any(is_single_input(facts, value) for value in op.operands if not divides)
        or (not two and any(abs(1 / n if divides else n) < _SMALL_STEP for n in factors)),
    )


def inverse(facts: Facts, divisor: Fact) -> float:
    """Return the number of terms of a value's inverse: less than 1 for a count or a long sum."""
    count = divisor.whole if divisor.whole is not None and not divisor.constant else 0.0
    terms = max(divisor.terms if divisor.size > facts.most else 1.0, min(count, FREE))
    return 1 / terms if terms > 1 else 1.0


def factor(facts: Facts, op: Op, read: Sequence[Fact]) -> float:
    numbers = [f.number for f in (read[1:] if op.kind == "Div" else read) if f.constant and f.number]
    factor = abs(1 / numbers[0] if op.kind == "Div" else numbers[0]) if len(read) == 2 and numbers else 0.0
    return factor if factor < INF else 0.0


def scalar_inputs(facts: Facts, op: Op) -> Values:
    """Return the operands among the model's single-element inputs."""
    return frozenset(v for v in map(facts.origin, op.operands) if is_single_input(facts, v))


def is_single_input(facts: Facts, value: ValueId) -> bool:
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
    if large := next((f.size for f in read if f.constant and INF > f.size > _NEAR_RANGE * facts.most), 0.0):
        return Beyond(f"computes with {large:g}")
    times = factor(facts, op, read)
    if facts.narrow and times > facts.beside and any(f.learned for f in varying):
        return Beyond(f"makes a product {times:g} times as large")
    return None


def steps_of(facts: Facts, op: Op, read: list[Fact]) -> int:
    """Return the number of small steps of a recursion so far: added small multiples, and factors near 1."""
    scales = op.kind in SCALINGS
    most = max((max(f.steps, 0 if scales or op.kind == "Sub" else f.gated) for f in read), default=0)
    moving = [f for f in read if (f.beside_one if scales else f.learned and f.small_factor)]
    others = [f for f in read if len(moving) > 1 or f not in moving]
    if moving and others:
        most = max(most, 1 + max(f.steps for f in others))
    return most


def too_large(facts: Facts, codes: DType | None, scale: Fact = NOTHING, zero: Fact = NOTHING) -> Beyond | None:
    """Return why decoded numbers leave the range; None if they do not."""
    low, high = range_of(codes)
    least, most = (zero.low, zero.high) if zero.constant else (0.0, 0.0)
    farthest = max(high - least, most - low)
    if scale.constant:
        return leaves(facts, 0.0, farthest * scale.size)
    wide = codes is not None and "FLOAT8" in codes.name and farthest > facts.most / 2
    return Beyond(f"its codes reach {farthest:g}, and its scale is not known to be small") if wide else None


def run_of(read: Sequence[Fact]) -> int:
    """Return the number of consecutive elementwise sums and products since the last layer."""
    deepest = max((f.depth for f in read), default=0)
    return 1 + max((f.run for f in read if f.depth == deepest and not f.constant), default=-1)


def fact_of_sum(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    fact = joined(read)
    if op.kind == "Neg":
        fact = fact._replace(low=-fact.high, high=-fact.low, negative=not fact.negative)
        return fact.without("number", "peak", "guard", "top")
    ends = [(-f.high, -f.low) if at and op.kind == "Sub" else (f.low, f.high) for at, f in enumerate(read)]
    low, high = (sum(side) for side in zip(*ends, strict=True))
    varying, constants = [f for f in read if not f.constant], [f for f in read if f.constant]
    tiny = [f.number for f in constants if f.number is not None and 0 < f.number < 1]
    guard = min(tiny) if tiny and varying and op.kind == "Add" else INF
    top = read[1].top if op.kind == "Sub" and len(read) == 2 else None
    peak = top[1] if top is not None and top[0] == op.inputs[0] else ()
    hides = fact.hides or any(f.raw for f in varying)
    wholes = [f.whole for f in read if f.whole is not None]
    from_afar = any(f.learned for f in varying) and any(facts.reach < f.size < INF for f in constants)
    nudged = sum(f.nudged for f in varying)
    counting = [f for f in read if f.grid and not (f.constant and op.id in _near(facts.view, facts.to))]
    return fact._replace(
        low=low if not math.isnan(low) else -INF,
        high=min(high, 0.0) if peak else high if not math.isnan(high) else INF,
        whole=sum(wholes) if len(wholes) == len(read) else None,
        guard=guard,
        beside_one=bool(varying)
        and (any(f.number is not None and abs(f.number) == 1 for f in constants) or (guard < INF and fact.beside_one)),
        peak=peak,
        placed=fact.placed or bool(fact.levels) or from_afar,
        nudged=fact.nudged or (fact.raw and any(0 < f.size < _MAX_STEP for f in constants)),
        slope=fact.slope or (len(varying) == 2 and (nudged == 1 or (nudged == 2 and all(f.learned for f in varying)))),
        moved=fact.states,
        steps=steps_of(facts, op, read),
        run=run_of(read),
        grid=sum(f.grid for f in counting),
        best=sum(f.grid if hides else f.best for f in counting),
        hides=hides,
        beyond=fact.beyond or _drowns(facts, op, read, varying, constants),
        small=fact.small and (guard == INF or guard < facts.tiny),
    )


def _drowns(facts: Facts, op: Op, read: list[Fact], varying: list[Fact], constants: list[Fact]) -> Beyond | None:
    if varying and any(f.fill for f in constants):
        return Beyond("adds a mask that would overflow", mask=True)
    far = max((f.size for f in constants if f.size < INF), default=0.0) if varying else 0.0
    if far > _NEAR_RANGE * facts.most:
        return Beyond(f"adds {far:g}, near the limit of the range")
    level = max((max(f.low, -f.high) for f in constants if f.size <= facts.most), default=0.0)
    if level > facts.beside and any(f.learned for f in varying):
        return Beyond(f"adds {level:g}, next to which a product is small")
    for value, bias in orders(op) if op.kind == "Add" else ():
        layer = facts.view.producer(facts.origin(value), *LAYERS)
        if facts[bias].constant and layer is not None and outweighs(facts.view, bias, layer.inputs[1], facts.to):
            return Beyond("adds a bias that outweighs the product")
    return None


def fact_of_reduction(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    fact = joined(read[:1])._replace(averaged=True)
    fact = fact.without("number", "steps", "run", "running", "guard", "gated", "top")
    shape = shape_of(facts.view, op.results[0])  # a sum over states and new values has their shape
    states = frozenset(state for state in fact.states if shape_of(facts.view, state) == shape)
    fact = fact._replace(states=states, moved=states)
    if op.kind in ("ReduceSumSquare", "ReduceL2", "GlobalLpPool", "LpPool"):
        squares, small = frozenset((facts.line(op.operands[0]),)), fact.small or bool(fact.sources)
        return fact.unbounded()._replace(low=0.0, squares=squares, levels=frozenset(), grows=True, small=small)
    if op.kind in ("ReduceMax", "ReduceMin"):
        top = (op.operands[0], _axes_from_end(facts, op)) if op.kind == "ReduceMax" else None
        return fact._replace(peak=(), top=top)
    if op.kind in ("ReduceMean", "AveragePool", "GlobalAveragePool"):
        return fact.without("whole", "peak")
    if op.kind in ("DFT", "STFT"):
        return fact.unbounded()
    known = terms_of_product(facts.view, op) if op.kind == "Einsum" else combined_elements(facts.view, op)
    count = min(known or FREE, 1 << 60)
    whole = fact.whole * count if fact.whole is not None else None
    if op.kind in ("ReduceProd", "CumProd", "Det"):
        return fact.unbounded()._replace(grows=True, whole=whole and INF)
    small = (fact.small or (bool(fact.peak) and fact.low >= 0)) and not adds_peak(facts, op)
    added = count if known is not None or fact.learned else 1  # the number of weights in an input is unknown
    low, high = min(fact.low * count, 0.0), max(fact.high * count, 0.0)
    return fact._replace(low=low, high=high, whole=whole, small=small, peak=(), terms=fact.terms * added)


def adds_peak(facts: Facts, op: Op) -> bool:
    """True for a sum along rows whose largest element is 1, so the sum is not small."""
    peak = facts[op.inputs[0]].peak
    return bool(peak) and (not reduction_axes(facts.view, op) or set(peak) <= set(_axes_from_end(facts, op)))


def _axes_from_end(facts: Facts, op: Op) -> tuple[int, ...]:
    """Return the axes of a reduction, counted from the end if the rank is known; all axes if none are given."""
    axes, shape = reduction_axes(facts.view, op), shape_of(facts.view, op.inputs[0])
    if shape is None:
        return tuple(axes)
    return tuple(axis - len(shape) if axis >= 0 else axis for axis in axes or range(len(shape)))


def fact_of_product(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    first, second = (*read, NOTHING, NOTHING)[:2]
    operands = op.operands[:2]
    if len(operands) < 2:  # an Einsum of one operand
        return fact_of_reduction(facts, op, row, read)
    if Trait.INTEGER in row.traits and not facts.floats(op.outputs[0]):
        return _exact_sum(facts, op, first, second)
    few = terms_of_product(facts.view, op) < TENSOR_CORE_STEP  # of a convolution: it is a filter
    if op.kind in PRODUCTS and (few or not contracts(op)):
        scaled, terms = fact_of_scaling(facts, op, OPS["Mul"], [first, second]), terms_of_product(facts.view, op)
        whole = scaled.whole * terms if scaled.whole is not None else None
        return scaled._replace(products=frozenset().union(*map(facts.line, operands)), whole=whole)
    varying = [f for f in (first, second) if not f.constant]
    fact = joined([f for f in read if not f.constant] or [NOTHING])
    weight = next((f for f in (second, first) if f.constant), None)
    two = len(varying) == 2
    after_layer = any(facts[v].learned and facts[v].depth for v in operands)
    wholes = [f.whole for f in read if f.whole is not None]
    small = any(f.small and f.high == INF for f in varying) or all(f.small for f in varying)  # e.g. an exponential
    gain = weight.size * math.sqrt(terms_of_product(facts.view, op)) if weight is not None else INF
    gain *= abs(float_attribute(op.node, "alpha", 1.0))
    return Fact(
        low=0.0 if two and all(f.low >= 0 for f in varying) else -INF,
        constant=not varying,
        learned=True,
        products=frozenset().union(*map(facts.line, operands)),
        squares=varying[0].squares if len(varying) == 1 else frozenset(),
        negative=fact.negative,
        sources=fact.sources if fact.transform or not after_layer else frozenset(),
        hides=len(read) > 2 and read[2].raw,
        nudged=fact.nudged,
        averaged=averages(facts, op),
        depth=fact.depth + (not few),
        whole=INF if read and len(wholes) == len(read) else None,
        grows=two and all(f.size > _MODERATE for f in varying),
        small=small and bool(varying) and (weight is None or weight.low >= 0),
        small_factor=gain < _SMALL_STEP,
        terms=_added_up(facts, op, read if op.kind == "Einsum" else [first, second]),
    )


def _exact_sum(facts: Facts, op: Op, *factors: Fact) -> Fact:
    """Return the facts of a sum of integer products; converted to float, it counts as a layer's result."""
    ranges = (range_of(facts.view.dtype(v)) for v in op.operands[:2])
    sizes = (min(f.size, max(map(abs, ends))) for f, ends in zip(factors, ranges, strict=True))
    most = min(terms_of_product(facts.view, op) * math.prod(sizes), range_of(facts.view.dtype(op.results[0]))[1])
    return Fact(-most, most, whole=most, learned=True, depth=1 + max(f.depth for f in factors))


def _added_up(facts: Facts, op: Op, factors: Sequence[Fact]) -> float:
    together = math.prod(f.terms for f in factors)
    layer = any(f.constant and not (f.running or (f.low >= 0 and f.whole is not None)) for f in factors)
    if not layer:
        return together * terms_of_product(facts.view, op)
    return together if together >= 1 else min(1.0, together * terms_of_product(facts.view, op))


def averages(facts: Facts, op: Op) -> bool:
    """True for a product with the weights of an average or a plain sum, all of them nonnegative."""
    weights = [f for f in (facts[v] for v in op.operands[:2]) if f.constant]
    return any(f.low >= 0 and (f.high < 1 or f.number is not None) for f in weights)


def contracts(op: Op) -> bool:
    """True if a product sums over an axis of two operands."""
    if op.kind != "Einsum":
        return True
    labels = [label for axes in summed_labels(op) for label in {label for _, label in axes}]
    return len(labels) > len(set(labels))


@once
def _near(view: View, to: DType) -> frozenset[OpId]:
    """Return sums of scores and a bias, if the bias is small at the best key in each row of the softmax."""
    rows = scored_rows(view, cache(partial(view.array, limit=MAX_GRID)))
    return frozenset(term.op.id for row in rows if row.near(to) for term in row.terms)
