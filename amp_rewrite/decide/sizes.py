"""Sizes of values, and operations of products, from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from onnx import ValueInfoProto

from amp_rewrite.decide.flops import UNKNOWN_DIMENSION, flops_of, summed_length
from amp_rewrite.ir.op_classes import TENSOR_CORE_STEP
from amp_rewrite.ir.shapes.onnx_shapes import Shape, declared_dims, fixed, shape_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View

UNKNOWN_SIZE = 1 << 16
"""Elements of a value without a known shape that is made from no value with one."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's values, each computed once.

    Shapes are those that the main graph states; if one that it does not state is needed, onnx infers them all.
    """

    view: View
    known: dict[ValueId, int] = field(default_factory=dict, repr=False)

    def flops(self, op: Op) -> float:
        """Return the operations of a matrix product, convolution, recurrent op or attention; 0 for other ops."""
        return flops_of(self, op)

    def is_tiny(self, op: Op) -> bool:
        """True if a product is known to sum fewer terms than tensor cores multiply in a step."""
        if op.outputs[0] is None:
            return False
        for slot, value in enumerate(op.inputs[:2]):
            tensor = self.view.constant(value)
            if tensor is not None and op.kind != "Einsum":
                terms = summed_length(op, slot, tuple(tensor.dims))
                return terms is not None and terms < TENSOR_CORE_STEP
        return 0 < self.flops(op) < 2 * TENSOR_CORE_STEP * self.size(op.outputs[0])

    def shape(self, value: ValueId | None) -> tuple[int, ...]:
        """Return the shape with free dimensions filled in; () if it is unknown."""
        shape = self._shape(value) if value is not None else None
        return tuple(UNKNOWN_DIMENSION if d is None else d for d in shape or ())

    def size(self, value: ValueId | None) -> int:
        """Return the number of elements; without a shape, that of the largest value behind it. 0 for None."""
        if value is None:
            return 0
        pending = [value] if value not in self.known else []
        while pending:
            current = pending[-1]
            shape, op = self._shape(current), self.view.producer(current)
            operands = op.operands if op is not None and shape is None else []
            unseen = [v for v in operands if v not in self.known]
            if unseen:
                pending.extend(unseen)
                continue
            if shape is not None:
                size = prod(UNKNOWN_DIMENSION if d is None else d for d in shape)
            else:
                size = max((self.known[v] for v in operands), default=0) or UNKNOWN_SIZE
            self.known.setdefault(pending.pop(), size)
        return self.known[value]

    def is_stated(self, value: ValueId) -> bool:
        """True if the number of elements is known, without a guess for a free dimension."""
        shape = self._shape(value)
        return shape is not None and None not in shape

    def _shape(self, value: ValueId) -> Shape | None:
        known = self.view.values[value]
        if known.tensor is not None:
            return tuple(known.tensor.dims)
        stated = self._stated.get(known.name) if known.scope == MAIN else None
        dims = declared_dims(stated) if stated is not None else None
        return fixed(dims) if dims is not None else shape_of(self.view, value)

    @cached_property
    def _stated(self) -> Mapping[str, ValueInfoProto]:
        graph = self.view.model.proto.graph
        return {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
