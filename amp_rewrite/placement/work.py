"""What ops and Casts cost on a GPU, as far as shapes tell: bytes moved and operations done, under its roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from amp_rewrite.dtypes import DType
from amp_rewrite.fuse.shapes import Shape, shapes_of
from amp_rewrite.roofline import Roof
from amp_rewrite.schema import attribute
from amp_rewrite.view import Op, ValueId, View

UNKNOWN_DIMENSION = 128
"""What a free dimension counts as: in most exported models a length of text, or a batch."""
UNKNOWN_SIZE = 1 << 16
"""Elements of a value of which nothing is known, nor of what it is made from."""
ATTOSECONDS = 1e18

VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant"))
"""They rename or relabel memory: nothing moves."""
READ_IN_PART = frozenset(("Gather", "GatherElements", "GatherND", "Slice"))
"""Of their first input they read what the others ask for."""


@dataclass(frozen=True)
class Work:
    """The sizes of a model's values, and what that comes to on one GPU; all times in attoseconds.

    Products count their operations, everything else the bytes that it reads and writes; nothing stays in a cache,
    no time goes into starting kernels.
    """

    view: View
    roof: Roof
    to: DType
    elements: Sequence[int]
    shapes: Mapping[ValueId, Shape]

    @classmethod
    def of(cls, view: View, roof: Roof, to: DType) -> Work:
        """O(nodes + uses), and onnx's shape inference on the model without its weights."""
        named = shapes_of(view)
        shapes = {v.id: s for v in view.values if (s := named.get((v.scope, v.name))) is not None}
        elements = [_count(shapes[v.id]) if v.id in shapes else 0 for v in view.values]
        for op in view.ops:
            size = max((elements[v] for v in op.inputs if v is not None), default=0) or UNKNOWN_SIZE
            for out in op.outputs:
                if out is not None and out not in shapes:
                    elements[out] = size
        known = [elements[v.id] if v.id in shapes else elements[v.id] or UNKNOWN_SIZE for v in view.values]
        return cls(view, roof, to, known, shapes)

    def cast(self, value: ValueId) -> int:
        """The time of a Cast between float32 and the low type: it reads the one and writes the other."""
        return self._time(0.0, self._nbytes(value, DType.FLOAT) + self._nbytes(value, self.to), low=False)

    def trip(self, value: ValueId) -> int:
        """The time that a float32 value takes to memory and back, which fused ops save."""
        return self._time(0.0, 2 * self._nbytes(value, DType.FLOAT), low=False)

    def loss(self, op: Op, values: Sequence[ValueId], *, main: bool) -> int:
        """How much longer an op takes if it reads and writes these values in float32; never below 0.

        `main`: they are those that it computes with, so that its operations count too.
        """
        if op.kind in VIEWS or op.kind == "Dropout":
            return 0
        moved = [v for v in values if not (op.kind in READ_IN_PART and v == op.inputs[0])]
        flops = self.flops(op) if main else 0.0
        float32 = self._time(flops, sum(self._nbytes(v, DType.FLOAT) for v in moved), low=False)
        return max(0, float32 - self._time(flops, sum(self._nbytes(v, self.to) for v in moved), low=True))

    def flops(self, op: Op) -> float:
        """The operations of a matrix product or convolution, 2 for each product that is summed; 0 of other ops."""
        count = _FLOPS.get(op.kind)
        return count(self, op) if count is not None else 0.0

    def shape(self, value: ValueId | None) -> tuple[int, ...]:
        """The shape, free dimensions filled in; () where it is not known."""
        found = self.shapes.get(value) if value is not None else None
        return tuple(UNKNOWN_DIMENSION if d is None else d for d in found or ())

    def size(self, value: ValueId | None) -> int:
        return self.elements[value] if value is not None else 0

    def _nbytes(self, value: ValueId, dtype: DType) -> int:
        return dtype.nbytes(self.elements[value])

    def _time(self, flops: float, nbytes: float, *, low: bool) -> int:
        return round(self.roof.seconds(flops, nbytes, low=low) * ATTOSECONDS)


def _count(shape: Shape) -> int:
    return prod(UNKNOWN_DIMENSION if d is None else d for d in shape)


def _product(work: Work, op: Op) -> float:
    """Of a MatMul: one sum of as many products as the first factor has columns, for each result."""
    return 2.0 * work.size(op.outputs[0]) * (work.shape(op.inputs[0]) or (UNKNOWN_DIMENSION,))[-1]


def _gemm(work: Work, op: Op) -> float:
    flipped = attribute(op.node, "transA")
    shape = work.shape(op.inputs[0]) or (UNKNOWN_DIMENSION,)
    return 2.0 * work.size(op.outputs[0]) * shape[0 if flipped is not None and flipped.i else -1]


def _convolution(work: Work, op: Op) -> float:
    """One sum over a window for each result; a ConvTranspose spreads each element of what it reads over one."""
    spread = op.inputs[0] if op.kind == "ConvTranspose" else op.outputs[0]
    return 2.0 * work.size(spread) * prod(work.shape(op.inputs[1])[1:])


def _recurrent(work: Work, op: Op) -> float:
    """Each step multiplies what it reads by W and the state by R."""
    steps = prod(work.shape(op.inputs[0])[:2])
    return 2.0 * steps * (work.size(op.inputs[1]) + work.size(op.inputs[2]))


def _attention(work: Work, op: Op) -> float:
    """Scores, and what they select: for each query two products with all keys."""
    keys = work.shape(op.inputs[1])
    return 4.0 * work.size(op.inputs[0]) * (keys[-2] if len(keys) > 2 else UNKNOWN_DIMENSION)


_FLOPS: Mapping[str, Callable[[Work, Op], float]] = {
    "MatMul": _product,
    "com.microsoft::FusedMatMul": _product,
    "Gemm": _gemm,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
}
