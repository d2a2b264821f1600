"""Small numbers and differences that a logarithm, root, divisor, arc function or choice magnifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import (
    described,
    first_inputs,
    float32_constant,
    leading_to,
    operands_at,
    results_of,
)
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32, makers, squared, trail
from amp_rewrite.ir.op_classes import (
    BOUNDED,
    CARRIERS,
    CLAMPS,
    COPIES,
    LAYERS,
    MAGNIFIES,
    PAIR_SUMS,
    PRODUCTS,
    SCALINGS,
    SOFTMAXES,
    SQUEEZES,
    Slots,
)
from amp_rewrite.ir.patterns.clusters import clusters
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_LOGARITHMS = ("Log", "Atanh")
_ENDS: Slots = {**MAGNIFIES, **dict.fromkeys((*_LOGARITHMS, "Acos", "Acosh", "Pow"), (0,))}
"""Ops that magnify small differences of these inputs."""
_LENGTHS = ("LpNormalization", "ReduceL2")
_SATURATES = BOUNDED & SQUEEZES - SOFTMAXES
"""Ops that map large values to nearly 1, element by element."""
_UNSQUEEZED = {kind: slots for kind, slots in CARRIERS.items() if kind not in SQUEEZES}
_RANKS: Slots = {"ArgMax": (0,), "ArgMin": (0,), "NonMaxSuppression": (1,), "TopK": (0,)}
"""Ops that choose by the order of these inputs."""
_GUARD_SLOTS = {"Add": (0, 1), "Max": (0, 1), "Clip": (1,), "Where": (1, 2)}


@rule(
    reasons.MAGNIFIED,
    "Small numbers that a logarithm, root or divisor magnifies are computed in float32, and scores that are ranked.",
    cases=("epsilon", "logarithm", "ranked"),
)
def magnified(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from where a number is small to the op that magnifies it. O(nodes + uses).

    A number is small behind a squeeze, such as a softmax, and where an epsilon below the smallest normal number, a
    summand or the lower bound of a Max, Clip or Where, keeps it from zero. One product may stand between. Then squares
    and normalized vectors among its operands count as well; copies, scales and sums with constants may follow it.

    What it protects: Divisors and arguments of roots that an epsilon keeps away from zero, with the products that read
        such a reciprocal. The argument of Log, and of Atanh, which is half the logarithm of (1 + x) / (1 − x); products
        of probabilities, exponentials and squares whose logarithm, root, quotient or angle is wanted. Behind a product,
        the roots and divisors of norms and softmaxes are left alone. Results of Sigmoid and Tanh that TopK, ArgMax or
        NonMaxSuppression ranks, alone, combined or with constants; those of a softmax are left alone.
    Why: A logarithm turns a relative error into an absolute one, and zero into −inf. float16 loses precision below
        6.1e-5, rounds small p to 0 below 3e-8 and large p to 1 above 0.9998, where the logarithms of p and 1 − p are
        −17 and −9. GPUs may flush all below 6.1e-5 to 0: a division then gives infinity, and 0 · inf is NaN. Between
        0.5 and 1 a float16 has 1024 steps, a bfloat16 128: confident scores become equal, and a choice among them
        another one.
    Example: x / sqrt(mean(x²) + 1e-6), x / max(‖x‖, 1e-12); log(softmax(x)), log(1 − sigmoid(x)), log(1 + x), log(π ·
        softmax(x)), a / (exp(x) · v); a router that picks experts by sigmoid scores.
    How to override: An epsilon of 1e-4 or more; LogSoftmax in the model; `--lower 'op=Log'`.
    Source: IEEE 754 binary16: smallest normal number 2⁻¹⁴, smallest subnormal 2⁻²⁴, largest number below 1 is 1 − 2⁻¹¹.
    """
    yield from guarded(view, to)
    yield from squeezed(view)
    yield from ranked(view)


def guarded(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops from an epsilon below the smallest normal number to the op that it keeps from zero."""
    guards = {op.id: value for op in view.of_kinds(_GUARD_SLOTS) if (value := _guard(view, op, to)) is not None}
    if not guards:
        return
    flow = Flow.of(view, {**COPIES, "Sqrt": (0,), "Pow": (0,)})
    small = flow.forth({v: op_id for op_id in guards for v in view.ops[op_id].results}, float32(view))
    read = [(value, view.ops[use.op]) for value in small for use in view.uses[value] if _magnifies(view, use)]
    pins = {op_id: small[value] for value, op in reversed(read) for op_id in (op.id, *_products_of_inverse(view, op))}
    ends = {value: op.id for value, op in reversed(read)}
    for op_id, cause in {**flow.path(ends, small.__contains__), **pins}.items():
        note = f"relies on an epsilon below {to.tiny:g}"
        if (value := guards.get(op_id)) is not None:
            note = f"epsilon {view.value_name(value)!r} is {view.fit(value, to).absmax:g}, below {to.tiny:g}"
        yield HeldOp(op_id, cause, note)


def _guard(view: View, op: Op, to: DType) -> ValueId | None:
    """Return the epsilon of an op: a positive constant below the smallest normal number."""
    for slot in _GUARD_SLOTS[op.kind]:
        value = float32_constant(view, op, slot)
        if value is None or view.fit(value, to).nonfinite or not 0 < view.fit(value, to).absmax < to.tiny:
            continue
        numbers = view.array(value)
        if numbers is not None and (numbers > 0).all():
            return value
    return None


def _magnifies(view: View, use: Use) -> bool:
    """True if small values of an input matter as much as large ones. A Pow counts if its exponent may be below 1."""
    op = view.ops[use.op]
    return use.slot in MAGNIFIES.get(op.kind, ()) or (op.kind == "Pow" and use.slot == 0 and _is_root(view, op, True))


def _is_root(view: View, op: Op, unknown: bool) -> bool:
    """True if an exponent is below 1; `unknown` if it is not a constant."""
    exponent = view.array(op.inputs[1])
    return bool((exponent < 1).any()) if exponent is not None else unknown


def _products_of_inverse(view: View, op: Op) -> Iterator[OpId]:
    """Yield the products with a reciprocal: 1e12 overflows where a float16 Mul reads it, and 0 · inf is NaN."""
    inverse = op.kind in ("Reciprocal", "Pow") or (op.kind == "Div" and view.constant(op.inputs[0]) is not None)
    for value in op.outputs if inverse else ():
        if value is not None:
            yield from (reader.id for reader in view.readers(value) if reader.kind == "Mul")


def squeezed(view: View) -> Iterator[HeldOp]:
    """Hold the ops from a squeeze to a logarithm, and from one through a product to what magnifies its result."""
    ends, products = first_inputs(view, _LOGARITHMS), _products(view)
    flow = Flow.of(view, _UNSQUEEZED)
    squeezes = results_of(view, SQUEEZES)
    small = flow.forth(squeezes, float32(view)) if ends else {}
    marked = flow.back(ends, lambda value: value in small or _shifted(view, value))
    pins: dict[OpId, OpId] = {}
    squares = {v: op.id for op in view.ops if squared(op) is not None for v in op.results} if products else {}
    sources = flow.forth({**squeezes, **results_of(view, _LENGTHS), **squares}, float32(view)) if products else {}
    read = {product: [v for v in view.ops[product].operands[:2] if v in sources] for product in products}
    grouped = {op_id for group in clusters(view) for op_id in group.ops} if any(read.values()) else set[OpId]()
    for product, (end, passed) in products.items():
        if read[product] and end not in grouped:
            path = flow.path(dict.fromkeys(read[product], end), sources.__contains__)
            pins.update({**path, **dict.fromkeys((product, *passed, end), end)})
    pins |= {**makers(view, marked), **{op_id: op_id for value, op_id in ends.items() if value in marked}}
    for op_id, cause in pins.items():
        yield HeldOp(op_id, cause, f"computes the argument of {described(view, cause)}")


def ranked(view: View) -> Iterator[HeldOp]:
    """Hold the ops from scores near 1 to the op that chooses by their order; scores of such a choice count as well."""
    if not view.of_kinds(_RANKS):
        return
    flow = Flow.of(view, {**_UNSQUEEZED, "TopK": (0,)})
    starts = filter(float32(view), results_of(view, _SATURATES))
    scores = flow.only(starts, lambda v: view.constant(v) is not None)
    ends = {value: use.op for _, use, value in operands_at(view, _RANKS) if value in scores}
    for op_id, end in leading_to(flow, ends, scores.__contains__).items():
        yield HeldOp(op_id, end, f"computes scores that {described(view, end)} ranks")


def _products(view: View) -> dict[OpId, tuple[OpId, Sequence[OpId]]]:
    """Return the products whose result, at most moved, scaled, shifted and bounded, an op magnifies.

    Each has that op and the ops between.
    """
    magnified: dict[OpId, tuple[OpId, Sequence[OpId]]] = {}
    for op in view.of_kinds(_ENDS):
        if op.kind == "Pow" and not _is_root(view, op, False):
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


def _shifted(view: View, value: ValueId) -> bool:
    """True if a value is a float32 sum or difference of a value and a constant."""
    op = view.producer(value, *PAIR_SUMS) if view.dtype(value) is DType.FLOAT else None
    return op is not None and any(view.constant(v) is not None for v in op.inputs)
