"""The backward pass: needs of readers, handed to the makers of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from amp_rewrite.decide import reasons
from amp_rewrite.decide.needs.asks import TERM, Asks
from amp_rewrite.decide.needs.elementwise import too_large
from amp_rewrite.decide.needs.facts import INF, NOTHING, Fact
from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.decide.needs.sums import contracts, terms_of
from amp_rewrite.decide.reasons import described
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import Flow, loses_digits
from amp_rewrite.ir.op_classes import ATTENTION_MASKS, COPIES, PAIR_SUMS, SCALINGS, TENSOR_CORE_STEP
from amp_rewrite.ir.ops import Need, OpRow, Trait, Way, row_of
from amp_rewrite.ir.patterns.clusters import snakes
from amp_rewrite.ir.schema import KEPT_VARIABLES
from amp_rewrite.ir.shapes import declared_dims
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_WITHOUT_NUMBERS = (Way.PICK, Way.SOURCE, Way.TEST, Way.UNKNOWN)
_NOT_ARITHMETIC = (Way.COPY, *_WITHOUT_NUMBERS)


class Held(NamedTuple):
    """Reason of an op for float32: its id, the op behind it, and a note."""

    reason: str
    because: OpId | None
    note: str


def unfit(facts: Facts, op: Op, row: OpRow) -> Held | None:
    """Return why facts alone keep an op in float32; None if they do not."""
    if op.bodies:
        return None
    read = [facts[v] for v in op.operands if row.way is not Way.COPY or facts.floats(v)]
    varying = [f for f in read if not f.constant or f.decoded]
    by_constants = _by_constants(facts, op, row, read, varying)
    return by_constants or _by_range(facts, op, row, varying) or _by_spelling(facts, op, row, read)


def _by_constants(facts: Facts, op: Op, row: OpRow, read: Sequence[Fact], varying: Sequence[Fact]) -> Held | None:
    limits = facts.limits
    computes = row.way not in _NOT_ARITHMETIC
    if computes and read and not varying and not row.traits & (Trait.RANDOM | Trait.DEQUANTIZES):
        note = "reads constants alone: computed once, in float32, when a model is loaded"
        return Held(reasons.FOLDED, None, note)
    if varying and ((computes and row.way is not Way.SELECT) or Trait.COMPARES in row.traits):
        far = next((f for f in read if f.constant and limits.most < f.size < INF), None)
        if far is not None:
            reason = reasons.MASK_FILL if far.fill else reasons.CONSTANT_RANGE
            return Held(reason, None, f"computes with {far.size:g}, beyond {limits.most:g}")
    note = _quantizes_beyond(facts, op) if Trait.QUANTIZES in row.traits else ""
    if row.way in (Way.SCALE, Way.PRODUCT) or Trait.QUANTIZES in row.traits:
        lost = next((v for slot, v in enumerate(op.inputs) if _loses_digits(facts, op, row, slot, v)), None)
        if lost is not None:
            least = facts.view.fit(lost, facts.to).absmin
            note = f"constant {facts.view.value_name(lost)!r} goes down to {least:g}, below {limits.tiny:g}"
    if op.kind == "BatchNormalization" and len(op.inputs) > 4 and facts[op.inputs[4]].constant:
        least = facts[op.inputs[4]].low + float_attribute(op.node, "epsilon", 1e-5)
        if least < limits.tiny:
            note = f"variance + epsilon is {least:g}, below {limits.tiny:g}"
    return Held(reasons.CONSTANT_RANGE, None, note) if note else None


def _by_range(facts: Facts, op: Op, row: OpRow, varying: Sequence[Fact]) -> Held | None:
    if op.kind == "ReduceProd" and facts.limits.narrow:
        return Held(reasons.CONSTANT_RANGE, None, "a product of many numbers leaves the range")
    made = facts[op.outputs[0]] if op.outputs else NOTHING
    if made.beyond and (made.decoded or not made.constant) and row.way not in _WITHOUT_NUMBERS:
        return Held(_reason_of(made), None, made.beyond)
    sure = row.way is not Way.PRODUCT  # a layer may well bring a value back into the range
    far = next((f for f in varying if f.beyond and (sure or facts.limits.most < f.size < INF)), None)
    if far is not None and row.way not in (Way.SOURCE, Way.TEST, Way.UNKNOWN):
        return Held(_reason_of(far), None, far.beyond)
    return None


def _by_spelling(facts: Facts, op: Op, row: OpRow, read: Sequence[Fact]) -> Held | None:
    """Return the reason of an op for float32 by its meaning: a sum, a count, a biased softmax."""
    if op.kind == "Range":
        return Held(reasons.WHOLE_NUMBER, None, "how many elements it gives depends on its arithmetic")
    if op.kind == "Einsum" and not contracts(facts, op) and terms_of(facts, op) >= TENSOR_CORE_STEP:
        return Held(reasons.RUNNING_SUM, None, "a sum, spelled as a product")
    if row.way is Way.PRODUCT and any(f.running for f in read) and not _for_products(facts, op):
        return Held(reasons.RUNNING_SUM, None, "a running sum or a mean, spelled as a product")
    masks = [op.inputs[slot] for slot in ATTENTION_MASKS.get(op.kind, ()) if slot < len(op.inputs)]
    if any(facts[mask].best > facts.limits.reach for mask in masks):
        return Held(reasons.POSITION, None, "its mask is a bias that grows with the position")
    return None


def _quantizes_beyond(facts: Facts, op: Op) -> str:
    zero = facts[op.inputs[2] if len(op.inputs) > 2 else None]
    return too_large(facts, facts.view.dtype(op.outputs[0]), facts[op.inputs[1]], zero)


def _loses_digits(facts: Facts, op: Op, row: OpRow, slot: int, value: ValueId | None) -> bool:
    """True for weights, a divisor or a single factor that the low type keeps few digits of."""
    if value is None or not facts.floats(value) or facts.view.constant(value) is None:
        return False
    fit = facts.view.fit(value, facts.to)
    if row.way is Way.SCALE and slot == 1 and op.kind != "Mul":
        return bool(fit.flushed or fit.subnormal)
    return (row.way is not Way.SCALE or fit.count == 1) and loses_digits(facts.view, value, facts.to)


def _for_products(facts: Facts, op: Op) -> bool:
    copies = Flow.of(facts.view, COPIES)
    reached = copies.forth(dict.fromkeys(op.results))
    ways = [row_of(reader.kind).way for reader in copies.readers(reached)]
    return facts.view.yielded.isdisjoint(reached) and bool(ways) and all(way is Way.PRODUCT for way in ways)


def _reason_of(fact: Fact) -> str:
    if "mask" in fact.beyond:
        return reasons.MASK_FILL
    return reasons.WHOLE_NUMBER if fact.whole is not None else reasons.CONSTANT_RANGE


_STEPS = 4
"""Small steps in a row that make a recursion."""
_RUN = 16
"""Elementwise sums and products in a row, without a layer between, that make a recursion."""
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


class Ask(NamedTuple):
    """A need of a value, and the state of its path."""

    need: Need
    state: ValueId | None = None


@dataclass
class Needs:
    """Needs of values, and their float32 ops. O(nodes + uses)."""

    facts: Facts
    asked: dict[ValueId, dict[Ask, Held]] = field(default_factory=dict)
    held: dict[OpId, Held] = field(default_factory=dict)
    _waiting: set[OpId] = field(default_factory=set)
    _left: list[int] = field(default_factory=list)
    """Ops to visit, the last of them first: a heap of their negative ids."""

    @property
    def view(self) -> View:
        """The view of both passes."""
        return self.facts.view

    @classmethod
    def of(cls, facts: Facts) -> Needs:
        """Return the needs of all readers."""
        needs = cls(facts)
        ops = facts.view.ops
        needs._waiting.update(op.id for op in ops)
        needs._left.extend(range(1 - len(ops), 1))
        needs._ask_of_states()
        needs._ask_of_outputs()
        while needs._left:
            last = ops[-heappop(needs._left)]
            needs._waiting.discard(last.id)
            needs._visit(last)
        return needs

    def _visit(self, op: Op) -> None:
        row = row_of(op.kind)
        for value in op.results:
            for ask, why in list(self.asked.get(value, {}).items()):
                if op.bodies:
                    self._ask_outside(value, ask, why)
                else:
                    self._hand_on(op, row, value, ask, why)
        if op.id not in self._sines_of_snakes:
            for asked, need, note, reason in self._asks.of(op, row):
                why = Held(reason or _REASONS[need], op.id, note or f"{described(self.view, op.id)} reads {need.value}")
                if self._ask(asked, Ask(need), why) and self._reads_low(op, asked):
                    self.held.setdefault(op.id, why)
        if (why_not := unfit(self.facts, op, row)) is not None:
            self.held.setdefault(op.id, why_not)

    @cached_property
    def _asks(self) -> Asks:
        return Asks(self.facts)

    @cached_property
    def _sines_of_snakes(self) -> frozenset[OpId]:
        return frozenset(snakes(self.view))

    def _reads_low(self, op: Op, value: ValueId | None) -> bool:
        """True if an op would read a value in the low type; sizes of Resize, for example, are float32 always."""
        if op.signature is None or op.bodies:
            return False
        kept = KEPT_VARIABLES.get((op.domain, op.op_type), ())
        names = [op.signature.input_variable(slot) for slot, v in enumerate(op.inputs) if v == value]
        return any(n is not None and n not in kept and op.signature.admits(n, self.facts.to) for n in names)

    # -- needs that travel -----------------------------------------------------------------------------

    def _ask(self, value: ValueId | None, ask: Ask, why: Held) -> bool:
        """Note a need of a value, unless the low type meets it; True if it does not."""
        if value is None or not self.facts.floats(value) or not self.unmet(ask.need, self.facts[value]):
            return False
        asked = self.asked.setdefault(value, {})
        if ask not in asked:
            asked[ask] = why
            maker = self.view.values[value].producer
            if maker is None:
                self._ask_outside(value, ask, why)
            elif maker not in self._waiting:  # an iteration asks the one before
                self._waiting.add(maker)
                heappush(self._left, -maker)
        return True

    def _ask_outside(self, value: ValueId, ask: Ask, why: Held) -> None:
        """Hand a need across the edge of a body; a carried state has asked already."""
        branch = self.view.producer(value, "If") is not None
        if branch or ask.need not in (Need.PATH, Need.FACTOR):
            for source in self.facts.outside.sources(value):
                self._ask(source, ask, why)

    def unmet(self, need: Need, fact: Fact) -> bool:
        """True if a value of which this is known does not do for a reader in the low type."""
        limits = self.facts.limits
        many = fact.whole is not None and fact.whole > limits.integers
        if fact.constant:
            return (need is Need.EXACT and many) or (need is Need.RANGE and limits.most < fact.size < INF)
        unknown = fact.raw and fact.whole is None
        match need:
            case Need.EXACT:
                return many or unknown or (fact.bent and fact.whole is None)
            case Need.SIDE:
                return many or unknown
            case Need.ORDER:
                return many or unknown or fact.near_one
            case Need.PLACE:
                return many or fact.raw or fact.grid > 0 or fact.placed or bool(fact.levels)
            case Need.TINY:
                return self._is_small(fact)
            case Need.RATIO:
                near = fact.near_one or fact.beside_one or bool(fact.peak)
                return fact.small or self._is_small(fact) or near or bool(fact.squares)
            case Need.RANGE:
                return fact.grows or bool(fact.beyond) or (fact.terms > limits.most / TERM and fact.size > limits.most)
            case Need.LONG:
                return fact.terms > 1 and fact.size > limits.most
            case Need.FACTOR:
                return fact.near_one or fact.beside_one or fact.size <= 1
            case Need.DIGITS | Need.PATH | Need.SLOPE:
                return True

    def _is_small(self, fact: Fact) -> bool:
        limits = self.facts.limits
        divided = limits.narrow and fact.terms < TERM / limits.most
        return (fact.small and limits.narrow) or fact.guard < limits.tiny or divided

    def _hand_on(self, op: Op, row: OpRow, value: ValueId, ask: Ask, why: Held) -> None:
        self.held.setdefault(op.id, why)
        if ask.need is Need.PATH:
            self._along_state(op, value, ask, why)
            return
        product = row.way is Way.PRODUCT
        varying = [v for v in op.operands if not self.facts[v].constant]
        if ask.need is Need.RANGE and len(varying) > 1 and row.way is not Way.SUM:
            return
        through = product and (ask.need in _THROUGH_PRODUCTS or terms_of(self.facts, op) < TENSOR_CORE_STEP)
        through |= product and ask.need is Need.DIGITS and (self.facts[value].averaged or self.facts[value].transform)
        if not (through or ask.need in row.passed):
            return
        for slot, operand in enumerate(op.inputs):
            if slot not in row.slots or operand is None:
                continue
            if not (ask.need is Need.DIGITS and operand in self._asks.shared):
                self._ask(operand, ask, why)
            near = self.facts[operand].beside_one if op.kind == "Mul" else self.facts[value].beside_one
            if near and ask.need in _BESIDE_ONE.get(op.kind, ()):
                self._ask(operand, Ask(Need.FACTOR), why)
            if ask.need is Need.RATIO and self._is_front(op, value, operand):
                note = "part of the spectrum of an input, of which small parts count"
                self._ask(operand, Ask(Need.DIGITS), Held(reasons.CANCELLATION, why.because, note))

    def _is_front(self, op: Op, value: ValueId, operand: ValueId) -> bool:
        """True if an op takes the squares of a linear transform of inputs, and nothing else reads the transform."""
        squared = self.facts.line(operand) in self.facts[value].squares
        alone = all(reader.kind == op.kind for reader in self.view.readers(operand))
        return squared and alone and self.facts[operand].transform

    # -- states and recursions -------------------------------------------------------------------------

    def _ask_of_states(self) -> None:
        """Ask for all digits of states: in streams, in bodies, and written out."""
        facts, view = self.facts, self.view
        pairs = [(out, into, "the next iteration") for out, into in view.carried]
        for out in view.scopes[0].outputs:
            pairs += [(out, into, "the next run") for into, _ in facts[out].states if self._alike(out, into)]
        for out, into, when in pairs:
            made_by = view.producer(out)
            if made_by is not None and (into, True) in facts[out].states:
                note = f"computes the state {view.value_name(into)!r}, which {when} reads"
                self._ask(out, Ask(Need.PATH, into), Held(reasons.RUNNING_SUM, None, note))
        for op in view.ops:
            for value in op.results:
                fact = facts[value]
                if fact.steps >= _STEPS and any(facts[v].steps < fact.steps for v in op.operands):
                    note = "moves a state by a small step, as ops before and after it"
                elif fact.run >= _RUN and op.kind in PAIR_SUMS | SCALINGS:
                    note = "a recursion written out"
                else:
                    continue
                self._ask(value, Ask(Need.PATH), Held(reasons.RUNNING_SUM, None, note))

    def _alike(self, a: ValueId, b: ValueId) -> bool:
        """True if an output and an input of the model have the same type and shape, free dimensions by name."""
        dims = [self._public_dims.get(self.view.value_name(value)) for value in (a, b)]
        return a != b and self.view.values[b].public and None not in dims and dims[0] == dims[1]

    @cached_property
    def _public_dims(self) -> Mapping[str, tuple[int | str | None, ...] | None]:
        graph = self.view.model.proto.graph
        return {formal.name: declared_dims(formal) for formal in (*graph.input, *graph.output)}

    def _along_state(self, op: Op, value: ValueId, ask: Ask, why: Held) -> None:
        here = self.facts[value]
        for operand in op.operands:
            fact = self.facts[operand]
            if ask.state is None:
                on = 0 < fact.steps >= here.steps - 1 or (fact.run > 1 and here.run >= _RUN // 2)
            else:
                on = any(state == ask.state for state, _ in fact.states)
            if on:
                self._ask(operand, ask, why)
            elif op.kind == "Mul":
                self._ask(operand, Ask(Need.FACTOR), why)

    def _ask_of_outputs(self) -> None:
        for out in self.view.scopes[0].outputs:
            fact = self.facts[out]
            if fact.grid and (fact.learned or fact.products) and self.view.producer(out) is not None:
                self._ask(out, Ask(Need.PLACE), Held(reasons.POSITION, None, "counts from places on a grid"))


_BESIDE_ONE = {
    "Mul": (Need.DIGITS, Need.PLACE),
    **dict.fromkeys(PAIR_SUMS, (Need.TINY, Need.RATIO)),
}
"""Needs for which an operand must keep its distance from 1: it multiplies, or is added to 1."""
_THROUGH_PRODUCTS = frozenset((Need.EXACT, Need.TINY, Need.RATIO, Need.LONG))
