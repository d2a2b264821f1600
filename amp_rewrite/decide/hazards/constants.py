"""Constants that underflow in the low type, and statistics and epsilons out of its range; `mask.py` has overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import float32_constant
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, first_input_of, float32, makers, origin
from amp_rewrite.ir.op_classes import COPIES, LAYERS, MAGNIFIES, PRODUCTS, SCALINGS, Slots
from amp_rewrite.ir.schema import KEPT_VARIABLES, float_attribute
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View

_FACTOR_SLOTS: Slots = {
    **dict.fromkeys(SCALINGS | PRODUCTS, (0, 1)),
    **dict.fromkeys(("Conv", "ConvTranspose", "DequantizeLinear", "QuantizeLinear"), (1,)),
}
_OUTWEIGHS = 2.0**11
_LOSS = 2.0**-8
"""Largest part of a constant's norm that may be lost."""
_GUARD_SLOTS = {"Add": (0, 1), "Max": (0, 1), "Clip": (1,), "Where": (1, 2)}


def reads_low(view: View, use: Use, to: DType) -> bool:
    """True if a lowered reader takes this input in the low type.

    False at ports of a fixed type (the scales of Resize), at those that stay float32 by choice, and where the schema
    does not admit the low type.
    """
    op = view.ops[use.op]
    variable = op.signature.input_variable(use.slot) if op.signature and not op.bodies else None
    if op.signature is None or variable is None or variable in KEPT_VARIABLES.get((op.domain, op.op_type), ()):
        return False
    return op.signature.admits(variable, to)


def constants(view: View) -> Iterator[ValueId]:
    """Yield the float32 constants that some op reads."""
    for value in view.values:
        if view.constant(value.id) is not None and view.uses[value.id] and view.dtype(value.id) is DType.FLOAT:
            yield value.id


def underflow(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops whose weights or only factor lose digits, or whose divisor or scale is below the normal numbers."""
    for op in view.ops:
        for slot in _FACTOR_SLOTS.get(op.kind, ()):
            value = float32_constant(view, op, slot)
            if value is None or not reads_low(view, Use(op.id, slot), to):
                continue
            fit = view.fit(value, to)
            product = op.kind in LAYERS or op.kind in PRODUCTS
            divides = slot == 1 and op.kind != "Mul" and not product
            lost = (fit.count == 1 or product) and loses_digits(view, value, to)
            if lost or (divides and (fit.flushed or fit.subnormal)):
                note = f"constant {view.value_name(value)!r} goes down to {fit.absmin:g}, below {to.tiny:g}"
                yield Pin(op.id, reasons.CONSTANT_RANGE, None, note)
                break


def outweighs(view: View, bias: ValueId | None, weight: ValueId | None, to: DType) -> bool:
    """True if the norm of a constant bias is more than 2¹¹ times that of the constant weights."""
    if bias is None or weight is None or view.constant(bias) is None or view.constant(weight) is None:
        return False
    added, factors = view.fit(bias, to), view.fit(weight, to)
    if added.nonfinite or added.absmax * math.sqrt(added.count) <= _OUTWEIGHS * factors.absmax:
        return False
    return _norm(view, bias) > _OUTWEIGHS * _norm(view, weight)


def _norm(view: View, value: ValueId, rounded_to: DType | None = None) -> float:
    """Return the norm of a constant, or of what rounding changes in it. Read in parts."""
    tensor, squares = view.constant(value), 0.0
    for chunk in view.model.chunks(tensor) if tensor is not None else ():
        exact = chunk.astype(np.float64)
        numbers = exact if rounded_to is None else chunk.astype(rounded_to.numpy).astype(np.float64) - exact
        squares += float(np.square(numbers).sum())
    return math.sqrt(squares)


def large_biases(view: View, to: DType) -> Iterator[Pin]:
    """Pin sums of a product and a constant that outweighs it, copies of these sums, and norms that read them."""
    copies = first_input_of(COPIES)
    sums: dict[ValueId, OpId] = {}
    for op in view.ops:
        for value, bias in (op.inputs, op.inputs[::-1]) if op.kind == "Add" and len(op.inputs) == 2 else ():
            product = view.producer(origin(view, value, copies)) if value is not None else None
            weight = product.inputs[1] if product is not None and product.kind in LAYERS else None
            if outweighs(view, bias, weight, to) and op.outputs[0] is not None:
                sums[op.outputs[0]] = op.id
    moved = Flow.of(view, COPIES).forth(sums, float32(view)) if sums else {}
    pins = makers(view, moved)
    for value, cause in moved.items():
        pins.update((r.id, cause) for r in view.readers(value) if r.kind.endswith("Normalization"))
    for op_id, cause in sorted(pins.items()):
        yield Pin(op_id, reasons.CONSTANT_RANGE, cause, "a bias that outweighs the product it is added to")


def loses_digits(view: View, value: ValueId, to: DType) -> bool:
    """True if rounding a constant to the type changes it by more than 2⁻⁸ of its norm: most of it is subnormal."""
    fit, half = view.fit(value, to), to.smallest_subnormal / 2
    if fit.nonfinite or fit.overflow or not (fit.flushed or fit.subnormal):
        return False
    if fit.absmax * _LOSS > half * math.sqrt(fit.count):  # a subnormal is off by half its spacing at most
        return False
    return _norm(view, value, to) > _LOSS * _norm(view, value)


@rule(reasons.STATISTICS, "A BatchNormalization runs in a low type only if its statistics fit.")
def statistics(view: View, to: DType) -> Iterator[Pin]:
    """Pin a BatchNormalization whose scale, bias or mean overflow, or whose variance + epsilon leaves [tiny, max].

    What it protects: BatchNormalization in inference.
    Why: It divides by the square root of variance + epsilon. A variance of 0 with epsilon 1e-5 is below float16's
        smallest normal number, 6.1e-5; a variance of 1e-12 with epsilon 1e-3 is safe.
    Example: A channel without variance after pruning, or with dead inputs.
    How to override: `--lower 'op=BatchNormalization'`.
    Source: ONNX operator BatchNormalization; IEEE 754 binary16.
    """
    for op in view.ops:
        if op.kind == "BatchNormalization" and computes_float32(view, op):
            notes = (_misfit(view, op, slot, to) for slot in range(1, 5))
            if (note := next(filter(None, notes), None)) is not None:
                yield Pin(op.id, reasons.STATISTICS, None, note)


def _misfit(view: View, op: Op, slot: int, to: DType) -> str | None:
    """Return a note if a statistic of a BatchNormalization does not fit."""
    value = float32_constant(view, op, slot)
    if value is None:
        return None
    fit, epsilon = view.fit(value, to), float_attribute(op.node, "epsilon", 1e-5)
    statistic = f"{('scale', 'bias', 'mean', 'variance')[slot - 1]} {view.value_name(value)!r}"
    if fit.overflow:
        return f"{statistic} goes up to {fit.absmax:g}, beyond {to.max:g}"
    variances = view.array(value) if slot == 4 and epsilon < to.tiny else None
    if variances is None or (least := float(variances.min(initial=to.max))) + epsilon >= to.tiny:
        return None
    return f"{statistic} goes down to {least:g}: with epsilon {epsilon:g}, below {to.tiny:g}"


@rule(reasons.EPSILON, "A division by x + epsilon runs in a low type only if epsilon fits.")
def epsilon(view: View, to: DType) -> Iterator[Pin]:
    """Pin a division, root or logarithm that a constant below the smallest normal number keeps from zero.

    The constant is a summand, or the lower bound of a Max, Clip or Where. The pins cover that op, the ops between, the
    root, power, reciprocal, logarithm or division, and a product with such a reciprocal.

    What it protects: Divisors and arguments that an epsilon keeps away from zero.
    Why: float16 loses precision below 6.1e-5 and rounds to 0 below 3e-8; GPUs may flush the range between to 0. The
        division then gives infinity, and 0 · inf is NaN.
    Example: x / sqrt(mean(x²) + 1e-6), x / max(‖x‖, 1e-12).
    How to override: An epsilon of 1e-4 or more.
    Source: IEEE 754 binary16: smallest normal number 2⁻¹⁴, smallest subnormal 2⁻²⁴.
    """
    guards = {op.id: value for op in view.ops if (value := _guard(view, op, to)) is not None}
    if not guards:
        return
    flow = Flow.of(view, {**COPIES, "Sqrt": (0,), "Pow": (0,)})
    starts = {v: op_id for op_id in guards for v in view.ops[op_id].results}
    small = flow.forth(starts, float32(view))
    ends: dict[ValueId, OpId] = {}
    pins: dict[OpId, OpId] = {}
    for value, guard in small.items():
        for use in view.uses[value]:
            op = view.ops[use.op]
            if _magnifies(view, op, use.slot):
                ends.setdefault(value, op.id)
                for op_id in (op.id, *_products_of_inverse(view, op)):
                    pins.setdefault(op_id, guard)
    pins = {**makers(view, flow.back(ends, small.__contains__)), **pins}
    for op_id, cause in sorted(pins.items()):
        note = f"relies on an epsilon below {to.tiny:g}"
        if (value := guards.get(op_id)) is not None:
            note = f"epsilon {view.value_name(value)!r} is {view.fit(value, to).absmax:g}, below {to.tiny:g}"
        yield Pin(op_id, reasons.EPSILON, cause, note)


def _guard(view: View, op: Op, to: DType) -> ValueId | None:
    """Return the epsilon of an op: a positive constant below the smallest normal number."""
    for slot in _GUARD_SLOTS.get(op.kind, ()):
        value = float32_constant(view, op, slot)
        if value is None or view.fit(value, to).nonfinite or not 0 < view.fit(value, to).absmax < to.tiny:
            continue
        numbers = view.array(value)
        if numbers is not None and (numbers > 0).all():
            return value
    return None


def _magnifies(view: View, op: Op, slot: int) -> bool:
    """True if small values of an input matter as much as large ones.

    A Pow counts if its exponent is below 1, or not a constant.
    """
    if op.kind != "Pow":
        return slot in MAGNIFIES.get(op.kind, ())
    exponent = view.array(op.inputs[1])
    return slot == 0 and (exponent is None or bool((exponent < 1).any()))


def _products_of_inverse(view: View, op: Op) -> Iterator[OpId]:
    """Yield the products with a reciprocal: 1e12 overflows where a float16 Mul reads it, and 0 · inf is NaN."""
    inverse = op.kind in ("Reciprocal", "Pow") or (op.kind == "Div" and view.constant(op.inputs[0]) is not None)
    for value in op.outputs if inverse else ():
        if value is not None:
            yield from (reader.id for reader in view.readers(value) if reader.kind == "Mul")
