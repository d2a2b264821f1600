"""Growth: magnitudes through layers whose weights are one number throughout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.placeholders import Placeholder, number_throughout, placeholders
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import computes_float32
from amp_rewrite.ir.op_classes import BOUNDED, CONTRACTS, COPIES, LAYERS, SELECTIONS, SUMS
from amp_rewrite.ir.schema import attribute, float_attribute, int_attribute
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View


class Magnitude(NamedTuple):
    """How large a value gets, and the last layer of placeholders that it comes from, if it comes from any."""

    most: float
    because: OpId | None


@rule(reasons.GROWTH, "Placeholder weights do not drive values out of the type's range.")
def growth(view: View, to: DType) -> Iterator[Pin]:
    """Pin ops that read or give, behind placeholder layers, more than the low type holds. O(ops + uses).

    What it protects: Models whose trained weights were left out, every weight being one number throughout.
    Why: Trained weights differ in sign, so most of a sum cancels and the next layer reads values of the same size.
        With placeholders nothing cancels, and values grow from layer to layer. Magnitudes are computed from weights and
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
        met = [known[v] for v in (*op.inputs, *op.outputs) if v is not None and v in known]
        grown = max((m for m in met if m.because is not None), default=None, key=lambda m: m.most)
        if grown is not None and grown.most > to.max and computes_float32(view, op):
            note = f"weights that are one number throughout let values grow to {grown.most:.0e}, beyond {to.max:g}"
            yield Pin(op.id, reasons.GROWTH, grown.because, note)


def magnitudes(view: View, to: DType, layers: Mapping[OpId, Placeholder]) -> dict[ValueId, Magnitude]:
    """How large float32 values get, as far as that is known."""
    known = {v: Magnitude(1.0, None) for v in view.scopes[MAIN].inputs if view.dtype(v) is DType.FLOAT}
    for op in view.ops:
        rule = RULES.get(op.kind)
        most = rule(Reading(view, to, op, known, layers.get(op.id))) if rule is not None else None
        if most is None or math.isnan(most):
            continue
        causes = (known[v].because for v in op.inputs if v is not None and v in known)
        because = op.id if op.id in layers else next((cause for cause in causes if cause is not None), None)
        results = [v for v in op.outputs if v is not None and view.dtype(v) is DType.FLOAT]
        known.update(dict.fromkeys(results, Magnitude(min(most, DType.FLOAT.max), because)))
    return known


@dataclass(frozen=True, slots=True)
class Reading:
    """An op and what is known of its inputs; `layer` is what it is if it is a layer of placeholders."""

    view: View
    to: DType
    op: Op
    known: Mapping[ValueId, Magnitude]
    layer: Placeholder | None

    def at(self, slot: int) -> float | None:
        """How large an input gets; None where that is not known, or it is left out."""
        value = self.op.inputs[slot] if slot < len(self.op.inputs) else None
        if value is None:
            return None
        if value in self.known:
            return self.known[value].most
        if self.view.constant(value) is None or self.view.dtype(value) is not DType.FLOAT:
            return None
        fit = self.view.fit(value, self.to)
        return None if fit.nonfinite else fit.absmax

    def given(self, slots: Sequence[int]) -> list[float | None]:
        """How large those of some inputs get that are not left out."""
        return [self.at(slot) for slot, v in enumerate(self.op.inputs) if v is not None and slot in slots]

    def numbers(self, slot: int) -> Array | None:
        """What a constant input holds, or one that is one number throughout."""
        value = self.op.inputs[slot]
        if value is None:
            return None
        number, tensor = number_throughout(self.view, value, self.to), self.view.constant(value)
        if number is not None:
            return np.array(number)
        return self.view.model.array(tensor).astype(np.float64) if tensor is not None else None


Bound = Callable[[Reading], float | None]

# -- rules: how large an op's results get, from how large its inputs get --------------------------------------------


def _together(put: Callable[[Sequence[float]], float], slots: Sequence[int] = range(1 << 16)) -> Bound:
    """Of ops whose results are put together from some of their inputs."""

    def most(reading: Reading) -> float | None:
        given = reading.given(slots)
        known = [m for m in given if m is not None]
        return put(known) if known and len(known) == len(given) else None

    return most


def _scaled(by: Callable[[Reading], float | None]) -> Bound:
    """Of ops that multiply their first input by what another or an attribute says."""

    def most(reading: Reading) -> float | None:
        x, factor = reading.at(0), by(reading)
        return None if x is None or factor is None else x * factor

    return most


def _layer(reading: Reading) -> float | None:
    """The sum of K equal terms, and the bias."""
    if reading.layer is None:
        return None
    x, (bias, *_) = reading.at(reading.layer.reads), (*reading.given((2,)), 0.0)
    if x is None or bias is None:
        return None
    return x * reading.layer.gain + bias * abs(float_attribute(reading.op.node, "beta", 1.0))


def _normalized(reading: Reading) -> float | None:
    """A BatchNormalization by statistics that are known: y = (x − mean) · scale / √(variance + epsilon) + bias."""
    if int_attribute(reading.op.node, "training_mode", 0):
        return None
    x, found = reading.at(0), [reading.numbers(slot) for slot in range(1, 5)]
    known = [numbers.reshape(-1) for numbers in found if numbers is not None]
    if x is None or len(known) < 4 or len({numbers.size for numbers in known} - {1}) > 1:
        return None
    scale, bias, mean, variance = known
    with np.errstate(all="ignore"):  # a variance below 0, or what is no number
        factor = scale / np.sqrt(variance + float_attribute(reading.op.node, "epsilon", 1e-5))
        shift = bias - mean * factor
        return float((x * np.abs(factor) + np.abs(shift)).max(initial=0))


def _locally_normalized(reading: Reading) -> float | None:
    """LRN: x / (k + a · Σx²)^β is largest where x stands alone; for β > ½ it peaks at x = √(k / (a · (2β − 1)))."""
    x, op = reading.at(0), reading.op
    k, beta = float_attribute(op.node, "bias", 1.0), float_attribute(op.node, "beta", 0.75)
    a = float_attribute(op.node, "alpha", 1e-4) / max(int_attribute(op.node, "size", 1), 1)
    if x is None or not (k > 0 and a > 0):
        return None
    peak = min(x, math.sqrt(k / (a * (2 * beta - 1)))) if beta > 0.5 else x
    with np.errstate(all="ignore"):  # what no model states leads to infinity or zero
        return float(peak / np.float64(k + a * peak * peak) ** beta)


def _clipped(reading: Reading) -> float | None:
    """No more than the larger bound, where there are both; else what is largest."""
    x, op = reading.at(0), reading.op
    bounds = [abs(found.f) for name in ("min", "max") if (found := attribute(op.node, name)) is not None]
    given = [*bounds, *reading.given((1, 2))]
    known = [bound for bound in given if bound is not None]
    if x is None or len(known) < len(given):
        return None
    return min(x, max(known)) if len(known) == 2 else max(x, *known, 0.0)


def _filled(reading: Reading) -> float | None:
    result = reading.op.outputs[0]
    number = None if result is None else number_throughout(reading.view, result, reading.to)
    return None if number is None else abs(number)


def _divisor(reading: Reading) -> float | None:
    value = reading.op.inputs[1]
    if value is None or reading.view.constant(value) is None or reading.view.dtype(value) is not DType.FLOAT:
        return None
    least = reading.view.fit(value, reading.to).absmin
    return 1 / least if least else None


RULES: Mapping[str, Bound] = {
    **{kind: _together(max, slots) for kind, slots in {**COPIES, **SELECTIONS}.items()},
    **dict.fromkeys(CONTRACTS, _together(max, (0,))),
    **dict.fromkeys(SUMS, _together(sum)),
    **dict.fromkeys(BOUNDED, lambda reading: 1.0),
    **dict.fromkeys(LAYERS, _layer),
    "BatchNormalization": _normalized,
    "Clip": _clipped,
    "ConstantOfShape": _filled,
    "Div": _scaled(_divisor),
    "LRN": _locally_normalized,
    "LeakyRelu": _scaled(lambda reading: max(1.0, abs(float_attribute(reading.op.node, "alpha", 0.01)))),
    "Mean": _together(max),
    "Mul": _together(math.prod),
}
"""By op. Exact where a sum has equal terms, and no less than what it can be elsewhere."""
