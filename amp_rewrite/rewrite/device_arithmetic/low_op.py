"""Float16 ops of a twin, written out as a kernel computes them: inputs, shapes, values, and a builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.shapes import Shape, shape_of
from amp_rewrite.ir.view import Op, View
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.node_builder import NodeBuilder


class LowBuilder(NodeBuilder):
    """A builder of float32 nodes with each result rounded to a low type; without one, to none."""

    low_type: DType | None = DType.FLOAT16

    def rounded(self, x: str) -> str:
        """Append Casts to the low type and back."""
        if self.low_type is None:
            return x
        return self.op("Cast", self.op("Cast", x, to=self.low_type.code), to=DType.FLOAT.code)

    def low(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an op and round its result."""
        return self.rounded(self.op(op_type, *inputs, **attributes))

    def number(self, value: float) -> str:
        """Return a constant that holds the value as float16 does."""
        with np.errstate(over="ignore"):
            return self.constant(np.array(value, DType.FLOAT16.numpy).astype(np.float32))

    def shaped(self, x: str, dims: Sequence[int]) -> str:
        """Append a Reshape in which 0 copies the dimension of the input, and -1 takes what is left."""
        return self.op("Reshape", x, self.ints(dims))

    def zeros(self, *sizes: str) -> str:
        """Return zeros of a shape that is made of these lists of sizes."""
        shape = self.op("Concat", *sizes, axis=0) if len(sizes) > 1 else sizes[0]
        return self.full(shape, 0.0, DType.FLOAT)

    def picked(self, x: str, first: int, count: int, axis: int) -> str:
        """Return `count` neighbors along an axis, from `first` on."""
        return self.op("Gather", x, self.ints(range(first, first + count)), axis=axis)

    def filled(self, x: str, length: int, width: int) -> str:
        """Return rows of a known length, filled up with zeros to a multiple of the width."""
        if length % width == 0:
            return x
        rows = self.picked(self.op("Shape", x), 0, 1, 0)
        return self.op("Concat", x, self.zeros(rows, self.ints([-length % width])), axis=1)

    def scan(
        self, states: Sequence[str], parts: Sequence[tuple[str, int]], step: Step, rank: int, *, backward: bool = False
    ) -> list[str]:
        """Append a Scan over slices of `parts`, each a value and the axis along which it is cut.

        `step` gets a builder of the body, the states and the slices; it returns the next states, all of one rank, and
        behind them values of that rank, of which the Scan stacks those of all steps along axis 0. `backward`: from the
        last slice to the first, stacked in the order of the slices.
        """
        inner = LowBuilder(self._taken, opset=self.opset, region=f"{self._region}/step")
        names = [inner.fresh(f"{inner._region}/in") for _ in (*states, *parts)]
        results = step(inner, names[: len(states)], names[len(states) :])
        for slot, result in enumerate(results):  # an output of a body is made in it, and once
            results[slot] = inner.fresh(f"{inner._region}/out")
            inner.name(result, results[slot])
        read = [declared(name, DType.FLOAT, None) for name in names]
        ends = [declared(name, DType.FLOAT, [None] * rank) for name in results]  # onnxruntime wants the rank
        body = onnx.helper.make_graph(inner.nodes, "step", read, ends)
        inputs, axes = (*states, *(name for name, _ in parts)), [axis for _, axis in parts]
        stated: dict[str, Any] = {"body": body, "num_scan_inputs": len(parts), "scan_input_axes": axes}
        if backward:
            stated["scan_input_directions"] = [1] * len(parts)
            stated["scan_output_directions"] = [1] * (len(results) - len(states))
        return list(self.ops("Scan", *inputs, results=len(results), **stated))


Step = Callable[[LowBuilder, list[str], list[str]], list[str]]
"""One step of a Scan: from states and slices to the next states and stacked values."""


@dataclass(frozen=True, slots=True)
class LowOp:
    """A float16 op, and its node with the float32 inputs of the twin."""

    view: View
    op: Op
    node: NodeProto

    @property
    def inputs(self) -> list[str]:
        return list(self.node.input)

    def input(self, slot: int) -> str:
        """Return the name of an input, "" if it is absent."""
        return self.node.input[slot] if slot < len(self.node.input) else ""

    def shape(self, slot: int) -> Shape | None:
        return shape_of(self.view, self.op.inputs[slot])

    def static(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of an input, all dimensions of which are numbers; None for another one."""
        shape = self.shape(slot)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def attributes(self) -> dict[str, Any]:
        """Return the node's attributes as keywords."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}


Recipe = Callable[[LowBuilder, LowOp], "list[str] | None"]
"""Nodes of one op as a kernel computes it: its outputs, each of float16 values; None if shapes are unknown."""


def written_out(
    view: View, recipe: Recipe, op: Op, node: NodeProto, taken: set[str], low_type: DType | None
) -> tuple[list[NodeProto], list[str]] | None:
    """Return the nodes of an op and the names of its results; None if it is computed in float32 inside.

    `node`: the op with the inputs of the twin. `taken`: names in use, to which those of the nodes are added.
    """
    builder = LowBuilder(taken, opset=view.opset, region=op.name)
    builder.low_type = low_type
    results = recipe(builder, LowOp(view, op, node))
    return None if results is None else (builder.nodes, results)
