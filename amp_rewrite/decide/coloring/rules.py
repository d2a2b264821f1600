"""The rules of TensorFlow's auto_mixed_precision graph pass, each a function over a `Canvas`.

Roots from the allow list, deny paint forward, gray ops between two lowered ones, clear ops beside them. Paint
is a closed union, so no rule depends on the order of ops, `gray_after_allow` excepted: that one is a single
sweep in topological order, as in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.state import Canvas
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import exposed
from amp_rewrite.ir.op_classes import ELEMENTLESS, GENERATORS, LABEL_LOSSES, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color

_NEVER_FORCED = LABEL_LOSSES | RANDOM | GENERATORS


def freeze(canvas: Canvas) -> None:
    """Ops that the user or a safety rule holds in float32; they still conduct deny paint."""
    for op, pattern in sorted(canvas.keep.items()):
        canvas.frozen[op] = canvas.high(reasons.KEEP, None, f"kept by {pattern!r}")
    for pin in canvas.pins:
        if pin.op not in canvas.lower:
            canvas.frozen.setdefault(pin.op, canvas.high(pin.rule, pin.because, pin.note))


def allow_roots(canvas: Canvas) -> None:
    """Every vertex of an op on the allow list, and what the level or the user makes a root."""
    for v, (op, _, entry, _) in enumerate(canvas.vertices.all):
        if not canvas.can(v) or _widens(canvas, canvas.view.ops[op]):
            continue
        if op in canvas.lower:
            canvas.low[v] = Paint(canvas.to, reasons.LOWER, None, f"lowered by {canvas.lower[op]!r}")
        elif entry.color is Color.ALLOW:
            canvas.low[v] = Paint(canvas.to, reasons.ALLOW_ROOT, None, entry.because)
        elif canvas.level is Level.LOWER_ALL and entry.color in (Color.GRAY, Color.CLEAR):
            canvas.low[v] = Paint(canvas.to, reasons.LOWER_ALL, None, f"{entry.color.value} list")
        elif canvas.level is Level.UNSAFE_FORCE_ALL and canvas.op(v).op_type not in _NEVER_FORCED:
            canvas.low[v] = Paint(canvas.to, reasons.FORCE_ALL, None, "forced by the level")


def _widens(canvas: Canvas, op: Op) -> bool:
    """Whether an op is a Cast from a low type: lowered, it would be a copy or round, with another Cast after it."""
    source = canvas.view.dtype(op.inputs[0]) if op.kind == "Cast" and op.inputs[0] is not None else None
    return source is not None and source.low


def deny_forward(canvas: Canvas) -> None:
    """Deny ops, and every path from one through clear and gray ops up to its last deny or gray op."""
    if canvas.level is Level.UNSAFE_FORCE_ALL:
        return
    denied = [v for v, color in enumerate(canvas.colors) if color is Color.DENY]
    for v in denied:
        canvas.denied[v] = canvas.high(reasons.DENY, None, canvas.vertices.all[v].entry.because)
    if canvas.level is Level.LOWER_ALL:
        return
    ends = [v for v, color in enumerate(canvas.colors) if color in (Color.DENY, Color.GRAY)]
    conductors = set(ends)
    conductors.update(canvas.walk(ends, canvas.vertices.sources.__getitem__, canvas.clear))
    loud = [v for v in denied if canvas.vertices.all[v].op not in canvas.numbers]
    reached = canvas.walk(loud, canvas.vertices.readers.__getitem__, conductors.__contains__)
    for v, due in reached.items():
        canvas.denied.setdefault(v, canvas.high(reasons.DENY_FORWARD, due))


def between_allow(canvas: Canvas) -> None:
    """Gray and clear ops on a path from an allowed op to an allowed op with no denied op on it.

    With `spare_casts` a path may also start at a table of weights: what is looked up in it is low once it is baked.
    """
    roots = [v for v in canvas.low if canvas.color(v) is Color.ALLOW]
    starts = [*roots, *_tables(canvas)]
    downstream = set(starts)
    downstream.update(canvas.walk(starts, canvas.vertices.readers.__getitem__, lambda v: _between(canvas, v)))
    reached = canvas.walk(roots, canvas.vertices.sources.__getitem__, lambda v: v in downstream and _between(canvas, v))
    for v, due in reached.items():
        note = canvas.benign.get(canvas.vertices.all[v].op, "")
        canvas.low.setdefault(v, Paint(canvas.to, reasons.BETWEEN_ALLOW, due, note))


def _tables(canvas: Canvas) -> Iterator[int]:
    """Lookups in constants that fit the low type."""
    for v, vertex in enumerate(canvas.vertices.all if canvas.spare_casts else ()):
        op = canvas.view.ops[vertex.op]
        if op.kind == "Gather" and _between(canvas, v):
            table = op.inputs[0]
            if table is not None and canvas.view.constant(table) is not None:
                fit = canvas.view.fit(table, canvas.to)
                if not fit.overflow:
                    yield v


_CARRIERS = (Color.GRAY, Color.CLEAR)


def _between(canvas: Canvas, v: int) -> bool:
    return canvas.colors[v] in _CARRIERS and v not in canvas.denied and canvas.can(v)


def joins(canvas: Canvas) -> None:
    """Where several lowered values meet in a gray op at the end of a model: one Cast behind it instead of several.

    Lowered are such a meeting and the gray and clear ops before it, if all that they read is low or constant. Of a
    constant that is copied or reshaped on its way there, that too, if nobody reads it in float32.
    """
    if not canvas.spare_casts:
        return
    copied = {v for v, vertex in enumerate(canvas.vertices.all) if vertex.op in canvas.numbers and _joinable(canvas, v)}
    for attempt in range(_ATTEMPTS):
        joined = _joined(canvas, copied)
        wanted = {v for v in copied & joined.keys() if not _only_read_by(canvas, v, joined)}
        if not wanted:
            break
        copied = copied - wanted if attempt < _ATTEMPTS - 2 else set()
    for v, cause in sorted(joined.items()):
        canvas.low[v] = Paint(canvas.to, reasons.JOIN, cause)


_ATTEMPTS = 4


def _joinable(canvas: Canvas, v: int) -> bool:
    return v not in canvas.low and _between(canvas, v) and _reads_vertices(canvas, v)


def _joined(canvas: Canvas, copied: Collection[int]) -> dict[int, OpId]:
    """The meetings and what is before them, each with the op that it is due to. `copied`: constants on their way."""
    read: dict[int, tuple[int, ...]] = {}
    for v in range(len(canvas.vertices.all)):
        sources = canvas.vertices.sources[v]
        if not sources or v in copied or not _joinable(canvas, v):
            continue
        if all(s in canvas.low or s in read or s in copied for s in sources):
            read[v] = tuple(s for s in sources if s not in copied)
    met = {s for sources in read.values() if len(sources) > 1 for s in sources}
    spared = {s for s in met if all(r in canvas.low or r in read for r in canvas.vertices.readers[s])}
    meetings = [v for v, sources in read.items() if len(sources) > 1 and len(spared.intersection(sources)) > 1]
    before = canvas.walk(meetings, canvas.vertices.sources.__getitem__, lambda v: v in read or v in copied)
    return {v: canvas.vertices.all[min(read[v])].op if read.get(v) else before[v] for v in (*meetings, *before)}


def _only_read_by(canvas: Canvas, v: int, joined: Collection[int]) -> bool:
    """Whether nobody else reads what an op gives than lowered ops and these."""
    results = [value for value in canvas.op(v).outputs if value is not None]
    readers = [canvas.vertices.by_op.get(use.op) for value in results for use in canvas.view.uses[value]]
    low = all(at and all(r in canvas.low or r in joined for r in at) for at in readers)
    return low and canvas.view.yielded.isdisjoint(results)


def _reads_vertices(canvas: Canvas, v: int) -> bool:
    """Whether every float32 that an op reads is a constant or made by a vertex: no input, no edge of a body."""
    for value in canvas.op(v).inputs:
        if value is None or canvas.view.dtype(value) is not DType.FLOAT or canvas.view.constant(value) is not None:
            continue
        made_by = canvas.view.values[value].producer
        if made_by is None or made_by not in canvas.vertices.by_op:
            return False
    return True


def gray_after_allow(canvas: Canvas) -> None:
    """TensorFlow 2.20: a gray op that directly follows a lowered op, and no denied one, is lowered."""
    if not canvas.gray_follows_allow:
        return
    for v in range(len(canvas.vertices.all)):
        if canvas.color(v) is not Color.GRAY or not canvas.free(v):
            continue
        sources = canvas.vertices.sources[v]
        due = next((s for s in sources if s in canvas.low), None)
        if due is not None and not any(s in canvas.denied for s in sources):
            canvas.low[v] = Paint(canvas.to, reasons.GRAY_FOLLOWS_ALLOW, canvas.vertices.all[due].op)


def allow_through_clear(canvas: Canvas) -> None:
    """Clear ops that touch a lowered op, upstream or downstream, transitively."""

    def near(v: int) -> Iterable[int]:
        return (*canvas.vertices.sources[v], *canvas.vertices.readers[v])

    reached = canvas.walk(list(canvas.low), near, lambda v: canvas.clear(v) and canvas.free(v))
    for v, due in reached.items():
        canvas.low[v] = Paint(canvas.to, reasons.ALLOW_THROUGH_CLEAR, due)


def shapes_follow(canvas: Canvas) -> None:
    """Shape and Size read no element: they take their input as it comes, and no Cast or copy is made for them."""
    for v, vertex in enumerate(canvas.vertices.all if canvas.shapes_follow else ()):
        op = canvas.view.ops[vertex.op]
        if op.kind not in ELEMENTLESS or vertex.refusal is not None:
            continue
        source = op.inputs[0]
        due = next((s for s in canvas.vertices.sources[v] if s in canvas.low), None)
        if due is not None or source in canvas.low_inputs or _wanted_low_alone(canvas, source):
            because = canvas.vertices.all[due].op if due is not None else None
            canvas.low[v] = Paint(canvas.to, reasons.SHAPE_FOLLOWS, because)
        elif v in canvas.low:
            canvas.low.pop(v)


def _wanted_low_alone(canvas: Canvas, value: ValueId | None) -> bool:
    """Whether a value is a constant that is read for its elements in the low type alone."""
    if value is None or canvas.view.constant(value) is None:
        return False
    if exposed(canvas.view, value):
        return False
    uses = [use for use in canvas.view.uses[value] if canvas.view.ops[use.op].kind not in ELEMENTLESS]
    return bool(uses) and all(canvas.reads_low(use.op, use.slot) for use in uses)


def existing_casts(canvas: Canvas) -> None:
    """A Cast to float32 that only lowered ops read casts to the low type instead."""
    for v, vertex in enumerate(canvas.vertices.all):
        op = canvas.view.ops[vertex.op]
        if op.kind != "Cast" or v in canvas.low or op.outputs[0] is None or vertex.refusal is not None:
            continue
        out = op.outputs[0]
        if canvas.view.dtype(out) is not DType.FLOAT or "T2" not in vertex.variables:
            continue
        readers = canvas.vertices.readers[v]
        uses = canvas.view.uses[out]
        if exposed(canvas.view, out) or not uses:
            continue
        if all(canvas.reads_low(use.op, use.slot) for use in uses):
            canvas.low[v] = Paint(canvas.to, reasons.EXISTING_CAST, canvas.vertices.all[readers[0]].op)
