"""Upcasts: low ops of the model, raised to float32 for patterns or evidence.

Named ops are upcast, and ops that cannot differ in type from them: those of the same decomposed norm, softmax or
activation, and the scale and bias that the runtime fuses. Ops on a sequence of a low type keep it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import partial

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.affine import AFFINE_NOTE, input_type
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.gate import Gate, GateRefusal
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable, trail
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_ANY_TYPE = ELEMENTLESS | {"Cast"}
"""Ops whose results do not depend on the type in which they read a value."""


@dataclass
class Upcast:
    """The paint of raised variables, and of ops with a refused wish for float32."""

    problem: Problem
    gate: Gate
    upcast: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    refused: dict[OpId, Paint] = field(default_factory=dict)

    @property
    def view(self) -> View:
        """The model's index."""
        return self.problem.view

    @property
    def lower(self) -> Container[OpId]:
        """Ops lowered by the user."""
        return self.problem.options.lower

    def made(self, value: ValueId) -> bool:
        """True if a value is low in the model and now made in float32."""
        return made_variable(self.view, value) in self.upcast

    def type_of(self, value: ValueId) -> DType | None:
        """Return the new type of a value."""
        return DType.FLOAT if self.made(value) else self.view.dtype(value)

    def reads(self, use: Use) -> bool:
        """True if an op reads one of its inputs in float32 now and in a low type in the model."""
        return read_variable(self.view.ops[use.op], use.slot) in self.upcast


def upcast_low(problem: Problem, gate: Gate) -> Upcast:
    """Upcast the low variables of the named ops, and of ops tied to their type."""
    state = Upcast(problem, gate)
    wishes = dict(_wishes(state))
    if not wishes:
        return state
    for op_id in sorted(wishes):
        _upcast(state, op_id, wishes[op_id])
    groups = clusters(state.view, LOW_TYPES) if state.upcast else ()
    for cluster in groups:
        _whole(state, cluster)
    for cluster in groups:
        _affine(state, cluster)
    _casts(state, wishes)
    for op in state.view.ops:  # Shape and Size read no element: they take an upcast value as it comes
        source = op.inputs[0] if op.kind in ELEMENTLESS else None
        if source is not None and state.made(source):
            state.upcast[op.id, "T"] = Paint.float32(reasons.SHAPE_FOLLOWS, state.view.values[source].producer)
    return state


def _wishes(state: Upcast) -> Iterator[tuple[OpId, Paint]]:
    paints: dict[OpId, Paint] = {}
    found = state.problem.options.found
    for op, pattern in state.problem.options.keep.items():
        by = "the check" if pattern in found else repr(pattern)
        paints[op] = Paint.float32(reasons.RAISED, None, f"kept by {by}")
    for pin in state.problem.pins:
        if pin.raises and pin.op not in state.lower:
            paints.setdefault(pin.op, Paint.float32(reasons.RAISED, pin.because, f"{pin.rule}: {pin.note}"))
    yield from ((op, paint) for op, paint in paints.items() if low_type(state.view, op) is not None)


def low_type(view: View, op: OpId) -> DType | None:
    """Return the low type of an op's first low variable; None if it has none."""
    types = (v.type.dtype for v in view.variables[op] if v.type is not None)
    return next((dtype for dtype in types if dtype in LOW_TYPES), None)


def _upcast(state: Upcast, op_id: OpId, paint: Paint) -> None:
    """Upcast an op as far as the gate admits it; constants are widened for their readers instead."""
    op = state.view.ops[op_id]
    if op.kind in _ANY_TYPE or op.kind == "Constant":
        return
    if _low_sequences(state.view, op):
        _refuse(state, op_id, f"{paint.note}; a sequence has one element type for all ops that share it")
        return
    names = state.gate.upcastable(state.view, op)
    if isinstance(names, GateRefusal):
        _refuse(state, op_id, f"{paint.note}; {names.rule}: {names.note}")
        return
    for name in names:
        state.upcast.setdefault((op_id, name), paint)


def _refuse(state: Upcast, op: OpId, note: str) -> None:
    for variable in state.view.variables[op]:
        state.upcast.pop((op, variable.name), None)
    state.refused[op] = Paint(low_type(state.view, op) or state.problem.to, reasons.UNRAISED, None, note)


def _is_upcast(state: Upcast, op: OpId) -> bool:
    return any((op, variable.name) in state.upcast for variable in state.view.variables[op])


# -- groups ------------------------------------------------------------------------------------------


def _whole(state: Upcast, cluster: Cluster) -> None:
    culprit = next((op for op in cluster.ops if _is_upcast(state, op)), None)
    if culprit is None:
        return
    note = f"{cluster.kind} is raised as a whole, because {state.view.ops[culprit].name!r} is"
    for op in cluster.ops:
        if low_type(state.view, op) is not None and op not in state.lower:
            _upcast(state, op, Paint.float32(reasons.RAISED, culprit, note))


def _low_sequences(view: View, op: Op) -> list[ValueId]:
    types = ((v, view.types[v]) for v in op.ports)
    return [v for v, t in types if t is not None and t.container != TENSOR and t.dtype in LOW_TYPES]


def _affine(state: Upcast, cluster: Cluster) -> None:
    view = state.view
    low = next((dtype for op in cluster.tail if (dtype := low_type(view, op)) is not None), None)
    dtype = input_type(view, cluster, low, state.type_of, partial(_read_as, state)) if low is not None else None
    if low is None or dtype is None:
        return
    high = dtype is DType.FLOAT
    for op in (op for op in cluster.tail if view.ops[op].kind != "Cast"):
        if high and not _is_upcast(state, op):
            _upcast(state, op, Paint.float32(reasons.RAISED, cluster.ops[0], AFFINE_NOTE))
        elif not high and _is_upcast(state, op):
            _refuse(state, op, f"what {cluster.kind} normalizes is {low.spelling}, and onnxruntime fuses both")


def _read_as(state: Upcast, value: ValueId, use: Use) -> DType | None:
    upcast = state.made(value) if _takes_any_type(state, use) else state.reads(use)
    return DType.FLOAT if upcast else state.view.dtype(value)


# -- ops that follow ---------------------------------------------------------------------------------


def _takes_any_type(state: Upcast, use: Use) -> bool:
    return state.view.ops[use.op].kind in _ANY_TYPE


def _casts(state: Upcast, wishes: dict[OpId, Paint]) -> None:
    view = state.view
    for op in reversed(view.ops):
        _move_along(state, op)
        result = op.outputs[0] if op.kind == "Cast" else None
        if result is None or view.dtype(result) not in LOW_TYPES:
            continue
        if exposed(view, result) or op.id in state.lower:
            continue
        uses = view.uses[result]
        upcast = [use for use in uses if state.reads(use)]
        through = op.id in wishes and any(view.ops[use.op].kind == "Cast" for use in uses)
        if any(not _takes_any_type(state, use) and not state.reads(use) for use in uses):
            continue
        if (upcast or through) and (op.id in wishes or len(upcast) == len(uses)):
            paint = Paint.float32(reasons.EXISTING_CAST, upcast[0].op if upcast else None)
            state.upcast[op.id, "T2"] = wishes.get(op.id, paint)


def _move_along(state: Upcast, op: Op) -> None:
    """Upcast a mover of the result of a Cast to a low type, if only upcast ops read it.

    The Cast rounds, and the digits that it drops are the reason for which its readers were upcast.
    """
    view = state.view
    results = op.results
    if not _moves(view, op) or op.id in state.lower or any(exposed(view, v) for v in results):
        return
    uses = [use for v in results for use in view.uses[v]]
    if not uses or not all(map(state.reads, uses)) or isinstance(state.gate.upcastable(view, op), GateRefusal):
        return
    if _cast_to_low(view, op):
        note = "moves what is cast, and only ops in float32 read it"
        _upcast(state, op.id, Paint.float32(reasons.RAISED, uses[0].op, note))


def _moves(view: View, op: Op) -> bool:
    copies = COPIES.get(op.kind) == (0,) and op.kind not in CASTS
    return copies and low_type(view, op.id) is not None and not _low_sequences(view, op)


def _cast_to_low(view: View, op: Op) -> bool:
    _, moved = trail(view, op.outputs[0], lambda step: step.inputs[0] if _moves(view, step) else None)
    source = view.producer(moved, "Cast")
    before = view.dtype(source.inputs[0]) if source is not None else None
    return before is not None and not before.low
