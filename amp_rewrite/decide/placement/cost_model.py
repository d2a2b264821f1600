"""The cost model: times of ops and Casts on a GPU, from bytes and operations under its roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from onnx import ValueInfoProto

from amp_rewrite.decide.placement.flops import UNKNOWN_DIMENSION, flops_of, summed_length
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import PICKS, TENSOR_CORE_STEP, VIEWS
from amp_rewrite.ir.shapes.onnx_shapes import Shape, declared_dims, fixed, shape_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View
from amp_rewrite.runtime.roofline import START, Roof

UNKNOWN_SIZE = 1 << 16
"""Elements of a value without a known shape that is made from no value with one."""
ATTOSECONDS = 1e18
_START = round(START * ATTOSECONDS)


@dataclass(frozen=True)
class CostModel:
    """The costs of a model's ops and Casts on one GPU. All times are in attoseconds.

    Products cost their operations, other ops the bytes that they read and write; nothing stays in a cache. Only an
    additional kernel takes time to start (`cast`, `trip`). Shapes are those that the main graph states; if one that it
    does not state is needed, onnx infers them all. `sizes` holds numbers of elements: those computed so far, and those
    that the caller knows better. `times`: how much longer float32 takes, by operations and elements.
    """

    view: View
    roof: Roof
    to: DType
    sizes: dict[ValueId, int] = field(default_factory=dict, repr=False)
    times: dict[tuple[float, int], int] = field(default_factory=dict, repr=False)

    @cached_property
    def _attained(self) -> Roof:
        return self.roof.attained

    def cast(self, value: ValueId) -> int:
        """Return the time of a Cast between float32 and the low type: it starts, reads one and writes the other."""
        size = self.size(value)
        return _START + self._time(0.0, DType.FLOAT.nbytes(size) + self.to.nbytes(size), low=False)

    def trip(self, value: ValueId) -> int:
        """Return the time that a fusion saves: a kernel's start, and the way of a float32 value to memory and back."""
        return _START + self._time(0.0, 2 * DType.FLOAT.nbytes(self.size(value)), low=False)

    def loss(self, op: Op, values: Sequence[ValueId], *, main: bool) -> int:
        """Return how much longer an op takes if it reads and writes these values in float32, at least 0.

        `main`: the op computes with these values, so its operations count, too.
        """
        if op.kind in VIEWS or op.kind == "Dropout":
            return 0
        flops, size = self.flops(op) if main else 0.0, self._moved(op, values)
        if (flops, size) not in self.times:  # most ops of a model are as large as many others
            float32 = self._time(flops, DType.FLOAT.nbytes(size), low=False)
            self.times[flops, size] = max(0, float32 - self._time(flops, self.to.nbytes(size), low=True))
        return self.times[flops, size]

    def _moved(self, op: Op, values: Sequence[ValueId]) -> int:
        """Return the elements that an op moves of these values; a table is read in part."""
        return sum(self.size(v) for v in values if not (op.kind in PICKS and v == op.inputs[0]))

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

    @property
    def free(self) -> bool:
        """True if an input has a dimension that the model does not state."""
        shapes = (declared_dims(value) for value in self.view.model.proto.graph.input)
        return any(dims is None or None in fixed(dims) for dims in shapes)

    def size(self, value: ValueId | None) -> int:
        """Return the number of elements; without a shape, that of the largest value behind it. 0 for None."""
        if value is None:
            return 0
        pending = [value] if value not in self.sizes else []
        while pending:
            current = pending[-1]
            shape, op = self._shape(current), self.view.producer(current)
            operands = op.operands if op is not None and shape is None else []
            unseen = [v for v in operands if v not in self.sizes]
            if unseen:
                pending.extend(unseen)
                continue
            if shape is not None:
                size = prod(UNKNOWN_DIMENSION if d is None else d for d in shape)
            else:
                size = max((self.sizes[v] for v in operands), default=0) or UNKNOWN_SIZE
            self.sizes.setdefault(pending.pop(), size)
        return self.sizes[value]

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

    def _time(self, flops: float, nbytes: float, *, low: bool) -> int:
        return round(self._attained.seconds(flops, nbytes, low=low) * ATTOSECONDS)
