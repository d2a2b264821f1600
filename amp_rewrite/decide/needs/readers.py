"""Needs of an op for its inputs, regardless of the readers of its result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.arithmetic import adds_peak, factor, is_single_input, scalar_inputs, too_large
from amp_rewrite.decide.needs.facts import INF, Fact, Facts, Values
from amp_rewrite.decide.reasons import described
from amp_rewrite.decide.sizes import summed_axes
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import first_input, origin, reach
from amp_rewrite.ir.op_classes import PAIR_SUMS, PRODUCTS, SCALINGS, SOFTMAXES
from amp_rewrite.ir.ops import Need, OpRow, Trait, Way, row_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once

TERM = 32
"""Assumed size of a term in a sum."""
_MAX_WEIGHTS = 1 << 14
"""Maximum number of weights to add up in a test for a sum of zero."""
_BALANCE = 1e-4
_NEIGHBOURS = 64
_DIFFERENCE = "a difference of squares and products, much smaller than they are"
_LEVEL = "its weights sum to zero: it subtracts values on the same level"
_INVERSES = ("Pow", "Reciprocal")
"""Divisions by the first input; a Pow is one if its exponent is negative."""
_SMALL_FACTOR = 2.0**-5
"""Factors below this scale large numbers down for their reader."""


class InputNeed(NamedTuple):
    """A need of an input; `note` and `reason` replace those of the need."""

    value: ValueId | None
    need: Need
    note: str = ""
    reason: str = ""


@dataclass
class Readers:
    """Needs of ops for their inputs.

    `shared`: values read by both sides of a difference, and elements picked from them: their own rounding cancels. `of`
    adds to this set.
    """

    facts: Facts
    shared: set[ValueId] = field(default_factory=set)

    def of(self, op: Op, row: OpRow) -> Iterator[InputNeed]:
        """Yield the needs of an op for its inputs, regardless of the readers of its result."""
        facts = [self.facts[v] for v in op.inputs]
        # Rounding keeps the sign of a value, but not that of a state to which small values are added.
        sign = op.kind in ("NonZero", "Sign") or any(f.constant and f.number == 0 for f in facts)
        sign &= not any(f.moved for f in facts)
        for slot, need in (*row.needs.items(), *((slot, Need.EXACT) for slot in row.shapes)):
            if slot < len(op.inputs) and not (sign and need is Need.SIDE):
                yield InputNeed(op.inputs[slot], need)
        made = self.facts.view.dtype(op.outputs[0]) if op.outputs else None
        counts = op.kind == "Cast" and made is not None and not made.floating and made is not DType.BOOL
        if counts or op.kind == "Mod" or (row.whole and facts and facts[0].whole is not None):
            yield InputNeed(op.inputs[0], Need.EXACT)
        if row.way is Way.PRODUCT and len(facts) > 1 and (value := self._balanced(op)) is not None:
            yield InputNeed(value, Need.DIGITS, _LEVEL)
        if row.way is Way.PRODUCT and len(facts) > 2 and any(_among(facts[2], self.facts[op.outputs[0]])):
            yield InputNeed(op.inputs[2], Need.DIGITS, _DIFFERENCE)
        if self.facts.narrow and (row.way in (Way.SCALE, Way.PRODUCT) or op.kind in _INVERSES):
            yield from self._by_means(op, facts)
        if op.kind in PAIR_SUMS and len(facts) == 2:
            yield from self._by_sum(op, *facts)
        elif op.kind in SCALINGS and len(facts) == 2:
            yield from self._by_scaling(op, *facts)
        elif op.kind in SOFTMAXES and not facts[0].constant and self.facts.counts_far(op.inputs[0]):
            note = f"its scores have a bias that grows with the position, up to {facts[0].grid:g}"
            yield InputNeed(op.inputs[0], Need.PLACE, note)
        elif op.kind == "BatchNormalization" and len(facts) > 4 and facts[3].constant and facts[4].constant:
            deviation = math.sqrt(max(facts[4].high, 0.0) + float_attribute(op.node, "epsilon", 1e-5))
            mean = facts[3].size
            if mean > self.facts.most / 4 or mean > self.facts.beside * deviation:
                yield InputNeed(op.inputs[0], Need.DIGITS, f"its mean is {mean:g}, its deviation {deviation:g}")
        elif Trait.QUANTIZES in row.traits and len(facts) > 1:
            beyond = too_large(self.facts, self.facts.view.dtype(op.outputs[0]), *facts[1:3])
            if beyond is not None:
                yield InputNeed(op.inputs[0], Need.DIGITS, beyond.note, reasons.CONSTANT_RANGE)
        elif op.kind == "Pow":
            if facts[1].constant and -INF < facts[1].low < 1:  # perhaps one root per channel
                yield InputNeed(op.inputs[0], Need.TINY)
            elif facts[1].constant and facts[1].low > 1 / _SMALL_FACTOR:
                yield InputNeed(op.inputs[0], Need.FACTOR)
        elif op.kind == "ReduceLogSum" and not adds_peak(self.facts, op):
            yield InputNeed(op.inputs[0], Need.RATIO)

    def _by_sum(self, op: Op, a: Fact, b: Fact) -> Iterator[InputNeed]:
        for value, fact in ((op.inputs[0], a), (op.inputs[1], b)):
            if any(pair < fact.products for pair in fact.squares):  # part of a distance
                yield InputNeed(value, Need.DIGITS, _DIFFERENCE)
        apart = (op.kind == "Sub") != (a.negative != b.negative)
        means = a.squares & b.squares if a.averaged or b.averaged else ()
        shared = frozenset().union(*means, *_among(a, b), *_among(b, a))
        lines = {self.facts.line(v) for v in op.operands}
        centers = (a.averaged or b.averaged) and len(lines) == 1  # a value's own mean is subtracted
        relative = centers or self.facts[op.outputs[0]].peak
        if shared and apart and not (a.constant or b.constant or relative):
            self.shared |= reach(shared, self._picked, lambda v: v not in self.shared)
            yield from (InputNeed(v, Need.DIGITS, _DIFFERENCE) for v in op.operands)
        many = min(a.whole or 0.0, b.whole or 0.0) > self.facts.integers
        if apart and many and a.raw and b.raw:
            yield from (InputNeed(v, Need.EXACT) for v in op.operands)
        copies = a.sources == b.sources and not relative
        leveled = any(self._leveled(f, other) for f, other in ((a, b), (b, a)))
        if leveled or (apart and a.levels & b.levels and (a.learned or b.learned or copies)):
            note = f"{described(self.facts.view, op.id)} subtracts their level again"
            yield from (InputNeed(v, Need.PLACE, note, reasons.CANCELLATION) for v in op.operands)

    def _leveled(self, fact: Fact, other: Fact) -> bool:
        """True for a sum with an input, if a constant of large magnitude removes the input's level again."""
        level = max(other.low, -other.high) if other.constant else 0.0
        return level > self.facts.reach and fact.learned and bool(fact.levels)

    def _balanced(self, op: Op) -> ValueId | None:
        """Return the input of a product with weights of sum 0, which cancel its level; None for other products."""
        for slot in (1, 0) if op.kind in PRODUCTS else (1,):
            value, other = op.inputs[slot], op.inputs[1 - slot]
            fact = self.facts[other]
            if (fact.transform and fact.averaged) or fact.raw or fact.levels or fact.placed:
                axes = summed_axes(op, slot) if op.kind in PRODUCTS else ()
                if _sums_to_zero(self.facts.view, value, tuple(axes)):
                    return other
        return None

    def _by_means(self, op: Op, facts: list[Fact]) -> Iterator[InputNeed]:
        long = self.facts.most / TERM
        note = f"part of a mean: {described(self.facts.view, op.id)} divides by the number or sum of its weights"
        if op.kind == "Div" or op.kind in _INVERSES:
            divisor = facts[-1] if op.kind == "Div" else facts[0]
            inverts = op.kind != "Pow" or facts[1].number == -1
            summed = inverts and divisor.terms > long and divisor.size > self.facts.most
            counted = op.kind == "Div" and facts[0].terms > long and self._counts(op)
            if summed or counted:
                yield from (InputNeed(v, Need.LONG, note) for v in op.operands)
        elif any(f.terms < 1 / long for f in facts) and any(f.terms > 1 for f in facts):
            for value, fact in zip(op.inputs, facts, strict=True):
                if fact.terms != 1:
                    yield InputNeed(value, Need.LONG if fact.terms > 1 else Need.TINY, note, reasons.RUNNING_SUM)

    def _by_scaling(self, op: Op, a: Fact, b: Fact) -> Iterator[InputNeed]:
        times = factor(self.facts, op, (a, b))
        if times > 1 / _SMALL_FACTOR and (a.slope or b.slope):
            note = f"{described(self.facts.view, op.id)} divides a difference by a small step"
            yield from (InputNeed(v, Need.SLOPE, note) for v in op.operands)
        narrow, exact = self.facts.narrow, self.facts.integers if a.raw and a.whole else self.facts.most
        if op.kind == "Div" and narrow and (b.whole or 0.0) > exact:
            yield InputNeed(op.inputs[1], Need.EXACT)
            if a.raw and a.whole is not None:
                yield InputNeed(op.inputs[0], Need.EXACT)
        before = a.scaled | b.scaled
        twice = bool(before) and bool(scalar_inputs(self.facts, op) - before)
        if narrow and (0 < times < _SMALL_FACTOR or twice):
            note = f"{described(self.facts.view, op.id)} scales it down again"
            yield from (InputNeed(v, Need.RANGE, note) for v in op.operands)

    def _counts(self, op: Op) -> bool:
        """True if an op divides by a number of elements: computed from a shape, or passed as an input of one element.

        A number that first multiplies the dividend, such as a loss scale, does not count.
        """
        value, view = op.inputs[1], self.facts.view
        if value is None or self.facts[value].constant:
            return False
        if self.facts[value].whole is not None:
            return True
        source, dividend = self.facts.origin(value), view.producer(op.inputs[0])
        return is_single_input(self.facts, source) and (dividend is None or dividend.id not in _after(view, source))

    def _picked(self, value: ValueId) -> list[ValueId]:
        """Return the values copied or picked from a value."""
        readers = (r for r in self.facts.view.readers(value) if r.inputs[0] == value)
        return [v for r in readers if row_of(r.kind).way in (Way.COPY, Way.PICK) for v in r.results]


@once
def _after(view: View, source: ValueId) -> set[OpId]:
    return view.after(reader.id for reader in view.readers(source))


@once
def _sums_to_zero(view: View, value: ValueId | None, axes: tuple[int, ...]) -> bool:
    """True for few weights that sum to 0 along the axes; without axes, for filters if half of them sum to 0."""
    source = origin(view, value, first_input(("Cast", "Identity"))) if value is not None else None
    weights = view.array(source, _MAX_WEIGHTS)
    if weights is None or weights.ndim < 2 or weights.dtype.kind != "f":
        return False
    needed = 1.0 if axes else 0.5  # half of a filter bank may be averages, as in a wavelet
    axes = axes or tuple(range(1, weights.ndim))
    with np.errstate(invalid="ignore"):  # infinities of both signs, signalling NaN
        numbers = weights.astype(np.float64)
        sums, sizes = abs(numbers.sum(axis=axes)), abs(numbers).sum(axis=axes)
    few = np.count_nonzero(numbers) <= _NEIGHBOURS * sums.size  # more are usually waves, which also add up to 0
    zero = np.count_nonzero((sums <= _BALANCE * sizes)[sizes > 0])
    return bool(few and zero and zero >= needed * np.count_nonzero(sizes))


def _among(a: Fact, b: Fact) -> Iterator[Values]:
    return (pair for pair in a.squares if pair <= b.products)
