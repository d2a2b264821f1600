"""Logarithms of probabilities, and what magnifies small results of products."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, first_inputs, in_float32, results_of
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32, makers, squared
from amp_rewrite.ir.op_classes import CARRIERS, COPIES, LAYERS, PAIR_SUMS, PRODUCTS, SCALINGS, SELECTIONS, SQUEEZES
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_LOGARITHMS = ("Log", "Atanh")
_ENDS = {**dict.fromkeys((*_LOGARITHMS, "Acos", "Acosh", "Reciprocal", "Sqrt"), 0), "Div": 1, "Pow": 0}
"""Ops that magnify small differences of this input."""
_BOUNDING = SELECTIONS.keys() - {"Where"}
_LENGTHS = ("LpNormalization", "ReduceL2")


@rule(reasons.LOGARITHM, "From a softmax or sigmoid to the logarithm of its result all ops are float32.")
def logarithm(view: View, to: DType) -> Iterator[Pin]:
    """Pin the ops from a squeeze to a logarithm, and sums with constants before a logarithm. O(nodes + uses).

    One product may stand between. Then roots, divisions and arc functions count as well, and squares and normalized
    vectors among the operands; copies, scales and sums with constants may follow the product.

    What it protects: The argument of Log, and of Atanh, which is half the logarithm of (1 + x) / (1 − x); products of
        probabilities, exponentials and squares whose logarithm, root, quotient or angle is wanted. The roots and
        divisors of norms and softmaxes are left alone.
    Why: A logarithm turns a relative error into an absolute one, and zero into −inf. float16 rounds small p to 0 below
        3e-8 and large p to 1 above 0.9998, where the logarithms of p and 1 − p are −17 and −9.
    Example: log(softmax(x)), log(1 − sigmoid(x)), log(1 + x), log(π · softmax(x)), a / (exp(x) · v).
    How to override: LogSoftmax in the model; `--lower 'op=Log'`.
    Source: IEEE 754 binary16: smallest subnormal 2⁻²⁴, largest number below 1 is 1 − 2⁻¹¹.
    """
    ends = first_inputs(view, _LOGARITHMS)
    flow = Flow.of(view, {kind: slots for kind, slots in CARRIERS.items() if kind not in SQUEEZES})
    pins: dict[OpId, OpId] = {}
    squeezed: dict[ValueId, OpId] = {}
    if ends:
        squeezed = flow.forth(results_of(view, SQUEEZES), float32(view))
        marked = flow.back(ends, lambda value: value in squeezed or _shifted(view, value))
        pins = {**makers(view, marked), **{op_id: op_id for value, op_id in ends.items() if value in marked}}
    for op_id, cause in in_float32(view, {**_behind_products(view, flow), **pins}).items():
        yield Pin(op_id, reasons.LOGARITHM, cause, f"computes the argument of {described(view, cause)}")


def _behind_products(view: View, flow: Flow) -> dict[OpId, OpId]:
    """Return the ops from a squeeze, square or length through one product to an op that magnifies its result."""
    products = {op.outputs[0]: op for op in view.ops if op.kind in PRODUCTS | LAYERS and op.outputs[0] is not None}
    reached: dict[OpId, tuple[Op, list[OpId]]] = {}
    for op in view.ops:
        slot = _ENDS.get(op.kind)
        if slot is None or (op.kind == "Pow" and not _is_root(view, op)):
            continue
        between, value = _behind_affine(view, op.inputs[slot])
        if value in products:
            reached.setdefault(products[value].id, (op, [*between, op.id]))
    if not reached:
        return {}
    squares = {v: op.id for op in view.ops if squared(op) is not None and (v := op.outputs[0]) is not None}
    sources = flow.forth({**results_of(view, (*SQUEEZES, *_LENGTHS)), **squares}, float32(view))
    grouped = {op_id for group in clusters(view) for op_id in group.ops}
    pins: dict[OpId, OpId] = {}
    for product, (end, passed) in reached.items():
        read = {v: end.id for v in view.ops[product].inputs[:2] if v is not None and v in sources}
        if not read or end.id in grouped:
            continue
        path = makers(view, flow.back(read, lambda v: v in sources))
        pins.update({**path, **dict.fromkeys((product, *passed), end.id)})
    return pins


def _is_root(view: View, op: Op) -> bool:
    exponent = view.array(op.inputs[1])
    return exponent is not None and bool((exponent < 1).any())


def _behind_affine(view: View, value: ValueId | None) -> tuple[list[OpId], ValueId | None]:
    """Follow copies, and sums, scales and bounds of one value with constants, up to the value that they start from."""
    passed: list[OpId] = []
    while (op := view.producer(value)) is not None:
        if op.kind in COPIES:
            varying: list[ValueId | None] = [op.inputs[0]]
        elif op.kind in PAIR_SUMS | SCALINGS | _BOUNDING:
            varying = [v for v in op.operands if view.constant(v) is None]
        else:
            break
        if len(varying) != 1:
            break
        passed.append(op.id)
        value = varying[0]
    return passed, value


def _shifted(view: View, value: ValueId) -> bool:
    """True if a value is a float32 sum or difference of a value and a constant."""
    op = view.producer(value, *PAIR_SUMS) if view.dtype(value) is DType.FLOAT else None
    return op is not None and any(view.constant(v) is not None for v in op.inputs)
