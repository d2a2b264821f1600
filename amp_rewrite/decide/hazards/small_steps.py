"""States that a network moves by many small steps, unrolled."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32, first_input_of, number, origin
from amp_rewrite.ir.op_classes import COPIES, HEAVY, PAIR_SUMS
from amp_rewrite.ir.view import OpId, ValueId, View

_SMALL = 2.0**-4
_LEAST = 4
"""Steps in a row, at least."""


@rule(reasons.SMALL_STEP, "A state that moves by small steps is summed up in float32.")
def small_steps(view: View, to: DType) -> Iterator[Pin]:
    """Pin sums x + c·f(x) in a row, where c is one small number and f contains a product. O(nodes + uses).

    What it protects: States of solvers of differential equations, samplers and gradient descents, four steps or more.
        A vector of small factors is a layer scale, and is left alone.
    Why: A step below half the spacing of the state is lost. At 10 the float16 spacing is 0.008, that of bfloat16 0.06.
    Example: x = x + 0.01 · tanh(x · W), 32 times.
    Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.
    """
    copies = first_input_of({kind for kind in COPIES if kind != "Concat"})
    lengths: dict[ValueId, tuple[int, OpId | None]] = {}
    pinned: dict[OpId, OpId | None] = {}
    for op in view.ops:
        if op.kind not in PAIR_SUMS or len(op.inputs) != 2 or not computes_float32(view, op):
            continue
        for state, step in (op.inputs, op.inputs[::-1]) if op.kind == "Add" else (op.inputs,):
            if state is None or op.outputs[0] is None or (moved := _moved(view, step)) is None:
                continue
            start = origin(view, state, copies)
            before, last = lengths.get(start, (0, None))
            if _learned(view, moved, lengths.keys() | {start}):
                lengths[op.outputs[0]] = before + 1, op.id
                pinned[op.id] = last
                break
    ends = {lengths[op.outputs[0]] for op in map(view.ops.__getitem__, pinned) if op.outputs[0] is not None}
    chains = {op_id for length, op_id in ends if length >= _LEAST}
    for op_id in reversed(pinned):
        if op_id in chains and (before_it := pinned[op_id]) is not None:
            chains.add(before_it)
    for op_id in sorted(op_id for op_id in chains if op_id is not None):
        yield Pin(op_id, reasons.SMALL_STEP, pinned[op_id], "moves a state by a small step, as ops before and after it")


def _moved(view: View, step: ValueId | None) -> ValueId | None:
    """Return f of a step c·f with a small number, or a number that is an input, for c."""
    op = view.producer(step)
    if op is not None and op.kind == "Div":
        size = number(view, op.inputs[1])
        return op.inputs[0] if size is not None and abs(size) > 1 / _SMALL else None
    if op is None or op.kind != "Mul":
        return None
    for moved, factor in (op.inputs, op.inputs[::-1]):
        size = number(view, factor)
        if (size is not None and 0 < abs(size) < _SMALL) or (factor is not None and _is_fed_number(view, factor)):
            return moved
    return None


def _is_fed_number(view: View, value: ValueId) -> bool:
    """True if a value is an input of the model with a single element."""
    formals = {port.name: port.type.tensor_type for port in view.model.proto.graph.input}
    formal = formals.get(view.value_name(value)) if view.values[value].public else None
    return formal is not None and formal.HasField("shape") and all(dim.dim_value == 1 for dim in formal.shape.dim)


def _learned(view: View, value: ValueId, states: Collection[ValueId]) -> bool:
    """True if a product lies between the states and a value that is computed from one."""
    queue, seen, product = [value], {value}, False
    while queue:
        op = view.producer(queue.pop())
        if op is None:
            continue
        product = product or op.kind in HEAVY
        fresh = [v for v in op.operands if v not in seen and v not in states]
        seen.update(fresh)
        queue += fresh
    return product
