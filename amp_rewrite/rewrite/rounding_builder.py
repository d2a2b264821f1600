"""Builder of float32 nodes with explicit rounding, and the type of the recipes for ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.shapes import Shape, shape_of
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder


class RoundingBuilder(NodeBuilder):
    """A builder of float32 nodes with results rounded to `low_type`, or unrounded if `low_type` is None."""

    low_type: DType | None = DType.FLOAT16

    def rounded(self, x: str) -> str:
        """Append Casts to the low type and back."""
        if self.low_type is None:
            return x
        return self.op("Cast", self.op("Cast", x, to=self.low_type.code), to=DType.FLOAT.code)

    def low(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an op and round its result."""
        return self.rounded(self.op(op_type, *inputs, **attributes))

    def total(self, *terms: str) -> str:
        """Append the sum of terms, rounded after each addition; empty names are skipped."""
        return reduce(partial(self.low, "Add"), filter(None, terms))

    def number(self, value: float) -> str:
        """Append a constant rounded to float16."""
        with np.errstate(over="ignore"):
            return self.constant(np.array(value, DType.FLOAT16.numpy).astype(np.float32))

    def reshaped(self, x: str, dims: Sequence[int]) -> str:
        """Append a Reshape; 0 copies the dimension of the input, and -1 is inferred."""
        return self.op("Reshape", x, self.ints(dims))

    def zeros(self, *sizes: str) -> str:
        """Append a tensor of zeros; its shape is the concatenation of `sizes`."""
        shape = self.op("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0]
        return self.full(shape, 0.0, DType.FLOAT)

    def slice(self, x: str, first: int, count: int, axis: int) -> str:
        """Append a Gather of `count` consecutive elements along an axis, starting at `first`."""
        return self.op("Gather", x, self.ints(range(first, first + count)), axis=axis)

    def zero_padded(self, x: str, length: int, width: int) -> str:
        """Pad rows of length `length` with zeros to a multiple of `width`."""
        if length % width == 0:
            return x
        rows = self.slice(self.op("Shape", x), 0, 1, 0)
        return self.op("Concat", x, self.zeros(rows, self.ints([-length % width])), axis=1)

    def scan(
        self, states: Sequence[str], parts: Sequence[tuple[str, int]], step: Step, rank: int, *, backward: bool = False
    ) -> list[str]:
        """Append a Scan over slices of `parts`, each a value and the axis to slice.

        `step` receives a builder for the body, the states and the slices. It returns the next states, then the values
        to stack along axis 0; all have the same rank. With `backward`, the steps run from the last slice to the first;
        the stacked values are still in the order of the slices.
        """
        inner = RoundingBuilder(self._taken, opset=self.opset, region=f"{self._region}/step")
        names = [inner.fresh(f"{inner._region}/in") for _ in (*states, *parts)]
        results = step(inner, names[: len(states)], names[len(states) :])
        for slot, result in enumerate(results):  # a body must compute each of its outputs, and list it once
            results[slot] = inner.fresh(f"{inner._region}/out")
            inner.name(result, results[slot])
        formals = [declared(name, DType.FLOAT, None) for name in names]
        outputs = [declared(name, DType.FLOAT, [None] * rank) for name in results]  # onnxruntime requires the rank
        body = onnx.helper.make_graph(inner.nodes, "step", formals, outputs)
        inputs, axes = (*states, *(name for name, _ in parts)), [axis for _, axis in parts]
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(parts), "scan_input_axes": axes}
        if backward:
            attributes["scan_input_directions"] = [1] * len(parts)
            attributes["scan_output_directions"] = [1] * (len(results) - len(states))
        return list(self.ops("Scan", *inputs, results=len(results), **attributes))


Step = Callable[[RoundingBuilder, list[str], list[str]], list[str]]
"""Function to append one step of a Scan: from states and slices to the next states and the values to stack."""


@dataclass(frozen=True, slots=True)
class EmulatedOp:
    """A float16 op, and its node with the twin's float32 inputs."""

    view: View
    op: Op
    node: NodeProto

    def input(self, slot: int) -> str:
        return self.node.input[slot] if slot < len(self.node.input) else ""

    def shape(self, slot: int) -> Shape | None:
        return shape_of(self.view, self.op.inputs[slot])

    def static(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of an input; None if a dimension is unknown."""
        shape = self.shape(slot)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def attributes(self) -> dict[str, Any]:
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}


Recipe = Callable[[RoundingBuilder, EmulatedOp], "list[str] | None"]
"""Function to append the steps of an op's kernel and return its outputs in float16; None if shapes are unknown."""
