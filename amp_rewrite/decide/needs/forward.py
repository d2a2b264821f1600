"""The forward pass: facts of all values, from inputs and constants to outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import permutations

import numpy as np

from amp_rewrite.decide.flops import summed_terms
from amp_rewrite.decide.needs.facts import INF, NOTHING, Fact, Pairs, joined, union
from amp_rewrite.decide.needs.limits import Limits
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute, equation, int_attribute
from amp_rewrite.ir.dataflow import Flow, orders
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS, LAYERS, PRODUCTS, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import OPS, UNKNOWN, OpRow, Trait, Way
from amp_rewrite.ir.patterns.grids import LEAST, MOST, is_grid
from amp_rewrite.ir.patterns.mask_fills import mask_fills
from amp_rewrite.ir.patterns.scores import FILL, counts_far, scored_rows
from amp_rewrite.ir.shapes.onnx_shapes import combined_elements, shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View, once
from amp_rewrite.ir.weights import outweighs

FREE = 4096
"""What a free dimension counts as in a number of elements."""
_READ = 1 << 16
"""Elements of the largest constant that is read whole; of larger ones the magnitudes are known."""
_DOUBLE = 1000
"""Doublings that a float holds."""
_MANY = 1 << 60
_OF_EXPONENTIALS = 2.0**8
"""Terms of moderate size that an exponential counts for in a sum."""
_NEAR_RANGE = 0.6
"""Share of the range beyond which a sum or product may leave it."""
_MODERATE = 8.0
"""A factor of at most this size makes no product large."""
_SMALL_STEP = 2.0**-4
_STEP = 2.0**-6
"""The largest step of a derivative by differences."""
_FAR = 1e30
"""No quantity of a network is as large: a larger number is the fill of a mask."""
_RANGES: Mapping[DType, tuple[float, float]] = {
    DType.BOOL: (0.0, 1.0),
    DType.INT8: (-128.0, 127.0),
    DType.UINT8: (0.0, 255.0),
    DType.INT16: (-32768.0, 32767.0),
    DType.UINT16: (0.0, 65535.0),
    DType.FLOAT8E4M3FN: (-448.0, 448.0),
    DType.FLOAT8E4M3FNUZ: (-240.0, 240.0),
    DType.FLOAT8E5M2: (-57344.0, 57344.0),
    DType.FLOAT8E5M2FNUZ: (-57344.0, 57344.0),
}


def range_of(dtype: DType | None) -> tuple[float, float]:
    """Return the smallest and the largest number of a small type."""
    return _RANGES.get(dtype, (-INF, INF)) if dtype is not None else (-INF, INF)


def row_of(op: Op) -> OpRow:
    """Return the row of an op in the table."""
    return OPS.get(op.kind, UNKNOWN)


@dataclass
class Facts:
    """Facts of the values of a view, for one low type. O(nodes + uses), and small constants are read."""

    view: View
    to: DType
    limits: Limits
    known: dict[ValueId, Fact] = field(default_factory=dict)
    _origins: dict[ValueId, ValueId] = field(default_factory=dict)

    @classmethod
    def of(cls, view: View, to: DType) -> Facts:
        """Return the facts of all values, found once for a view and a type."""
        return _facts(view, to)

    def counts_far(self, value: ValueId) -> bool:
        """True for a bias of scores that counts positions, and is large at the best key of a row."""
        return self[value].best > self.limits.reach

    def __getitem__(self, value: ValueId | None) -> Fact:
        if value is None:
            return NOTHING
        fact = self.known.get(value)
        if fact is None:
            fact = self.known[value] = self._given(value)
        return fact

    def line(self, value: ValueId) -> frozenset[ValueId]:
        """Return the value of which a value is a linear function."""
        return self[value].line or frozenset((value,))

    def origin(self, value: ValueId) -> ValueId:
        """Return the value that a value is a copy of; itself if it is none."""
        return self._origins.get(value, value)

    def floats(self, value: ValueId | None) -> bool:
        """True for a tensor of a floating type."""
        return value is not None and self.view.holds_floats(value)

    def read(self, op: Op, row: OpRow) -> list[Fact]:
        """Return the facts of the inputs whose numbers are in an op's result."""
        return [self[value] for slot, value in enumerate(op.inputs) if slot in row.slots and value is not None]

    # -- values that no op makes -----------------------------------------------------------------------

    def _given(self, value: ValueId) -> Fact:
        view, dtype = self.view, self.view.dtype(value)
        if view.constant(value) is not None:
            return self._constant(value)
        sources = [self[source] for source in self._outside.sources(value) if source not in self._looped]
        if sources:
            fact = joined(sources)
            if value in self._carried:
                states = ((value, False),) if dtype is DType.FLOAT else ()
                fact = _unbounded(fact)._replace(states=states)
            return fact._replace(number=None, constant=False)
        public, integer = (
            view.values[value].public,
            dtype is not None and not (dtype.floating or "FLOAT8" in dtype.name),
        )
        low, high = range_of(dtype)
        own = frozenset((value,))
        if integer:
            whole = max(abs(low), abs(high))
            return Fact(low, high, whole=whole, sources=own if dtype is not DType.BOOL or public else frozenset())
        if not public or dtype is not DType.FLOAT:
            return Fact(low, high)
        return Fact(sources=own, levels=own, states=((value, False),), ones=1.0)

    @cached_property
    def _outside(self) -> Flow:
        """The walk across the edges of bodies alone."""
        return Flow.of(self.view, {})

    @cached_property
    def _carried(self) -> frozenset[ValueId]:
        return frozenset(into for _, into in self.view.carried)

    @cached_property
    def _looped(self) -> frozenset[ValueId]:
        return frozenset(out for out, _ in self.view.carried)

    def _constant(self, value: ValueId) -> Fact:
        view = self.view
        array = view.array(value, _READ)
        if array is None:
            return self._large_constant(value)
        if array.size == 0 or (array.dtype.kind not in "fiub" and "float" not in array.dtype.name):
            return Fact(constant=True)
        with np.errstate(invalid="ignore"):  # signalling NaN
            numbers = array.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        if finite.size == 0:
            return Fact(constant=True)
        low, high = float(finite.min()), float(finite.max())
        far = finite[abs(finite) >= self.limits.most]
        single = far.size > 0 and bool((far == far[0]).all()) and (far[0] < 0 or far[0] > _FAR)
        fact = Fact(
            low,
            high,
            constant=True,
            number=low if low == high else None,
            whole=max(abs(low), abs(high)) if bool((finite == np.round(finite)).all()) else None,
            running=_is_running(numbers),
            peak=high == 0 and low < 0,
            fill=single,
        )
        return self._counting(value, fact)

    def _large_constant(self, value: ValueId) -> Fact:
        """Return what is known of a constant that is too large to be read whole, unless it may be spelled a sum."""
        if not self.floats(value):
            return Fact(constant=True, whole=INF)
        fit, tensor = self.view.fit(value, self.to), self.view.constant(value)
        fact = Fact(-fit.absmax, fit.absmax, constant=True)
        if 0 < fit.absmax == fit.absmin <= 1 and tensor is not None and len(tensor.dims) == 2:
            array = self.view.array(value)
            fact = fact._replace(running=array is not None and _is_running(array))
        return self._counting(value, fact)

    def _counting(self, value: ValueId, fact: Fact) -> Fact:
        """Return what is known of a constant of floats, with how far it counts."""
        tensor = self.view.constant(value)
        reads = ((row_of(self.view.ops[use.op]), use.slot) for use in self.view.uses[value])
        weight = all(row.way is Way.PRODUCT and slot in row.slots for row, slot in reads)
        if tensor is None or not tensor.dims or weight:
            return fact
        far = fact.size > self.limits.reach and tensor.dims[-1] >= LEAST
        numbers = self.view.array(value, MOST) if far or is_grid(self.view, value) else None
        if numbers is None or not (is_grid(self.view, value) or counts_far(numbers, self.to)):
            return fact
        best = np.where(numbers > -FILL, numbers, -np.inf).max(axis=-1)
        return fact._replace(grid=fact.size, best=float(abs(best[np.isfinite(best)]).max(initial=0.0)))

    # -- values that ops make --------------------------------------------------------------------------

    def _pass(self, op: Op) -> None:
        row = row_of(op)
        made = self._made(op, row)
        for slot, value in enumerate(op.outputs):
            if value is None:
                continue
            if op.kind in COPIES and op.inputs[0] is not None:
                self._origins[value] = self.origin(op.inputs[0])
            fact = made
            if self.view.constant(value) is not None:
                fact = self._constant(value)
            elif self._becomes_integer(op, row, value):
                fact = self._given(value)._replace(sources=frozenset((value,)))
            for into, out in row.states if Trait.RECURRENT not in row.traits else ():
                if slot == out and into < len(op.inputs) and (states := self[op.inputs[into]].states):
                    fact = fact._replace(states=tuple((state, True) for state, _ in states))
            self.known[value] = fact

    def _becomes_integer(self, op: Op, row: OpRow, value: ValueId) -> bool:
        computes = row.way not in (Way.SOURCE, Way.UNKNOWN) and op.kind != "Cast"
        return computes and not self.floats(value) and self.floats(op.inputs[0] if op.inputs else None)

    def _leave_bodies(self, op: Op) -> None:
        """Give the results of an op with bodies what is known of theirs."""
        for value in op.results:
            inside = [self[source] for source in self._outside.sources(value)]
            self.known[value] = _unbounded(joined(inside))._replace(number=None, constant=False)

    def _made(self, op: Op, row: OpRow) -> Fact:
        read = self.read(op, row)
        fact = _WAYS[row.way](self, op, row, read) if read or not row.slots else NOTHING
        if fact.constant and not all(self[v].constant for v in op.operands):
            table = op.kind == "Gather" and fact.whole is None  # learned, as an embedding is
            source = frozenset() if table else frozenset((op.operands[-1],))
            beyond = "" if fact.fill else self._leaves(fact.low, fact.high)
            fact = fact._replace(
                constant=False, number=None, learned=table, sources=source, best=fact.grid, beyond=beyond
            )
            if table:  # its reach is that of rare rows: data tell more
                fact = fact._replace(low=-INF, high=INF)
        varying = [v for v in op.operands if self.floats(v) and not self[v].constant]
        linear = row.way in _LINEAR and len(varying) == 1 and op.kind not in _NOT_LINEAR
        linear &= row.way is not Way.PRODUCT or self._averages(op)
        return fact._replace(
            line=self.line(varying[0]) if linear else frozenset(),
            low=max(fact.low, row.low),
            high=min(fact.high, row.high),
        )

    def _copied(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        fact = joined(read)
        if op.kind in CASTS:
            if not self.floats(op.outputs[0]):
                whole = fact.whole if fact.whole is not None else INF
                return Fact(fact.low, fact.high, whole=whole, constant=fact.constant, sources=fact.sources)
            if not self.floats(op.inputs[0]):
                wide = fact.whole is not None and fact.whole > self.limits.most and fact.raw
                return fact._replace(beyond=self._leaves(fact.low, fact.high), grows=wide)
            return fact
        kept = row.traits & (Trait.MOVES | Trait.RELABELS)
        return fact if kept else fact._replace(number=None, peak=fact.peak and op.kind == "TopK")

    def _selected(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        if op.kind == "Relu":
            return read[0]._replace(low=max(0.0, read[0].low), guard=INF)
        fills = [f for f in read if f.fill or (op.kind != "Where" and f.constant and self.limits.most < f.size < INF)]
        if fills:
            others = [f for f in read if f not in fills]
            fact = joined(others or fills)
            return fact._replace(best=fact.grid, number=None)
        fact = joined(read)
        if len([f for f in read if not f.constant]) > 1:  # a state that decays, and is raised again
            moved = {state for f in read if f.run for state, _ in f.states}
            fact = fact._replace(states=tuple((state, was or state in moved) for state, was in fact.states))
        if op.kind == "Where":
            data = max((f.size for f in read if f.constant and not f.fill and f.size < INF), default=0.0)
            fact = fact._replace(beyond=fact.beyond or self._leaves(-data, data))
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
            small=fact.small and guard < self.limits.tiny,
        )

    def _summed(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        fact, minus = joined(read), op.kind in ("Sub", "Neg")
        signs = [-1.0] if op.kind == "Neg" else [1.0, *([-1.0 if minus else 1.0] * (len(read) - 1))]
        low = sum(f.low if sign > 0 else -f.high for f, sign in zip(read, signs, strict=True))
        high = sum(f.high if sign > 0 else -f.low for f, sign in zip(read, signs, strict=True))
        varying, constants = [f for f in read if not f.constant], [f for f in read if f.constant]
        if op.kind == "Neg":
            return fact._replace(
                low=low, high=high, number=None, negative=not fact.negative, peak=False, guard=INF, top=None
            )
        tiny = [f.number for f in constants if f.number is not None and 0 < f.number < 1]
        guard = min(tiny) if tiny and varying and op.kind == "Add" else INF
        peak = op.kind == "Sub" and len(read) == 2 and read[1].top is not None and read[1].top == op.inputs[0]
        wholes = [f.whole for f in read if f.whole is not None]
        hides = fact.hides or any(f.raw for f in varying)
        counting = [f for f in read if f.grid and not (f.constant and op.id in self._near)]
        return fact._replace(
            low=low if not math.isnan(low) else -INF,
            high=min(high, 0.0) if peak else high if not math.isnan(high) else INF,
            whole=sum(wholes) if len(wholes) == len(read) else None,
            number=None,
            guard=guard,
            beside_one=bool(varying) and any(f.number is not None and abs(f.number) == 1 for f in constants),
            peak=peak,
            placed=fact.placed or bool(fact.levels),
            nudged=fact.nudged or (fact.raw and any(0 < f.size < _STEP for f in constants)),
            slope=fact.slope or (len(varying) == 2 and fact.nudged and all(f.learned for f in varying)),
            states=() if self.centers(op) else tuple((state, True) for state, _ in fact.states),
            steps=self._steps(op, read),
            run=_run(read),
            grid=sum(f.grid for f in counting),
            best=sum(f.grid if hides else f.best for f in counting),
            hides=hides,
            gated=0,
            small_factor=False,
            negative=fact.negative,
            beyond=fact.beyond or self._drowns(read, varying, constants) or self._outweighs(op),
            small=(fact.small and (guard == INF or guard < self.limits.tiny)) or self._is_rest(op, varying, constants),
            ones=None,
            running=False,
        )

    @cached_property
    def _near(self) -> frozenset[OpId]:
        """Sums of scores and a bias that is small at the best key of each row, as far as a softmax sees it."""
        rows = scored_rows(self.view, cache(partial(self.view.array, most=MOST)))
        return frozenset(term.op.id for row in rows if row.near(self.to) for term in row.terms)

    def _outweighs(self, op: Op) -> str:
        """Return a note if an op adds a bias that outweighs the weights of the layer before it."""
        for value, bias in orders(op) if op.kind == "Add" else ():
            layer = self.view.producer(self.origin(value), *LAYERS)
            if self[bias].constant and layer is not None and outweighs(self.view, bias, layer.inputs[1], self.to):
                return "a bias that outweighs the product it is added to"
        return ""

    def _is_rest(self, op: Op, varying: Sequence[Fact], constants: Sequence[Fact]) -> bool:
        """True for the difference of 1 and a number near it."""
        return op.kind == "Sub" and any(f.near_one for f in varying) and any(f.number == 1 for f in constants)

    def _drowns(self, read: list[Fact], varying: list[Fact], constants: list[Fact]) -> str:
        """Return why a sum leaves the range, or loses the result of a layer in it."""
        if varying and any(f.fill for f in constants):
            return "adds a mask that would overflow"
        far = max((f.size for f in constants if f.size < INF), default=0.0) if varying else 0.0
        if far > _NEAR_RANGE * self.limits.most:
            return f"adds {far:g}, near the end of the range"
        level = max((f.size for f in constants if f.number is not None and f.size <= self.limits.most), default=0.0)
        if level > self.limits.beside and any(f.learned for f in varying):
            return f"adds {level:g}, beside which a product is small"
        return ""

    def centers(self, op: Op) -> bool:
        """True if an op subtracts from a value its own mean, or another linear function of it."""
        averaged = len(op.operands) == 2 and any(self[v].averaged for v in op.operands)
        return averaged and self.line(op.operands[0]) == self.line(op.operands[1])

    def _scaled(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        divides = op.kind == "Div"
        if Trait.DEQUANTIZES in row.traits:
            return self._dequantized(op, read)
        fact = joined(read)
        varying, constants = [f for f in read if not f.constant], [f for f in read if f.constant]
        two = len(varying) == 2
        square = two and op.inputs[0] == op.inputs[1]
        low, high = self._bounds(op, read, square=square)
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
        return fact._replace(
            low=low,
            high=high,
            whole=math.prod(wholes) if wholes and len(wholes) == len(read) else None,
            number=None,
            small=small,
            grows=fact.grows or (two and not divides and all(f.size > _MODERATE for f in varying)),
            near_one=bool(varying) and all(f.near_one for f in varying),
            squares=self._pair(op) if two else fact.squares,
            products=frozenset() if two else fact.products,
            negative=any(f.negative for f in varying) != any(n < 0 for n in factors),
            levels=self._levels(read, varying, factors),
            placed=not two and (fact.placed or bool(fact.levels)),
            terms=read[0].terms * self._inverse(read[-1]) if divides else math.prod(f.terms for f in read),
            grid=0.0 if two and not fact.whole else counts,
            best=fact.best if counts else 0.0,
            steps=self._steps(op, read),
            run=_run(read),
            guard=INF,
            peak=False,
            beside_one=False,
            ones=None,
            running=False,
            beyond=fact.beyond or self._scales_away(op, read, low, high),
            gated=1 + max((f.steps for f in varying if f is not gate), default=0)
            if gate is not None and not divides
            else 0,
            small_factor=self._is_fed_number(op)
            or (not two and any(abs(1 / n if divides else n) < _SMALL_STEP for n in factors)),
        )

    def _pair(self, op: Op) -> Pairs:
        """Return the two factors of a product, each as the value that it is a linear function of."""
        return frozenset((frozenset().union(*map(self.line, op.operands)),))

    def _inverse(self, divisor: Fact) -> float:
        """Return the terms in the inverse of a value: less than 1 for a sum of weights that may leave the range."""
        count = divisor.whole if divisor.whole is not None and not divisor.constant else 0.0
        terms = max(divisor.terms, min(count, FREE))
        return 1 / terms if terms > 1 and divisor.size > self.limits.most else 1.0

    def factor(self, op: Op, read: Sequence[Fact]) -> float:
        """Return the one number by which an op multiplies a value; 0 without one, and if it is infinite."""
        numbers = [f.number for f in (read[1:] if op.kind == "Div" else read) if f.constant and f.number]
        factor = abs(1 / numbers[0] if op.kind == "Div" else numbers[0]) if len(read) == 2 and numbers else 0.0
        return factor if factor < INF else 0.0

    def _is_fed_number(self, op: Op) -> bool:
        """True if an op multiplies by the only number of an input, as the size of a step is fed."""
        return op.kind == "Mul" and any(map(self.is_single_input, op.operands))

    def is_single_input(self, value: ValueId) -> bool:
        """True for an input of the model that holds one number."""
        shape = shape_of(self.view, value) if self.view.values[value].public else None
        return shape is not None and all(size == 1 for size in shape)

    def _levels(self, read: Sequence[Fact], varying: Sequence[Fact], factors: Sequence[float]) -> frozenset[ValueId]:
        """Return the inputs on whose level a product stays: the other factor is 1, −1 or near it."""
        if len(varying) == 2:
            return union(a.levels for a, b in permutations(varying) if b.beside_one)
        return joined(read).levels if any(abs(n) == 1 for n in factors) else frozenset()

    def _bounds(self, op: Op, read: list[Fact], *, square: bool) -> tuple[float, float]:
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

    def _scales_away(self, op: Op, read: list[Fact], low: float, high: float) -> str:
        """Return why a product or quotient leaves the range."""
        varying = [f for f in read if not f.constant]
        if varying and (why := self._leaves(low, high)):
            return why
        if any(f.fill for f in read):
            return "scales a mask beyond the range"
        large = next((f.size for f in read if f.constant and INF > f.size > _NEAR_RANGE * self.limits.most), 0.0)
        if large:
            return f"computes with {large:g}"
        factor = self.factor(op, read)
        if self.limits.narrow and factor > self.limits.beside and any(f.learned for f in varying):
            return f"makes a product {factor:g} times as large"
        return ""

    def _dequantized(self, op: Op, read: list[Fact]) -> Fact:
        codes, scale = (*read, NOTHING)[:2]
        zero = self[op.inputs[2] if len(op.inputs) > 2 else None]
        beyond = self.too_large(self.view.dtype(op.inputs[0]), scale, zero)
        return Fact(constant=codes.constant, sources=codes.sources, decoded=True, beyond=beyond)

    def too_large(self, codes: DType | None, scale: Fact, zero: Fact) -> str:
        """Return why numbers that codes with a scale stand for leave the range; "" if that is not known."""
        low, high = range_of(codes)
        least, most = (zero.low, zero.high) if zero.constant else (0.0, 0.0)
        farthest = max(high - least, most - low)
        if scale.constant:
            return self._leaves(0.0, farthest * scale.size)
        wide = codes is not None and "FLOAT8" in codes.name and farthest > self.limits.most / 2
        return f"its codes reach {farthest:g}, and its scale is not known to be small" if wide else ""

    def _leaves(self, low: float, high: float) -> str:
        """Return why a value leaves the range; "" if that is not known."""
        size = max(abs(low), abs(high))
        return f"its values reach {size:g}" if self.limits.most < size < INF else ""

    def _steps(self, op: Op, read: list[Fact]) -> int:
        """Return the small steps of a recursion so far: a small multiple is added, or a factor near 1 multiplies."""
        most = max((max(f.steps, f.gated if op.kind == "Add" else 0) for f in read), default=0)
        if len(read) == 2:
            for state, other in ((read[0], read[1]), (read[1], read[0])):
                moves = op.kind in ("Add", "Sub") and other.learned and other.small_factor
                if moves or (op.kind == "Mul" and other.beside_one):
                    most = max(most, state.steps + 1)
        return most

    def _reduced(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        fact = joined(read[:1])._replace(
            number=None,
            states=(),
            steps=0,
            run=0,
            ones=None,
            averaged=True,
            running=False,
            guard=INF,
            gated=0,
            top=None,
        )
        if op.kind in ("ReduceSumSquare", "ReduceL2"):
            squares = frozenset((self.line(op.operands[0]),))
            small = fact.small or bool(fact.sources)
            fact = fact._replace(squares=squares, levels=frozenset(), whole=None, grows=True, small=small, peak=False)
            return fact._replace(low=0.0, high=INF)
        if op.kind in ("ReduceMax", "ReduceMin"):
            return fact._replace(peak=False, top=op.inputs[0] if op.kind == "ReduceMax" else None)
        if op.kind in ("ReduceMean", "AveragePool", "GlobalAveragePool"):
            return fact._replace(whole=None, peak=False)
        known = combined_elements(self.view, op)
        count = min(known or FREE, _MANY)
        whole = fact.whole * count if fact.whole is not None else None
        if op.kind in ("ReduceProd", "CumProd"):
            return fact._replace(low=-INF, high=INF, grows=True, whole=whole and INF, peak=False)
        small = fact.small and not fact.peak
        added = count if known is not None or fact.learned else 1  # of weights that are fed, the number is not known
        low, high = min(fact.low * count, 0.0), max(fact.high * count, 0.0)
        return fact._replace(low=low, high=high, whole=whole, small=small, peak=False, terms=fact.terms * added)

    def _applied(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        fact = read[0] if read else NOTHING
        kept = Fact(
            constant=fact.constant,
            learned=fact.learned,
            sources=fact.sources,
            depth=fact.depth,
            small=row.small,
            near_one=row.near_one,
            bent=fact.learned,
            nudged=fact.nudged,
        )
        if row.whole or op.kind == "Mod":
            whole = fact.size if row.whole else fact.whole
            return kept._replace(low=fact.low, high=fact.high, whole=whole, levels=fact.levels, bent=False)
        if op.kind == "Exp":
            high = math.exp(fact.high) if fact.high < 700 else INF
            terms = 1.0 if high < INF else _OF_EXPONENTIALS
            return kept._replace(high=high, peak=fact.peak, small=not fact.peak, terms=terms)
        if op.kind == "Abs":
            return kept._replace(small=fact.small, high=fact.size, whole=fact.whole, terms=fact.terms)
        if op.kind == "Sqrt":
            guard = math.sqrt(fact.guard)
            return kept._replace(low=0.0, guard=guard, small=fact.small, squares=fact.squares)
        if op.kind == "Pow":
            return self._raised(op, kept, fact)
        if op.kind == "Reciprocal":
            least = max(fact.low, fact.guard if fact.guard < INF else 0.0)
            high = 1 / least if least > 0 else INF
            beyond = self._leaves(0.0, high) if fact.guard < INF else ""
            return kept._replace(terms=self._inverse(fact), high=high, beyond=beyond)
        return kept

    def _raised(self, op: Op, kept: Fact, fact: Fact) -> Fact:
        exponent = self[op.inputs[1]].number
        square = exponent == 2
        whole = None
        if fact.whole is not None and exponent and exponent > 0:
            whole = fact.whole**exponent if exponent * math.log2(max(fact.whole, 2.0)) < _DOUBLE else INF
        return kept._replace(
            low=0.0 if square else -INF,
            squares=frozenset((self.line(op.operands[0]),)) if square else frozenset(),
            grows=fact.size > 1 and (exponent is None or exponent > 1),
            small=fact.small or (square and bool(fact.sources)),
            whole=whole,
        )

    def _multiplied(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        first, second = (*read, NOTHING, NOTHING)[:2]
        operands = op.operands[:2]
        if len(operands) < 2:  # an Einsum of one operand
            return self._reduced(op, row, read)
        if Trait.INTEGER in row.traits and not self.floats(op.outputs[0]):
            return self._exact_sum(op, first, second)
        few = self.terms(op) < TENSOR_CORE_STEP  # a filter, if a convolution
        if op.kind in PRODUCTS and (few or not self.contracts(op)):
            scaled, terms = self._scaled(op, OPS["Mul"], [first, second]), self.terms(op)
            whole = scaled.whole * terms if scaled.whole is not None else None
            return scaled._replace(products=frozenset().union(*map(self.line, operands)), whole=whole)
        varying = [f for f in (first, second) if not f.constant]
        fact = joined([f for f in read if not f.constant] or [NOTHING])
        weight = next((f for f in (second, first) if f.constant), None)
        ones = None
        if weight is not None and weight.number is not None and len(varying) == 1 and varying[0].ones is not None:
            ones = varying[0].ones * abs(weight.number) * self.terms(op)
        two = len(varying) == 2
        behind_layer = any(self[v].learned and self[v].depth for v in operands)
        wholes = [f.whole for f in read if f.whole is not None]
        return Fact(
            low=0.0 if two and all(f.low >= 0 for f in varying) else -INF,
            constant=not varying,
            learned=True,
            products=frozenset().union(*map(self.line, operands)),
            squares=varying[0].squares if len(varying) == 1 else frozenset(),
            negative=fact.negative,
            sources=fact.sources if not behind_layer else frozenset(),
            hides=len(read) > 2 and read[2].raw,
            nudged=fact.nudged,
            averaged=self._averages(op),
            depth=fact.depth + (not few),
            ones=ones,
            whole=INF if read and len(wholes) == len(read) else None,
            grows=two and all(f.size > _MODERATE for f in varying),
            beyond=f"for an input of ones, it is {ones:g}" if ones is not None and ones > self.limits.most else "",
            small=_small_product(varying, weight),
            terms=self._added_up(op, read if op.kind == "Einsum" else [first, second]),
        )

    def _exact_sum(self, op: Op, *factors: Fact) -> Fact:
        """Return what is known of a sum of products of integers, which a layer scales down once it is a float."""
        ranges = (range_of(self.view.dtype(v)) for v in op.operands[:2])
        sizes = (min(f.size, max(map(abs, ends))) for f, ends in zip(factors, ranges, strict=True))
        most = min(self.terms(op) * math.prod(sizes), range_of(self.view.dtype(op.results[0]))[1])
        return Fact(-most, most, whole=most, learned=True, depth=1 + max(f.depth for f in factors))

    def _added_up(self, op: Op, factors: Sequence[Fact]) -> float:
        """Return how many terms of one sign a product adds up; weights of a layer have both signs, a mask has one."""
        together = math.prod(f.terms for f in factors)
        layer = any(f.constant and not (f.running or (f.low >= 0 and f.whole is not None)) for f in factors)
        if not layer:
            return together * self.terms(op)
        return together if together >= 1 else min(1.0, together * self.terms(op))

    def _averages(self, op: Op) -> bool:
        """True for a product with the weights of an average or a plain sum: none is negative."""
        weights = [f for f in (self[v] for v in op.operands[:2]) if f.constant]
        return any(f.low >= 0 and (f.high < 1 or f.number is not None) for f in weights)

    def contracts(self, op: Op) -> bool:
        """True if a product sums over an axis that two of its operands share."""
        if op.kind != "Einsum":
            return True
        operands, result = equation(op.node)
        summed = {label for labels in operands for label in labels} - set(result) - {"."}
        return any(sum(label in labels for labels in operands) > 1 for label in summed)

    def terms(self, op: Op) -> int:
        """Return how many terms each result of a product adds up; a free dimension counts as `FREE`."""
        stored = [tuple(t.dims) if (t := self.view.constant(v)) is not None else None for v in op.inputs]
        known = any(stored) and op.kind != "Einsum"
        return min(_MANY, summed_terms(op, stored if known else [shape_of(self.view, v) for v in op.inputs], FREE))

    def _normalized(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        fact = read[0] if read else NOTHING
        return Fact(
            learned=fact.learned,
            depth=fact.depth,
            small=row.small,
            constant=fact.constant,
            sources=fact.sources,
            peak=op.kind == "Softmax",
            nudged=fact.nudged,
            terms=1 / self._row_length(op) if op.kind == "Softmax" else 1.0,
        )

    def _row_length(self, op: Op) -> int:
        shape, axis = shape_of(self.view, op.inputs[0]), int_attribute(op.node, "axis", -1)
        return shape[axis] or FREE if shape is not None and -len(shape) <= axis < len(shape) else FREE

    def _counted(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        own = frozenset(op.results)
        if op.kind == "Range":
            constant = all(self[v].constant for v in op.operands)
            return Fact(whole=INF, grid=INF, best=INF, constant=constant, sources=own)
        if op.kind in ELEMENTLESS:
            shape = shape_of(self.view, op.inputs[0])
            sizes = [size if size is not None else FREE for size in shape] if shape is not None else [FREE]
            most = float(math.prod(sizes) if op.kind == "Size" else max(sizes, default=1))
            return Fact(0.0, most, whole=most, sources=own)
        if op.kind == "ConstantOfShape":
            stated = attribute(op.node, "value")
            numbers = self.view.model.array(stated.t) if stated is not None else np.zeros(1)
            if numbers.size != 1 or numbers.dtype.kind not in "fiub":
                return Fact(constant=True)
            number = float(numbers.item())
            return Fact(number, number, number=number, constant=True, fill=number <= -self.limits.most or number > _FAR)
        return Fact(row.low, row.high, whole=1.0 if row.whole else None)

    def _unknown(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        facts, fills = [self[v] for v in op.operands], mask_fills(self.view, self.to)
        far = fills.get(op.results[0]) if op.results else None
        if far is not None:  # numbers that an attribute states
            return Fact(-far.absmax, far.absmax, beyond=self._leaves(-far.absmax, far.absmax))
        return Fact(learned=any(f.learned for f in facts), depth=1 + max((f.depth for f in facts), default=0))

    def _nothing(self, op: Op, row: OpRow, read: list[Fact]) -> Fact:
        return NOTHING


@once
def _facts(view: View, to: DType) -> Facts:
    facts = Facts(view, to, Limits.of(to))
    for op in view.ops:
        if op.bodies:
            facts._leave_bodies(op)
        else:
            facts._pass(op)
    return facts


def _unbounded(fact: Fact) -> Fact:
    return fact._replace(low=-INF, high=INF, whole=None, peak=False)


def _small_product(varying: Sequence[Fact], weight: Fact | None) -> bool:
    """True if a sum of products may be small: all factors are, or one is of any size, as an exponential."""
    if any(f.small and f.high == INF for f in varying):
        return weight is None or weight.low >= 0
    return bool(varying) and all(f.small for f in varying) and (weight is None or weight.low >= 0)


def _run(read: Sequence[Fact]) -> int:
    """Return the elementwise sums and products in a row since the last layer."""
    deepest = max((f.depth for f in read), default=0)
    return 1 + max((f.run for f in read if f.depth == deepest and not f.constant), default=-1)


def _is_running(numbers: Array) -> bool:
    """True for a triangle of ones, or the number 1/n throughout a matrix with a side of n."""
    if numbers.ndim != 2 or max(numbers.shape) < 3:
        return False
    first, last = numbers.flat[0], numbers.flat[-1]
    if first == last and 0 < first < 1:
        return any(np.float32(1 / n) == np.float32(first) for n in numbers.shape) and bool((numbers == first).all())
    ones = np.tri(len(numbers), dtype=bool) if numbers.shape[0] == numbers.shape[1] else None
    return ones is not None and bool((numbers == ones).all() or (numbers == ones.T).all())


_LINEAR = frozenset((Way.COPY, Way.PICK, Way.SUM, Way.SCALE, Way.REDUCE, Way.PRODUCT))
_NOT_LINEAR = frozenset(
    (
        "ReduceMax",
        "ReduceMin",
        "MaxPool",
        "GlobalMaxPool",
        "ReduceSumSquare",
        "ReduceL2",
        "ReduceProd",
        "ReduceL1",
        "ReduceLogSumExp",
        "CumProd",
    )
)
_Forward = Callable[[Facts, Op, OpRow, list[Fact]], Fact]
_WAYS: Mapping[Way, _Forward] = {
    Way.COPY: Facts._copied,
    Way.PICK: Facts._copied,
    Way.SELECT: Facts._selected,
    Way.SUM: Facts._summed,
    Way.SCALE: Facts._scaled,
    Way.FUNCTION: Facts._applied,
    Way.REDUCE: Facts._reduced,
    Way.NORM: Facts._normalized,
    Way.PRODUCT: Facts._multiplied,
    Way.TEST: Facts._nothing,
    Way.SOURCE: Facts._counted,
    Way.UNKNOWN: Facts._unknown,
}
