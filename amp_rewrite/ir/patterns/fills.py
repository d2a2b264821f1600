"""Fills: constants with extreme values, such as the −3.4e38 of an attention mask."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.arrays import from_array
from amp_rewrite.files.rounding import Fit
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import ValueId, View

_STATES = {
    "ConstantOfShape": ("value",),
    "ai.onnx.ml::LabelEncoder": ("values_floats", "default_float", "values_tensor", "default_tensor"),
}
"""Ops whose results are numbers that their attributes state."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The extreme values of a constant, at or beyond the largest finite number of the low type.

    `level`: the single such value, None if there are several. `overflows`: it rounds to infinity.
    """

    level: float | None
    overflows: bool
    absmax: float


def fills(view: View, to: DType, among: Container[ValueId] | None = None) -> dict[ValueId, Fill]:
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape and LabelEncoder.

    Each constant is read once, and only if it is `among` the given values.
    """
    extreme: dict[ValueId, Fill] = {}
    for value in _constants(view):
        if among is not None and value not in among:
            continue
        fit = view.fit(value, to)
        values = view.array(value) if fit.absmax >= to.max else None
        if values is not None:
            beyond = values[(abs(values) >= to.max) & (abs(values) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = Fill(level, fit.overflow > 0, fit.absmax)
    for op in view.ops:
        result = op.outputs[0] if op.kind in _STATES else None
        if result is None or view.dtype(result) is not DType.FLOAT or (among is not None and result not in among):
            continue
        tensors = [_tensor(a) for name in _STATES[op.kind] if (a := attribute(op.node, name)) is not None]
        fit = max((view.model.fit(tensor, to) for tensor in tensors), key=lambda fit: fit.absmax, default=Fit())
        if fit.absmax >= to.max:
            level = float(view.model.array(tensors[0]).item()) if op.kind == "ConstantOfShape" else None
            extreme[result] = Fill(level, fit.overflow > 0, fit.absmax)
    return extreme


def _tensor(numbers: AttributeProto) -> TensorProto:
    """Return the numbers of an attribute as a tensor."""
    if numbers.type == AttributeProto.TENSOR:
        return numbers.t
    return from_array(np.array(numbers.floats or [numbers.f], np.float32))


def _constants(view: View) -> Iterator[ValueId]:
    """Yield the float32 constants that some op reads."""
    for value in view.values:
        if view.constant(value.id) is not None and view.uses[value.id] and view.dtype(value.id) is DType.FLOAT:
            yield value.id
