"""Logarithms of probabilities, and what magnifies small results of products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import described, first_inputs, in_float32, results_of
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32, makers, squared, trail
from amp_rewrite.ir.op_classes import (
    CARRIERS,
    CLAMPS,
    COPIES,
    LAYERS,
    MAGNIFIES,
    PAIR_SUMS,
    PRODUCTS,
    SCALINGS,
    SQUEEZES,
    Slots,
)
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_LOGARITHMS = ("Log", "Atanh")
_ENDS: Slots = {**MAGNIFIES, **dict.fromkeys((*_LOGARITHMS, "Acos", "Acosh", "Pow"), (0,))}
"""Ops that magnify small differences of this input."""
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
    ends, products = first_inputs(view, _LOGARITHMS), _products(view)
    if not ends and not products:
        return
    flow = Flow.of(view, {kind: slots for kind, slots in CARRIERS.items() if kind not in SQUEEZES})
    pins = _behind_squeezes(flow, products)
    if ends:
        squeezed = flow.forth(results_of(view, SQUEEZES), float32(view))
        marked = flow.back(ends, lambda value: value in squeezed or _shifted(view, value))
        pins |= {**makers(view, marked), **{op_id: op_id for value, op_id in ends.items() if value in marked}}
    for op_id, cause in in_float32(view, pins).items():
        yield Pin(op_id, reasons.LOGARITHM, cause, f"computes the argument of {described(view, cause)}")


_Magnified = Mapping[OpId, tuple[OpId, Sequence[OpId]]]
"""Products with the op that magnifies their result, and the ops between."""


def _products(view: View) -> _Magnified:
    """Return the products behind whose result, at most moved, scaled, shifted and bounded, an op magnifies it."""
    magnified: dict[OpId, tuple[OpId, Sequence[OpId]]] = {}
    for op in view.ops:
        if op.kind not in _ENDS or (op.kind == "Pow" and not _is_root(view, op)):
            continue
        passed, value = trail(view, op.inputs[_ENDS[op.kind][0]], lambda step: _affine(view, step))
        product = view.producer(value, *PRODUCTS, *LAYERS)
        if product is not None and product.outputs[0] == value:
            magnified.setdefault(product.id, (op.id, [step.id for step in passed]))
    return magnified


def _affine(view: View, op: Op) -> ValueId | None:
    """Return the input that an op copies, or adds to, scales by or bounds by constants."""
    if op.kind in COPIES:
        return op.inputs[0]
    varying = [v for v in op.operands if view.constant(v) is None] if op.kind in PAIR_SUMS | SCALINGS | CLAMPS else []
    return varying[0] if len(varying) == 1 else None


def _behind_squeezes(flow: Flow, products: _Magnified) -> dict[OpId, OpId]:
    """Return the ops from a squeeze, square or length through a product to the op that magnifies its result."""
    if not products:
        return {}
    view = flow.view
    squares = {v: op.id for op in view.ops if squared(op) is not None and (v := op.outputs[0]) is not None}
    sources = flow.forth({**results_of(view, (*SQUEEZES, *_LENGTHS)), **squares}, float32(view))
    reads = {product: [v for v in view.ops[product].operands[:2] if v in sources] for product in products}
    grouped = {op_id for group in clusters(view) for op_id in group.ops} if any(reads.values()) else set[OpId]()
    pins: dict[OpId, OpId] = {}
    for product, (end, passed) in products.items():
        if reads[product] and end not in grouped:
            path = makers(view, flow.back(dict.fromkeys(reads[product], end), sources.__contains__))
            pins.update({**path, **dict.fromkeys((product, *passed, end), end)})
    return pins


def _is_root(view: View, op: Op) -> bool:
    exponent = view.array(op.inputs[1])
    return exponent is not None and bool((exponent < 1).any())


def _shifted(view: View, value: ValueId) -> bool:
    """True if a value is a float32 sum or difference of a value and a constant."""
    op = view.producer(value, *PAIR_SUMS) if view.dtype(value) is DType.FLOAT else None
    return op is not None and any(view.constant(v) is not None for v in op.inputs)
