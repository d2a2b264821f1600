"""The way back: what the model computes in a low type and patterns or evidence ask for in float32.

Only the ops that are named are raised, and what cannot be in two types: the rest of a sequence's ops, the rest of
a norm, softmax or activation that is written out op by op, and the scale and bias that the runtime fuses.
"""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.groups import fuses
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed, trail
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS, SEEN_THROUGH
from amp_rewrite.ir.patterns.clusters import Cluster, clusters
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_LOW = tuple(dtype for dtype in DType if dtype.low)
_TAKE_ANYTHING = ELEMENTLESS | {"Cast"}
"""They read a value in whatever type it is made: no number that they give depends on it."""


def raise_low(canvas: Canvas) -> None:
    """Every low variable of the named ops, and of the ops that cannot be in another type than those."""
    wishes = dict(sorted(_wishes(canvas)))
    if not wishes:
        return
    for op, why in wishes.items():
        _raise(canvas, op, why)
    groups = clusters(canvas.view, _LOW) if canvas.raised else ()
    for cluster in groups:
        _whole(canvas, cluster)
    _sequences(canvas)
    for cluster in groups:
        _tail(canvas, cluster)
    _casts(canvas, wishes)
    _shapes(canvas)


def _wishes(canvas: Canvas) -> Iterator[tuple[OpId, Paint]]:
    """The ops with a low type that are asked back to float32, by the first that asks."""
    asked: dict[OpId, Paint] = {}
    for op, pattern in canvas.keep.items():
        asked[op] = canvas.high(reasons.RAISED, None, f"kept by {pattern!r}")
    for pin in canvas.pins:
        if pin.raises and pin.op not in canvas.lower:
            asked.setdefault(pin.op, canvas.high(reasons.RAISED, pin.because, f"{pin.rule}: {pin.note}"))
    yield from ((op, why) for op, why in asked.items() if low_type(canvas.view, canvas.view.ops[op]) is not None)


def low_type(view: View, op: Op) -> DType | None:
    """The low type of an op's first low variable; None if it has none."""
    types = (v.type.dtype for v in view.variables[op.id] if v.type is not None)
    return next((dtype for dtype in types if dtype is not None and dtype.low), None)


def _raise(canvas: Canvas, op_id: OpId, why: Paint) -> None:
    """Raise an op as far as the gate lets it; constants are widened for their readers, not raised."""
    op = canvas.view.ops[op_id]
    if op.kind in _TAKE_ANYTHING or op.kind == "Constant":
        return
    lift = canvas.gate.lift(canvas.view, op)
    if lift.refusal is not None:
        _refuse(canvas, op, f"{why.note}; {lift.refusal.rule}: {lift.refusal.note}")
    for name in lift.variables:
        canvas.raised.setdefault((op_id, name), why)


def _refuse(canvas: Canvas, op: Op, note: str) -> None:
    """Leave an op in its low type, and say why."""
    for variable in canvas.view.variables[op.id]:
        canvas.raised.pop((op.id, variable.name), None)
    canvas.unraised[op.id] = Paint(low_type(canvas.view, op) or canvas.to, reasons.UNRAISED, None, note)


def _is_raised(canvas: Canvas, op: OpId) -> bool:
    return any((op, variable.name) in canvas.raised for variable in canvas.view.variables[op])


def _liftable(canvas: Canvas, op: Op) -> bool:
    return canvas.gate.lift(canvas.view, op).refusal is None


# -- groups ------------------------------------------------------------------------------------------


def _whole(canvas: Canvas, cluster: Cluster) -> None:
    """A cluster of which anything is raised is raised as a whole: its numbers are largest between its ops."""
    culprit = next((op for op in cluster.ops if _is_raised(canvas, op)), None)
    if culprit is None:
        return
    note = f"{cluster.kind} is raised as a whole, because {canvas.view.ops[culprit].name!r} is"
    for op in cluster.ops:
        if low_type(canvas.view, canvas.view.ops[op]) is not None and op not in canvas.lower:
            _raise(canvas, op, canvas.high(reasons.RAISED, culprit, note))


def _sequences(canvas: Canvas) -> None:
    """A sequence has one element type: all ops that touch it are raised, or none is."""
    done: set[OpId] = set()
    for op in sorted({op for op, _ in canvas.raised}):
        if op in done or not _low_sequences(canvas.view, canvas.view.ops[op]):
            continue
        members, sealed = _sharing(canvas, op)
        done.update(members)
        for member in sorted(members):
            found = canvas.view.ops[member]
            if not sealed:
                note = "shares a sequence, which has one element type"
                _raise(canvas, member, canvas.high(reasons.RAISED, op, note))
            elif _is_raised(canvas, member):
                _refuse(canvas, found, "a sequence that it shares reaches a place that keeps its type")


def _low_sequences(view: View, op: Op) -> list[ValueId]:
    """The sequences and optionals of a low type that an op reads or makes."""
    values = [v for v in (*op.inputs, *op.outputs) if v is not None]
    types = ((v, view.types[v]) for v in values)
    return [v for v, t in types if t is not None and t.container != TENSOR and t.dtype is not None and t.dtype.low]


def _sharing(canvas: Canvas, start: OpId) -> tuple[set[OpId], bool]:
    """The ops that sequences join to one, and whether any of those keeps its type."""
    view, members, pending, sealed = canvas.view, {start}, [start], False
    while pending:
        op = view.ops[pending.pop()]
        sealed = sealed or op.signature is None or bool(op.bodies) or not _liftable(canvas, op)
        for value in _low_sequences(view, op):
            made_by = view.values[value].producer
            sealed = sealed or made_by is None or exposed(view, value)
            near = {use.op for use in view.uses[value]} | ({made_by} if made_by is not None else set())
            pending.extend(near - members)
            members |= near
    return members, sealed


def _tail(canvas: Canvas, cluster: Cluster) -> None:
    """Scale and bias of a decomposed normalization get the type of what is normalized (see `unit.norm_tails`)."""
    view = canvas.view
    low = next((found for op in cluster.tail if (found := low_type(view, view.ops[op])) is not None), None)
    if low is None or cluster.entry is None or not fuses(view, cluster, low):
        return
    tail = [view.ops[op] for op in cluster.tail if view.ops[op].kind != "Cast"]
    high = _seen(canvas, cluster.entry, frozenset(cluster.ops)) is DType.FLOAT
    for op in tail:
        if high and not _is_raised(canvas, op.id):
            note = "scale and bias have the type of what is normalized: onnxruntime fuses them into one node"
            _raise(canvas, op.id, canvas.high(reasons.RAISED, cluster.ops[0], note))
        elif not high and _is_raised(canvas, op.id):
            _refuse(canvas, op, f"what {cluster.kind} normalizes is {low.spelling}, and onnxruntime fuses both")


def _seen(canvas: Canvas, value: ValueId, readers: frozenset[OpId]) -> DType | None:
    """The type of a value where the runtime's fusion finds it: before the Casts that only `readers` read."""
    view = canvas.view
    made = DType.FLOAT if canvas.made_raised(value) else view.dtype(value)
    mine = [use for use in view.uses[value] if use.op in readers]
    wanted = _read_as(canvas, mine[0]) if mine else made
    others = [use for use in view.uses[value] if use.op not in readers]
    if made is not wanted and any(_read_as(canvas, use) is wanted for use in others):
        return wanted
    op = view.producer(value)
    alone = not others and not exposed(view, value)
    if op is not None and alone and op.kind in SEEN_THROUGH and op.inputs[0] is not None:
        return _seen(canvas, op.inputs[0], frozenset((op.id,)))
    return made


def _read_as(canvas: Canvas, use: Use) -> DType | None:
    """The type in which a value is read there; a Cast takes it as it is made."""
    value = canvas.view.ops[use.op].inputs[use.slot]
    assert value is not None
    raised = canvas.made_raised(value) if _takes_anything(canvas, use) else canvas.reads_raised(use.op, use.slot)
    return DType.FLOAT if raised else canvas.view.dtype(value)


# -- what follows --------------------------------------------------------------------------------------


def _takes_anything(canvas: Canvas, use: Use) -> bool:
    return canvas.view.ops[use.op].kind in _TAKE_ANYTHING


def _casts(canvas: Canvas, wishes: dict[OpId, Paint]) -> None:
    """A Cast to a low type that only raised ops read casts to float32 instead; one that is named, also before Casts."""
    view = canvas.view
    for op in reversed(view.ops):
        _move_along(canvas, op)
        result = op.outputs[0] if op.kind == "Cast" else None
        if result is None or (low := view.dtype(result)) is None or not low.low:
            continue
        if _kept(view, result) or op.id in canvas.lower:
            continue
        uses = view.uses[result]
        raised = [use for use in uses if canvas.reads_raised(use.op, use.slot)]
        through = [use for use in uses if op.id in wishes and view.ops[use.op].kind == "Cast"]
        rest = [use for use in uses if not _takes_anything(canvas, use) and not canvas.reads_raised(use.op, use.slot)]
        if not rest and len(raised) + len(through) > 0 and (op.id in wishes or len(raised) == len(uses)):
            why = canvas.high(reasons.EXISTING_CAST, raised[0].op) if raised else None
            canvas.raised[op.id, "T2"] = wishes.get(op.id) or why or canvas.high(reasons.EXISTING_CAST, None)


def _move_along(canvas: Canvas, op: Op) -> None:
    """Raise an op that only moves what the model casts to a low type, for raised ops alone: the Cast rounds, and
    what it rounds away is what they were raised for."""
    view = canvas.view
    if not _moves(view, op) or op.id in canvas.lower or any(_kept(view, v) for v in op.outputs):
        return
    uses = [use for v in op.outputs if v is not None for use in view.uses[v]]
    if not uses or not all(canvas.reads_raised(use.op, use.slot) for use in uses) or not _liftable(canvas, op):
        return
    if _cast_to_low(view, op):
        note = "moves what is cast, and only ops in float32 read it"
        _raise(canvas, op.id, canvas.high(reasons.RAISED, uses[0].op, note))


def _moves(view: View, op: Op) -> bool:
    """Whether an op moves or selects elements of its first input, a low tensor, and does nothing else."""
    copies = COPIES.get(op.kind) == (0,) and op.kind not in CASTS
    return copies and low_type(view, op) is not None and not _low_sequences(view, op)


def _cast_to_low(view: View, op: Op) -> bool:
    """Whether what an op moves was cast to a low type from another."""
    _, moved = trail(view, op.outputs[0], lambda step: step.inputs[0] if _moves(view, step) else None)
    source = view.producer(moved)
    if source is None or source.kind != "Cast" or source.inputs[0] is None:
        return False
    before = view.dtype(source.inputs[0])
    return before is not None and not before.low


def _kept(view: View, value: ValueId | None) -> bool:
    """Whether a value keeps its type: others than ops read it."""
    return value is not None and exposed(view, value)


def _shapes(canvas: Canvas) -> None:
    """Shape and Size read no element: they take a raised value as it comes."""
    for op in canvas.view.ops:
        source = op.inputs[0] if op.kind in ELEMENTLESS else None
        if source is not None and canvas.made_raised(source):
            canvas.raised[op.id, "T"] = canvas.high(reasons.SHAPE_FOLLOWS, canvas.view.values[source].producer)
