"""Low ops of the model, raised to float32 for patterns or evidence.

Named ops are raised, and ops that cannot differ in type from them: those of the same decomposed norm, softmax or
activation, and the scale and bias that the runtime fuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.affine import AFFINE_NOTE, input_type
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.gate import Gate
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.reasons import Cause
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable, trail
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_ANY_TYPE = ELEMENTLESS | {"Cast"}
"""Ops whose results do not depend on the type in which they read a value."""


@dataclass
class Raised:
    """The paints of raised variables, and of ops without the float32 wished for them."""

    problem: Problem
    gate: Gate
    paints: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    refused: dict[OpId, Paint] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """The model's index."""
        return self.problem.view

    @classmethod
    def of(cls, problem: Problem, gate: Gate) -> Raised:
        """Raise the low variables of the named ops, and of ops tied to their type."""
        raised = cls(problem, gate)
        wishes = _wishes(problem)
        for op_id in sorted(wishes):
            raised._raise(op_id, wishes[op_id])
        groups = clusters(problem.view, LOW_TYPES) if raised.paints else ()
        for cluster in groups:
            raised._whole(cluster)
        for cluster in groups:
            raised._affine(cluster)
        for op in reversed(problem.view.ops) if wishes else ():
            raised._move(op)
            raised._cast(op, wishes)
        for op in problem.view.of_kinds(ELEMENTLESS):  # they read no element
            source = op.inputs[0]
            if source is not None and made_variable(problem.view, source) in raised.paints:
                made_by = problem.view.values[source].producer
                raised.paints[op.id, "T"] = Paint.float32(reasons.SHAPE_FOLLOWS, made_by)
        return raised

    def _raise(self, op_id: OpId, paint: Paint) -> None:
        """Raise an op as far as the gate admits it; constants are stored in float32 for their readers instead."""
        op = self.view.ops[op_id]
        if op.kind in _ANY_TYPE or op.kind == "Constant":
            return
        names = self.gate.raisable(self.view, op)
        if isinstance(names, Cause):
            self._refuse(op_id, f"{paint.note}; {names.rule}: {names.note}")
            return
        for name in names:
            self.paints.setdefault((op_id, name), paint)

    def _refuse(self, op: OpId, note: str) -> None:
        for variable in self.view.variables[op]:
            self.paints.pop((op, variable.name), None)
        self.refused[op] = Paint(low_type(self.view, op) or self.problem.to, reasons.UNRAISED, None, note)

    def _is_raised(self, op: OpId) -> bool:
        return any((op, variable.name) in self.paints for variable in self.view.variables[op])

    def _whole(self, cluster: Cluster) -> None:
        first = next(filter(self._is_raised, cluster.ops), None)
        if first is None:
            return
        note = f"{cluster.kind} is raised as a whole, because {self.view.ops[first].name!r} is"
        for op in cluster.ops:
            if low_type(self.view, op) is not None and op not in self.problem.options.lower:
                self._raise(op, Paint.float32(reasons.RAISED, first, note))

    def _affine(self, cluster: Cluster) -> None:
        low = next((dtype for op in cluster.tail if (dtype := low_type(self.view, op)) is not None), None)
        dtype = input_type(self.view, cluster, low, self._made, self._read) if low is not None else None
        if low is None or dtype is None:
            return
        high = dtype is DType.FLOAT
        for op in (op for op in cluster.tail if self.view.ops[op].kind != "Cast"):
            if high and not self._is_raised(op):
                self._raise(op, Paint.float32(reasons.RAISED, cluster.ops[0], AFFINE_NOTE))
            elif not high and self._is_raised(op):
                self._refuse(op, f"what {cluster.kind} normalizes is {low.spelling}, and onnxruntime fuses both")

    def _made(self, value: ValueId) -> DType | None:
        return DType.FLOAT if made_variable(self.view, value) in self.paints else self.view.dtype(value)

    def _read(self, value: ValueId, use: Use) -> DType | None:
        op = self.view.ops[use.op]
        if op.kind in _ANY_TYPE:
            return self._made(value)
        return DType.FLOAT if read_variable(op, use.slot) in self.paints else self.view.dtype(value)

    def _move(self, op: Op) -> None:
        """Raise a mover of the result of a Cast to a low type, if only raised ops read it.

        The Cast rounds, and the digits that it drops are the reason for which its readers were raised.
        """
        if not _moves(self.view, op) or op.id in self.problem.options.lower:
            return
        uses = [use for value in op.results for use in self.view.uses[value]]
        if not uses or any(exposed(self.view, value) for value in op.results) or not _casts_to_low(self.view, op):
            return
        low = any(read_variable(self.view.ops[use.op], use.slot) not in self.paints for use in uses)
        if not low and not isinstance(self.gate.raisable(self.view, op), Cause):
            note = "moves what is cast, and only ops in float32 read it"
            self._raise(op.id, Paint.float32(reasons.RAISED, uses[0].op, note))

    def _cast(self, op: Op, wishes: Mapping[OpId, Paint]) -> None:
        """Raise a Cast to a low type with its readers."""
        result = op.outputs[0] if op.kind == "Cast" else None
        if result is None or self.view.dtype(result) not in LOW_TYPES or op.id in self.problem.options.lower:
            return
        uses = self.view.uses[result]
        raised = [use for use in uses if read_variable(self.view.ops[use.op], use.slot) in self.paints]
        free = [use for use in uses if self.view.ops[use.op].kind in _ANY_TYPE]
        through = op.id in wishes and any(self.view.ops[use.op].kind == "Cast" for use in uses)
        if exposed(self.view, result) or len(raised) + len(free) < len(uses):
            return
        if (raised or through) and (op.id in wishes or len(raised) == len(uses)):
            paint = Paint.float32(reasons.EXISTING_CAST, raised[0].op if raised else None)
            self.paints[op.id, "T2"] = wishes.get(op.id, paint)


def _moves(view: View, op: Op) -> bool:
    return COPIES.get(op.kind) == (0,) and op.kind not in CASTS and low_type(view, op.id) is not None


def _casts_to_low(view: View, op: Op) -> bool:
    _, moved = trail(view, op.outputs[0], lambda step: step.inputs[0] if _moves(view, step) else None)
    source = view.producer(moved, "Cast")
    before = view.dtype(source.inputs[0]) if source is not None else None
    return before is not None and not before.low


def _wishes(problem: Problem) -> dict[OpId, Paint]:
    paints: dict[OpId, Paint] = {}
    options = problem.options
    for op, pattern in options.keep.items():
        by = "the check" if pattern in options.found else repr(pattern)
        paints[op] = Paint.float32(reasons.RAISED, None, f"kept by {by}")
    for pin in problem.pins:
        if pin.raises and pin.op not in options.lower:
            paints.setdefault(pin.op, Paint.float32(reasons.RAISED, pin.because, f"{pin.rule}: {pin.note}"))
    return {op: paint for op, paint in paints.items() if low_type(problem.view, op) is not None}


def low_type(view: View, op: OpId) -> DType | None:
    """Return the low type of an op's first low variable; None if it has none."""
    types = (v.type.dtype for v in view.variables[op] if v.type is not None)
    return next((dtype for dtype in types if dtype in LOW_TYPES), None)
