"""Op patterns: nested op expressions with captures, matched against a view.

A pattern describes how one value is computed: `op("Div", X, op("Sqrt", ANY))` is a division by a square root. Operands
of commutative ops match in any order, operands beyond those of the pattern are free, and equal names capture equal
values. Casts between floating types and Identities are looked through; those before an op belong to the match.
A match is closed: only the result of its last op is read outside, and all its ops lie in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from amp_rewrite.ir.dataflow import behind, casts_floats, confined
from amp_rewrite.ir.op_classes import COMMUTATIVE
from amp_rewrite.ir.view import Op, OpId, ValueId, View

Test = Callable[[View, ValueId], bool]
Way = tuple[tuple[tuple[str, ...], bool], ...]
"""The kinds of the ops from an anchor to the last op of a pattern; True for an optional op."""

ANCHOR = "anchor"
"""The name of the rarest op of a pattern. The search for matches starts there."""
ENTRY = "x"
"""The name of the input of a matched computation."""
_MOST_READERS = 4
"""The most readers of a value within a match. A value with more is read outside."""


@dataclass(frozen=True, slots=True)
class Match:
    """The ops of a match and its captured values by name. `direct`: without looking through Casts."""

    ops: frozenset[OpId] = frozenset()
    values: Mapping[str, ValueId] = field(default_factory=dict)
    direct: bool = False

    def bind(self, name: str, value: ValueId) -> Match | None:
        """Capture a value; None if the name already has another."""
        if not name or self.values.get(name) == value:
            return self
        return None if name in self.values else Match(self.ops, {**self.values, name: value}, self.direct)

    def take(self, *ops: OpId) -> Match:
        """Add ops."""
        return Match(self.ops.union(ops), self.values, self.direct) if ops else self


class Pattern:
    """A way to compute a value."""

    __slots__ = ()

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        """Extend a match by the ops behind this value, in every fitting way."""
        raise NotImplementedError

    def ways(self) -> Iterator[Way]:
        """Yield the ways from the anchor of the pattern to its last op."""
        return iter(())


@dataclass(slots=True, eq=False, repr=False)
class AnyValue(Pattern):
    """Any value, but for a test and for matches of `unless`.

    `read`: capture the value as it is read, not the one behind Casts. `casts`: these Casts belong to the match.
    """

    name: str = ""
    test: Test | None = None
    unless: Pattern | None = None
    read: bool = False
    casts: bool = False

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        bare, passed = (value, []) if self.read or match.direct else behind_casts(view, value)
        bound = match.bind(self.name, bare)
        if bound is None or (self.test is not None and not self.test(view, bare)):
            return
        if self.unless is None or next(self.unless.at(view, bare, Match(direct=match.direct)), None) is None:
            yield bound.take(*passed) if self.casts else bound


@dataclass(slots=True, eq=False, repr=False)
class Ops(Pattern):
    """An op of one of these kinds with matching first operands. With `once`, its result has a single reader."""

    kinds: tuple[str, ...]
    of: tuple[Pattern, ...]
    name: str = ""
    casts: bool = True
    once: bool = False

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        bare, passed = (value, []) if match.direct else behind_casts(view, value)
        op = view.producer(bare)
        if op is None or op.kind not in self.kinds or len(op.inputs) < len(self.of):
            return
        bound = match.bind(self.name, bare)
        if bound is None or (self.once and len(readers(view, bare)) > 1):
            return
        taken = bound.take(op.id, *(passed if self.casts else ()))
        swaps = op.kind in COMMUTATIVE and len(op.inputs) > 1
        orders = dict.fromkeys(permutations(op.inputs, len(self.of))) if swaps else (op.inputs,)
        for order in orders:
            yield from _all(view, order, self.of, taken)

    def ways(self) -> Iterator[Way]:
        if self.name == ANCHOR:
            yield ((self.kinds, False),)
        for part in self.of:
            yield from ((*way, (self.kinds, False)) for way in part.ways())


def _all(view: View, values: tuple[ValueId | None, ...], of: tuple[Pattern, ...], match: Match) -> Iterator[Match]:
    if not of:
        yield match
    elif values[0] is not None:
        for extended in of[0].at(view, values[0], match):
            yield from _all(view, values[1:], of[1:], extended)


@dataclass(slots=True, eq=False, repr=False)
class Either(Pattern):
    """Alternative patterns, tried in order."""

    of: tuple[Pattern, ...]

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        for part in self.of:
            yield from part.at(view, value, match)

    def ways(self) -> Iterator[Way]:
        for part in self.of:
            yield from part.ways()


@dataclass(slots=True, eq=False, repr=False)
class Through(Pattern):
    """A pattern with up to `most` ops of these kinds between it and its reader."""

    kinds: tuple[str, ...]
    of: Pattern
    most: int = 8

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        yield from self.of.at(view, value, match)
        if self.most:
            yield from Ops(self.kinds, (Through(self.kinds, self.of, self.most - 1),)).at(view, value, match)

    def ways(self) -> Iterator[Way]:
        yield from ((*way, *((self.kinds, True),) * self.most) for way in self.of.ways())


@dataclass(slots=True, eq=False, repr=False)
class MadeOf(Pattern):
    """An expression of the captured entry and weights, of at most `most` ops of these kinds."""

    kinds: tuple[str, ...]
    most: int = 8

    def at(self, view: View, value: ValueId, match: Match) -> Iterator[Match]:
        pending: list[ValueId | None] = [value]
        count = 0
        while pending:
            read = pending.pop()
            if read is None:
                return
            bare, passed = behind_casts(view, read)
            if bare == match.values[ENTRY] or weight(view, bare):
                continue
            op = view.producer(bare)
            if op is None or op.kind not in self.kinds or (match.direct and passed):
                return
            count += not match.ops.issuperset((op.id, *passed))
            if count > self.most:
                return
            match = match.take(op.id, *passed)
            pending.extend(op.inputs)
        yield match


def op(kinds: str, *of: Pattern, name: str = "", casts: bool = True, once: bool = False) -> Ops:
    """Return a pattern for an op of one of these kinds, separated by "|", with these first operands."""
    return Ops(tuple(kinds.split("|")), of, name, casts, once)


def either(*of: Pattern) -> Either:
    """Return a pattern for one of several."""
    return Either(of)


X = AnyValue(ENTRY)


def constant(view: View, value: ValueId) -> bool:
    """True for a constant, Casts looked through."""
    return view.constant(behind_casts(view, value)[0]) is not None


def weight(view: View, value: ValueId) -> bool:
    """True for an initializer, a Constant, or the result of a single op of these."""
    bare, _ = behind_casts(view, value)
    made_by = view.producer(bare)
    read = (bare,) if made_by is None or made_by.kind == "Constant" else made_by.inputs
    return bool(read) and all(v is not None and view.values[v].tensor is not None for v in read)


def varying(view: View, value: ValueId) -> bool:
    """True for anything but a weight."""
    return not weight(view, value)


# -- search ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Search:
    """A search for patterns from their anchors, along the ways to their last ops."""

    patterns: Sequence[Pattern]
    ways: Sequence[tuple[int, Way]]
    """The ways of all patterns, each with the number of its pattern."""

    @classmethod
    def of(cls, *patterns: Pattern) -> Search:
        return cls(patterns, [(number, way) for number, pattern in enumerate(patterns) for way in pattern.ways()])

    @property
    def anchors(self) -> frozenset[str]:
        """The kinds of ops at the start of a search."""
        return frozenset(kind for _, way in self.ways for kind in way[0][0])

    def matches(self, view: View, anchor: Op, start: Match = Match()) -> Iterator[tuple[int, Match, Op]]:
        """Yield the number of a pattern, a match with this anchor, and its last op. The match may not be closed."""
        for number, last_id in sorted(set(_ends(view, anchor, self.ways))):
            last = view.ops[last_id]
            value = last.outputs[0]
            for match in self.patterns[number].at(view, value, start) if value is not None else ():
                if anchor.id in match.ops:
                    yield number, match, last

    def direct(self, view: View, anchor: Op) -> Match | None:
        """Return the first closed match with this anchor, without looking through Casts and Identities."""
        matches = self.matches(view, anchor, Match(direct=True))
        return next((match for _, match, last in matches if is_closed(view, match, last)), None)


def _ends(view: View, at: Op, ways: Iterable[tuple[int, Way]]) -> Iterator[tuple[int, OpId]]:
    """Yield the numbers of patterns with the ends of their ways from an op. O(ways)."""
    left = {(number, rest[1:]) for number, way in ways for rest in _shortened(way) if rest and at.kind in rest[0][0]}
    yield from ((number, at.id) for number, way in left if () in _shortened(way))
    following = readers(view, at.outputs[0]) if any(way for _, way in left) else ()
    for reader in following if len(following) <= _MOST_READERS else ():
        yield from _ends(view, view.ops[reader], left)


def _shortened(way: Way) -> Iterator[Way]:
    """Yield a way, and its rest without leading optional steps."""
    yield way
    if way and way[0][1]:
        yield from _shortened(way[1:])


def with_entry_casts(view: View, match: Match) -> Match:
    """Add the Casts of a match's entry read by the match alone.

    A Cast of the entry with other readers stays outside; its result is then the entry.
    """
    ops, entry = set(match.ops), match.values[ENTRY]
    for reader in view.readers(entry):
        mine = all(use.op in ops for value in reader.results for use in view.uses[value])
        if is_transparent(view, reader) and mine and _encloses(view, ops, reader):
            ops.add(reader.id)
    for op_id in sorted(ops):
        cast = view.ops[op_id]
        if cast.inputs[:1] == (entry,) and is_transparent(view, cast) and not _encloses(view, ops, cast):
            ops.discard(op_id)
            entry = cast.outputs[0] or entry
    return Match(frozenset(ops), {**match.values, ENTRY: entry}, match.direct)


def is_closed(view: View, match: Match, last: Op) -> bool:
    """True if all ops lie in one graph and only the results of the last one are read outside."""
    inner = (view.ops[op_id] for op_id in match.ops if op_id != last.id)
    return all(op.scope == last.scope and _encloses(view, match.ops, op) for op in inner)


def readers(view: View, value: ValueId | None) -> list[OpId]:
    """Return the readers of a value, each once, Casts looked through."""
    ops: dict[OpId, None] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        for use in view.uses[value] if value is not None else ():
            if is_transparent(view, view.ops[use.op]):
                pending.append(view.ops[use.op].outputs[0])
            else:
                ops[use.op] = None
    return list(ops)


def is_transparent(view: View, op: Op) -> bool:
    """True for a Cast between floating types and for an Identity."""
    return op.kind == "Identity" or casts_floats(view, op)


def behind_casts(view: View, value: ValueId) -> tuple[ValueId, list[OpId]]:
    """Return the value behind Casts, and these Casts."""
    passed = list(behind(view, value, lambda op: op.inputs[0] if is_transparent(view, op) else None))
    return passed[-1][1] if passed else value, [op.id for op, _ in passed]


def _encloses(view: View, ops: Container[OpId], op: Op) -> bool:
    return all(confined(view, value, ops) for value in op.results)
