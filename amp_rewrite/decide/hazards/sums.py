"""Sums that run over many terms, step by step or spelled as products."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import Held, rule
from amp_rewrite.decide.hazards.steps import described, summed_length
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import (
    Flow,
    computes_float32,
    first_input_of,
    float32,
    makers,
    number,
    origin,
    reach,
)
from amp_rewrite.ir.op_classes import (
    ALL,
    COPIES,
    HEAVY,
    PAIR_SUMS,
    PRODUCTS,
    REDUCTIONS,
    SELECTIONS,
    SUMS,
)
from amp_rewrite.ir.shapes.onnx_shapes import declared_dims
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_SUMS = {**dict.fromkeys(SUMS, ALL), "Sub": (0,)}
_SMALL = 2.0**-4
_LEAST = 4
"""Small steps in a row, at least."""


@rule(
    reasons.RUNNING_SUM,
    "A sum that runs over many terms is computed in float32.",
    cases=("accumulators", "small_step", "disguise"),
)
def running_sums(view: View, to: DType) -> Iterator[Held]:
    """Hold the additions to a state, and products that are sums. O(nodes + uses).

    What it protects: Counters and running sums that a Loop or Scan carries in a float state; one that is multiplied or
        passes through a layer does not accumulate. Unrolled, four or more steps x + c·f(x) in a row, where c is one
        small number and f contains a product: a vector of small factors is a layer scale. CumSum and ReduceMean,
        spelled as a product with a triangle of ones or a matrix of 1/n, unless other products read it; a triangle that
        masks is not meant.
    Why: A term below half the spacing of the sum is lost. A float16 counter stalls at 2048, a bfloat16 counter at 256;
        at 10 the spacing is 0.008 and 0.06. A running sum is read by differences, a mean by deviations: both are small
        beside it.
    Example: A Loop that adds a step to a float state; x = x + 0.01 · tanh(x · W), 32 times; windows as differences of
        running sums; LayerNorm by products.
    How to override: `--lower 'op=Add'`, `--lower 'op=MatMul'` or the name of the op.
    Source: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4; IEEE 754 binary16 has 11
        significant bits, bfloat16 has 8; CumSum and ReduceMean are on the deny list.
    """
    yield from accumulators(view)
    yield from small_steps(view)
    yield from disguises(view, to)


def accumulators(view: View) -> Iterator[Held]:
    """Hold the sums by which the state of a body gets from its start to its end."""
    flow = Flow.of(view, {**COPIES, **SELECTIONS, **REDUCTIONS, **_SUMS})
    for out, into in view.carried:
        owner = view.scopes[view.values[out].scope].owner
        loop = described(view, owner) if owner is not None else "the loop"
        for op_id in flow.path({out: owner}, flow.forth({into: owner}, float32(view)).__contains__):
            if view.ops[op_id].kind in _SUMS:
                yield Held(op_id, owner, f"sums up over {loop}")


def small_steps(view: View) -> Iterator[Held]:
    """Hold sums x + c·f(x) in a row, where c is one small number and f contains a product."""
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
        last = before.get(op.id)
        if length >= _LEAST or op.id in chained:
            chained.update((op.id, last.id) if last is not None else (op.id,))
            note = "moves a state by a small step, as ops before and after it"
            yield Held(op.id, last.id if last is not None else None, note)


def _moved(view: View, step: ValueId | None) -> ValueId | None:
    """Return f of a step c·f with a small number, or a number that is an input, for c."""
    op = view.producer(step, "Div", "Mul")
    for moved, factor in (op.inputs, op.inputs[::-1])[: 1 if op.kind == "Div" else 2] if op is not None else ():
        size = number(view, factor)
        if size and op is not None and abs(1 / size if op.kind == "Div" else size) < _SMALL:
            return moved
        if op is not None and op.kind == "Mul" and factor is not None and _is_fed_number(view, factor):
            return moved
    return None


def _is_fed_number(view: View, value: ValueId) -> bool:
    """True if a value is an input of the model with a single element."""
    if not view.values[value].public:
        return False
    formals = (formal for formal in view.model.proto.graph.input if formal.name == view.value_name(value))
    return any(dims is not None and all(dim == 1 for dim in dims) for dims in map(declared_dims, formals))


def _learned(view: View, value: ValueId, start: ValueId, states: Container[ValueId]) -> bool:
    """True if a product lies between the states and a value that is computed from one."""

    def operands(value: ValueId) -> Sequence[ValueId]:
        op = view.producer(value)
        return op.operands if op is not None else ()

    reached = reach({value: None}, operands, lambda v: v == value or (v != start and v not in states))
    return any(view.ops[op_id].kind in HEAVY for op_id in makers(view, reached))


def disguises(view: View, to: DType) -> Iterator[Held]:
    """Hold products with a triangle of ones or a matrix of 1/n, unless other products alone read them."""
    pairs = ((op.id, _disguised(view, op, slot, to)) for op in view.ops if op.kind in PRODUCTS for slot in (0, 1))
    copies = Flow.of(view, COPIES)
    for op_id, name in {op_id: name for op_id, name in pairs if name}.items():
        reached = copies.forth(dict.fromkeys(view.ops[op_id].results), float32(view))
        readers = [reader.kind in HEAVY for reader in copies.readers(reached)]
        if not (readers and all(readers) and view.yielded.isdisjoint(reached)):
            yield Held(op_id, None, f"a {name} by a product")


def _disguised(view: View, op: Op, slot: int, to: DType) -> str:
    """Return "running sum" for a triangle of ones, "mean" for a matrix of 1/n, n terms; else an empty string."""
    value = op.inputs[slot] if slot < len(op.inputs) else None
    tensor = view.constant(value)
    if tensor is None or value is None or len(tensor.dims) < 2 or max(tensor.dims[-2:]) < 3:
        return ""
    fit, (rows, columns) = view.fit(value, to), tensor.dims[-2:]
    if fit.absmax != fit.absmin or fit.nonfinite:
        return ""
    lengths = (rows, columns) if op.kind == "Einsum" else (summed_length(op, slot, tuple(tensor.dims)),)
    mean = np.float32(fit.absmax) in [np.float32(1 / length) for length in lengths if length]
    elements = view.array(value) if mean or (fit.absmax == 1 and rows == columns) else None
    if elements is None:
        return ""
    if mean:
        return "mean" if (elements == elements.flat[0]).all() else ""
    ones = np.tri(rows, dtype=elements.dtype)
    return "running sum" if any((elements == t).all() for t in (ones, ones.T)) else ""
