"""Pairing: match values of two models, to compare the models inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import casts_floats, exact
from amp_rewrite.ir.op_classes import CASTS, RANDOM
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, ValueId, View
from amp_rewrite.reports.match import match
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.passes.inline import inlined


@dataclass(frozen=True)
class Pairing:
    """Matching values of two models. Only tensors of the main graphs are paired, floats with floats.

    `values` maps from the candidate to the reference. Several values of the candidate may map to one of the reference,
    for example a value and its Cast to another floating type. Constants are never paired.
    """

    reference: View
    candidate: View
    values: Mapping[ValueId, ValueId]

    @classmethod
    def between(cls, reference: View, candidate: View) -> Self:
        """Match ops by `reports.match`, and remaining values by name. Nearly O(ops + values)."""
        ops = {OpId(j): OpId(i) for i, j in match(report_of(reference), report_of(candidate))}
        ops = {j: i for j, i in ops.items() if candidate.ops[j].scope == reference.ops[i].scope == MAIN}
        return cls(reference, candidate, _values(reference, candidate, ops))

    @classmethod
    def of(cls, reference: Model, candidate: Model) -> Self:
        """Pair two models. ModelError for models without floats, or if no value matches."""
        pairing = cls.between(*(View.of(inlined(model)) for model in (reference, candidate)))
        if not pairing.measurable:
            raise ModelError("the candidate's main graph computes no floating value; there is nothing to compare")
        if not pairing.measured:
            raise ModelError("no value of the two models matches: their ops have neither names nor structure in common")
        return pairing

    @cached_property
    def low(self) -> DType:
        return next(iter(self.candidate.low_types), DType.FLOAT)

    @cached_property
    def measured(self) -> Mapping[ValueId, ValueId]:
        first: dict[ValueId, ValueId] = {}
        for mine, theirs in self.values.items():
            if self._computes(mine):
                first.setdefault(theirs, mine)
        return {mine: theirs for theirs, mine in first.items()}

    @cached_property
    def measurable(self) -> int:
        """Number of the candidate's floating results, without Casts and constants."""
        view = self.candidate
        return sum(view.constant(v.id) is None and self._computes(v.id) for v in view.values_of[MAIN])

    def _computes(self, value: ValueId) -> bool:
        op = self.candidate.producer(value)
        return op is not None and not casts_floats(self.candidate, op) and self.candidate.holds_floats(value)

    @cached_property
    def shadowed(self) -> tuple[ValueId, ...]:
        """Candidate's values in the shadows' reach: results of low ops with available inputs."""
        shadowed = (op for op in self.candidate.ops if op.id in self._available and self.rounds(op))
        return tuple(value for op in shadowed for value in op.results if value in self.measured)

    def rounds(self, op: Op) -> bool:
        """True if an op can lose digits: a low op doing more than move or select."""
        if not self.is_low(op.id) or op.op_type in RANDOM:
            return False
        view = self.candidate
        weights = (v for v in op.inputs if v is not None and v not in self.values)
        return bool(op.bodies) or not exact(op) or any((view.dtype(v) or DType.FLOAT).low for v in weights)

    def is_low(self, op: OpId) -> bool:
        """True if an op reads or writes a low type, or contains one in its bodies."""
        view = self.candidate
        inner = (other for body in view.ops[op].bodies for other in view.scopes[body].ops)
        return any(view.dtype(v) in LOW_TYPES for v in view.ops[op].ports) or any(map(self.is_low, inner))

    @cached_property
    def _available(self) -> frozenset[OpId]:
        """Ops of the main graph over paired values and the candidate's constants alone."""
        view = self.candidate
        available: set[OpId] = set()
        for op in view.ops:
            if op.scope != MAIN:
                continue
            unpaired = [view.values[v] for v in reads(view, op) if v not in self.values]
            if all(v.role is Role.INITIALIZER if v.producer is None else v.producer in available for v in unpaired):
                available.add(op.id)
        return frozenset(available)


def reads(view: View, op: Op) -> Iterator[ValueId]:
    """Yield an op's operands in the main graph, those of its bodies too."""
    yield from (v for v in op.inputs if v is not None and view.values[v].scope == MAIN)
    for body in op.bodies:
        for inner in view.scopes[body].ops:
            yield from reads(view, view.ops[inner])
        yield from (v for v in view.scopes[body].outputs if view.values[v].scope == MAIN)


def _values(reference: View, candidate: View, ops: Mapping[OpId, OpId]) -> dict[ValueId, ValueId]:
    named = {v.name: v.id for v in reference.values if v.scope == MAIN and _pairable(reference, v.id)}
    by_ops: dict[ValueId | None, ValueId | None] = {}
    for j, i in ops.items():
        by_ops.update(zip(candidate.ops[j].outputs, reference.ops[i].outputs, strict=False))
    paired_by_op = set(by_ops.values())
    pairs: dict[ValueId, ValueId] = {}
    for value in candidate.values:
        if value.scope != MAIN or not _pairable(candidate, value.id):
            continue
        op = candidate.producer(value.id)
        other = by_ops.get(value.id)
        if other is None and op is not None and casts_floats(candidate, op):
            other = pairs.get(op.inputs[0])  # type: ignore[arg-type]
        if other is None and named.get(value.name) not in paired_by_op:
            other = named.get(value.name)
        if other is not None and _alike(reference, other, candidate, value.id):
            pairs[value.id] = other
    return pairs


def _pairable(view: View, value: ValueId) -> bool:
    """True for a tensor of the input data: an input, or a result other than a Constant."""
    known = view.values[value]
    if view.tensor_dtype(value) is None:
        return False
    return known.overridable or (known.role is not Role.INITIALIZER and known.tensor is None)


def _alike(reference: View, theirs: ValueId, candidate: View, mine: ValueId) -> bool:
    if reference.holds_floats(theirs) != candidate.holds_floats(mine):
        return False
    if not candidate.holds_floats(mine) and reference.types[theirs] != candidate.types[mine]:
        return False
    a, b = reference.producer(theirs), candidate.producer(mine)
    if a is None or b is None:
        return a is None
    if a.kind == b.kind or {a.kind, b.kind} & (CASTS | {"Identity"}):
        return True
    # An op of another type under the same name replaces the old one, as a Where does for the Add of a mask.
    return a.node.name == b.node.name != ""
