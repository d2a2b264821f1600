"""Constants that vanish in the low type, and statistics and epsilons out of its range; `mask.py` has overflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, computes_float32, float32, makers
from amp_rewrite.ir.op_classes import COPIES, MAGNIFIES
from amp_rewrite.ir.schema import KEPT_VARIABLES, float_attribute
from amp_rewrite.ir.view import Op, OpId, Use, ValueId, View


def reads_low(view: View, use: Use, to: DType) -> bool:
    """Whether lowering the reader would hand it this input in the low type.

    Not so at a port of a fixed type (the scales of Resize), at one that stays float32 by choice, and where the
    schema does not admit the low type.
    """
    op = view.ops[use.op]
    variable = op.signature.input_variable(use.slot) if op.signature and not op.bodies else None
    if op.signature is None or variable is None or variable in KEPT_VARIABLES.get((op.domain, op.op_type), ()):
        return False
    return op.signature.admits(variable, to)


def constants(view: View) -> Iterator[ValueId]:
    """The float32 values that are constants and are read."""
    for value in view.values:
        held = value.tensor is not None and not value.overridable
        if held and view.uses[value.id] and view.dtype(value.id) is DType.FLOAT:
            yield value.id


def underflow(view: View, to: DType) -> Iterator[Pin]:
    """Pin a Mul or Div with a single constant that would become zero, and a Div or Q/DQ whose constant divisor or
    scale lies below the smallest normal number."""
    for op in view.ops:
        for slot in _FACTOR_SLOTS.get(op.kind, ()):
            value = op.inputs[slot] if slot < len(op.inputs) else None
            if value is None or view.dtype(value) is not DType.FLOAT or not reads_low(view, Use(op.id, slot), to):
                continue
            fit = view.fit(value, to)
            divides = slot == 1 and op.kind != "Mul"
            if fit.count == fit.flushed == 1 or (divides and (fit.flushed or fit.subnormal)):
                note = f"constant {view.value_name(value)!r} goes down to {fit.absmin:g}, below {to.tiny:g}"
                yield Pin(op.id, reasons.CONSTANT_RANGE, None, note)
                break


_FACTOR_SLOTS = {"Mul": (0, 1), "Div": (0, 1), "QuantizeLinear": (1,), "DequantizeLinear": (1,)}


@rule(reasons.STATISTICS, "A BatchNormalization runs in a low type only if its statistics fit.")
def statistics(view: View, to: DType) -> Iterator[Pin]:
    """Pin a BatchNormalization whose scale, bias or mean overflow, or whose variance + epsilon leaves [tiny, max].

    What it protects: BatchNormalization in inference.
    Why: It divides by the root of variance + epsilon. A variance of 0 behind an epsilon of 1e-5 is below float16's
        smallest normal number, 6.1e-5; a variance of 1e-12 behind an epsilon of 1e-3 is safe.
    Example: A channel that pruning or dead inputs left without variance.
    How to override: `--lower 'op=BatchNormalization'`.
    Source: ONNX operator BatchNormalization; IEEE 754 binary16.
    """
    for op in view.ops:
        if op.kind != "BatchNormalization" or not computes_float32(view, op):
            continue
        for slot, what in enumerate(("scale", "bias", "mean", "variance"), start=1):
            value = op.inputs[slot]
            if value is None or view.constant(value) is None or view.dtype(value) is not DType.FLOAT:
                continue
            note = _statistic(view, value, what, to, float_attribute(op.node, "epsilon", 1e-5))
            if note:
                yield Pin(op.id, reasons.STATISTICS, None, note)
                break


def _statistic(view: View, value: ValueId, what: str, to: DType, epsilon: float) -> str | None:
    fit = view.fit(value, to)
    name = view.value_name(value)
    if fit.overflow:
        return f"{what} {name!r} goes up to {fit.absmax:g}, beyond {to.max:g}"
    tensor = view.constant(value)
    if what != "variance" or epsilon >= to.tiny or tensor is None:
        return None
    least = float(view.model.array(tensor).min(initial=to.max))
    if least + epsilon >= to.tiny:
        return None
    return f"{what} {name!r} goes down to {least:g}: with epsilon {epsilon:g}, below {to.tiny:g}"


@rule(reasons.EPSILON, "A division by x + epsilon runs in a low type only if epsilon fits.")
def epsilon(view: View, to: DType) -> Iterator[Pin]:
    """Pin a division, root or logarithm that a constant below the smallest normal number keeps from zero.

    The constant is added, or is the lower bound of a Max, Clip or Where; the pins cover that op, what lies
    between, the root, power, reciprocal, logarithm or division by it, and a product with such a reciprocal.

    What it protects: Divisors and arguments that an epsilon keeps away from zero.
    Why: float16 has few digits below 6.1e-5 and nothing below 6e-8. The epsilon rounds to zero, or GPUs flush it, and
        the division gives infinity: 1e12 overflows as soon as a product reads it, and 0 · inf is NaN.
    Example: x / sqrt(mean(x²) + 1e-6), x / max(‖x‖, 1e-12).
    How to override: An epsilon of 1e-4 or more.
    Source: IEEE 754 binary16: smallest normal number 2⁻¹⁴, smallest subnormal 2⁻²⁴.
    """
    guards = {op.id: slot for op in view.ops if (slot := _guard_slot(view, op, to)) is not None}
    if not guards:
        return
    flow = Flow.of(view, {**COPIES, "Sqrt": (0,), "Pow": (0,)})
    starts = {v: op_id for op_id in guards for v in view.ops[op_id].outputs if v is not None}
    small = flow.forth(starts, float32(view))
    ends: dict[ValueId, OpId] = {}
    pins: dict[OpId, OpId] = {}
    for value, guard in small.items():
        for use in view.uses[value]:
            op = view.ops[use.op]
            if _ends(view, op, use.slot):
                ends.setdefault(value, op.id)
                pins.setdefault(op.id, guard)
                for product in _products_of_inverse(view, op):
                    pins.setdefault(product, guard)
    for op_id, end in makers(view, flow.back(ends, small.__contains__)).items():
        pins.setdefault(op_id, end)
    for op_id, cause in sorted(pins.items()):
        yield Pin(op_id, reasons.EPSILON, cause, _epsilon_note(view, op_id, guards, small, to))


def _epsilon_note(view: View, op_id: OpId, guards: Mapping[OpId, int], small: Mapping[ValueId, OpId], to: DType) -> str:
    slot = guards.get(op_id)
    if slot is None:
        return f"relies on an epsilon below {to.tiny:g}"
    value = view.ops[op_id].inputs[slot]
    assert value is not None
    return f"epsilon {view.value_name(value)!r} is {view.fit(value, to).absmax:g}, below {to.tiny:g}"


_GUARD_SLOTS = {"Add": (0, 1), "Max": (0, 1), "Clip": (1,), "Where": (1, 2)}


def _guard_slot(view: View, op: Op, to: DType) -> int | None:
    for slot in _GUARD_SLOTS.get(op.kind, ()):
        value = op.inputs[slot] if slot < len(op.inputs) else None
        if value is None or view.dtype(value) is not DType.FLOAT or view.constant(value) is None:
            continue
        fit = view.fit(value, to)
        if 0 < fit.absmax < to.tiny and not fit.nonfinite and _positive(view, value):
            return slot
    return None


def _positive(view: View, value: ValueId) -> bool:
    tensor = view.constant(value)
    return tensor is not None and bool((view.model.array(tensor) > 0).all())


def _ends(view: View, op: Op, slot: int) -> bool:
    if op.kind == "Pow":
        return slot == 0 and _shrinks(view, op)
    return slot in MAGNIFIES.get(op.kind, ())


def _shrinks(view: View, op: Op) -> bool:
    """Whether a Pow is a root or an inverse: an exponent below 1, or one that only the run tells."""
    tensor = view.constant(op.inputs[1])
    return tensor is None or bool((view.model.array(tensor) < 1).any())


def _products_of_inverse(view: View, op: Op) -> Iterator[OpId]:
    """1e12 overflows as soon as a Mul reads it in float16, and 0 · inf is NaN."""
    inverse = op.kind in ("Reciprocal", "Pow") or (op.kind == "Div" and view.constant(op.inputs[0]) is not None)
    for value in op.outputs if inverse else ():
        if value is not None:
            yield from (reader.id for reader in view.readers(value) if reader.kind == "Mul")
