"""What ops and Casts cost on a GPU, as far as shapes tell: bytes moved and operations done, under its roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from onnx import ValueInfoProto

from amp_rewrite.decide.placement.flops import UNKNOWN_DIMENSION, operations
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import PICKS, VIEWS
from amp_rewrite.ir.shapes.onnx_shapes import Shape, Shapes, shapes_of
from amp_rewrite.ir.view import MAIN, Op, ValueId, View
from amp_rewrite.runtime.roofline import START, Roof

UNKNOWN_SIZE = 1 << 16
"""Elements of a value of which nothing is known, nor of what it is made from."""
ATTOSECONDS = 1e18
_START = round(START * ATTOSECONDS)


@dataclass(frozen=True)
class Work:
    """The sizes of a model's values, and what that comes to on one GPU; all times in attoseconds.

    Products count their operations, everything else the bytes that it reads and writes; nothing stays in a cache.
    What runs takes no time to start, but a kernel more or less does (`cast`, `trip`). Shapes are those that the main
    graph states; only where one is asked for that it does not state, onnx infers them all. `sizes` holds the elements
    of values that were asked about, or are known better; `times` what float32 takes longer for so many operations and
    elements.
    """

    view: View
    roof: Roof
    to: DType
    sizes: dict[ValueId, int] = field(default_factory=dict, repr=False)
    times: dict[tuple[float, int], int] = field(default_factory=dict, repr=False)

    def cast(self, value: ValueId) -> int:
        """The time of a Cast between float32 and the low type: it starts, reads the one and writes the other."""
        size = self.size(value)
        return _START + self._time(0.0, DType.FLOAT.nbytes(size) + self.to.nbytes(size), low=False)

    def trip(self, value: ValueId) -> int:
        """The time that fused ops save: to start another kernel, and of a float32 value to memory and back."""
        return _START + self._time(0.0, 2 * DType.FLOAT.nbytes(self.size(value)), low=False)

    def loss(self, op: Op, values: Sequence[ValueId], *, main: bool) -> int:
        """How much longer an op takes if it reads and writes these values in float32; never below 0.

        `main`: they are those that it computes with, so that its operations count too.
        """
        if op.kind in VIEWS or op.kind == "Dropout":
            return 0
        moved = [v for v in values if not (op.kind in PICKS and v == op.inputs[0])]
        work = self.flops(op) if main else 0.0, sum(map(self.size, moved))
        if work not in self.times:  # most ops of a model are as large as many others
            self.times[work] = self._longer(*work)
        return self.times[work]

    def _longer(self, flops: float, size: int) -> int:
        """How much longer operations and elements moved take in float32."""
        float32 = self._time(flops, DType.FLOAT.nbytes(size), low=False)
        return max(0, float32 - self._time(flops, self.to.nbytes(size), low=True))

    def flops(self, op: Op) -> float:
        """The operations of a matrix product, convolution, recurrent op or attention; 0 of other ops."""
        return operations(self, op)

    def shape(self, value: ValueId | None) -> tuple[int, ...]:
        """The shape, free dimensions filled in; () where it is not known."""
        found = self._shape(value) if value is not None else None
        return tuple(UNKNOWN_DIMENSION if d is None else d for d in found or ())

    def size(self, value: ValueId | None) -> int:
        """Elements; where the shape is not known, as many as the largest has that a value is made from."""
        if value is None:
            return 0
        if value in self.sizes:  # asked four times of each
            return self.sizes[value]
        pending = [value]
        while pending:
            wanted = pending[-1]
            found = self._size(wanted)
            if isinstance(found, int):
                self.sizes[wanted] = found
                pending.pop()
            else:
                pending.extend(found)
        return self.sizes[value]

    def _size(self, value: ValueId) -> int | list[ValueId]:
        """How many elements a value has, or the values that have to be looked at before."""
        if value in self.sizes:
            return self.sizes[value]
        shape = self._shape(value)
        if shape is not None:
            return prod(UNKNOWN_DIMENSION if d is None else d for d in shape)
        op = self.view.producer(value)
        read = [v for v in op.inputs if v is not None] if op is not None else []
        unseen = [v for v in read if v not in self.sizes]
        return unseen or max((self.sizes[v] for v in read), default=0) or UNKNOWN_SIZE

    def _shape(self, value: ValueId) -> Shape | None:
        found = self.view.values[value]
        if found.tensor is not None:
            return tuple(found.tensor.dims)
        stated = self._stated.get(found.name) if found.scope == MAIN else None
        if stated is not None and stated.type.tensor_type.HasField("shape"):
            dims = stated.type.tensor_type.shape.dim
            return tuple(d.dim_value if d.HasField("dim_value") else None for d in dims)
        return self._inferred.get((found.scope, found.name))

    @cached_property
    def _stated(self) -> Mapping[str, ValueInfoProto]:
        graph = self.view.model.proto.graph
        return {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}

    @cached_property
    def _inferred(self) -> Shapes:
        return shapes_of(self.view)

    def _time(self, flops: float, nbytes: float, *, low: bool) -> int:
        return round(self.roof.seconds(flops, nbytes, low=low) * ATTOSECONDS)
