"""Nodes that measure errors of values inside a model against their reference: a few numbers per pair.

The nodes reduce each pair of values to one row of numbers right after they are computed, so no activation leaves the
runtime, and none lives longer than its own readers need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.builder import new_node

_WIDEST = 2.0**64  # its square is the first power of two that no float32 holds


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Error of values against their reference, over all batches.

    max_abs: the largest |value - reference|; noise: sum (value - reference)^2, over elements finite in both. absmax:
    the largest |reference|; signal: sum reference^2 without masks (`ErrorNodes.nodes`), over elements finite there.
    lost: the number of elements finite only in the reference.
    """

    max_abs: float = 0.0
    absmax: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    lost: int = 0

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Return the statistics of both together."""
        return ErrorStats(
            max(self.max_abs, other.max_abs),
            max(self.absmax, other.absmax),
            self.noise + other.noise,
            self.signal + other.signal,
            self.lost + other.lost,
        )

    def error(self, floor: float) -> float:
        """Return sqrt(noise / signal), the inverse signal-to-noise ratio of amplitudes; inf if elements are lost.

        `floor`: lower bound on sqrt(signal).
        """
        if self.lost:
            return math.inf
        noise, signal = math.sqrt(self.noise), math.sqrt(self.signal)
        return noise / max(signal, floor) if noise else 0.0


class ErrorNodes:
    """Builder of nodes that measure pairs of values. All its names begin with `prefix`."""

    def __init__(self, prefix: str, low: DType) -> None:
        """`low`: references below its smallest normal number count as that number."""
        self._prefix = prefix
        floats = {"zero": 0.0, "infinity": math.inf, "least": low.tiny}
        for name, bound in (("low", min(low.max, _WIDEST)), ("wide", _WIDEST)):
            floats |= {f"{name}/most": bound, f"{name}/lowest": -bound}
        self.initializers = (
            helper.make_tensor(f"{prefix}flat", TensorProto.INT64, [1], [-1]),
            *(helper.make_tensor(prefix + name, TensorProto.FLOAT, [1], [held]) for name, held in floats.items()),
        )

    def nodes(self, number: int, value: str, reference: str, *, is_low: bool) -> Iterator[NodeProto]:
        """Yield the nodes for two float32 tensors of one shape; they write `self.row(number)`.

        Elements beyond the range of the value's type (`is_low`: the low one), or whose square overflows float32, count
        as masks: they are clamped to the bound, and excluded from the size of the reference.
        """
        at, held = f"{self._prefix}{number}/", self._prefix
        bounds = held + ("low" if is_low else "wide")

        def node(op: str, result: str, *inputs: str, **attributes: Any) -> NodeProto:
            return helper.make_node(op, inputs, [at + result], at + result, **attributes)

        for name, source in (("v", value), ("r", reference)):
            yield node("Reshape", name, source, held + "flat")
            yield node("Abs", f"|{name}|", at + name)
            yield node("Less", f"{name}_finite", at + f"|{name}|", held + "infinity")
        yield node("And", "finite", at + "v_finite", at + "r_finite")
        # From here on all elements are finite; those not finite in both differ by 0.
        yield node("Where", "r_only", at + "r_finite", at + "r", held + "zero")
        yield node("Where", "v_only", at + "finite", at + "v", at + "r_only")
        for name in ("v", "r"):
            yield node("Min", f"{name}_below", at + f"{name}_only", bounds + "/most")
            yield node("Max", f"{name}_within", at + f"{name}_below", bounds + "/lowest")
        yield node("Sub", "d", at + "v_within", at + "r_within")
        yield node("Abs", "error", at + "d")
        yield node("Abs", "any", at + "r_only")
        yield node("Less", "inside", at + "any", bounds + "/most")
        yield node("Where", "size", at + "inside", at + "any", held + "zero")
        for name in ("error", "size", "any"):
            yield node("ReduceMax", f"{name}_largest", at + name, keepdims=1)
        # Squares of large values must not overflow, those of small ones not vanish; the maximum of no element is -inf.
        yield node("Max", "unit", at + "size_largest", at + "error_largest", held + "least")
        for name, result in (("error", "noise"), ("size", "signal")):
            yield node("Div", f"{name}_scaled", at + name, at + "unit")
            yield node("ReduceSumSquare", result, at + f"{name}_scaled", keepdims=1)
        yield node("Xor", "lost_where", at + "r_finite", at + "finite")
        yield node("Cast", "lost_ones", at + "lost_where", to=TensorProto.FLOAT)
        yield node("ReduceSum", "lost", at + "lost_ones", keepdims=1)
        parts = [at + part for part in ("error_largest", "any_largest", "noise", "signal", "lost", "unit")]
        yield new_node("Concat", parts, self.row(number), self.row(number), axis=0)

    def row(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def packed(self, rows: Sequence[str], output: str) -> Iterator[NodeProto]:
        """Yield nodes for the end of the graph that concatenate rows into one output.

        onnxruntime first runs the producers of the input with the highest node number. With one Concat of all rows it
        would begin with the last row and keep every earlier value alive until its own row; with a chain it begins with
        the first.
        """
        so_far = rows[0]
        for number, row in enumerate(rows[1:], 1):
            name = f"{self._prefix}upto/{number}"
            yield new_node("Concat", [so_far, row], name, name, axis=0)
            so_far = name
        yield new_node("Identity", [so_far], output, output)


def read(packed: NDArray[np.float32]) -> list[ErrorStats]:
    """Return the statistics of the rows in an output."""
    return [
        ErrorStats(max(0.0, error), max(0.0, size), noise * unit**2, signal * unit**2, int(lost))
        for error, size, noise, signal, lost, unit in packed.astype(np.float64).reshape(-1, 6).tolist()
    ]
