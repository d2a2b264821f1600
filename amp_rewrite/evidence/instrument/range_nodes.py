"""Measuring nodes for the range of a tensor inside the graph, and their numbers.

A measured tensor gives a *row*: nine float64 numbers for any size. Rows are merged by adding the first seven and taking
the larger of the last two, so many batches, or iterations of a loop, give one row.

    0       number of elements
    1 to 6  number of magnitudes above: -1 (all except NaN), 0, the largest that rounds to zero, to a subnormal number,
            to a finite number, and the largest finite number. Zeros may count as above the first four, consistently:
            only differences are read
    7       the largest finite magnitude
    8       minus the smallest magnitude that is neither 0 nor infinite; -infinity without one
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Range
from amp_rewrite.files.casting import thresholds
from amp_rewrite.ir.builder import NodeBuilder

WIDTH = 9

_ADDED = 7  # columns; the rest are compared
_EXACT_IN_FLOAT = 1 << 24  # ones; float32 can count that far
_NAMES = ("number", "nonzero", "survives", "normal", "infinite_in_low", "infinite")
_NEUTRAL = [0.0] * 8 + [-np.inf]

Rows = NDArray[np.float64]


def neutral(rows: int) -> Rows:
    """Return concatenated rows of empty tensors."""
    return np.array(_NEUTRAL * rows)


def merged(a: Rows, b: Rows) -> Rows:
    """Merge two vectors of rows, row by row."""
    added = np.tile(np.arange(WIDTH) < _ADDED, len(a) // WIDTH)
    with np.errstate(invalid="ignore"):  # -inf + -inf, which is not taken
        return np.where(added, a + b, np.maximum(a, b))


def ranges(rows: Rows) -> Iterator[Range]:
    """Yield the Range of each row."""
    for row in rows.reshape(-1, WIDTH):
        elements, numbers, nonzero, survive, normal, beyond, infinite = (int(n) for n in row[:_ADDED])
        yield Range(
            count=elements,
            nonfinite=elements - numbers + infinite,
            absmax=max(0.0, float(row[7])),
            absmin=float(-row[8]) if np.isfinite(row[8]) else 0.0,
            overflow=beyond - infinite,
            flushed=nonzero - survive,
            subnormal=survive - normal,
        )


def bounds(to: DType, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the bounds of columns 1 to 6, in the type of the magnitudes.

    Rounding is to nearest, ties to even: zero, the smallest normal number, infinity.
    """
    limit, half, normal = thresholds(to, dtype)
    exact = np.array([-1, 0, half, normal, limit, np.finfo(dtype).max], dtype)
    below = np.nextafter(exact, dtype.type(0))
    return (*exact[:3], *below[3:5], exact[5])


class RangeNodes:
    """Builder of measuring nodes for one element type, FLOAT or DOUBLE; `head` gets their constants."""

    def __init__(self, head: NodeBuilder, dtype: DType, to: DType) -> None:
        self._dtype, one = dtype, dtype.numpy.type
        named = dict(zip(_NAMES, bounds(to, dtype.numpy), strict=True))
        overflows = np.nextafter(named["infinite_in_low"], one(np.inf))
        self._bounds = {**named, "overflows": overflows}
        values = {
            **self._bounds,
            "zero": one(0),
            "infinity": one(np.inf),
            "flat": np.array([-1]),
            "many": np.array([_EXACT_IN_FLOAT]),
            "no_count": np.zeros(1),
        }
        self._known = {name: head.constant(np.asarray(value)) for name, value in values.items()}

    def row(self, nodes: NodeBuilder, name: str) -> str:
        """Append nodes for the row of the tensor `name`; return the row.

        One count is enough where all numbers are finite, none overflows, and all but zeros survive. Reductions on the
        CPU drop NaN together with their intermediate result; only the sum shows it reliably. Without elements the
        largest one is -infinity, and the smallest infinity.
        """
        a = nodes.op("Reshape", nodes.op("Abs", name), self._known["flat"])
        n = nodes.op("Shape", a)
        number, largest, apart = nodes.cast(n, DType.DOUBLE), _reduced(nodes, "ReduceMax", a), self._nonzero(nodes, a)
        least = _reduced(nodes, "ReduceMin", apart)
        limits = ((_reduced(nodes, "ReduceSum", a), "infinity"), (largest, "overflows"), (n, "many"))
        tests = [nodes.op("Less", value, self._known[limit]) for value, limit in limits]
        dense = reduce(partial(nodes.op, "And"), [*tests, nodes.op("Greater", least, self._known["survives"])])

        def one_count(branch: NodeBuilder) -> str:
            all_normal = self._bounds["normal"] < self._bounds["survives"]
            normal = number if all_normal else self._above(branch, apart, "normal", self._dtype)
            return self._joined(branch, [number] * 4 + [normal], largest, least)

        return nodes.choice(dense, one_count, lambda branch: self._all_counts(branch, a, number))

    def _all_counts(self, nodes: NodeBuilder, a: str, number: str) -> str:
        """Return the row of any numbers and any count: NaN, infinities, overflowing and vanishing values."""
        counts = [self._above(nodes, a, name, DType.DOUBLE) for name in _NAMES]
        finite = nodes.op("Where", nodes.op("Less", a, self._known["infinity"]), a, self._known["zero"])
        least = _reduced(nodes, "ReduceMin", self._nonzero(nodes, finite))
        return self._joined(nodes, [number, *counts], _reduced(nodes, "ReduceMax", finite), least)

    def _nonzero(self, nodes: NodeBuilder, a: str) -> str:
        return nodes.op("Where", nodes.op("Greater", a, self._known["zero"]), a, self._known["infinity"])

    def _above(self, nodes: NodeBuilder, a: str, name: str, counted_in: DType) -> str:
        ones = nodes.cast(nodes.op("Greater", a, self._known[name]), counted_in)
        return nodes.cast(_reduced(nodes, "ReduceSum", ones), DType.DOUBLE)

    def _joined(self, nodes: NodeBuilder, counts: list[str], largest: str, least: str) -> str:
        none = [self._known["no_count"]] * (_ADDED - len(counts))
        ends = (nodes.cast(end, DType.DOUBLE) for end in (largest, nodes.op("Neg", least)))
        return nodes.op("Concat", *counts, *none, *ends, axis=0)


def merging(nodes: NodeBuilder, stacked: str, rows: int) -> str:
    """Append nodes to merge vectors of rows, stacked along the first axis, as `merged` does; return the result."""
    added, most = (nodes.reduce(op_type, stacked, [0], keepdims=False) for op_type in ("ReduceSum", "ReduceMax"))
    return nodes.op("Where", nodes.constant(np.tile(np.arange(WIDTH) < _ADDED, rows)), added, most)


def _reduced(nodes: NodeBuilder, op_type: str, name: str) -> str:
    return nodes.op(op_type, name, keepdims=1)
