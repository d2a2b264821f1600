"""Pairing: match values of two models, to compare the models inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import casts_floats
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.view import MAIN, OpId, Role, ValueId, View
from amp_rewrite.reports.match import match
from amp_rewrite.reports.report_builder import report_of


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

    @cached_property
    def low(self) -> DType:
        """Return the candidate's low type; float32 if it has none."""
        return next(iter(self.candidate.low_types), DType.FLOAT)

    @cached_property
    def measured(self) -> Mapping[ValueId, ValueId]:
        """Return the pairs of floating results, one per value of the reference, in the candidate's order."""
        pairs: dict[ValueId, ValueId] = {}
        taken: set[ValueId] = set()
        for mine, theirs in self.values.items():
            op = self.candidate.producer(mine)
            casts = op is None or casts_floats(self.candidate, op)
            if not casts and theirs not in taken and self.candidate.holds_floats(mine):
                pairs[mine] = theirs
                taken.add(theirs)
        return pairs

    @cached_property
    def measurable(self) -> int:
        """Return the number of the candidate's floating results that can be paired, without Casts and constants."""
        return sum(
            1
            for op in self.candidate.ops
            if op.scope == MAIN and not casts_floats(self.candidate, op)
            for value in op.results
            if self.candidate.constant(value) is None and self.candidate.holds_floats(value)
        )


def _values(reference: View, candidate: View, ops: Mapping[OpId, OpId]) -> dict[ValueId, ValueId]:
    """Return the pairs in the candidate's order: by matched ops, through Casts, then by name."""
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
    """True if a value depends on the input data: a result that is not a Constant, or an input."""
    known = view.values[value]
    return known.overridable or (known.role is not Role.INITIALIZER and known.tensor is None)


def _alike(reference: View, theirs: ValueId, candidate: View, mine: ValueId) -> bool:
    """True if two values can be compared and their producers compute the same thing."""
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
