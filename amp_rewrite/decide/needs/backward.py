"""Backward pass: needs of readers, passed to the producers of their inputs, and ops in float32 because of facts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.arithmetic import contracts
from amp_rewrite.decide.needs.facts import INF, NOTHING, Beyond, Fact, Facts
from amp_rewrite.decide.needs.readers import TERM, Readers
from amp_rewrite.decide.reasons import Paint, described, float32
from amp_rewrite.decide.sizes import terms_of_product
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import Flow, loses_digits
from amp_rewrite.ir.op_classes import ATTENTION_MASKS, COPIES, PAIR_SUMS, SCALINGS, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import Need, OpRow, Trait, Way, row_of
from amp_rewrite.ir.patterns.clusters import snakes
from amp_rewrite.ir.shapes import declared_dims
from amp_rewrite.ir.view import Op, OpId, ValueId

_MIN_STEPS = 4
"""Minimum number of consecutive small steps of a recursion."""
_MIN_RUN = 16
"""Minimum number of consecutive elementwise sums and products of a recursion, without a layer in between."""
_REASONS = {
    Need.EXACT: reasons.WHOLE_NUMBER,
    Need.SIDE: reasons.WHOLE_NUMBER,
    Need.ORDER: reasons.MAGNIFIED,
    Need.TINY: reasons.MAGNIFIED,
    Need.RATIO: reasons.MAGNIFIED,
    Need.RANGE: reasons.CONSTANT_RANGE,
    Need.LONG: reasons.RUNNING_SUM,
    Need.DIGITS: reasons.CANCELLATION,
    Need.PLACE: reasons.POSITION,
    Need.PATH: reasons.RUNNING_SUM,
    Need.FACTOR: reasons.RUNNING_SUM,
    Need.SLOPE: reasons.CANCELLATION,
}


NeedOf = tuple[Need, ValueId | None]
"""A need, and the state whose path it follows, if any."""


@dataclass
class Backward:
    """Needs of values, and the ops to keep in float32 for them. O(nodes + uses).

    `needs`: the needs of each value. `pinned`: the reason for each op in float32.
    """

    facts: Facts
    needs: dict[ValueId, dict[NeedOf, Paint]] = field(default_factory=dict)
    pinned: dict[OpId, Paint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.view, self._readers = self.facts.view, Readers(self.facts)
        self._waiting = {op.id for op in self.view.ops}
        self._record_states()
        while self._waiting:
            for op_id in sorted(self._waiting, reverse=True):
                self._waiting.discard(op_id)
                self._visit(self.view.ops[op_id])

    def _visit(self, op: Op) -> None:
        row = row_of(op.kind)
        for value in op.results:
            for need_of, why in list(self.needs.get(value, {}).items()):
                if op.bodies:
                    self._record_outside(value, need_of, why)
                else:
                    self._pass_on(op, row, value, need_of, why)
        snake = op.id in snakes(self.view)
        for read, need, note, reason in self._readers.of(op, row) if not snake else ():
            text = note or f"{described(self.view, op.id)} needs {need.value}"
            why = float32(reason or _REASONS[need], op.id, text)
            if self._record(read, need, why) and self._reads_low(op, read):
                self.pinned.setdefault(op.id, why)
        if (why_not := cause_of(self.facts, op, row)) is not None:
            self.pinned.setdefault(op.id, why_not)

    def _reads_low(self, op: Op, value: ValueId | None) -> bool:
        """True if an op could read a value in the low type; sizes of Resize, for example, are always float32."""
        if op.signature is None or op.bodies:
            return False
        kept = row_of(op.kind).kept
        names = [op.signature.input_variable(slot) for slot, v in enumerate(op.inputs) if v == value]
        return any(n is not None and n != kept and op.signature.admits(n, self.facts.to) for n in names)

    # -- needs that travel -----------------------------------------------------------------------------

    def _record(self, value: ValueId | None, need: Need, why: Paint, state: ValueId | None = None) -> bool:
        """Record a need of a value if the low type does not meet it; return True in that case."""
        if value is None or not self.facts.floats(value) or not self.unmet(need, self.facts[value]):
            return False
        needs, need_of = self.needs.setdefault(value, {}), (need, state)
        if need_of not in needs:
            needs[need_of] = why
            maker = self.view.values[value].producer
            if maker is None:
                self._record_outside(value, need_of, why)
            else:
                self._waiting.add(maker)
        return True

    def _record_outside(self, value: ValueId, need_of: NeedOf, why: Paint) -> None:
        """Pass a need across the edge of a body; a carried state already has it, except for its first value."""
        need, state = need_of
        branch = self.view.producer(value, "If") is not None
        for source in self.facts.outside.sources(value):
            if branch or need not in (Need.PATH, Need.FACTOR):
                self._record(source, need, why, state)
            elif self.facts[source].beside_one:
                self._record(source, Need.FACTOR, why)

    def unmet(self, need: Need, fact: Fact) -> bool:
        facts = self.facts
        many = fact.whole is not None and fact.whole > facts.integers
        if fact.constant:
            return (need is Need.EXACT and many) or (need is Need.RANGE and facts.most < fact.size < INF)
        unknown = (fact.raw or fact.part_raw) and fact.whole is None
        small = fact.guard < facts.tiny or (facts.narrow and (fact.small or fact.terms < TERM / facts.most))
        match need:
            case Need.EXACT:
                return many or unknown or (fact.bent and fact.whole is None)
            case Need.SIDE:
                return many or unknown
            case Need.ORDER:
                return many or unknown or fact.near_one or fact.placed
            case Need.PLACE:
                return many or fact.raw or fact.grid > 0 or fact.placed or bool(fact.levels)
            case Need.TINY:
                return small or (fact.near_one and fact.beside_one)
            case Need.RATIO:
                near = fact.near_one or fact.beside_one or bool(fact.peak)
                return small or fact.small or near or bool(fact.squares)
            case Need.RANGE:
                return fact.grows or bool(fact.beyond) or (fact.terms > facts.most / TERM and fact.size > facts.most)
            case Need.LONG:
                return fact.terms > 1 and fact.size > facts.most
            case Need.FACTOR:
                return fact.near_one or fact.beside_one or fact.size <= 1
            case Need.DIGITS | Need.PATH | Need.SLOPE:
                return True

    def _pass_on(self, op: Op, row: OpRow, value: ValueId, need_of: NeedOf, why: Paint) -> None:
        """Keep an op in float32, and pass the need on to its inputs as far as its row allows."""
        self.pinned.setdefault(op.id, why)
        need, state = need_of
        if need is Need.PATH:
            self._along_state(op, value, state, why)
            return
        if need is Need.FACTOR and op.kind in _TURNS:  # a TINY need may have become this need on the way
            self._record(op.inputs[0], Need.TINY if why.rule == _REASONS[Need.TINY] else Need.DIGITS, why)
        product = row.way is Way.PRODUCT
        varying = [v for v in op.operands if not self.facts[v].constant]
        if need is Need.RANGE and len(varying) > 1 and row.way is not Way.SUM:
            return
        through = product and (need in _THROUGH_PRODUCTS or terms_of_product(self.view, op) < TENSOR_CORE_STEP)
        through |= product and need is Need.DIGITS and (self.facts[value].averaged or self.facts[value].transform)
        through |= need is Need.FACTOR and self.facts[value].near_one and row.way in (Way.SUM, Way.SCALE)
        if not (through or need in row.passed):
            return
        for slot, operand in enumerate(op.inputs):
            if slot not in row.slots or operand is None:
                continue
            if not (need is Need.DIGITS and operand in self._readers.shared):
                self._record(operand, need, why)
            near = self.facts[operand].beside_one if op.kind == "Mul" else self.facts[value].beside_one
            if near and need in _BESIDE_ONE.get(op.kind, ()):
                self._record(operand, Need.FACTOR, why)
            if need is Need.RATIO and self._is_front(op, value, operand):
                note = "part of the spectrum of an input, whose small components matter"
                self._record(operand, Need.DIGITS, float32(reasons.CANCELLATION, why.because, note))

    def _is_front(self, op: Op, value: ValueId, operand: ValueId) -> bool:
        """True if an op squares a linear transform of inputs, and no other op reads the transform."""
        squared = self.facts.line(operand) in self.facts[value].squares
        only_reader = all(reader.kind == op.kind for reader in self.view.readers(operand))
        return squared and only_reader and self.facts[operand].transform

    # -- states and recursions -------------------------------------------------------------------------

    def _record_states(self) -> None:
        """Record the needs of states (in streams, in bodies, and unrolled), and of outputs with positions."""
        facts, view = self.facts, self.view
        pairs = [(out, into, "the next iteration") for out, into in view.carried]
        graph = view.model.proto.graph
        dims = {formal.name: declared_dims(formal) for formal in (*graph.input, *graph.output)}
        for out in view.scopes[0].outputs:  # free dimensions of a state have equal names
            shape = dims.get(view.value_name(out))
            inputs = {v for v in facts[out].moved if v != out and view.values[v].public and shape is not None}
            alike = {v for v in inputs if dims.get(view.value_name(v)) == shape}
            nearest = self._nearest(out, alike)
            pairs += [(out, v, "the next run") for v in sorted(alike, key=lambda v: (v != nearest, v))]
        for out, into, when in pairs:
            producer = view.producer(out)
            if producer is not None and into in facts[out].moved:
                note = f"computes the state {view.value_name(into)!r}, which {when} reads"
                self._record(out, Need.PATH, float32(reasons.RUNNING_SUM, None, note), into)
        for op in view.ops:
            for value in op.results:
                fact = facts[value]
                if fact.steps >= _MIN_STEPS and any(facts[v].steps < fact.steps for v in op.operands):
                    note = "moves a state by a small step, as the ops before and after it do"
                elif fact.run >= _MIN_RUN and op.kind in PAIR_SUMS | SCALINGS:
                    note = "an unrolled recursion"
                else:
                    continue
                self._record(value, Need.PATH, float32(reasons.RUNNING_SUM, None, note))
        for out in view.scopes[0].outputs:
            if facts[out].grid and (facts[out].learned or facts[out].products) and view.producer(out) is not None:
                self._record(out, Need.PLACE, float32(reasons.POSITION, None, "counts from positions on a grid"))

    def _nearest(self, out: ValueId, states: Collection[ValueId]) -> ValueId | None:
        """Return the state with the fewest ops between it and an output: usually the state that the output replaces."""
        level, seen = [out], {out}
        while level and seen.isdisjoint(states):
            producers = filter(None, map(self.view.producer, level))
            level = [*dict.fromkeys(v for op in producers for v in op.operands if v not in seen)]
            seen.update(level)
        return next(filter(states.__contains__, level), None)

    def _along_state(self, op: Op, value: ValueId, state: ValueId | None, why: Paint) -> None:
        here = self.facts[value]
        for operand in op.operands:
            fact = self.facts[operand]
            if state is None:
                on_path = 0 < fact.steps >= here.steps - 1 or (fact.run > 1 and here.run >= _MIN_RUN // 2)
            else:
                on_path = state in fact.states
            if on_path:
                self._record(operand, Need.PATH, why, state)
            elif op.kind in SCALINGS:
                self._record(operand, Need.FACTOR, why)


_BESIDE_ONE = {
    "Mul": (Need.DIGITS, Need.PLACE),
    **dict.fromkeys(PAIR_SUMS, (Need.TINY, Need.RATIO)),
}
"""By op, the needs of its result for which an operand must keep its distance from 1."""
_TURNS = ("Cos", "Exp", "Sin")
"""Functions whose product, if it multiplies a state, depends on all digits of the sum of their arguments. Near x = 0,
the distance of eˣ from 1 is about x instead."""
_THROUGH_PRODUCTS = frozenset((Need.EXACT, Need.TINY, Need.RATIO, Need.LONG))


# -- ops in float32 because of facts -----------------------------------------------------------------

_WITHOUT_NUMBERS = (Way.PICK, Way.SOURCE, Way.TEST, Way.UNKNOWN)
_NOT_ARITHMETIC = (Way.COPY, *_WITHOUT_NUMBERS)


def cause_of(facts: Facts, op: Op, row: OpRow) -> Paint | None:
    """Return why constants, ranges or other facts keep an op in float32; None if they do not."""
    if op.bodies:
        return None
    read = [facts[v] for v in op.operands if row.way is not Way.COPY or facts.floats(v)]
    varying = [f for f in read if not f.constant or f.decoded]
    computes = row.way not in _NOT_ARITHMETIC
    if computes and read and not varying and not row.traits & (Trait.RANDOM | Trait.DEQUANTIZES):
        note = "reads only constants: computed once, in float32, when the model is loaded"
        return float32(reasons.FOLDED, None, note)
    if varying and ((computes and row.way is not Way.SELECT) or Trait.COMPARES in row.traits):
        far = next((f for f in read if f.constant and facts.most < f.size < INF), None)
        if far is not None:
            reason = reasons.MASK_FILL if far.fill else reasons.CONSTANT_RANGE
            return float32(reason, None, f"computes with {far.size:g}, beyond {facts.most:g}")
    if note := _lost_digits_note(facts, op, row):
        return float32(reasons.CONSTANT_RANGE, None, note)
    made = facts[op.outputs[0]] if op.outputs else NOTHING
    if made.beyond and (made.decoded or not made.constant) and row.way not in _WITHOUT_NUMBERS:
        return _beyond(made.beyond, made)
    sure = row.way is not Way.PRODUCT  # a layer may bring a value back into the range
    far = next((f for f in varying if f.beyond and (sure or facts.most < f.size < INF)), None)
    if far is not None and far.beyond and row.way not in (Way.SOURCE, Way.TEST, Way.UNKNOWN):
        return _beyond(far.beyond, far)
    if op.kind == "Range":
        return float32(reasons.WHOLE_NUMBER, None, "its arithmetic determines how many elements it returns")
    if op.kind == "Einsum" and not contracts(op) and terms_of_product(facts.view, op) >= TENSOR_CORE_STEP:
        return float32(reasons.RUNNING_SUM, None, "a sum, written as a product")
    if row.way is Way.PRODUCT and any(f.running for f in read):
        copies = Flow(facts.view, COPIES)
        reached = copies.forth(op.results)
        ways = {row_of(reader.kind).way for reader in copies.readers(reached)}
        if ways != {Way.PRODUCT} or not facts.view.yielded.isdisjoint(reached):
            return float32(reasons.RUNNING_SUM, None, "a running sum or a mean, written as a product")
    masks = [op.inputs[slot] for slot in ATTENTION_MASKS.get(op.kind, ()) if slot < len(op.inputs)]
    if any(map(facts.counts_far, masks)):
        return float32(reasons.POSITION, None, "its mask is a bias that grows with the position")
    return None


def _lost_digits_note(facts: Facts, op: Op, row: OpRow) -> str:
    """Return a note if numbers in an op become subnormal or 0 in the low type, otherwise ""."""
    if op.kind == "ReduceProd" and facts.narrow:
        return "a product of many numbers leaves the range"
    if op.kind == "BatchNormalization" and len(op.inputs) > 4 and facts[op.inputs[4]].constant:
        least = facts[op.inputs[4]].low + float_attribute(op.node, "epsilon", 1e-5)
        if least < facts.tiny:
            return f"variance + epsilon is {least:g}, below {facts.tiny:g}"
    if row.way in (Way.SCALE, Way.PRODUCT) or Trait.QUANTIZES in row.traits:
        lost = next((v for slot, v in enumerate(op.inputs) if _loses_digits(facts, op, row, slot, v)), None)
        if lost is not None:
            least = facts.view.fit(lost, facts.to).absmin
            return f"constant {facts.view.value_name(lost)!r} has elements as small as {least:g}, below {facts.tiny:g}"
    return ""


def _loses_digits(facts: Facts, op: Op, row: OpRow, slot: int, value: ValueId | None) -> bool:
    """True for weights, a divisor or a single factor with too few digits in the low type."""
    if value is None or not facts.floats(value) or facts.view.copied(value) is None:
        return False
    fit = facts.view.fit(value, facts.to)
    if row.way is Way.SCALE and slot > 0 and op.kind != "Mul":
        return bool(fit.flushed or fit.subnormal)
    return (row.way is not Way.SCALE or fit.count == 1) and loses_digits(facts.view, value, facts.to)


def _beyond(why: Beyond, fact: Fact) -> Paint:
    other = reasons.WHOLE_NUMBER if fact.whole is not None else reasons.CONSTANT_RANGE
    return float32(reasons.MASK_FILL if why.mask else other, None, why.note)
