"""Ops of a model that a device computes in the low type inside, written out step by step."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.shapes.onnx_shapes import shape_at, shapes_of
from amp_rewrite.ir.versions import FIRST_UNBATCHED_SCAN
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.sums.site import LowBuilder, Recipe, Site

_MOST_LISTED = 64
"""Elements of a constant that states axes."""


class Written:
    """Writes ops out, by the recipes of a device. ModelError for an opset without Scan."""

    def __init__(self, view: View, recipes: Mapping[str, Recipe]) -> None:
        self._view, self._recipes, self._shapes = view, recipes, shapes_of(view)
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
        if recipe is None or not op.outputs or op.outputs[0] is None:
            return None
        kind = view.types[op.outputs[0]]
        if kind is None or kind.container != TENSOR or kind.dtype is not DType.FLOAT16:
            return None
        builder = LowBuilder(taken, opset=self._opset, region=node.name or op.name, dtype=DType.FLOAT16)
        shapes = tuple(shape_at(self._shapes, view, value) for value in op.inputs)
        results = recipe(builder, Site(op, node, shapes, tuple(map(self._listed, op.inputs))))
        return None if results is None else (builder.nodes, results)

    def _listed(self, value: ValueId | None) -> Array | None:
        """Return a small constant."""
        tensor = self._view.constant(value) if value is not None else None
        if tensor is None or tensor.ByteSize() > 16 * _MOST_LISTED:
            return None
        values: Array = self._view.model.array(tensor)
        return values if values.size <= _MOST_LISTED else None
