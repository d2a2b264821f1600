"""Facts of sums and differences, reductions along axes, and products of matrices and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

from amp_rewrite.decide.needs.elementwise import FREE, MODERATE, fact_of_scaling, run_of, steps_of
from amp_rewrite.decide.needs.facts import INF, NOTHING, Beyond, Fact, Facts, joined, range_of
from amp_rewrite.decide.sizes import summed_labels, summed_terms
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import axes_of, orders, outweighs
from amp_rewrite.ir.op_classes import LAYERS, PRODUCTS, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import OPS, OpRow, Trait
from amp_rewrite.ir.patterns.scores import MOST, scored_rows
from amp_rewrite.ir.shapes import combined_elements, shape_of
from amp_rewrite.ir.view import Op, OpId, View, once

_MANY = 1 << 60
_NEAR_RANGE = 0.6
"""Share of the range beyond which a sum may leave it."""
_STEP = 2.0**-6
"""The largest step of a derivative by differences."""


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
    from_afar = any(f.learned for f in varying) and any(facts.limits.reach < f.size < INF for f in constants)
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
        nudged=fact.nudged or (fact.raw and any(0 < f.size < _STEP for f in constants)),
        slope=fact.slope or _is_slope(varying),
        states=tuple((state, True) for state, _ in fact.states),
        steps=steps_of(facts, op, read),
        run=run_of(read),
        grid=sum(f.grid for f in counting),
        best=sum(f.grid if hides else f.best for f in counting),
        hides=hides,
        beyond=fact.beyond or _drowns(facts, read, varying, constants) or _outweighs(facts, op),
        small=fact.small and (guard == INF or guard < facts.limits.tiny),
    )


def _is_slope(varying: Sequence[Fact]) -> bool:
    nudged = [f.nudged for f in varying].count(True)
    return len(varying) == 2 and nudged > 0 and (nudged == 1 or all(f.learned for f in varying))


def _outweighs(facts: Facts, op: Op) -> Beyond | None:
    for value, bias in orders(op) if op.kind == "Add" else ():
        layer = facts.view.producer(facts.origin(value), *LAYERS)
        if facts[bias].constant and layer is not None and outweighs(facts.view, bias, layer.inputs[1], facts.to):
            return Beyond("adds a bias that outweighs the product")
    return None


def _drowns(facts: Facts, read: list[Fact], varying: list[Fact], constants: list[Fact]) -> Beyond | None:
    if varying and any(f.fill for f in constants):
        return Beyond("adds a mask that would overflow", mask=True)
    far = max((f.size for f in constants if f.size < INF), default=0.0) if varying else 0.0
    if far > _NEAR_RANGE * facts.limits.most:
        return Beyond(f"adds {far:g}, near the end of the range")
    level = max((max(f.low, -f.high) for f in constants if f.size <= facts.limits.most), default=0.0)
    if level > facts.limits.beside and any(f.learned for f in varying):
        return Beyond(f"adds {level:g}, beside which a product is small")
    return None


def centers(facts: Facts, op: Op) -> bool:
    """True if an op subtracts from a value its own mean, or another linear function of it."""
    averaged = len(op.operands) == 2 and any(facts[v].averaged for v in op.operands)
    return averaged and facts.line(op.operands[0]) == facts.line(op.operands[1])


def fact_of_reduction(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    fact = joined(read[:1])._replace(averaged=True)
    fact = fact.without("number", "states", "steps", "run", "running", "guard", "gated", "top")
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
    known = combined_elements(facts.view, op)
    count = min(known or FREE, _MANY)
    whole = fact.whole * count if fact.whole is not None else None
    if op.kind in ("ReduceProd", "CumProd", "Det"):
        return fact.unbounded()._replace(grows=True, whole=whole and INF)
    small = (fact.small or (bool(fact.peak) and fact.low >= 0)) and not adds_peak(facts, op)
    added = count if known is not None or fact.learned else 1  # of weights that are fed, the number is not known
    low, high = min(fact.low * count, 0.0), max(fact.high * count, 0.0)
    return fact._replace(low=low, high=high, whole=whole, small=small, peak=(), terms=fact.terms * added)


def adds_peak(facts: Facts, op: Op) -> bool:
    """True for a sum along rows with the largest element 1: it is not small."""
    peak = facts[op.inputs[0]].peak
    return bool(peak) and (not axes_of(facts.view, op) or set(peak) <= set(_axes_from_end(facts, op)))


def _axes_from_end(facts: Facts, op: Op) -> tuple[int, ...]:
    """Return the axes of a reduction, counted from the end if the rank is known; all if none are stated."""
    axes, shape = axes_of(facts.view, op), shape_of(facts.view, op.inputs[0])
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
    few = number_of_terms(facts, op) < TENSOR_CORE_STEP  # a filter, if a convolution
    if op.kind in PRODUCTS and (few or not contracts(facts, op)):
        scaled, terms = fact_of_scaling(facts, op, OPS["Mul"], [first, second]), number_of_terms(facts, op)
        whole = scaled.whole * terms if scaled.whole is not None else None
        return scaled._replace(products=frozenset().union(*map(facts.line, operands)), whole=whole)
    varying = [f for f in (first, second) if not f.constant]
    fact = joined([f for f in read if not f.constant] or [NOTHING])
    weight = next((f for f in (second, first) if f.constant), None)
    two = len(varying) == 2
    after_layer = any(facts[v].learned and facts[v].depth for v in operands)
    wholes = [f.whole for f in read if f.whole is not None]
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
        grows=two and all(f.size > MODERATE for f in varying),
        small=_small_product(varying, weight),
        terms=_added_up(facts, op, read if op.kind == "Einsum" else [first, second]),
    )


def _exact_sum(facts: Facts, op: Op, *factors: Fact) -> Fact:
    """Return the facts of a sum of products of integers; a layer scales it down once it is a float."""
    ranges = (range_of(facts.view.dtype(v)) for v in op.operands[:2])
    sizes = (min(f.size, max(map(abs, ends))) for f, ends in zip(factors, ranges, strict=True))
    most = min(number_of_terms(facts, op) * math.prod(sizes), range_of(facts.view.dtype(op.results[0]))[1])
    return Fact(-most, most, whole=most, learned=True, depth=1 + max(f.depth for f in factors))


def _added_up(facts: Facts, op: Op, factors: Sequence[Fact]) -> float:
    together = math.prod(f.terms for f in factors)
    layer = any(f.constant and not (f.running or (f.low >= 0 and f.whole is not None)) for f in factors)
    if not layer:
        return together * number_of_terms(facts, op)
    return together if together >= 1 else min(1.0, together * number_of_terms(facts, op))


def averages(facts: Facts, op: Op) -> bool:
    """True for a product with the weights of an average or a plain sum: none is negative."""
    weights = [f for f in (facts[v] for v in op.operands[:2]) if f.constant]
    return any(f.low >= 0 and (f.high < 1 or f.number is not None) for f in weights)


def contracts(facts: Facts, op: Op) -> bool:
    """True if a product sums over an axis of two operands."""
    if op.kind != "Einsum":
        return True
    labels = [label for axes in summed_labels(op) for label in {label for _, label in axes}]
    return len(labels) > len(set(labels))


def number_of_terms(facts: Facts, op: Op) -> int:
    """Return how many terms each result of a product adds up; a free dimension counts as `FREE`."""
    stored = [tuple(t.dims) if (t := facts.view.constant(v)) is not None else None for v in op.inputs]
    known = any(stored) and op.kind != "Einsum"
    return min(_MANY, summed_terms(op, stored if known else [shape_of(facts.view, v) for v in op.inputs], FREE))


def _small_product(varying: Sequence[Fact], weight: Fact | None) -> bool:
    """True if a sum of products may be small: all factors are, or one is of any size, as an exponential."""
    if any(f.small and f.high == INF for f in varying):
        return weight is None or weight.low >= 0
    return bool(varying) and all(f.small for f in varying) and (weight is None or weight.low >= 0)


@once
def _near(view: View, to: DType) -> frozenset[OpId]:
    """Return the sums of scores and a bias, small at the best key of each row as far as a softmax sees it."""
    rows = scored_rows(view, cache(partial(view.array, most=MOST)))
    return frozenset(term.op.id for row in rows if row.near(to) for term in row.terms)
