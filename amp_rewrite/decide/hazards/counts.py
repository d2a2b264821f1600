"""Numbers that count, point or state a shape, held in floats."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described, operands_at
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32
from amp_rewrite.ir.op_classes import (
    AFFINE,
    ALL,
    COMPARISONS,
    COPIES,
    ELEMENTLESS,
    PRODUCTS,
    ROUNDS,
    SELECTIONS,
    SHAPE_SLOTS,
    SUMS,
    Slots,
)
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View, once

_INTEGERS = frozenset(d for d in DType if d.name.startswith(("INT", "UINT")))
_WHOLE_TYPES = {*_INTEGERS, DType.BOOL}
_MEASURES = {**COPIES, **dict.fromkeys(AFFINE - {"Sum"} | {"Reciprocal", "ReduceProd"}, range(2))}
"""Ops that give a number known from shapes if these inputs are."""
_WHOLE: Slots = {
    **COPIES,
    **SELECTIONS,
    **dict.fromkeys(SUMS | PRODUCTS | {"Mul"}, ALL),
    **dict.fromkeys(("Abs", "CumSum", "Neg", "ReduceMax", "ReduceMin", "ReduceSum", "Relu"), (0,)),
}
"""Ops that give whole numbers if these inputs are whole numbers."""
_BIRTHS = ROUNDS | {"Cast", "OneHot", "Sign"}
_ROUNDING = ROUNDS | {"Equal", "Mod"}
_POINTED = COMPARISONS | {"GridSample", "NonMaxSuppression", "RoiAlign"}


@rule(
    reasons.WHOLE_NUMBER,
    "A number that counts, points or states a shape keeps its value.",
    cases=("shape_taint", "index_taint", "element_counts"),
)
def whole_numbers(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from where such a number arises to the op that uses it as one. O(nodes + uses).

    Walks pass copies, arithmetic and small reductions only, so that an index computed from a network's products does
    not keep these float32.

    What it protects: Inputs that state a shape, axis, size, scale, count or position, and a Range of floats, whose
        length depends on its own arithmetic. Integers that a Cast makes floats and Floor, Ceil, Round, Mod, Equal or
        another Cast uses as integers. Numbers made by OneHot, by rounding, or from bools, and computed by sums and
        products of whole numbers alone, up to an index or a comparison. The number of elements by which a sum is
        divided. A mask that feeds no such op, and a single size as a divisor, are left alone.
    Why: float16 represents all integers to 2048, bfloat16 to 256: a larger one is rounded to another one silently. 256
        × 256 elements overflow float16, and a division by infinity gives 0.
    Example: The sizes of a Resize computed as floor(height · scale); token ids cast to float and compared with the
        padding id; hash bits times powers of two; a mean written as sum / cast(size(x)).
    Source: IEEE 754 binary16 has 11 significant bits, bfloat16 has 8; its largest number is 65504.
    """
    yield from shapes(view)
    yield from integers(view)
    yield from element_counts(view, to)


def shapes(view: View) -> Iterator[HeldOp]:
    """Hold ops that compute a shape, axis, size, scale or count; the walk stops at booleans."""
    flow, sinks = Flow.of(view), dict[ValueId, Use]()
    for _, use, value in operands_at(view, SHAPE_SLOTS):
        sinks.setdefault(value, use)
    for op in view.of_kinds(("Range",)):
        yield HeldOp(op.id, None, "how many elements it gives depends on its arithmetic")
    for op_id, use in flow.path(sinks, lambda value: view.dtype(value) is not DType.BOOL).items():
        if flow.through(view.ops[op_id]):
            yield HeldOp(op_id, use.op, f"feeds {_port(view, use)}")


def _port(view: View, use: Use) -> str:
    op = view.ops[use.op]
    formal = op.signature.input(use.slot) if op.signature else None
    return f"{formal.name if formal else f'input {use.slot}'!r} of {described(view, use.op)}"


def integers(view: View) -> Iterator[HeldOp]:
    """Hold the ops from an integer in floats, or a whole number, to those that use it as one."""
    flow, sinks = Flow.of(view), dict[ValueId, OpId]()
    held = flow.forth(counted(view), float32(view))
    for op in view.of_kinds(_ROUNDING | {"Cast"}) if held else ():
        uses = op.kind in _ROUNDING or _casts(view, op, op.outputs, _INTEGERS)
        if uses and (read := [v for v in op.operands if v in held]):
            sinks.update((value, op.id) for value in read if value not in sinks)
            yield HeldOp(
                op.id, held[read[0]], f"reads an integer that {described(view, held[read[0]])} put into floats"
            )
    for op_id, sink in {**flow.path(sinks, held.__contains__), **_computed(view)}.items():
        yield HeldOp(op_id, sink, f"holds an integer that {described(view, sink)} reads as one")


def _computed(view: View) -> dict[OpId, OpId]:
    """Return the ops that compute whole numbers for an index or a comparison, and these ends, each with an end."""
    is_float = float32(view)
    births = {v: op.id for op in view.of_kinds(_BIRTHS) if _gives_whole(view, op) for v in op.results if is_float(v)}
    flow = Flow.of(view, _WHOLE)
    whole = flow.only(births, partial(_is_whole, view)) if births else set[ValueId]()
    read = (op for op in view.of_kinds(_POINTED | {"Cast"}) if not whole.isdisjoint(op.inputs))
    ends = [op for op in read if op.kind in _POINTED or _casts(view, op, op.outputs, _INTEGERS)]
    path = flow.path({v: op.id for op in ends for v in op.inputs if v in whole}, whole.__contains__)
    path = {
        op_id: end for op_id, end in path.items() if op_id not in births.values() and view.ops[op_id].kind not in COPIES
    }
    reached = flow.forth({v: None for op_id in path for v in view.ops[op_id].results}, whole.__contains__)
    return {**path, **{op.id: op.id for op in ends if not reached.keys().isdisjoint(op.operands)}}


def _gives_whole(view: View, op: Op) -> bool:
    """True if an op gives whole numbers, whatever float32 numbers it reads."""
    if op.kind == "OneHot":
        return _is_whole(view, op.inputs[2])
    return op.kind != "Cast" or view.dtype(op.inputs[0]) in _WHOLE_TYPES


def _is_whole(view: View, value: ValueId | None) -> bool:
    """True for a constant of whole numbers."""
    elements = view.array(value)
    return elements is not None and elements.dtype.kind in "fiu" and bool((elements == np.round(elements)).all())


def _casts(view: View, op: Op, ports: Sequence[ValueId | None], types: Container[DType | None]) -> bool:
    """True for a Cast whose input or output, the first of `ports`, has one of these types."""
    return op.kind == "Cast" and view.dtype(ports[0]) in types


@once
def counted(view: View) -> Mapping[ValueId, OpId]:
    """Return the float32 results of a Cast from an integer type, each with that Cast."""
    made = (op for op in view.of_kinds(("Cast",)) if view.dtype(op.inputs[0]) in _INTEGERS)
    return {v: op.id for op in made for v in op.results if view.dtype(v) is DType.FLOAT}


def element_counts(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold ops that compute or read a product of sizes in floats; none for types with the range of float32."""
    sizes, products = set[ValueId](), dict[ValueId, OpId]()
    for op in view.ops if to.max <= 2.0**32 else ():
        measures = op.kind in ELEMENTLESS
        if not measures and sizes.isdisjoint(op.inputs):
            continue
        slots = _MEASURES.get(op.kind, ())
        read = [v for slot, v in enumerate(op.inputs) if slot in slots and v is not None]
        known = [v for v in read if v in sizes]
        whole = bool(known) and all(v in sizes or view.values[v].tensor is not None for v in read)
        product = op.kind in ("ReduceProd", "Size") or (op.kind == "Mul" and len(known) > 1)
        cause = next((products[v] for v in op.operands if v in products), op.id if product else None)
        if measures or whole:
            sizes.update(op.results)
        if cause is not None and (whole or op.kind == "Size"):
            products.update(dict.fromkeys(op.results, cause))
        if any(view.dtype(v) is DType.FLOAT for v in op.ports if v in products):
            yield HeldOp(op.id, cause, f"the number of elements may be beyond {to.max:g}")
