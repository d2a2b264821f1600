"""Forward pass: facts of all values, from inputs and constants to outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from onnx.numpy_helper import to_array

from amp_rewrite.decide.needs.arithmetic import (
    averages,
    fact_of_product,
    fact_of_reduction,
    fact_of_scaling,
    fact_of_sum,
    inverse,
)
from amp_rewrite.decide.needs.facts import INF, NOTHING, Fact, Facts, fact_of_constant, joined, leaves, union
from amp_rewrite.decide.sizes import FREE
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS, LAYERS, PRODUCTS, TABLES
from amp_rewrite.ir.ops import OPS, OpRow, Trait, Way, row_of
from amp_rewrite.ir.patterns.fills import fills
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, View, once


@once
def find_facts(view: View, to: DType) -> Facts:
    """Return the facts of all values for a low type. O(nodes + uses); reads small constants."""
    facts = Facts(view, to)
    for op in view.ops:
        if op.bodies:
            for result in op.results:
                inside = joined([facts[source] for source in facts.outside.sources(result)])
                facts[result] = inside.unbounded()._replace(number=None, constant=False)
            continue
        row = row_of(op.kind)
        made = _made(facts, op, row)
        computes = row.way not in (Way.SOURCE, Way.UNKNOWN) and op.kind != "Cast"
        reads_floats = facts.floats(op.inputs[0] if op.inputs else None)
        states = row.states if Trait.RECURRENT not in row.traits else ()
        for slot, value in enumerate(op.outputs):
            if value is None:
                continue
            if op.kind in COPIES and op.inputs[0] is not None:
                facts.origins[value] = facts.origin(op.inputs[0])
            fact = made
            if view.copied(value) is not None:
                fact = fact_of_constant(facts, value)
            elif computes and reads_floats and not facts.floats(value):
                fact = facts.initial(value)._replace(sources=frozenset((value,)), transform=False)
            for into in [into for into, out in states if out == slot and into < len(op.inputs)]:
                if known := facts[op.inputs[into]].states:
                    fact = fact._replace(states=known, moved=known)
            facts[value] = fact
    return facts


def _made(facts: Facts, op: Op, row: OpRow) -> Fact:
    read = [facts[value] for slot, value in enumerate(op.inputs) if slot in row.slots and value is not None]
    fact = _WAYS[row.way](facts, op, row, read) if read or not row.slots else NOTHING
    if fact.constant and not all(facts[v].constant for v in op.operands):
        table = op.kind in TABLES and fact.whole is None  # learned, like an embedding
        source = frozenset() if table else frozenset((op.operands[-1],))
        beyond = None if fact.fill else leaves(facts, fact.low, fact.high)
        fact = fact._replace(constant=False, number=None, learned=table, sources=source, best=fact.grid, beyond=beyond)
        if table:  # its extremes are in rare rows, so measured ranges are better
            fact = fact._replace(low=-INF, high=INF)
    varying = [v for v in op.operands if facts.floats(v) and not facts[v].constant]
    linear = row.way in _LINEAR and len(varying) == 1 and not row.bends
    linear &= row.way is not Way.PRODUCT or averages(facts, op)
    return fact._replace(
        line=facts.line(varying[0]) if linear else frozenset(),
        transform=_transforms(facts, op, row, read),
        low=max(fact.low, row.low),
        high=min(fact.high, row.high),
    )


def _transforms(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> bool:
    """True if an op turns linear transforms of inputs into another; it may add a constant to raw values."""
    varying = [f for f in read if not f.constant]
    if row.bends or not varying or not all(f.transform for f in varying):
        return False
    match row.way:
        case Way.COPY:
            return facts.floats(op.outputs[0]) or not facts.floats(op.inputs[0])
        case Way.REDUCE:
            return True
        case Way.SUM:
            return len(varying) == len(read) or all(f.raw for f in varying)
        case Way.SCALE:
            return len(varying) == 1 and (op.kind != "Div" or not read[0].constant)
        case Way.PRODUCT:
            biases = read[2:] if op.kind in LAYERS else []
            linear = op.kind in LAYERS | PRODUCTS and len(varying) == 1
            return linear and all(f.number == 0 for f in biases)
        case _:
            return False


def _copied(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    fact = joined(read)
    fact = fact._replace(part_raw=fact.part_raw or (fact.learned and any(f.raw for f in read)))
    if op.kind in CASTS:
        if not facts.floats(op.outputs[0]):
            whole = fact.whole if fact.whole is not None else INF
            return Fact(fact.low, fact.high, whole=whole, constant=fact.constant, sources=fact.sources)
        if not facts.floats(op.inputs[0]):
            wide = fact.whole is not None and fact.whole > facts.most and fact.raw
            return fact._replace(beyond=leaves(facts, fact.low, fact.high), grows=wide)
        return fact
    if row.traits & (Trait.MOVES | Trait.RELABELS):
        return fact._replace(peak=()) if op.kind == "Transpose" else fact
    return fact._replace(number=None, peak=fact.peak if op.kind == "TopK" else ())


def _selected(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    if op.kind == "Relu":
        return read[0]._replace(low=max(0.0, read[0].low), guard=INF)
    if op.kind == "ThresholdedRelu":  # numbers below its threshold, which may exceed a peak, become 0
        return read[0]._replace(low=min(0.0, read[0].low), high=max(0.0, read[0].high), guard=INF, peak=())
    fills = [f for f in read if f.fill or (op.kind != "Where" and f.constant and facts.most < f.size < INF)]
    if fills:
        others = [f for f in read if f not in fills]
        fact = joined(others or fills)
        return fact._replace(best=fact.grid, number=None)
    fact = joined(read)
    if len([f for f in read if not f.constant]) > 1:  # a state that decays and is raised again
        fact = fact._replace(moved=union([fact.moved, *(f.states for f in read if f.run)]))
    if op.kind == "Where":
        data = max((f.size for f in read if f.constant and not f.fill and f.size < INF), default=0.0)
        fact = fact._replace(beyond=fact.beyond or leaves(facts, -data, data))
        chosen = [f.number for f in read if f.constant and f.number is not None and 0 < f.number < 1]
        return fact._replace(best=fact.grid, guard=min((*chosen, fact.guard)))
    bounds = [f for f in read if f.constant and f.number is not None]
    below = [f.low for f in (bounds if op.kind == "Max" else read[1:2] if op.kind == "Clip" else ()) if f.constant]
    above = [f.high for f in (bounds if op.kind == "Min" else read[2:] if op.kind == "Clip" else ()) if f.constant]
    varying = joined([f for f in read if not f.constant] or read)
    low, high = max(below, default=-INF), min(above, default=INF)
    guard = min((n for n in below if n > 0), default=INF)
    return fact._replace(
        top=varying.top,
        low=min(max(varying.low, low), high),
        high=max(min(varying.high, high), low),
        guard=guard,
        small=fact.small and guard < facts.tiny,
    )


def _counted(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    itself = frozenset(op.results)
    if op.kind == "Range":
        constant = all(facts[v].constant for v in op.operands)
        return Fact(whole=INF, grid=INF, best=INF, constant=constant, sources=itself)
    if op.kind in ELEMENTLESS:
        shape = shape_of(facts.view, op.inputs[0])
        sizes = [size if size is not None else FREE for size in shape] if shape is not None else [FREE]
        most = float(math.prod(sizes) if op.kind == "Size" else max(sizes, default=1))
        return Fact(0.0, most, whole=most, sources=itself)
    if op.kind == "ConstantOfShape":
        stated = attribute(op.node, "value")
        numbers = facts.view.model.array(stated.t) if stated is not None else np.zeros(1)
        if numbers.size != 1 or numbers.dtype.kind not in "fiub":
            return Fact(constant=True)
        number, fill = float(numbers.item()), fills(facts.view, facts.to).get(op.results[0])
        return Fact(number, number, number=number, constant=True, fill=fill is not None and fill.selects)
    return Fact(row.low, row.high, whole=1.0 if row.whole else None)


def _function(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    kind, fact = op.kind, read[0] if read else NOTHING
    if kind == "Pow" and fact.constant:  # a constant to a variable power is an exponential
        kind, row, fact = "Exp", OPS["Exp"], read[-1]._replace(high=INF)
    if row.whole:
        fact = fact._replace(whole=fact.size)
    kept = _inherited(fact, row)._replace(bent=fact.learned and "levels" not in row.keeps)
    kept = kept._replace(**{name: getattr(fact, name) for name in row.keeps})
    match kind:
        case "Abs":
            squares = frozenset((facts.line(op.operands[0]),)) if fact.transform and fact.products else frozenset()
            return kept._replace(high=fact.size, squares=squares)
        case "Exp":
            high = math.exp(fact.high) if fact.high < _MAX_EXPONENT else INF
            return kept._replace(high=high, small=not fact.peak, terms=1.0 if high < INF else _EXPONENTIAL_TERMS)
        case "Pow":
            exponent, whole = facts[op.inputs[1]].number, None
            square = exponent == 2
            if fact.whole is not None and exponent and exponent > 0:
                whole = fact.whole**exponent if exponent * math.log2(max(fact.whole, 2.0)) < _MAX_LOG2 else INF
            return kept._replace(
                low=0.0 if square else -INF,
                squares=frozenset((facts.line(op.operands[0]),)) if square else frozenset(),
                grows=fact.size > 1 and (exponent is None or exponent > 1),
                small=fact.small or (square and bool(fact.sources)),
                whole=whole,
                terms=inverse(facts, fact) if exponent == -1 else 1.0,
            )
        case "Reciprocal":
            least = max(fact.low, fact.guard if fact.guard < INF else 0.0)
            high = 1 / least if least > 0 else INF
            beyond = leaves(facts, 0.0, high) if fact.guard < INF else None
            return kept._replace(terms=inverse(facts, fact), high=high, beyond=beyond)
        case "Log":  # energies are far below 1, so their logarithms share a level
            return kept._replace(placed=bool(fact.squares))
        case "Sqrt":
            return kept._replace(low=0.0, guard=math.sqrt(fact.guard))
        case _:
            return kept


def _inherited(fact: Fact, row: OpRow) -> Fact:
    return Fact(
        constant=fact.constant,
        learned=fact.learned,
        sources=fact.sources,
        depth=fact.depth,
        small=row.small,
        near_one=row.near_one,
        nudged=fact.nudged,
    )


def _norm(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    """Return the facts of a norm; in old opsets, a row of a softmax spans all axes from `axis` to the last."""
    fact = _inherited(read[0] if read else NOTHING, row)
    if op.kind != "Softmax":
        return fact
    shape, last = shape_of(facts.view, op.inputs[0]), int_attribute(op.node, "axis", -1)
    length = shape[last] or FREE if shape is not None and -len(shape) <= last < len(shape) else FREE
    flattens = op.signature is not None and op.signature.since < FIRST_ROW_SOFTMAX
    axis = int_attribute(op.node, "axis", 1 if flattens else -1)
    from_end = axis - len(shape) if shape is not None and axis >= 0 else axis
    peak = tuple(range(from_end, 0)) if flattens and from_end < 0 else (from_end,)
    return fact._replace(peak=peak, terms=1 / length)


def _unknown(facts: Facts, op: Op, row: OpRow, read: list[Fact]) -> Fact:
    """Return the facts of an op without a row; for a LabelEncoder, by its largest number."""
    labels = op.node.attribute if op.kind == "ai.onnx.ml::LabelEncoder" else ()
    stated = [a for a in labels if a.name.startswith(("values_", "default_"))]
    numbers = [a.floats or [a.f] if not a.HasField("t") else to_array(a.t) for a in stated if not a.t.string_data]
    largest = max((float(np.abs(n).max(initial=0)) for n in numbers), default=0.0)
    if (beyond := leaves(facts, -largest, largest)) is not None:
        return Fact(-largest, largest, beyond=beyond)
    read = [facts[v] for v in op.operands]
    return Fact(learned=any(f.learned for f in read), depth=1 + max((f.depth for f in read), default=0))


_MAX_LOG2 = 1000
"""Maximum binary logarithm of a float64, rounded down."""
_MAX_EXPONENT = 700
_EXPONENTIAL_TERMS = 2.0**8
"""Number of terms of moderate size that an exponential in a sum counts as."""
_LINEAR = frozenset((Way.COPY, Way.PICK, Way.SUM, Way.SCALE, Way.REDUCE, Way.PRODUCT))
_WAYS: Mapping[Way, Callable[[Facts, Op, OpRow, list[Fact]], Fact]] = {
    Way.COPY: _copied,
    Way.PICK: _copied,
    Way.SELECT: _selected,
    Way.SUM: fact_of_sum,
    Way.SCALE: fact_of_scaling,
    Way.FUNCTION: _function,
    Way.REDUCE: fact_of_reduction,
    Way.NORM: _norm,
    Way.PRODUCT: fact_of_product,
    Way.TEST: lambda *_: NOTHING,
    Way.SOURCE: _counted,
    Way.UNKNOWN: _unknown,
}
