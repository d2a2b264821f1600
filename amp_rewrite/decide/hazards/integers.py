"""Shapes, sizes, indices and counters held in floats.

Walks lead back from the ops that use such a number, through copies, arithmetic and small reductions only
(`op_classes.CARRIERS`), so that an index computed from a network's products does not keep these float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, in_float32, results_of
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import (
    AFFINE,
    ALL,
    COMPARISONS,
    COPIES,
    ELEMENTLESS,
    PRODUCTS,
    REDUCTIONS,
    ROUNDS,
    SELECTIONS,
    SHAPE_SLOTS,
    SUMS,
    Slots,
)
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_INTEGERS = frozenset(d for d in DType if d.name.startswith(("INT", "UINT")))
_COUNTING = {**COPIES, **dict.fromkeys(AFFINE - {"Sum"} | {"Reciprocal", "ReduceProd"}, range(2))}
_ROUNDING = ROUNDS | {"Equal", "Mod"}
_SUMS = {**dict.fromkeys(SUMS, ALL), "Sub": (0,)}
_WHOLE: Slots = {
    **COPIES,
    **SELECTIONS,
    **dict.fromkeys(SUMS | PRODUCTS | {"Mul"}, ALL),
    **dict.fromkeys(("Abs", "CumSum", "Neg", "ReduceMax", "ReduceMin", "ReduceSum", "Relu"), (0,)),
}
"""Ops that give whole numbers if these inputs are whole numbers."""
_POINTED = COMPARISONS | {"GridSample", "NonMaxSuppression", "RoiAlign"}


@rule(reasons.SHAPE_TAINT, "Shapes, sizes, axes and scales are computed in float32.")
def shape_taint(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops that compute a shape, axis, size, scale or count; the walk stops at booleans.

    What it protects: Inputs that state a shape, axis, size, scale, count or position; also a Range of floats, whose
        length depends on its own arithmetic.
    Why: float16 represents all integers to 2048, bfloat16 to 256. A larger size is rounded to another one silently.
    Example: The sizes of a Resize computed as floor(height · scale).
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    flow = Flow.of(view)
    sinks: dict[ValueId, Use] = {}
    for op in view.ops:
        for slot in SHAPE_SLOTS.get(op.kind, ()):
            if slot < len(op.inputs) and (value := op.inputs[slot]) is not None:
                sinks.setdefault(value, Use(op.id, slot))
        if op.kind == "Range" and computes_float32(view, op):
            yield Pin(op.id, reasons.SHAPE_TAINT, None, "how many elements it gives depends on its arithmetic")
    marked = flow.back(sinks, lambda value: view.dtype(value) is not DType.BOOL)
    for op_id, use in in_float32(view, makers(view, marked)).items():
        if flow.through(view.ops[op_id]):
            yield Pin(op_id, reasons.SHAPE_TAINT, use.op, f"feeds {_port(view, use)}")


def _port(view: View, use: Use) -> str:
    op = view.ops[use.op]
    formal = op.signature.input(use.slot) if op.signature else None
    return f"{formal.name if formal else f'input {use.slot}'!r} of {described(view, use.op)}"


@rule(reasons.INDEX_TAINT, "An integer held in floats keeps its value until it is read as an integer.")
def index_taint(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a Cast of an integer to float to the op that uses the integer.

    What it protects: Integers that a Cast makes floats and Floor, Ceil, Round, Mod, Equal or another Cast uses as
        integers; and numbers that count or point, made by OneHot, by rounding, or from bools, and computed by sums and
        products of whole numbers alone, up to an index or a comparison. A mask that feeds no such op is left alone.
    Why: Above 2048 float16 represents every second integer only, bfloat16 above 256.
    Example: Token ids cast to float and compared with the padding id; hash bits times powers of two.
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    flow = Flow.of(view)
    held = flow.forth(counted(view), float32(view))
    sinks: dict[ValueId, OpId] = {}
    for op in view.ops:
        if op.kind in _ROUNDING or _casts_to_integer(view, op):
            read = [value for value in op.operands if value in held]
            sinks.update((value, op.id) for value in read if value not in sinks)
            if read:
                cast = held[read[0]]
                note = f"reads an integer that {described(view, cast)} put into floats"
                yield Pin(op.id, reasons.INDEX_TAINT, cast, note)
    path = makers(view, flow.back(sinks, held.__contains__))  # may include If, Loop and Scan, without a type variable
    for op_id, sink in {**in_float32(view, path), **in_float32(view, _counts(view))}.items():
        note = f"holds an integer that {described(view, sink)} reads as one"
        yield Pin(op_id, reasons.INDEX_TAINT, sink, note)


def _counts(view: View) -> dict[OpId, OpId]:
    """Return the ops that compute whole numbers for an index or a comparison, and these ends, each with an end."""
    whole: set[ValueId] = set()
    births: set[OpId] = set()
    for op in view.ops:
        result = op.outputs[0] if op.outputs else None
        if result is None or view.dtype(result) is not DType.FLOAT:
            continue
        slots = _WHOLE.get(op.kind, ())
        floats = [v for at, v in enumerate(op.inputs) if at in slots and v is not None]
        if op.kind in ROUNDS | {"Sign"} or _is_whole_cast(view, op) or _is_whole_one_hot(view, op):
            births.add(op.id)
        elif whole.isdisjoint(floats) or not all(v in whole or _is_whole(view, v) for v in floats):
            continue
        whole.add(result)
    ends = [
        op
        for op in view.ops
        if not whole.isdisjoint(op.inputs) and (op.kind in _POINTED or _casts_to_integer(view, op))
    ]
    if not ends:
        return {}
    flow = Flow.of(view, _WHOLE)
    path = makers(view, flow.back({v: op.id for op in ends for v in op.inputs if v in whole}, whole.__contains__))
    path = {op_id: end for op_id, end in path.items() if op_id not in births and view.ops[op_id].kind not in COPIES}
    reached = flow.forth({v: None for op_id in path for v in view.ops[op_id].results}, whole.__contains__)
    return {**path, **{op.id: op.id for op in ends if not reached.keys().isdisjoint(op.inputs)}}


def _is_whole_cast(view: View, op: Op) -> bool:
    source = op.inputs[0] if op.kind == "Cast" else None
    return source is not None and view.dtype(source) in (*_INTEGERS, DType.BOOL)


def _is_whole_one_hot(view: View, op: Op) -> bool:
    return op.kind == "OneHot" and op.inputs[2] is not None and _is_whole(view, op.inputs[2])


def _is_whole(view: View, value: ValueId) -> bool:
    """True for a constant of whole numbers."""
    elements = view.array(value)
    return elements is not None and elements.dtype.kind in "fiu" and bool((elements == np.round(elements)).all())


def counted(view: View) -> dict[ValueId, OpId]:
    """Return the float32 results of a Cast from an integer type, each with that Cast."""
    casts = results_of(view, ("Cast",))
    sources = {value: view.ops[op_id].inputs[0] for value, op_id in casts.items() if view.dtype(value) is DType.FLOAT}
    return {v: casts[v] for v, source in sources.items() if view.dtype(source) in _INTEGERS}


def _casts_to_integer(view: View, op: Op) -> bool:
    result = op.outputs[0] if op.kind == "Cast" else None
    return view.dtype(result) in _INTEGERS


@rule(reasons.SHAPE_TAINT, "A number of elements stays finite as a divisor.", name="element_counts")
def element_counts(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops that compute or read a product of sizes in floats; none for types with the range of float32.

    What it protects: The number of elements by which a sum is divided. A single size fits and is left alone.
    Why: 256 × 256 overflows float16, and a division by infinity gives 0.
    Example: A mean written as sum / cast(size(x)).
    Source: The largest number of IEEE 754 binary16 is 65504.
    """
    if to.max > 2.0**32:
        return
    sizes: set[ValueId] = set()
    counts: dict[ValueId, OpId] = {}
    for op in view.ops:
        measures = op.kind in ELEMENTLESS
        if not measures and sizes.isdisjoint(op.inputs):
            continue
        slots = _COUNTING.get(op.kind, ())
        taken = [v for slot, v in enumerate(op.inputs) if slot in slots and v is not None]
        known = [v for v in taken if v in sizes]
        whole = bool(known) and all(v in sizes or view.values[v].tensor is not None for v in taken)
        product = op.kind in ("ReduceProd", "Size") or (op.kind == "Mul" and len(known) > 1)
        cause = next((counts[v] for v in op.operands if v in counts), op.id if product else None)
        results = op.results
        if measures or whole:
            sizes.update(results)
        if cause is not None and (whole or op.kind == "Size"):
            counts.update(dict.fromkeys(results, cause))
        touched = (v for v in op.ports if v in counts)
        if any(view.dtype(v) is DType.FLOAT for v in touched) and computes_float32(view, op):
            yield Pin(op.id, reasons.SHAPE_TAINT, cause, f"the number of elements may be beyond {to.max:g}")


@rule(reasons.INDEX_TAINT, "A loop counts and sums up in float32.", name="accumulators")
def accumulators(view: View, to: DType) -> Iterator[Pin]:
    """Pin the additions by which a Loop or Scan counts or accumulates in a float state.

    What it protects: Counters and running sums that a loop carries. A state that is multiplied or passes through a
        layer does not accumulate, and is left alone.
    Why: A float16 counter stalls at 2048, a bfloat16 counter at 256.
    Example: A Loop that adds a step to a float state.
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8.
    """
    states = [(out, into) for out, into in view.carried if view.dtype(into) is DType.FLOAT]
    if not states:
        return
    import networkx as nx

    flow = Flow.of(view, {**COPIES, **SELECTIONS, **REDUCTIONS, **_SUMS})
    graph: nx.DiGraph[int] = nx.DiGraph()
    for value in flow.forth({into: None for _, into in states}, float32(view)):
        graph.add_edges_from((value, result) for result in flow.results(value))
    state_of = dict(states)
    for component in nx.strongly_connected_components(graph):
        if len(component) < 2:
            continue
        carries = [view.values[state_of[v]] for v in sorted(component) if v in state_of]
        for op_id in in_float32(view, makers(view, {ValueId(v): None for v in sorted(component)})):
            if view.ops[op_id].kind in _SUMS:
                owner = view.scopes[carries[0].scope].owner if carries else None
                loop = described(view, owner) if owner is not None else "the loop"
                yield Pin(op_id, reasons.INDEX_TAINT, owner, f"sums up over {loop}")
