"""Constants that overflow or underflow in the low type, or lose digits in it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.fill_reach import held_fills
from amp_rewrite.decide.hazards.mask_fills import additive, reads_low, unfit_readers
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import LARGE, described, float32_constant, leading_to, learned_ops, scaled_by
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.dataflow import Flow, first_input_of, float32, float32_ops, makers, number, orders, origin
from amp_rewrite.ir.op_classes import (
    AFFINE,
    ALL,
    COPIES,
    DEQUANTIZES,
    HEAVY,
    KEEP_SCALE,
    LAYERS,
    PRODUCTS,
    QUANTIZERS,
    QUANTIZES,
    REDUCTIONS,
    SCALINGS,
    SELECTIONS,
    SUMS,
    Slots,
)
from amp_rewrite.ir.patterns.mask_fills import mask_fills
from amp_rewrite.ir.view import Op, ValueId, View

_FACTOR_SLOTS: Slots = {
    **dict.fromkeys(SCALINGS | PRODUCTS, (0, 1)),
    **dict.fromkeys(("Conv", "ConvTranspose", "DequantizeLinear", "QuantizeLinear"), (1,)),
    "BatchNormalization": (4,),
}
_KEEP_SIZE: Slots = {**COPIES, **SELECTIONS, **REDUCTIONS, **dict.fromkeys(SUMS, ALL)}
OUTWEIGHS = 2.0**11
_LOSS = 2.0**-8
"""Largest part of a constant's norm that may be lost."""
_SMALL = 2.0**-5
"""Factor that makes a product of two values small again."""
_GROWS: Slots = {**COPIES, **REDUCTIONS, "Pow": (0,), **dict.fromkeys(SCALINGS | PRODUCTS - {"Einsum"}, (0, 1))}
_copied = first_input_of(COPIES)
_FLOATS = (DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ)  # zero points are 0
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)
"""Types that matter: four bits are too small, and no bias fills its int32."""


@rule(
    reasons.CONSTANT_RANGE,
    "An op that computes with a constant runs in a low type only if the constant fits.",
    cases=(reasons.CONSTANT_RANGE, "statistics", "scaled_down", "quantizer"),
)
def constant_range(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold readers of constants that overflow or underflow, and the copies between. O(nodes + uses).

    What it protects: Arithmetic with constants beyond the type's range, and quantizers whose integers or 8-bit floats,
        times their scale, leave it, with what feeds or reads them. BatchNormalization in inference, whose variance +
        epsilon is a divisor. Up to the next layer, numbers beyond 2⁸ (bfloat16: 2⁵) that are added to what a layer
        made, numbers beyond 2⁸ that multiply it in float16, and biases that outweigh its weights. In float16, products
        of two values, powers and Gram matrices that a number below 2⁻⁵ scales down behind them. A fill that only
        selects (a branch of Where, a bound of Clip, Max or Min, an attention mask) saturates instead; infinities are
        the same in every type. Tiny weights before a large scale, or a tiny scale before large weights, are balanced by
        a power of two beforehand.
    Why: float16 overflows to infinity beyond 65504, and rounds to 0 below 3e-8, which erases a product and breaks a
        quotient. A variance of 0 with epsilon 1e-5 is below its smallest normal number, 6.1e-5. The scale of a
        quantizer records how large the values were at calibration; FLOAT8E5M2 reaches 57344 without a scale, and a
        scale computed at run time is not known to be small.
    Example: x · 1e6, x / 1e-9, x · y / 1000, a scale of 1e-6 in DequantizeLinear, int8 codes with a scale of 1000; a
        channel without variance after pruning, or with dead inputs.
    How to override: `--lower 'op=BatchNormalization'`, `--lower 'op=DequantizeLinear'`.
    Source: IEEE 754 binary16; ONNX operators BatchNormalization, QuantizeLinear and DequantizeLinear, "Float stored in
        8 bits".
    """
    yield from overflow(view, to)
    yield from underflow(view, to)
    yield from large_constants(view, to)
    yield from scaled_down(view, to)
    yield from quantizers(view, to)


def overflow(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops that would compute with an overflowing constant, and the copies between."""
    extreme = mask_fills(view, to)
    overflowing = {value: fill for value, fill in extreme.items() if fill.overflows}
    masks = additive(view, extreme) if overflowing else {}
    for value, fill in overflowing.items():
        readers, between = unfit_readers(view, to, value, fill)
        note = f"constant {view.value_name(value)!r} goes to {fill.absmax:g}, beyond {to.max:g}"
        for op_id in {*readers, *between} - masks.keys():
            yield HeldOp(op_id, view.values[value].producer, note)
    yield from (HeldOp(*held) for held in held_fills(view, to) if held[0] not in masks)


def underflow(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold ops whose weights or only factor lose digits, or whose divisor or scale is below the normal numbers."""
    for value in filter(float32(view), view.constants):
        small = view.fit(value, to).flushed or view.fit(value, to).subnormal
        for use in view.uses[value]:
            op = view.ops[use.op]
            if use.slot not in _FACTOR_SLOTS.get(op.kind, ()) or not (small or op.kind == "BatchNormalization"):
                continue
            least = _vanishing(view, op, use.slot, value, to)
            if least is not None and reads_low(view, use, to):
                note = f"constant {view.value_name(value)!r} goes down to {least:g}, below {to.tiny:g}"
                yield HeldOp(op.id, None, note)


def _vanishing(view: View, op: Op, slot: int, value: ValueId, to: DType) -> float | None:
    """Return the least element of a constant if a product, a quotient or the root of a variance suffers from it."""
    if op.kind == "BatchNormalization":
        epsilon = float_attribute(op.node, "epsilon", 1e-5)
        variances = view.array(value) if epsilon < to.tiny else None
        least = float(variances.min(initial=to.max)) if variances is not None else to.max
        return least if least + epsilon < to.tiny else None
    fit, product = view.fit(value, to), op.kind in LAYERS or op.kind in PRODUCTS
    divides = slot == 1 and op.kind != "Mul" and not product
    return fit.absmin if divides or ((fit.count == 1 or product) and loses_digits(view, value, to)) else None


def outweighs(view: View, bias: ValueId | None, weight: ValueId | None, to: DType, *, by: float = OUTWEIGHS) -> bool:
    """True if the norm of a constant bias is more than `by` times that of the constant weights."""
    if bias is None or weight is None or view.constant(bias) is None or view.constant(weight) is None:
        return False
    added, factors = view.fit(bias, to), view.fit(weight, to)
    if added.nonfinite or added.absmax * math.sqrt(added.count) <= by * factors.absmax:
        return False
    return _norm(view, bias) > by * _norm(view, weight)


def _norm(view: View, value: ValueId, rounded_to: DType | None = None) -> float:
    """Return the norm of a constant, or of what rounding changes in it. Read in parts."""
    tensor, squares = view.constant(value), 0.0
    for chunk in view.model.chunks(tensor) if tensor is not None else ():
        exact = chunk.astype(np.float64)
        numbers = exact if rounded_to is None else chunk.astype(rounded_to.numpy).astype(np.float64) - exact
        squares += float(np.square(numbers).sum())
    return math.sqrt(squares)


def large_constants(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold what adds a large constant to learned values or multiplies them by one, and all to the next layer."""
    large = {op.id: note for op in view.ops if op.kind in AFFINE and (note := _enlarges(view, op, to))}
    if not large:
        return
    learned = learned_ops(view)
    starts = {v: op_id for op_id in large if op_id in learned for v in view.ops[op_id].results}
    reached = Flow.of(view, _KEEP_SIZE).forth(starts, float32(view))
    pins = makers(view, reached)
    for value, cause in reached.items():
        pins.update((reader.id, cause) for reader in view.readers(value) if reader.kind not in HEAVY)
    for op_id, cause in pins.items():
        yield HeldOp(op_id, cause, large[cause])


def _enlarges(view: View, op: Op, to: DType) -> str:
    """Return a note if an op adds a large constant or multiplies by one."""
    for value, constant in orders(op):
        if view.constant(constant) is None:
            continue
        size = abs(number(view, constant) or 0.0)
        if op.kind in SUMS and size > LARGE[to]:
            return f"adds {size:g}, beside which a product is small"
        size = 1 / size if size and op.kind == "Div" else size
        if op.kind in SCALINGS and to is DType.FLOAT16 and size > LARGE[to]:
            return f"makes a product {size:g} times as large"
        made_by = view.producer(origin(view, value, _copied)) if op.kind == "Add" else None
        if made_by is not None and made_by.kind in LAYERS and outweighs(view, constant, made_by.inputs[1], to):
            return "a bias that outweighs the product it is added to"
    return ""


def scaled_down(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold products of values that one small number scales down behind them, and the ops between; in float16 alone."""
    scaled = {op.id: v for op in view.of_kinds(SCALINGS) for v, size in scaled_by(view, op) if abs(size) < _SMALL}
    grown = set[ValueId]()
    for op in view.of_kinds(_GROWS) if scaled and to is DType.FLOAT16 else ():
        if _grows(view, op) or (op.kind not in PRODUCTS and not grown.isdisjoint(op.operands)):
            grown.update(v for v in op.results if view.dtype(v) is DType.FLOAT)
    ends = {value: op_id for op_id, value in scaled.items() if value in grown}
    for op_id, end in leading_to(Flow.of(view, _GROWS), ends, grown.__contains__).items():
        yield HeldOp(op_id, end, f"{described(view, end)} scales it down again")


def _grows(view: View, op: Op) -> bool:
    """True for a power, a product of two values, and one of a matrix and its transpose."""
    if op.kind == "Pow":
        exponent = view.array(op.inputs[1])
        return exponent is not None and bool((exponent > 1).any())
    varying = [origin(view, v, _copied) for v in op.inputs[:2] if v is not None and view.constant(v) is None]
    return len(varying) == 2 and (op.kind == "Mul" or (op.kind in PRODUCTS and varying[0] == varying[1]))


def loses_digits(view: View, value: ValueId, to: DType) -> bool:
    """True if rounding a constant to the type changes it by more than 2⁻⁸ of its norm: most of it is subnormal."""
    fit, half = view.fit(value, to), to.smallest_subnormal / 2
    if fit.nonfinite or fit.overflow or not (fit.flushed or fit.subnormal):
        return False
    if fit.absmax * _LOSS > half * math.sqrt(fit.count):  # a subnormal is off by half its spacing at most
        return False
    return _norm(view, value, to) > _LOSS * _norm(view, value)


def quantizers(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold ops that quantize or dequantize beyond the low type; with a constant scale also their neighbours."""
    notes = ((op, _beyond(view, op, to)) for op in float32_ops(view, QUANTIZERS))
    beyond = {op.id: note for op, note in notes if note is not None}
    yield from (HeldOp(op_id, None, note) for op_id, note in beyond.items())
    sure = [view.ops[op_id] for op_id in beyond if view.constant(view.ops[op_id].inputs[1]) is not None]
    flow = Flow.of(view, KEEP_SCALE)  # results of a maximum or selection are as large as what they read
    read = {v: op.id for op in sure if op.kind in QUANTIZES for v in op.operands[:1]}
    written = {v: op.id for op in sure if op.kind in DEQUANTIZES for v in op.results}
    fed = [(reader.id, op) for v, op in flow.forth(written, float32(view)).items() for reader in view.readers(v)]
    for op_id, cause in (*flow.path(read, float32(view)).items(), *fed):
        yield HeldOp(op_id, cause, beyond[cause])


def _beyond(view: View, op: Op, to: DType) -> str | None:
    """Return a note if an op's integers or 8-bit floats, scaled, exceed the low type."""
    value, scale = op.outputs[0] if op.kind in QUANTIZES else op.inputs[0], op.inputs[1]
    kind = view.dtype(value)
    most = _farthest(view, op, kind) if kind is not None else None
    if kind is None or scale is None or most is None:
        return None
    if view.constant(scale) is None:
        unsure = kind in _FLOATS and most > to.max / 2
        return f"{kind.spelling} goes to {most:g}, and its scale is not known to be small" if unsure else None
    times = view.fit(scale, to).absmax if float32_constant(view, op, 1) is not None else 0.0
    return f"{most:g} of {kind.spelling} times {times:g} is beyond {to.max:g}" if most * times > to.max else None


def _farthest(view: View, op: Op, kind: DType) -> float | None:
    """Return the largest distance of a type's numbers from the op's zero point; None for other types."""
    if kind in _FLOATS:
        import ml_dtypes

        return float(ml_dtypes.finfo(kind.numpy).max)
    if kind not in _INTEGERS:
        return None
    limits, stated = np.iinfo(kind.numpy), len(op.inputs) > 2 and op.inputs[2] is not None
    zeros = view.array(op.inputs[2]) if stated else np.zeros(1)
    if zeros is None:
        return float(limits.max)
    zeros = zeros.astype(np.int64)
    return float(max(limits.max - zeros.min(initial=limits.max), zeros.max(initial=limits.min) - limits.min))
