"""The rules of TensorFlow's auto_mixed_precision graph pass, each a function over a `PaintState`.

Roots from the allow list, deny paint forward, gray ops between two lowered ones, clear ops beside them. Paint
is a closed union, so no rule depends on the order of ops. The exception is `gray_after_allow`, a single sweep in
topological order, as in TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from onnx import TensorProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.coloring.coloring import Paint
from amp_rewrite.decide.coloring.paint_state import PaintState
from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.ir.dataflow import exposed, first_input_of, origin
from amp_rewrite.ir.op_classes import CASTS, COPIES, ELEMENTLESS, GENERATORS, LABEL_LOSSES, RANDOM
from amp_rewrite.ir.view import Op, OpId, ValueId
from amp_rewrite.settings.choices import Level
from amp_rewrite.settings.list_entry import Color

_NEVER_FORCED = LABEL_LOSSES | RANDOM | GENERATORS


def freeze(state: PaintState) -> None:
    """Freeze ops that the user or a safety rule holds in float32; they still conduct deny paint."""
    for op, pattern in sorted(state.options.keep.items()):
        state.frozen[op] = state.high(reasons.KEEP, None, f"kept by {pattern!r}")
    for pin in state.pins:
        if pin.op not in state.options.lower:
            state.frozen.setdefault(pin.op, state.high(pin.rule, pin.because, pin.note))


def allow_roots(state: PaintState) -> None:
    """Lower every vertex of an op on the allow list, and the roots that the level or the user adds."""
    for v, (op, _, entry, _) in enumerate(state.vertices.all):
        if not state.can(v) or _widens(state, state.view.ops[op]):
            continue
        if op in state.options.lower:
            state.low[v] = Paint(state.to, reasons.LOWER, None, f"lowered by {state.options.lower[op]!r}")
        elif entry.color is Color.ALLOW:
            state.low[v] = Paint(state.to, reasons.ALLOW_ROOT, None, entry.because)
        elif state.options.level is Level.LOWER_ALL and entry.color in (Color.GRAY, Color.CLEAR):
            state.low[v] = Paint(state.to, reasons.LOWER_ALL, None, f"{entry.color.value} list")
        elif state.options.level is Level.UNSAFE_FORCE_ALL and state.op(v).op_type not in _NEVER_FORCED:
            state.low[v] = Paint(state.to, reasons.FORCE_ALL, None, "forced by the level")


def _widens(state: PaintState, op: Op) -> bool:
    """True if an op is a Cast from a low type: lowered, it would be a copy or round, with another Cast after it."""
    return op.kind == "Cast" and state.view.dtype(op.inputs[0]) in LOW_TYPES


def deny_forward(state: PaintState) -> None:
    """Deny the ops on the deny list, and every path from one through clear and gray ops to its last deny or gray op."""
    if state.options.level is Level.UNSAFE_FORCE_ALL:
        return
    denied = [v for v, color in enumerate(state.colors) if color is Color.DENY]
    for v in denied:
        state.denied[v] = state.high(reasons.DENY, None, state.vertices.all[v].entry.because)
    if state.options.level is Level.LOWER_ALL:
        return
    ends = [v for v, color in enumerate(state.colors) if color in (Color.DENY, Color.GRAY)]
    conductors = {*ends, *state.walk(ends, state.vertices.sources.__getitem__, state.clear)}
    loud = [v for v in denied if state.vertices.all[v].op not in state.hazards.numbers]
    reached = state.walk(loud, state.vertices.readers.__getitem__, conductors.__contains__)
    for v, due in reached.items():
        state.denied.setdefault(v, state.high(reasons.DENY_FORWARD, due))


def between_allow(state: PaintState) -> None:
    """Lower gray and clear ops on a path between two allowed ops with no denied op on it.

    With `spare_casts` a path may also start at a table of weights: the results of lookups are low once it is baked.
    And it may end at a written-out norm that allowed ops read: what a norm widens is a Cast before it or behind it.
    """
    roots = [v for v in state.low if state.colors[v] is Color.ALLOW]
    tables = [v for v, _ in _tables(state, lambda v: _between(state, v))]
    behind = state.walk([*roots, *tables], state.vertices.readers.__getitem__, lambda v: _between(state, v))
    between, norms = {*tables, *behind}, _norm_entries(state)

    def before(v: int) -> Sequence[int]:
        return [norms.get(source, source) for source in state.vertices.sources[v]]

    reached = state.walk(roots, before, between.__contains__)
    for v, due in reached.items():
        note = state.hazards.benign.get(state.vertices.all[v].op, "")
        state.low.setdefault(v, Paint(state.to, reasons.BETWEEN_ALLOW, due, note))


def _norm_entries(state: PaintState) -> Mapping[int, int]:
    """Return the vertices of float32 norms, each with the vertex that computes the norm's input."""
    entries: dict[int, int] = {}
    for cluster in state.hazards.clusters if state.options.spare_casts else ():
        if cluster.kind == "rms_normalization" and cluster.entry is not None:
            maker = state.maker(origin(state.view, cluster.entry, first_input_of(CASTS)))
            if maker is not None:
                entries.update(dict.fromkeys(state.of_ops(cluster.ops), maker))
    return entries


def _tables(state: PaintState, admits: Callable[[int], bool]) -> Iterator[tuple[int, TensorProto]]:
    """Yield lookups that `admits` in constants that fit the low type, each with the constant."""
    for v in state.of_kinds(("Gather",)) if state.options.spare_casts else ():
        table = state.op(v).inputs[0]
        tensor = state.view.constant(table)
        if table is not None and tensor is not None and admits(v) and not state.view.fit(table, state.to).overflow:
            yield v, tensor


def large_tables(state: PaintState) -> None:
    """Lower lookups in a table of weights that is much larger than their results: a Cast behind it is cheaper."""
    for v, tensor in _tables(state, lambda v: v not in state.low and state.can(v)):
        elements = math.prod(tensor.dims)
        if len(tensor.dims) < 2 or elements < _LEAST_TABLE:
            continue
        if elements > _TIMES * state.sizes.size(state.op(v).outputs[0]):
            state.low[v] = Paint(state.to, reasons.TABLE, None)


_LEAST_TABLE, _TIMES = 1 << 16, 4
"""Elements of a table, and how many times those of a result, that are worth a Cast."""
_CARRIERS = (Color.GRAY, Color.CLEAR)


def _between(state: PaintState, v: int) -> bool:
    return state.colors[v] in _CARRIERS and v not in state.denied and state.can(v)


def joins(state: PaintState) -> None:
    """Lower a gray op at the end of a model where several low values meet: one Cast behind it instead of several.

    The gray and clear ops before it are lowered, too, if all their inputs are low or constant. So are ops that copy or
    reshape a constant on its way there, unless another op reads it in float32.
    """
    if not state.options.spare_casts:
        return
    copied = {v for v in state.of_ops(state.hazards.numbers) if _joinable(state, v)}
    for attempt in range(_ATTEMPTS):
        joined = _joined(state, copied)
        shared = {v for v in copied & joined.keys() if not _only_read_by(state, v, joined)}
        if not shared:
            break
        copied = copied - shared if attempt < _ATTEMPTS - 2 else set()
    for v, cause in sorted(joined.items()):
        state.low[v] = Paint(state.to, reasons.JOIN, cause)


_ATTEMPTS = 4


def _joinable(state: PaintState, v: int) -> bool:
    """True for a vertex that may join others: it reads only constants and vertices, not edges of a graph."""
    if v in state.low or not _between(state, v):
        return False
    read = filter(state.varies, state.op(v).operands)
    return all(state.view.values[value].producer in state.vertices.by_op for value in read)


def _joined(state: PaintState, copied: Collection[int]) -> dict[int, OpId]:
    """Return the meetings and the ops before them, each with its cause. `copied`: constants on their way."""
    read: dict[int, tuple[int, ...]] = {}
    for v in range(len(state.vertices.all)):
        sources = state.vertices.sources[v]
        if not sources or v in copied or not _joinable(state, v):
            continue
        if all(s in state.low or s in read or s in copied for s in sources):
            read[v] = tuple(s for s in sources if s not in copied)
    met = {s for sources in read.values() if len(sources) > 1 for s in sources}
    spared = {s for s in met if all(r in state.low or r in read for r in state.vertices.readers[s])}
    meetings = [v for v, sources in read.items() if len(sources) > 1 and len(spared.intersection(sources)) > 1]
    before = state.walk(meetings, state.vertices.sources.__getitem__, lambda v: v in read or v in copied)
    return {v: state.vertices.all[min(read[v])].op if read.get(v) else before[v] for v in (*meetings, *before)}


def _only_read_by(state: PaintState, v: int, joined: Collection[int]) -> bool:
    """True if only lowered ops and `joined` ones read the results of an op."""
    results = state.op(v).results
    readers = [state.vertices.by_op.get(use.op) for value in results for use in state.view.uses[value]]
    low = all(at and all(r in state.low or r in joined for r in at) for at in readers)
    return low and state.view.yielded.isdisjoint(results)


def gray_after_allow(state: PaintState) -> None:
    """Lower a gray op that directly follows a lowered op and no denied one, as TensorFlow 2.20 does."""
    follows = state.options.gray_follows_allow
    if not (state.to is DType.BFLOAT16 if follows is None else follows):
        return
    for v in range(len(state.vertices.all)):
        if state.colors[v] is not Color.GRAY or not state.free(v):
            continue
        sources = state.vertices.sources[v]
        due = next((s for s in sources if s in state.low), None)
        if due is not None and not any(s in state.denied for s in sources):
            state.low[v] = Paint(state.to, reasons.GRAY_FOLLOWS_ALLOW, state.vertices.all[due].op)


def allow_through_clear(state: PaintState) -> None:
    """Lower clear ops that touch a lowered op, upstream or downstream, transitively."""

    def near(v: int) -> Iterable[int]:
        return (*state.vertices.sources[v], *state.vertices.readers[v])

    reached = state.walk(list(state.low), near, lambda v: state.clear(v) and state.free(v))
    for v, due in reached.items():
        state.low[v] = Paint(state.to, reasons.ALLOW_THROUGH_CLEAR, due)


def copies_rise(state: PaintState) -> None:
    """Take copies of low values back to float32 if one Cast in front of them is cheaper than several behind them."""
    if not state.options.spare_casts:
        return
    leaving: dict[int, list[ValueId]] = {}
    """Copies for float32 ops alone, each with the values behind it that these read."""
    for v in reversed(state.of_kinds(COPIES)):
        cast = _cast_behind(state, v, leaving) if v in state.low and v not in state.held else None
        if cast is not None:
            leaving[v] = cast
    first: dict[ValueId, list[int]] = {}
    for v in leaving:
        if leaving.keys().isdisjoint(state.vertices.sources[v]):
            first.setdefault(next(filter(state.varies, state.op(v).operands)), []).append(v)
    for value, copies in first.items():
        behind = [each for v in copies for each in leaving[v]]
        there = state.needed_in_float32(value)  # there is a Cast in front already
        cost = 0.0 if there else state.sizes.cast(value)
        if len(behind) > (not there) and cost < sum(map(state.sizes.cast, behind)):
            rising = [*copies, *state.walk(copies, state.vertices.readers.__getitem__, leaving.__contains__)]
            for v in rising:
                del state.low[v]
                state.denied[v] = state.high(reasons.MIN_CUT, None, f"one Cast in front spares {len(behind)} behind")


def _cast_behind(state: PaintState, v: int, leaving: Mapping[int, list[ValueId]]) -> list[ValueId] | None:
    """Return the values that float32 ops read of a copy of one value and of copies behind it; None if others do."""
    low = (r for r in state.vertices.readers[v] if r in state.low and r not in leaving)
    if any(state.op(r).kind not in ELEMENTLESS for r in low):
        return None
    op = state.op(v)
    if sum(map(state.varies, op.operands)) != 1 or any(exposed(state.view, value) for value in op.results):
        return None
    cast: list[ValueId] = []
    for value in op.results:
        readers = [state.reader(*use) for use in state.element_uses(value)]
        cast += [value] if any(r not in leaving for r in readers) else []
        cast += [each for r in dict.fromkeys(readers) if r is not None for each in leaving.get(r, ())]
    return cast


def weights_follow(state: PaintState) -> None:
    """Let DequantizeLinear give a weight in the low type if only lowered ops read it: a Cast behind it would be read
    on every run, and runtimes would not see that the ops read a quantized weight."""
    if not state.options.spare_casts:
        return
    for v in reversed(state.of_ops(state.decoded_weights)):
        read = _read_low_alone(state, state.op(v).outputs[0])
        if read is not None and state.can(v):
            state.low.setdefault(v, Paint(state.to, reasons.WEIGHT_FOLLOWS, read))
        elif v in state.low and state.low[v].rule == reasons.WEIGHT_FOLLOWS:
            del state.low[v]


def shapes_follow(state: PaintState) -> None:
    """Give Shape and Size the type of their input: they read no element and need no Cast or copy."""
    for v in state.of_kinds(ELEMENTLESS) if state.options.shapes_follow else ():
        if state.vertices.all[v].refusal is not None:
            continue
        source = state.op(v).inputs[0]
        because = next((state.vertices.all[s].op for s in state.vertices.sources[v] if s in state.low), None)
        constant = state.view.constant(source) is not None
        if (
            because is not None
            or source in state.options.low_inputs
            or (constant and _read_low_alone(state, source) is not None)
        ):
            state.low[v] = Paint(state.to, reasons.SHAPE_FOLLOWS, because)
        else:
            state.low.pop(v, None)


def _read_low_alone(state: PaintState, value: ValueId | None) -> OpId | None:
    """Return the first reader of a value's elements; None if one reads them in float32, or the value is exposed."""
    if value is None or exposed(state.view, value):
        return None
    uses = state.element_uses(value)
    return uses[0].op if uses and all(state.reads_low(use.op, use.slot) for use in uses) else None


def existing_casts(state: PaintState) -> None:
    """Let a Cast to float32 that only lowered ops read cast to the low type instead."""
    for v in state.of_kinds(("Cast",)):
        vertex = state.vertices.all[v]
        if v in state.low or vertex.refusal is not None or "T2" not in vertex.variables:
            continue
        out = state.op(v).outputs[0]
        if out is None or state.view.dtype(out) is not DType.FLOAT or exposed(state.view, out):
            continue
        uses = state.view.uses[out]
        if uses and all(state.reads_low(use.op, use.slot) for use in uses):
            reader = state.vertices.readers[v][0]
            state.low[v] = Paint(state.to, reasons.EXISTING_CAST, state.vertices.all[reader].op)
