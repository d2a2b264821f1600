"""Low ops of a twin, written out as a device computes them: their inputs, shapes and values, and their builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx.helper
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.builder import NodeBuilder, declared
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.shapes.onnx_shapes import Shape, shape_of
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN
from amp_rewrite.ir.view import Op, View


class LowBuilder(NodeBuilder):
    """A builder of float32 nodes whose arithmetic rounds each result to a low type."""

    def __init__(self, taken: set[str], *, opset: int, region: str, dtype: DType) -> None:
        super().__init__(taken, opset=opset, region=region)
        self.low_type = dtype

    def rounded(self, x: str) -> str:
        """Append Casts to the low type and back."""
        return self.op("Cast", self.op("Cast", x, to=self.low_type.code), to=DType.FLOAT.code)

    def low(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an op and round its result."""
        return self.rounded(self.op(op_type, *inputs, **attributes))

    def number(self, value: float) -> str:
        """Return a constant that holds the value as the low type does."""
        with np.errstate(over="ignore"):
            return self.constant(np.array(value, self.low_type.numpy).astype(np.float32))

    def shaped(self, x: str, dims: Sequence[int]) -> str:
        """Append a Reshape in which 0 copies the dimension of the input, and -1 takes what is left."""
        return self.op("Reshape", x, self.ints(dims))

    def zeros_like(self, x: str, fill: float = 0.0) -> str:
        """Return a tensor of one value in the shape of another."""
        return self.full(self.op("Shape", x), fill, DType.FLOAT)

    def picked(self, x: str, first: int, count: int, axis: int) -> str:
        """Return `count` neighbors along an axis, from `first` on."""
        return self.op("Gather", x, self.ints(range(first, first + count)), axis=axis)

    def summed(self, x: str, count: int) -> str:
        """Add up the first `count` slices of axis 2, one by one."""
        slices = [self.op("Gather", x, self.constant(np.array(i, np.int64)), axis=2) for i in range(count)]
        return reduce(partial(self.low, "Add"), slices)

    def scan(
        self, states: Sequence[str], parts: Sequence[tuple[str, int]], step: Step, rank: int, *, backward: bool = False
    ) -> list[str]:
        """Append a Scan over slices of `parts`, each a value and the axis along which it is cut.

        `step` gets a builder of the body, the states and the slices; it returns the next states, all of one rank, and
        behind them values of that rank, of which the Scan stacks those of all steps along axis 0. `backward`: from the
        last slice to the first, stacked in the order of the slices.
        """
        inner = LowBuilder(self._taken, opset=self.opset, region=f"{self._region}/step", dtype=self.low_type)
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
    """A low op: its node with the float32 inputs of the twin, the shapes and constant values of those."""

    op: Op
    node: NodeProto
    shapes: tuple[Shape | None, ...]
    values: tuple[Array | None, ...] = field(repr=False)

    @property
    def inputs(self) -> list[str]:
        return list(self.node.input)

    def input(self, slot: int) -> str:
        """Return the name of an input, "" if it is absent."""
        return self.node.input[slot] if slot < len(self.node.input) else ""

    def shape(self, slot: int) -> Shape | None:
        return self.shapes[slot] if slot < len(self.shapes) else None

    def ranks(self, *slots: int) -> list[int] | None:
        """Return the ranks of inputs; None if one is unknown."""
        shapes = [self.shape(slot) for slot in slots]
        return None if None in shapes else [len(shape) for shape in shapes if shape is not None]

    def static(self, slot: int) -> tuple[int, ...] | None:
        """Return the shape of an input, all dimensions of which are numbers; None for another one."""
        shape = self.shape(slot)
        return None if shape is None or None in shape else tuple(d for d in shape if d is not None)

    def value(self, slot: int) -> Array | None:
        """Return the constant that an input holds."""
        return self.values[slot] if slot < len(self.values) else None

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the node."""
        stated = attribute(self.node, name)
        return default if stated is None else onnx.helper.get_attribute_value(stated)

    def attributes(self, *dropped: str) -> dict[str, Any]:
        """Return the node's attributes but some, as keywords."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute if a.name not in dropped}

    def plain(self, b: LowBuilder) -> str:
        """Append the op unchanged, in float32; return its first result."""
        return b.like(self.node, self.inputs)[0]


Recipe = Callable[[LowBuilder, LowOp], "list[str] | None"]
"""Nodes of one op as a device computes it: its outputs, each of values of the low type; None if shapes are unknown."""

_MOST_LISTED = 64
"""Elements of a constant that states axes."""


class WrittenOps:
    """Writes ops out, by the recipes of a device. ModelError for an opset without Scan."""

    def __init__(self, view: View, recipes: Mapping[str, Recipe]) -> None:
        self._view, self._recipes = view, recipes
        self._opset = view.opsets.get("", FIRST_UNBATCHED_SCAN)
        if self._opset < FIRST_UNBATCHED_SCAN:
            raise ModelError(
                f"the model imports ai.onnx opset {self._opset}, and sums are written out from opset"
                f" {FIRST_UNBATCHED_SCAN} on; convert it with --opset, or emulate with accumulate='float32'"
            )

    def out(self, op: Op, node: NodeProto, taken: set[str]) -> tuple[list[NodeProto], list[str]] | None:
        """Return the nodes of a float16 op and the names of its results; None if it is computed in float32 inside.

        `node`: the op with the inputs of the twin. `taken`: names in use, to which those of the nodes are added.
        """
        view, recipe = self._view, self._recipes.get(op.kind)
        result = next(iter(op.results), None)
        if recipe is None or result is None:
            return None
        kind = view.types[result]
        if kind is None or kind.container != TENSOR or kind.dtype is not DType.FLOAT16:
            return None
        builder = LowBuilder(taken, opset=self._opset, region=op.name, dtype=DType.FLOAT16)
        shapes = tuple(shape_of(view, value) for value in op.inputs)
        values = tuple(view.array(value, _MOST_LISTED) for value in op.inputs)
        written = recipe(builder, LowOp(op, node, shapes, values))
        return None if written is None else (builder.nodes, written)
