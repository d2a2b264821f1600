"""Constants: read in parts, each once, for what bounds need of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from amp_rewrite.decide.bounds.state import MOST, Ball, State, box
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.dataflow import casts_floats
from amp_rewrite.ir.view import ValueId, View

PART = 1 << 16
"""Elements that are read at once: their float64 copies stay in a core's cache, which is four times as fast as not."""
_WIDE = 1 << 19
"""Elements of a row whose columns are not told apart."""
EXTREME = 1e30
"""Numbers from here on are fills, which win or lose every comparison."""
NOTABLE = 16.0
"""Weights below it do not drive values out of float16 by themselves."""
BLOCK = 64
"""Columns of a weight whose product with themselves bounds a spectral norm."""


class Matrix(NamedTuple):
    """A constant matrix; `turned`: stored transposed. `rows` are summed over, `columns` are results."""

    value: ValueId
    tensor: TensorProto
    turned: bool
    rows: int
    columns: int


class Part(NamedTuple):
    """Some rows and columns of a matrix, from `row` and `column` on."""

    row: int
    column: int
    values: Array


def matrix_of(view: View, value: ValueId | None, *, turned: bool = False) -> Matrix | None:
    """Return a constant matrix, behind Casts, Identities and Transposes; None for other values."""
    while (op := view.producer(value, "Transpose", "Identity", "Cast")) is not None:
        if op.kind == "Transpose":
            perm = attribute(op.node, "perm")
            if perm is not None and list(perm.ints) != [1, 0]:
                return None
            turned = not turned
        elif op.kind == "Cast" and not casts_floats(view, op):
            return None
        value = op.inputs[0]
    tensor = view.constant(value)
    if value is None or tensor is None or len(tensor.dims) != 2 or not _floating(tensor):
        return None
    rows, columns = tensor.dims[::-1] if turned else tensor.dims
    return Matrix(value, tensor, turned, int(rows), int(columns))


def parts(model: Model, matrix: Matrix) -> Iterator[Part]:
    """Yield all parts of a matrix, in float64. Parts of columns start at multiples of `BLOCK`."""
    stored = matrix.rows if matrix.turned else matrix.columns
    lines = max(1, PART // max(stored, 1))
    lines = max(BLOCK, lines // BLOCK * BLOCK)
    at = 0
    for chunk in model.chunks(matrix.tensor, lines * max(stored, 1)):
        values = chunk.reshape(-1, stored).astype(np.float64)
        yield Part(0, at, values.T) if matrix.turned else Part(at, 0, values)
        at += len(values)


def _floating(tensor: TensorProto) -> bool:
    dtype = DType.of(tensor.data_type)
    return dtype is not None and dtype.floating


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of a constant in three facts: least and largest number of each column, and the longest row."""

    lo: Array
    hi: Array
    longest: float
    fills: bool

    def state(self, name: str) -> State:
        """Return the state of rows of the table."""
        width = self.lo.size
        ball = Ball((-1,), (width,), np.full((1,), self.longest)) if math.isfinite(self.longest) else None
        return replace(box(self.lo, self.hi, f"numbers of {name!r}", ball), fills=self.fills)


def table_of(model: Model, tensor: TensorProto) -> RowTable:
    """Read a constant once, and return what is known of its rows along the last axis. O(elements)."""
    width = max(int(tensor.dims[-1]) if tensor.dims else 1, 1)
    wide = width > _WIDE
    lo, hi = np.full(1 if wide else width, math.inf), np.full(1 if wide else width, -math.inf)
    longest, fills = 0.0, False
    for chunk in model.chunks(tensor, PART if wide else max(1, PART // width) * width):
        values = chunk.astype(np.float64)
        rows = values.reshape(-1, 1) if wide else values.reshape(-1, width)
        extreme = ~(np.abs(rows) < EXTREME)
        if extreme.any():
            fills, rows = True, np.where(extreme, 0.0, rows)
        lo, hi = np.minimum(lo, rows.min(axis=0)), np.maximum(hi, rows.max(axis=0))
        longest = max(longest, float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max(initial=0.0))))
    if not np.isfinite(lo).all():
        lo, hi = np.zeros(1), np.zeros(1)
    return RowTable(lo, hi, math.inf if fills or wide else longest, fills)


def largest(view: View, value: ValueId) -> float:
    """Return the largest magnitude of a constant, read once for all who ask; infinity for a fill or NaN."""
    fit = view.fit(value, DType.FLOAT16)
    return fit.absmax if not fit.nonfinite and fit.absmax < EXTREME else math.inf


def large_constants(view: View) -> Iterator[tuple[ValueId, float]]:
    """Yield constants with numbers of `NOTABLE` or more, and the largest. O(constants), which are read once."""
    for value in view.values:
        dtype = view.tensor_dtype(value.id)
        floats = dtype is not None and dtype.floating
        if floats and view.constant(value.id) is not None and NOTABLE <= (size := largest(view, value.id)) < math.inf:
            yield value.id, size


def notable(view: View) -> bool:
    """True if a constant holds numbers that may drive values out of float16. O(constants), which are read once."""
    return any(True for _ in large_constants(view))


def constant(view: View, value: ValueId, *, frugal: bool = False) -> State | None:
    """Return the state of a constant: its numbers, if it is small, else what is known of its rows.

    `frugal`: of a large one with small numbers, only the largest magnitude.
    """
    tensor = view.constant(value)
    dtype = DType.of(tensor.data_type) if tensor is not None else None
    if tensor is None or dtype is None or dtype in (DType.STRING, DType.COMPLEX64, DType.COMPLEX128):
        return None
    name, whole = view.value_name(value), not dtype.floating
    if math.prod(tensor.dims) > MOST:
        if frugal and dtype.floating and (most := largest(view, value)) < NOTABLE:
            return box(-most, most, f"the largest number of {name!r}")
        return replace(table_of(view.model, tensor).state(name), whole=whole)
    numbers = view.model.array(tensor).astype(np.float64)
    extreme = ~(np.abs(numbers) < EXTREME)
    fills = bool(extreme.any())
    if fills:
        numbers = np.where(extreme, 0.0, numbers)
    whole = whole or bool((numbers == np.round(numbers)).all())
    return replace(box(numbers, numbers, f"numbers of {name!r}"), fills=fills, whole=whole)
