"""Growth of magnitudes through layers whose weights are one number throughout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.placeholders import Placeholder, number_throughout, placeholders
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import float32_constant
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import ALL, BOUNDED, CONTRACTS, COPIES, LAYERS, SELECTIONS, SUMS
from amp_rewrite.ir.schema import attribute, float_attribute, int_attribute
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View


class Magnitude(NamedTuple):
    """An upper bound of a value's magnitude, and the last layer of placeholders before the value, if any."""

    most: float
    because: OpId | None


@rule(reasons.GROWTH, "Placeholder weights do not drive values out of the type's range.")
def growth(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops behind placeholder layers that read or compute more than the low type holds. O(ops + uses).

    What it protects: Models without their trained weights, where every weight is one number throughout.
    Why: Trained weights differ in sign, so most of a sum cancels and the next layer reads values of the same size.
        Placeholders do not cancel, and values grow from layer to layer. Magnitudes are computed from weights and
        shapes, from inputs of magnitude 1; an unknown op or a layer of other weights ends the computation.
    Example: The "light" models of the ONNX test suite, whose weights are ConstantOfShape.
    How to override: Calibration with `--data`.
    Source: ONNX backend test data, "light" models.
    """
    layers = placeholders(view, to)
    if not layers:
        return
    known = magnitudes(view, to, layers)
    for op in view.ops:
        near = [known[v] for v in op.ports if v in known]
        grown = max((m for m in near if m.because is not None), default=None, key=lambda m: m.most)
        if grown is not None and grown.most > to.max and computes_float32(view, op):
            note = f"weights that are one number throughout let values grow to {grown.most:.0e}, beyond {to.max:g}"
            yield Pin(op.id, reasons.GROWTH, grown.because, note)


def magnitudes(view: View, to: DType, layers: Mapping[OpId, Placeholder]) -> dict[ValueId, Magnitude]:
    """Return the known magnitudes of float32 values."""
    known = {v: Magnitude(1.0, None) for v in view.scopes[MAIN].inputs if view.dtype(v) is DType.FLOAT}
    for op in view.ops:
        bound = _BOUNDS.get(op.kind)
        most = bound(_Reading(view, to, op, known, layers.get(op.id))) if bound is not None else None
        if most is None or math.isnan(most):
            continue
        causes = (known[v].because for v in op.operands if v in known)
        because = op.id if op.id in layers else next((cause for cause in causes if cause is not None), None)
        results = [v for v in op.results if view.dtype(v) is DType.FLOAT]
        known.update(dict.fromkeys(results, Magnitude(min(most, DType.FLOAT.max), because)))
    return known


@dataclass(frozen=True, slots=True)
class _Reading:
    """An op and the known magnitudes; `layer` is set if the op is a layer of placeholders."""

    view: View
    to: DType
    op: Op
    known: Mapping[ValueId, Magnitude]
    layer: Placeholder | None

    def at(self, slot: int) -> float | None:
        """Return the magnitude of an input; None if it is unknown or left out."""
        value = self.op.inputs[slot] if slot < len(self.op.inputs) else None
        if value is not None and value in self.known:
            return self.known[value].most
        constant = float32_constant(self.view, self.op, slot)
        fit = self.view.fit(constant, self.to) if constant is not None else None
        return None if fit is None or fit.nonfinite else fit.absmax

    def each(self, slots: Sequence[int]) -> list[float | None]:
        """Return the magnitudes of some inputs, without those left out."""
        return [self.at(slot) for slot, v in enumerate(self.op.inputs) if v is not None and slot in slots]

    def numbers(self, slot: int) -> Array | None:
        """Return the elements of a constant input; a single one for an input that is one number throughout."""
        value = self.op.inputs[slot]
        number = number_throughout(self.view, value, self.to) if value is not None else None
        elements = np.array(number) if number is not None else self.view.array(value)
        return elements.astype(np.float64).reshape(-1) if elements is not None else None


_Bound = Callable[[_Reading], float | None]

# -- bounds on the results of an op, by the magnitudes of its inputs ---------------------------------------------------


def _together(combine: Callable[[Sequence[float]], float], slots: Sequence[int], reading: _Reading) -> float | None:
    """Combine the magnitudes of these inputs; None if one of them is unknown."""
    magnitudes = reading.each(slots)
    known = [m for m in magnitudes if m is not None]
    return combine(known) if known and len(known) == len(magnitudes) else None


def _scaled(by: _Bound, reading: _Reading) -> float | None:
    """Multiply the magnitude of the first input by a factor from another input or an attribute."""
    x, factor = reading.at(0), by(reading)
    return None if x is None or factor is None else x * factor


def _layer(reading: _Reading) -> float | None:
    """Bound a sum of K equal terms and the bias."""
    if reading.layer is None:
        return None
    x, (bias, *_) = reading.at(reading.layer.reads), (*reading.each((2,)), 0.0)
    if x is None or bias is None:
        return None
    return x * reading.layer.gain + bias * abs(float_attribute(reading.op.node, "beta", 1.0))


def _normalized(reading: _Reading) -> float | None:
    """Bound a BatchNormalization of known statistics: y = (x − mean) · scale / √(variance + epsilon) + bias."""
    if int_attribute(reading.op.node, "training_mode", 0):
        return None
    x, known = reading.at(0), [n for slot in range(1, 5) if (n := reading.numbers(slot)) is not None]
    if x is None or len(known) < 4 or len({numbers.size for numbers in known} - {1}) > 1:
        return None
    scale, bias, mean, variance = known
    with np.errstate(all="ignore"):  # a variance below 0, or NaN
        factor = scale / np.sqrt(variance + float_attribute(reading.op.node, "epsilon", 1e-5))
        shift = bias - mean * factor
        return float((x * np.abs(factor) + np.abs(shift)).max(initial=0))


def _locally_normalized(reading: _Reading) -> float | None:
    """Bound LRN: x / (k + a · Σx²)^β is largest for a single x; for β > ½ it peaks at x = √(k / (a · (2β − 1)))."""
    x, op = reading.at(0), reading.op
    k, beta = float_attribute(op.node, "bias", 1.0), float_attribute(op.node, "beta", 0.75)
    a = float_attribute(op.node, "alpha", 1e-4) / max(int_attribute(op.node, "size", 1), 1)
    if x is None or not (k > 0 and a > 0):
        return None
    peak = min(x, math.sqrt(k / (a * (2 * beta - 1)))) if beta > 0.5 else x
    with np.errstate(all="ignore"):  # unusual attributes lead to infinity or zero
        return float(peak / np.float64(k + a * peak * peak) ** beta)


def _clipped(reading: _Reading) -> float | None:
    """Bound a Clip by its larger bound if it has both, else by the largest magnitude at hand."""
    x, op = reading.at(0), reading.op
    attributes = (attribute(op.node, name) for name in ("min", "max"))
    bounds = [*(abs(bound.f) for bound in attributes if bound is not None), *reading.each((1, 2))]
    known = [bound for bound in bounds if bound is not None]
    if x is None or len(known) < len(bounds):
        return None
    return min(x, max(known)) if len(known) == 2 else max(x, *known, 0.0)


def _filled(reading: _Reading) -> float | None:
    result = reading.op.outputs[0]
    number = None if result is None else number_throughout(reading.view, result, reading.to)
    return None if number is None else abs(number)


def _divisor(reading: _Reading) -> float | None:
    value = float32_constant(reading.view, reading.op, 1)
    least = reading.view.fit(value, reading.to).absmin if value is not None else 0.0
    return 1 / least if least else None


_BOUNDS: Mapping[str, _Bound] = {
    **{kind: partial(_together, max, slots) for kind, slots in {**COPIES, **SELECTIONS}.items()},
    **dict.fromkeys(CONTRACTS, partial(_together, max, (0,))),
    **dict.fromkeys(SUMS, partial(_together, sum, ALL)),
    **dict.fromkeys(BOUNDED, lambda reading: 1.0),
    **dict.fromkeys(LAYERS, _layer),
    "BatchNormalization": _normalized,
    "Clip": _clipped,
    "ConstantOfShape": _filled,
    "Div": partial(_scaled, _divisor),
    "LRN": _locally_normalized,
    "LeakyRelu": partial(_scaled, lambda reading: max(1.0, abs(float_attribute(reading.op.node, "alpha", 0.01)))),
    "Mean": partial(_together, max, ALL),
    "Mul": partial(_together, math.prod, ALL),
}
"""Bounds by op: exact for a sum of equal terms, an upper bound elsewhere."""
