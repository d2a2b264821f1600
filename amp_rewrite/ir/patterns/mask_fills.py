"""Fills: constants with extreme values, such as the −3.4e38 of an attention mask."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.files.fit import Fit
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.view import ValueId, View, once

_STATES = {
    "ConstantOfShape": ("value",),
    "ai.onnx.ml::LabelEncoder": ("values_floats", "default_float", "values_tensor", "default_tensor"),
}
"""Ops whose results are numbers that their attributes state."""


@dataclass(frozen=True, slots=True)
class MaskFill:
    """The extreme values of a constant, at or beyond the largest finite number of the low type.

    `level`: the single such value, None if there are several. `overflows`: it rounds to infinity.
    """

    level: float | None
    overflows: bool
    absmax: float


@once
def mask_fills(view: View, to: DType) -> Mapping[ValueId, MaskFill]:
    """Return the extreme constants of a model, and the extreme results of ConstantOfShape and LabelEncoder."""
    return mask_fills_among(view, to, range(len(view.values)))


def mask_fills_among(
    view: View, to: DType, values: Container[int], least: float | None = None
) -> Mapping[ValueId, MaskFill]:
    """Return the fills among some values; only constants among these are read. `least`: their least size."""
    least = to.max if least is None else least
    extreme: dict[ValueId, MaskFill] = {}
    constants = (v for v in view.constants if view.uses[v] and view.dtype(v) is DType.FLOAT)
    for value in filter(values.__contains__, constants):
        fit = view.fit(value, to)
        numbers = view.array(value) if fit.absmax >= least else None
        if numbers is not None:
            beyond = numbers[(abs(numbers) >= least) & (abs(numbers) < float("inf"))]
            level = float(beyond[0]) if beyond.size and (beyond == beyond[0]).all() else None
            extreme[value] = MaskFill(level, fit.overflow > 0, fit.absmax)
    for op in view.of_kinds(_STATES):
        result = op.outputs[0]
        if result is None or view.dtype(result) is not DType.FLOAT or result not in values:
            continue
        stated = [_tensor(a) for name in _STATES[op.kind] if (a := attribute(op.node, name)) is not None]
        tensors = [tensor for tensor in stated if tensor.data_type == TensorProto.FLOAT]
        fit = max((view.model.fit(tensor, to) for tensor in tensors), key=lambda fit: fit.absmax, default=Fit())
        if fit.absmax >= least:
            alone = op.kind == "ConstantOfShape" and math.prod(tensors[0].dims) == 1
            level = float(view.model.array(tensors[0]).item()) if alone else None
            extreme[result] = MaskFill(level, fit.overflow > 0, fit.absmax)
    return extreme


def _tensor(numbers: AttributeProto) -> TensorProto:
    """Return the numbers of an attribute as a tensor."""
    if numbers.type == AttributeProto.TENSOR:
        return numbers.t
    return from_array(np.array(numbers.floats or [numbers.f], np.float32))
