"""States that a network moves by many small steps, unrolled."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes_float32, first_input_of, makers, number, origin, reach
from amp_rewrite.ir.op_classes import COPIES, HEAVY, PAIR_SUMS
from amp_rewrite.ir.shapes.onnx_shapes import declared_dims
from amp_rewrite.ir.view import Op, OpId, ValueId, View

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
    copies = first_input_of(COPIES.keys() - {"Concat"})
    steps: dict[ValueId, tuple[Op, int]] = {}
    before: dict[OpId, Op] = {}
    for op in view.ops:
        if op.kind not in PAIR_SUMS or len(op.inputs) != 2 or not computes_float32(view, op):
            continue
        for state, step in (op.inputs, op.inputs[::-1]) if op.kind == "Add" else (op.inputs,):
            if state is None or op.outputs[0] is None or (moved := _moved(view, step)) is None:
                continue
            start = origin(view, state, copies)
            if _learned(view, moved, start, steps):
                last, length = steps.get(start, (None, 0))
                steps[op.outputs[0]] = op, length + 1
                if last is not None:
                    before[op.id] = last
                break
    chained: set[OpId] = set()
    for op, length in reversed(steps.values()):
        if length >= _LEAST:
            chained.add(op.id)
        if op.id in chained and op.id in before:
            chained.add(before[op.id].id)
    for op_id in sorted(chained):
        because = before[op_id].id if op_id in before else None
        yield Pin(op_id, reasons.SMALL_STEP, because, "moves a state by a small step, as ops before and after it")


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
    if not view.values[value].public:
        return False
    name = view.value_name(value)
    formal = next((formal for formal in view.model.proto.graph.input if formal.name == name), None)
    dims = declared_dims(formal) if formal is not None else None
    return dims is not None and all(dim == 1 for dim in dims)


def _learned(view: View, value: ValueId, start: ValueId, states: Container[ValueId]) -> bool:
    """True if a product lies between the states and a value that is computed from one."""

    def operands(value: ValueId) -> Sequence[ValueId]:
        op = view.producer(value)
        return op.operands if op is not None else ()

    reached = reach({value: None}, operands, lambda v: v == value or (v != start and v not in states))
    return any(view.ops[op_id].kind in HEAVY for op_id in makers(view, reached))
