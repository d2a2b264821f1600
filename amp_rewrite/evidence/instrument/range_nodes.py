"""Nodes that measure the range of a tensor inside the graph, and their numbers.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.ranges import Range
from amp_rewrite.ir.builder import declared, new_cast, new_constant, new_if, new_node

WIDTH = 9

_ADDED = 7  # columns; the rest are compared
_EXACT_IN_FLOAT = 1 << 24  # ones; float32 can count that far
_NAMES = ("number", "nonzero", "survives", "normal", "infinite_in_low", "infinite")
_NEUTRAL = [0.0] * 8 + [-np.inf]
_STEP = 2.0**-149  # the smallest float32
_SURE = 2.0**-120  # from which on taking away a step changes no float32

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
            absmax=abs(float(row[7])),  # a Relu may give -0
            absmin=float(-row[8]) if np.isfinite(row[8]) else 0.0,
            overflow=beyond - infinite,
            flushed=nonzero - survive,
            subnormal=survive - normal,
        )


def bounds(to: DType, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the bounds of columns 1 to 6, in the type of the magnitudes.

    Rounding is to nearest, ties to even: zero, the smallest normal number, infinity.
    """
    half = to.smallest_subnormal / 2
    last = to.max / (2 - to.eps) * to.eps  # the distance between the two largest finite numbers
    exact = np.array([-1, 0, half, to.tiny - half, to.max + last / 2, np.finfo(dtype).max]).astype(dtype)
    below = np.nextafter(exact, dtype.type(0))
    return (*exact[:3], *below[3:5], exact[5])


@dataclass(frozen=True)
class RangeNodes:
    """Builder of measuring nodes for one element type, FLOAT or DOUBLE. All its names begin with `stem`."""

    stem: str
    dtype: DType
    to: DType

    def constants(self) -> list[NodeProto]:
        """Return the Constants that must precede all other nodes, in the same graph or one around it."""
        values = {
            **self._bounds,
            "zero": self.dtype.numpy.type(0),
            "infinity": self.dtype.numpy.type(np.inf),
            "step": self.dtype.numpy.type(_STEP),
            "flat": np.array([-1]),
            "none": np.array([0]),
            "many": np.array([_EXACT_IN_FLOAT]),
            "no_count": np.zeros(1, self.dtype.numpy),
        }
        return [new_constant(self._k(name), np.asarray(value)) for name, value in values.items()]

    @cached_property
    def _bounds(self) -> dict[str, Any]:
        """Return the numbers that magnitudes are compared with, by name."""
        named = dict(zip(_NAMES, bounds(self.to, self.dtype.numpy), strict=True))
        overflows = np.nextafter(named["infinite_in_low"], self.dtype.numpy.type(np.inf))
        return {**named, "overflows": overflows, "sure": max(named["survives"], self.dtype.numpy.type(_SURE))}

    def row(self, name: str, row: str, *, rectified: bool = False) -> list[NodeProto]:
        """Return nodes that write the row of the tensor `name` to `row`. `rectified`: it is the output of a Relu."""
        n = f"{row}_n"
        magnitudes = name if rectified else f"{row}_abs"
        return [
            *([] if rectified else [new_node("Abs", [name], magnitudes)]),
            new_node("Reshape", [magnitudes, self._k("flat")], f"{row}_a"),
            new_node("Shape", [f"{row}_a"], n),
            new_node("Greater", [n, self._k("none")], f"{row}_any"),
            choice(f"{row}_any", row, self._of_some(row, rectified), [new_constant(f"{row}_nothing", neutral(1))]),
        ]

    def _k(self, name: str) -> str:
        return f"{self.stem}{self.dtype.spelling}_{name}"

    def _of_some(self, row: str, rectified: bool) -> list[NodeProto]:
        """Return nodes for the row of a nonempty tensor, with as few passes as its values allow.

        Reductions on the CPU drop NaN together with their intermediate result; only the sum shows it reliably.
        """
        a, n, tame = f"{row}_a", f"{row}_n", f"{row}_tame"
        gapped = self._gapped(f"{row}_g", row)
        quick = gapped if rectified else self._if_sure(a, f"{row}_q", row, gapped)
        return [
            _reduced("ReduceSum", a, f"{row}_sum"),
            _reduced("ReduceMax", a, f"{row}_max"),
            new_cast(n, f"{row}_all", DType.DOUBLE),
            new_node("Less", [f"{row}_sum", self._k("infinity")], f"{row}_finite"),
            new_node("Less", [f"{row}_max", self._k("overflows")], f"{row}_fits"),
            new_node("Less", [n, self._k("many")], f"{row}_few"),
            new_node("And", [f"{row}_finite", f"{row}_fits"], f"{row}_ordinary"),
            new_node("And", [f"{row}_ordinary", f"{row}_few"], tame),
            choice(tame, f"{row}_some", quick, self._wild(f"{row}_w", row)),
        ]

    def _if_sure(self, a: str, own: str, row: str, otherwise: list[NodeProto]) -> list[NodeProto]:
        """Return nodes for a row of finite numbers: one count if min(a) surely survives rounding, else `otherwise`."""
        return [
            _reduced("ReduceMin", a, f"{own}_min"),
            new_node("Greater", [f"{own}_min", self._k("sure")], f"{own}_sure"),
            choice(f"{own}_sure", f"{own}_row", self._dense(a, f"{own}_min", f"{own}_d", row), otherwise),
        ]

    def _dense(self, a: str, smallest: str, own: str, row: str) -> list[NodeProto]:
        """Return nodes for finite numbers that all survive rounding; infinity stands for zero."""
        if self._bounds["normal"] < self._bounds["sure"]:
            return self._joined(own, [f"{row}_all"] * 5, [], f"{row}_max", smallest)
        return [
            *self._above(a, "normal", own, self.dtype),
            *self._joined(own, [f"{row}_all"] * 4, ["normal"], f"{row}_max", smallest),
        ]

    def _gapped(self, own: str, row: str) -> list[NodeProto]:
        """Return nodes for finite numbers with zeros, or numbers that round to zero, among them.

        A subtraction and a LeakyRelu are faster than Where: they turn zeros into infinities and keep numbers that
        surely survive; smaller numbers stay below that bound, so they are detected.
        """
        if self.dtype is not DType.FLOAT:
            return self._sparse(f"{own}_s", row)
        return [
            new_node("Sub", [f"{row}_a", self._k("step")], f"{own}_less"),
            new_node("LeakyRelu", [f"{own}_less"], f"{own}_a", alpha=-np.inf),
            *self._if_sure(f"{own}_a", own, row, self._sparse(f"{own}_s", row)),
        ]

    def _sparse(self, own: str, row: str) -> list[NodeProto]:
        """Return nodes for finite numbers of any size."""
        counted = ["nonzero", "survives", "normal"]
        return [
            *(node for name in counted for node in self._above(f"{row}_a", name, own, self.dtype)),
            new_node("Where", [f"{own}_nonzero_m", f"{row}_a", self._k("infinity")], f"{own}_where"),
            _reduced("ReduceMin", f"{own}_where", f"{own}_min"),
            *self._joined(own, [f"{row}_all"] * 2, counted, f"{row}_max", f"{own}_min"),
        ]

    def _wild(self, own: str, row: str) -> list[NodeProto]:
        """Return nodes for any numbers and any count: NaN, infinities, and values that overflow."""
        a = f"{row}_a"
        return [
            *(node for name in _NAMES for node in self._above(a, name, own, DType.DOUBLE)),
            new_node("Less", [a, self._k("infinity")], f"{own}_finite"),
            new_node("Where", [f"{own}_finite", a, self._k("zero")], f"{own}_below"),
            _reduced("ReduceMax", f"{own}_below", f"{own}_max"),
            new_node("And", [f"{own}_finite", f"{own}_nonzero_m"], f"{own}_counts"),
            new_node("Where", [f"{own}_counts", a, self._k("infinity")], f"{own}_where"),
            _reduced("ReduceMin", f"{own}_where", f"{own}_min"),
            *self._joined(own, [f"{row}_all", *(f"{own}_{name}" for name in _NAMES)], [], f"{own}_max", f"{own}_min"),
        ]

    def _above(self, a: str, name: str, own: str, counted_in: DType) -> list[NodeProto]:
        """Return nodes that write the number of magnitudes above a bound to `{own}_{name}`."""
        mask, ones = f"{own}_{name}_m", f"{own}_{name}_1"
        total = _reduced("ReduceSum", ones, f"{own}_{name}")
        if counted_in is DType.FLOAT and (ramp := _ramp(float(self._bounds[name]), float(self._bounds["overflows"]))):
            return [new_node("HardSigmoid", [a], ones, alpha=ramp[0], beta=ramp[1]), total]
        return [new_node("Greater", [a, self._k(name)], mask), new_cast(mask, ones, counted_in), total]

    def _joined(self, own: str, first: list[str], counted: list[str], largest: str, smallest: str) -> list[NodeProto]:
        """Return nodes that join a row: float64 columns, counts in this element type, zeros, and both extremes."""
        zeros = [self._k("no_count")] * (_ADDED - len(first) - len(counted))
        rest = [*(f"{own}_{name}" for name in counted), *zeros, largest, f"{own}_minus"]
        return [
            new_node("Neg", [smallest], f"{own}_minus"),
            new_node("Concat", rest, f"{own}_rest", axis=0),
            new_cast(f"{own}_rest", f"{own}_double", DType.DOUBLE),
            new_node("Concat", [*first, f"{own}_double"], f"{own}_row", axis=0),
        ]


def _ramp(bound: float, largest: float) -> tuple[float, float] | None:
    """Return slope and offset for which HardSigmoid is 1 for each float32 above the bound and 0 for all others.

    The slope is the power of two that maps one step above the bound to a distance of 1, so that no rounding changes the
    side. Return None if the slope overflows float32 for magnitudes below `largest`.
    """
    step = float(np.spacing(np.float32(bound)))
    slope = 1 / step
    return (slope, -slope * bound) if bound > 0 and slope * largest <= DType.FLOAT.max else None


def merging(stem: str, a: str, b: str, rows: int, out: str) -> list[NodeProto]:
    """Return nodes that merge two vectors of rows, as `merged` does."""
    added, most = f"{stem}sum", f"{stem}most"
    return [new_node("Add", [a, b], added), new_node("Max", [a, b], most), *chosen(stem, added, most, rows, out)]


def chosen(stem: str, added: str, most: str, rows: int, out: str) -> list[NodeProto]:
    """Return nodes that select the added columns from one vector of rows and the others from another."""
    mask = new_constant(f"{stem}mask", np.tile(np.arange(WIDTH) < _ADDED, rows))
    return [mask, new_node("Where", [f"{stem}mask", added, most], out)]


def choice(condition: str, out: str, then: list[NodeProto], otherwise: list[NodeProto]) -> NodeProto:
    """Return an If whose result is the output of the last node of the branch taken."""
    return new_if(condition, out, _branch(then), _branch(otherwise))


def _branch(nodes: list[NodeProto]) -> GraphProto:
    name = nodes[-1].output[0]
    return onnx.helper.make_graph(nodes, name, [], [declared(name, DType.DOUBLE, None)])


def _reduced(op_type: str, name: str, output: str) -> NodeProto:
    """Return a reduction over all elements, to a vector of one."""
    return new_node(op_type, [name], output, keepdims=1)
