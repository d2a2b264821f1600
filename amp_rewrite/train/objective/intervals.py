"""Intervals of values, whatever the weights and inputs are: which values can only be probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from amp_rewrite.ir.dataflow import axes_of, casts_floats
from amp_rewrite.ir.op_classes import MOVES, PERMUTES, PICKS, SCALINGS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.autodiff.facts import Shape
from amp_rewrite.train.objective.logits import activation

Interval = tuple[float, float]

_ANY: Interval = (-math.inf, math.inf)
_CLOSE = 1e-3
"""Largest distance from [0, 1] of what is taken for probabilities, such as a softmax plus an epsilon."""
_MOST = 64
"""Ops that the search for an interval visits."""
_SAME = (
    MOVES
    | PERMUTES
    | PICKS
    | {"Split", "Dropout", "ReduceMean", "ReduceMax", "ReduceMin", "MaxPool", "AveragePool", "Concat", "Mean"}
    | {"GlobalAveragePool", "GlobalMaxPool"}
)
"""Ops whose results lie between the least and the largest of their operands."""
_FIRST = _SAME - {"Concat", "Mean"}
"""Those of which only the first input has numbers."""
_KNOWN: Mapping[str, Interval] = {
    **dict.fromkeys(("Softmax", "Sigmoid", "HardSigmoid", "Hardmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Erf", "Softsign", "Sin", "Cos"), (-1.0, 1.0)),
    **dict.fromkeys(("Abs", "Softplus", "ReduceL1", "ReduceL2", "ReduceSumSquare"), (0.0, math.inf)),
    "LogSoftmax": (-math.inf, 0.0),
}
"""Intervals of results, whatever is read."""


def in_unit_interval(view: View, value: ValueId, shapes: Mapping[ValueId, Shape] = MappingProxyType({})) -> bool:
    """True if all elements of a value are known to lie in [0, 1], up to a small epsilon.

    `shapes`: those of values as far as they are known.
    """
    low, high = _Search(view, shapes).of(value)
    return low >= -_CLOSE and high <= 1 + _CLOSE


def _products(a: Interval, b: Interval) -> Interval:
    ends = [0.0 if 0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _inverse(a: Interval) -> Interval:
    if a[0] < 0:
        return _ANY
    return (1 / a[1] if a[1] else math.inf), (1 / a[0] if a[0] else math.inf)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


_STEPS: Mapping[str, Callable[..., Interval]] = {
    "Add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "Sum": lambda *parts: (sum(p[0] for p in parts), sum(p[1] for p in parts)),
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Neg": lambda a: (-a[1], -a[0]),
    "Mul": _products,
    "Div": lambda a, b: _products(a, _inverse(b)),
    "Reciprocal": _inverse,
    "Min": lambda *parts: (min(p[0] for p in parts), min(p[1] for p in parts)),
    "Max": lambda *parts: (max(p[0] for p in parts), max(p[1] for p in parts)),
    "Clip": lambda a, low=_ANY, high=_ANY: (min(max(a[0], low[0]), high[1]), max(min(a[1], high[1]), low[0])),
    "Where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "Relu": lambda a: (max(a[0], 0.0), max(a[1], 0.0)),
    "Exp": lambda a: (_exp(a[0]), _exp(a[1])),
    "Sqrt": lambda a: (math.sqrt(max(a[0], 0.0)), math.sqrt(max(a[1], 0.0))),
    "ReduceProd": lambda a, *_: (0.0, 1.0) if a[0] >= 0 and a[1] <= 1 else _ANY,
    "ReduceSum": lambda a, *_: ((0.0 if a[0] >= 0 else -math.inf), (0.0 if a[1] <= 0 else math.inf)),
    "Pow": lambda a, b: (0.0, 1.0) if a[0] >= 0 and a[1] <= 1 and b[0] >= 0 else _ANY,
}
"""Intervals of results from those of the operands."""


@dataclass(slots=True)
class _Search:
    view: View
    shapes: Mapping[ValueId, Shape]
    seen: dict[ValueId, Interval] = field(default_factory=dict)
    left: int = _MOST

    def of(self, value: ValueId | None) -> Interval:
        """Return the interval of a value."""
        if value is None:
            return _ANY
        if value not in self.seen:
            self.left -= 1
            op = self.view.producer(value) if self.left > 0 else None
            self.seen[value] = self._constant(value) if op is None or op.kind == "Constant" else self._result(op, value)
        return self.seen[value]

    def _constant(self, value: ValueId) -> Interval:
        """Return the interval of a constant; a weight, which is trained, may get any number."""
        tensor = self.view.constant(value)
        if tensor is None or (self.view.producer(value) is None and math.prod(tensor.dims) != 1):
            return _ANY
        array = self.view.array(value)
        if array is None or not array.size or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            return _ANY
        return float(array.min()), float(array.max())

    def _result(self, op: Op, value: ValueId) -> Interval:
        if op.kind in _KNOWN:
            return _KNOWN[op.kind]
        if op.kind == "If":
            slot = op.outputs.index(value)
            return _hull([self.of(self.view.scopes[body].outputs[slot]) for body in op.bodies])
        if casts_floats(self.view, op):
            return self.of(op.inputs[0])
        if op.kind in _SAME:
            return _hull([self.of(v) for v in (op.inputs[:1] if op.kind in _FIRST else op.inputs)])
        mixed = self._mixed(op)
        if mixed is not None:
            return self.of(mixed)
        step = _STEPS.get(op.kind)
        if step is None:
            return _ANY
        if op.kind in SCALINGS and self._shares(op):
            return (0.0, 1.0)
        given = [self.of(v) for v in op.inputs]
        low, high = step(*given)
        return (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)

    def _mixed(self, op: Op) -> ValueId | None:
        """Return the value of which a product or sum is a mean, weighted by a softmax; None for another op."""
        if op.kind == "MatMul":
            return next((op.inputs[1 - slot] for slot in (0, 1) if self._weighs(op.inputs[slot], -1 - slot)), None)
        product = self.view.producer(op.inputs[0], "Mul") if op.kind == "ReduceSum" else None
        shape = self.shapes.get(product.outputs[0]) if product is not None and product.outputs[0] is not None else None
        axes = axes_of(self.view, op) if shape is not None else ()
        if product is None or shape is None or len(axes) != 1:
            return None
        axis = axes[0] % len(shape) - len(shape)
        return next((product.inputs[1 - slot] for slot in (0, 1) if self._weighs(product.inputs[slot], axis)), None)

    def _weighs(self, value: ValueId | None, axis: int) -> bool:
        """True for the result of a softmax over this axis, counted from the end."""
        found = None if value is None else activation(self.view, value, self.shapes)
        if value is None or found is None or found.kind != "Softmax" or found.logarithm:
            return False
        return found.axis == len(self.shapes.get(value, ())) + axis

    def _shares(self, op: Op) -> bool:
        """True for numbers ≥ 0 divided by their sum, also by its reciprocal."""
        below = self.view.producer(op.inputs[1])
        if op.kind == "Mul":
            below = None if below is None or below.kind != "Reciprocal" else self.view.producer(below.inputs[0])
        return (
            below is not None
            and below.kind in ("ReduceSum", "ReduceL1")
            and below.inputs[0] == op.inputs[0]
            and self.of(op.inputs[0])[0] >= 0
        )


def _hull(parts: Sequence[Interval]) -> Interval:
    return min(p[0] for p in parts), max(p[1] for p in parts)
