"""Op patterns: nested op expressions with captures, matched against a view.

A pattern is a function of how one value is computed: `op("Div", X, op("Sqrt", X))` is a division by a square root.
Operands of commutative ops match in any order, operands beyond those of the pattern are free, and equal names capture
equal values. Casts between floating types and Identities are looked through; those before an op belong to the match.
A match is closed: only the result of its last op is read outside, and all its ops lie in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from amp_rewrite.ir.dataflow import casts_floats, confined, trail
from amp_rewrite.ir.op_classes import CARRIERS, COMMUTATIVE
from amp_rewrite.ir.view import Op, OpId, ValueId, View

ENTRY = "x"
"""The name of the input of a matched computation."""
_MOST_READERS = 4
"""The most readers of a value within a match. A value with more is read outside."""
_MOST_STEPS = 8
"""The most ops from the anchor of a match to its last op."""
_MOST_OPS = 8
"""The most ops of an expression of any form within a match."""


@dataclass(frozen=True, slots=True)
class Match:
    """The ops of a match and its captured values by name. `direct`: without looking through Casts."""

    ops: frozenset[OpId] = frozenset()
    values: Mapping[str, ValueId] = field(default_factory=dict)
    direct: bool = False

    def bare(self, view: View, value: ValueId) -> tuple[ValueId, list[OpId]]:
        return (value, []) if self.direct else behind_casts(view, value)

    def bind(self, name: str, value: ValueId) -> Match | None:
        """Capture a value; None if the name already has another."""
        if not name or self.values.get(name) == value:
            return self
        return None if name in self.values else replace(self, values={**self.values, name: value})

    def take(self, *ops: OpId) -> Match:
        return replace(self, ops=self.ops.union(ops)) if ops else self


Pattern = Callable[[View, ValueId, Match], Iterator[Match]]
"""Extend a match by the ops behind a value, in every fitting way."""
Test = Callable[[View, ValueId], bool]


def op(kinds: str, *of: Pattern, name: str = "", casts: bool = True) -> Pattern:
    """Return a pattern for an op of one of these kinds, separated by "|", with these first operands.

    `casts`: Casts of the result belong to the match.
    """
    known = frozenset(kinds.split("|"))

    def match(view: View, value: ValueId, match: Match) -> Iterator[Match]:
        bare, passed = match.bare(view, value)
        op = view.producer(bare)
        if op is None or op.kind not in known or len(op.inputs) < len(of):
            return
        bound = match.bind(name, bare)
        if bound is None:
            return
        taken = bound.take(op.id, *(passed if casts else ()))
        swaps = op.kind in COMMUTATIVE and len(op.inputs) > 1
        orders = dict.fromkeys(permutations(op.inputs, len(of))) if swaps else (op.inputs,)
        for order in orders:
            yield from _all(view, order, of, taken)

    return match


def _all(view: View, values: Sequence[ValueId | None], of: Sequence[Pattern], match: Match) -> Iterator[Match]:
    if not of:
        yield match
    elif values[0] is not None:
        for extended in of[0](view, values[0], match):
            yield from _all(view, values[1:], of[1:], extended)


def anything(
    name: str = "", test: Test | None = None, *, unless: Pattern | None = None, read: bool = False, casts: bool = False
) -> Pattern:
    """Return a pattern for any value, but for a test and for matches of `unless`.

    `read`: capture the value as it is read, not the one behind Casts. `casts`: these Casts belong to the match.
    """

    def match(view: View, value: ValueId, match: Match) -> Iterator[Match]:
        bare, passed = (value, []) if read else match.bare(view, value)
        bound = match.bind(name, bare)
        if bound is None or (test is not None and not test(view, bare)):
            return
        if unless is None or next(unless(view, bare, Match(direct=match.direct)), None) is None:
            yield bound.take(*passed) if casts else bound

    return match


def either(*of: Pattern) -> Pattern:
    """Return a pattern for one of several, tried in order."""

    def match(view: View, value: ValueId, match: Match) -> Iterator[Match]:
        for part in of:
            yield from part(view, value, match)

    return match


def through(kinds: str, of: Pattern, most: int = _MOST_OPS) -> Pattern:
    """Return a pattern with up to `most` ops of these kinds between it and its reader."""
    return either(of, op(kinds, through(kinds, of, most - 1))) if most else of


def made_of(kinds: str) -> Pattern:
    """Return a pattern for an expression of the captured entry and weights, of a few ops of these kinds."""
    known = frozenset(kinds.split("|"))

    def match(view: View, value: ValueId, match: Match) -> Iterator[Match]:
        pending: list[ValueId | None] = [value]
        count = 0
        while pending:
            read = pending.pop()
            if read is None:
                return
            bare, passed = match.bare(view, read)
            if bare == match.values[ENTRY] or weight(view, bare):
                continue
            op = view.producer(bare)
            if op is None or op.kind not in known:
                return
            count += op.id not in match.ops
            if count > _MOST_OPS:
                return
            match = match.take(op.id, *passed)
            pending.extend(op.inputs)
        yield match

    return match


X = anything(ENTRY)


def constant(view: View, value: ValueId) -> bool:
    return view.constant(behind_casts(view, value)[0]) is not None


def weight(view: View, value: ValueId) -> bool:
    """True for an initializer, a Constant, or the result of a single op of these."""
    bare, _ = behind_casts(view, value)
    made_by = view.producer(bare)
    read = (bare,) if made_by is None or made_by.kind == "Constant" else made_by.inputs
    return bool(read) and all(v is not None and view.values[v].tensor is not None for v in read)


# -- search ----------------------------------------------------------------------------------------


def matches(view: View, anchor: Op, pattern: Pattern, *, direct: bool = False) -> Iterator[tuple[Match, Op]]:
    """Yield the matches of a pattern with an op of a rare kind, each with its last op. The match may not be closed.

    O(steps from the anchor).
    """
    for last in _ends(view, anchor):
        value = last.outputs[0]
        for match in pattern(view, value, Match(direct=direct)) if value is not None else ():
            if anchor.id in match.ops:
                yield match, last


def direct_match(view: View, anchor: Op, pattern: Pattern) -> Match | None:
    """Return the first closed match with an op, without looking through Casts and Identities."""
    found = matches(view, anchor, pattern, direct=True)
    return next((match for match, last in found if is_closed(view, match, last)), None)


def _ends(view: View, anchor: Op) -> list[Op]:
    """Return the possible last ops of a match with this anchor, in order."""
    seen = level = {anchor.id}
    for _ in range(_MOST_STEPS):
        following = [readers(view, view.ops[op].outputs[0]) for op in level]
        near = {op for ops in following if len(ops) <= _MOST_READERS for op in ops}
        level = {op for op in near - seen if view.ops[op].kind in CARRIERS}
        seen = seen | level
    return [view.ops[op] for op in sorted(seen)]


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
    return Match(frozenset(ops), {**match.values, ENTRY: entry})


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
    return op.kind == "Identity" or casts_floats(view, op)


def behind_casts(view: View, value: ValueId) -> tuple[ValueId, list[OpId]]:
    """Return the value behind Casts, and these Casts."""
    passed, bare = trail(view, value, lambda op: op.inputs[0] if is_transparent(view, op) else None)
    return bare if bare is not None else value, [op.id for op in passed]


def _encloses(view: View, ops: Container[OpId], op: Op) -> bool:
    return all(confined(view, value, ops) for value in op.results)
