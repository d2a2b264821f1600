"""Low ops of the model, raised to float32 for patterns or evidence.

Named ops are raised, and ops that cannot differ in type from them: those of the same decomposed norm, softmax or
activation, and the scale and bias that the runtime fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.problem import Problem
from amp_rewrite.decide.reasons import Paint, float32
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, made_variable, read_variable, trail
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_ANY_TYPE = ELEMENTLESS | {"Cast"}
"""Ops whose results do not depend on the type in which they read a value."""


@dataclass
class Raised:
    """The paints of raised variables, and of ops without the float32 wished for them."""

    problem: Problem
    paints: dict[tuple[OpId, str], Paint] = field(default_factory=dict)
    refused: dict[OpId, Paint] = field(default_factory=dict)

    @property
    def view(self) -> View:
        return self.problem.view

    def __post_init__(self) -> None:
        wishes = _wishes(self.problem)
        for op_id in sorted(wishes):
            self._raise(op_id, wishes[op_id])
        groups = clusters(self.view, LOW_TYPES) if self.paints else ()
        for cluster in groups:
            self._whole(cluster)
        for cluster in groups:
            self._affine(cluster)
        for op in reversed(self.view.ops) if wishes else ():
            self._move(op)
            self._cast(op, wishes)
        for op in self.view.of_kinds(ELEMENTLESS):  # they read no element
            source = op.inputs[0]
            if source is not None and made_variable(self.view, source) in self.paints:
                self.paints[op.id, "T"] = float32(reasons.SHAPE_FOLLOWS, self.view.values[source].producer)

    def _raise(self, op_id: OpId, paint: Paint, *, asked: bool = True) -> None:
        """Raise an op as far as the gate admits it; constants are stored in float32 for their readers instead."""
        op = self.view.ops[op_id]
        if op.kind in _ANY_TYPE or op.kind == "Constant":
            return
        names = self.problem.gate.raisable(self.view, op)
        if not isinstance(names, Paint):
            for name in names:
                self.paints.setdefault((op_id, name), paint)
        elif asked:
            self._refuse(op_id, f"{paint.note}; {names.rule}: {names.note}")

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
            if low_type(self.view, op) is not None and op not in self.problem.lower:
                self._raise(op, float32(reasons.RAISED, first, note))

    def _affine(self, cluster: Cluster) -> None:
        low = next((dtype for op in cluster.tail if (dtype := low_type(self.view, op)) is not None), None)
        dtype = input_type(self.view, cluster, low, self.made, self._read) if low is not None else None
        for op in cluster.tail if low is not None and dtype is not None else ():
            if self.view.ops[op].kind == "Cast" or self._is_raised(op) is (dtype is DType.FLOAT):
                continue
            if dtype is DType.FLOAT:
                self._raise(op, float32(reasons.RAISED, cluster.ops[0], AFFINE_NOTE))
            elif low is not None:
                self._refuse(op, f"what {cluster.kind} normalizes is {low.spelling}, and onnxruntime fuses both")

    def made(self, value: ValueId) -> DType | None:
        """Return the type in which a value is made, of an op that is not lowered."""
        return DType.FLOAT if made_variable(self.view, value) in self.paints else self.view.dtype(value)

    def _read(self, value: ValueId, use: Use) -> DType | None:
        if self.view.ops[use.op].kind in _ANY_TYPE:
            return self.made(value)
        return DType.FLOAT if self._reads_raised(use) else self.view.dtype(value)

    def _reads_raised(self, use: Use) -> bool:
        return read_variable(self.view.ops[use.op], use.slot) in self.paints

    def _move(self, op: Op) -> None:
        """Raise a mover of the result of a Cast to a low type, if only raised ops read it.

        The Cast rounds, and the digits that it drops are the reason for which its readers were raised.
        """
        if not _moves(self.view, op) or op.id in self.problem.lower:
            return
        uses = [use for value in op.results for use in self.view.uses[value]]
        inner = bool(uses) and not any(exposed(self.view, value) for value in op.results)
        if inner and _casts_to_low(self.view, op) and all(map(self._reads_raised, uses)):
            note = "moves what is cast, and only ops in float32 read it"
            self._raise(op.id, float32(reasons.RAISED, uses[0].op, note), asked=False)

    def _cast(self, op: Op, wishes: Mapping[OpId, Paint]) -> None:
        result = op.outputs[0] if op.kind == "Cast" else None
        if result is None or self.view.dtype(result) not in LOW_TYPES or op.id in self.problem.lower:
            return
        uses = self.view.uses[result]
        raised = [use for use in uses if self._reads_raised(use)]
        free = [use for use in uses if self.view.ops[use.op].kind in _ANY_TYPE]
        through = op.id in wishes and any(self.view.ops[use.op].kind == "Cast" for use in uses)
        if exposed(self.view, result) or len(raised) + len(free) < len(uses):
            return
        if (raised or through) and (op.id in wishes or len(raised) == len(uses)):
            paint = float32(reasons.EXISTING_CAST, raised[0].op if raised else None)
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
    for op, pattern in problem.keep.items():
        by = "the check" if pattern in problem.found else repr(pattern)
        paints[op] = float32(reasons.RAISED, None, f"kept by {by}")
    for pin in problem.pins:
        if pin.raises and pin.op not in problem.lower:
            paints.setdefault(pin.op, float32(reasons.RAISED, pin.because, f"{pin.rule}: {pin.note}"))
    return {op: paint for op, paint in paints.items() if low_type(problem.view, op) is not None}


def low_type(view: View, op: OpId) -> DType | None:
    """Return the low type of an op's first low variable; None if it has none."""
    types = (v.type.dtype for v in view.variables[op] if v.type is not None)
    return next((dtype for dtype in types if dtype in LOW_TYPES), None)


# -- scale and bias of written-out norms, in the type of the input if onnxruntime fuses both ---------------

AFFINE_NOTE = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"
SEEN_THROUGH = frozenset(("Cast", "Dropout", "Identity"))
"""Ops that onnxruntime looks through when it fuses a normalization."""
Made = Callable[[ValueId], DType | None]
"""The type in which a value is made."""
Read = Callable[[ValueId, Use], DType | None]
"""The type in which an op reads a value."""


def tied(view: View, cluster: Cluster, low: DType) -> bool:
    """True if onnxruntime fuses a written-out norm and then wants scale and bias in the type of its input.

    It fuses from optimization level BASIC on and looks past a Cast that only the norm reads, so the fused node takes
    the type before that Cast, and the runtime refuses the model when scale and bias have another. The types of the ops
    in between do not matter. Source: some 360 small models opened with onnxruntime 1.31.1.
    """
    if cluster.kind == "layer_normalization":
        return low is DType.BFLOAT16 or view.opset >= FIRST_FUSED["LayerNormalization"]
    return cluster.kind == "rms_normalization" and low is DType.BFLOAT16


def input_type(view: View, cluster: Cluster, low: DType, made: Made, read: Read) -> DType | None:
    """Return the common type of a norm's input, scale and bias; None if they are free."""
    if not cluster.tail or not tied(view, cluster, low):
        return None
    return _seen_type(view, cluster.entry, cluster.ops, made, read)


def _seen_type(view: View, value: ValueId, readers: Collection[OpId], made: Made, read: Read) -> DType | None:
    """Return the type of a value for the runtime's fusion of `readers`, before the Casts for them alone."""
    dtype, uses = made(value), view.uses[value]
    needed = next((read(value, use) for use in uses if use.op in readers), dtype)
    others, edge = [use for use in uses if use.op not in readers], exposed(view, value)
    if dtype is not needed and (
        (edge and view.dtype(value) is needed) or any(read(value, u) is needed for u in others)
    ):
        return needed
    op = view.producer(value)
    if op is None or op.kind not in SEEN_THROUGH or op.inputs[0] is None or others or edge:
        return dtype
    return _seen_type(view, op.inputs[0], (op.id,), made, read)
