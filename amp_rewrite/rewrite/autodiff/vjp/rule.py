"""Rows of the table of VJPs, and the `Call` that their functions receive."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.nodes import Op
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.facts import Shape, known_dims

_OF_TORCH = "pkg.torch.onnx.fx_node"
"""Metadata in which PyTorch's exporter records what a node computes."""
_ATEN = re.compile(r"target=torch\.ops\.aten\.([\w.]+)")


@dataclass(frozen=True, slots=True)
class Stop:
    """No gradient passes: the derivative is zero wherever it exists, or the input is a setting."""

    because: str


@dataclass(frozen=True, slots=True)
class Joint:
    """The gradient of this input is computed with those of all joint inputs, by the row's `together`."""


Partial = Callable[["Call", int], str]
"""Append the gradient of one input, given by its slot, and return its name; called only if needed."""

Entry = Partial | Joint | Stop

Together = Callable[["Call", Sequence[int], Sequence[str]], Sequence[str]]
"""Append the gradients of the inputs in these slots and of these captured values; return their names."""


@dataclass(frozen=True, slots=True)
class GradientRule:
    """Gradient rules of one operator: an entry per formal input; the last entry repeats for variadic inputs.

    `outputs`: number of leading outputs whose gradients have a rule; a gradient of a later output is an error.
    `together`, for ops with bodies: the gradients of `Joint` inputs and of captured values.
    """

    inputs: tuple[Entry, ...]
    outputs: int = 1
    together: Together | None = None

    def entry(self, slot: int) -> Entry:
        """Entry of an actual input."""
        return self.inputs[min(slot, len(self.inputs) - 1)]


def row(*inputs: Entry, outputs: int = 1) -> GradientRule:
    """Make a row with one entry per input."""
    return GradientRule(inputs, outputs)


Backward = Callable[[Builder, Mapping[str, str], Sequence[str]], Mapping[str, str]]
"""Append a backward pass to a builder, from gradients of some values to those of others, all by name."""


@dataclass(frozen=True)
class Forward:
    """One op of the forward pass, and the builder through which nodes are appended."""

    b: Builder
    op: Op

    def x(self, slot: int) -> str:
        """Name of an input, which must be present."""
        name: str = self.op.node.input[slot]
        assert name
        return name

    def has(self, slot: int) -> bool:
        """True if an optional input is present."""
        return slot < len(self.op.inputs) and self.op.inputs[slot] is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, with text decoded; the default if absent."""
        proto = attribute(self.op.node, name)
        if proto is None:
            return default
        value = onnx.helper.get_attribute_value(proto)
        return value.decode() if isinstance(value, bytes) else value

    @property
    def torch_op(self) -> str:
        """Operator of PyTorch that the op was exported from, such as "max.dim"; "" if it is not recorded."""
        text = next((entry.value for entry in self.op.node.metadata_props if entry.key == _OF_TORCH), "")
        found = _ATEN.search(text)
        return found[1] if found else ""

    def shape(self, slot: int) -> Shape | None:
        """Shape of an input; None if its rank is unknown."""
        return self.b.shape(self.x(slot))

    def dims(self, slot: int, what: str) -> tuple[int, ...]:
        """Fully known shape of an input; GradientError, which names the purpose `what`, if unknown."""
        dims = known_dims(self.shape(slot))
        if dims is None:
            raise self.error(f"{what} needs the shape of input {self.x(slot)!r}; declare fixed dims for the inputs")
        return dims

    def rank(self, slot: int = 0) -> int:
        """Rank of an input; GradientError if unknown."""
        shape = self.shape(slot)
        if shape is None:
            raise self.error(f"the rank of input {self.x(slot)!r} is unknown; declare the shapes of the inputs")
        return len(shape)

    def axis(self, default: int) -> int:
        """The attribute `axis`, counted from the front of the first input's shape."""
        return positive(self.attr("axis", default), self.rank())

    def dtype(self, slot: int = 0) -> DType:
        """Element type of an input; GradientError if unknown."""
        return element_type(self.b, self.x(slot))

    def constant(self, slot: int) -> Array | None:
        """Values of a constant input; None if it is absent or not constant."""
        return self.b.constant_of(self.x(slot)) if self.has(slot) else None

    def joined(self, parts: Sequence[str], axis: int) -> str:
        """Concatenate values along an axis; one value stays as it is."""
        return parts[0] if len(parts) == 1 else self.b.op("Concat", *parts, axis=axis)

    def error(self, fact: str) -> GradientError:
        """Make an error that names this op."""
        return GradientError(f"node {self.op.name!r} ({self.op.kind}): {fact}")


@dataclass(frozen=True)
class Call(Forward):
    """One op of the forward pass, with the gradients of its outputs.

    `gradients`: one name per output, None for an output without a gradient; at least one is a name.
    """

    position: int
    """Index of the op's node in the graph."""
    gradients: tuple[str | None, ...]
    backward: Backward
    """The backward pass itself, for ops with bodies."""

    @property
    def g(self) -> str:
        """Name of the gradient of the first output."""
        assert self.gradients[0] is not None
        return self.gradients[0]

    @property
    def narrow(self) -> str:
        """The gradient of the first output before it was expanded, for ops beside another operand of its shape."""
        return self.b.narrow(self.g)

    def y(self, slot: int = 0) -> str:
        """Name of an output; an absent optional output is added to the node."""
        return self.b.extra_output(self.position, slot)

    @property
    def out_shape(self) -> Shape | None:
        """Shape of the first output; None if its rank is unknown."""
        return self.b.shape(self.op.node.output[0])

    def spans_output(self, slot: int) -> bool:
        """True if an input is known to have the shape of the first output."""
        shape = self.shape(slot)
        return shape is not None and None not in shape and shape == self.out_shape

    def do(self, op_type: str, *inputs: str | float, **attributes: Any) -> str:
        """Append an op; numbers become constants of the type of this op's first input."""
        return self.b.op(op_type, *[self.number(i) for i in inputs], **attributes)

    def number(self, value: str | float) -> str:
        """Name of a constant of the type of the op's first input; a name is returned as is."""
        return value if isinstance(value, str) else self.b.scalar(value, self.dtype(0))

    def typed(self, x: str) -> str:
        """Append a Cast to the type of the op's first input."""
        return self.b.op("Cast", x, to=self.dtype(0).code)

    def part(self, shape: str, begin: int, end: int) -> str:
        """Append a Slice of a shape, from `begin` to `end`."""
        return self.b.op("Slice", shape, self.b.ints([begin]), self.b.ints([end]))

    def counted(self, count: int | str) -> str:
        """Append a Range from 0 to a number or a value, int64."""
        zero = self.b.scalar(0, DType.INT64)
        end = count if isinstance(count, str) else self.b.scalar(count, DType.INT64)
        return self.b.op("Range", zero, end, self.b.scalar(1, DType.INT64))

    def sum_to(self, gradient: str, slot: int) -> str:
        """Sum a gradient of output 0's shape over the axes along which an input was broadcast.

        Axes known only at run time are compared there.
        """
        return sum_to(self.b, gradient, self.out_shape, self.x(slot))

    def shared(self, gradient: str, count: int | str) -> str:
        """Divide a gradient of the type of input 0 by a number, or by the product of the dims in a value.

        The product is computed as a sum of ones on the gradient's device, which avoids a copy from host to device.
        Low types divide in float32, because they cannot represent large integers.
        """
        own = self.dtype(0)
        wide = DType.FLOAT if own.low else own
        if isinstance(count, str):
            divisor = self.b.reduce("ReduceSum", self.b.full(count, 1.0, wide), None, keepdims=False)
        else:
            divisor = self.b.scalar(float(count), wide)
        return self.b.cast(self.b.op("Div", self.b.cast(gradient, wide, of=own), divisor), own, of=wide)

    def zeros(self, slot: int) -> str:
        """Append zeros of an input's shape and type."""
        return self.b.zeros_like(self.x(slot), self.dtype(slot))


def element_type(b: Builder, name: str) -> DType:
    """Element type of a value; GradientError if unknown."""
    dtype = b.dtype(name)
    if dtype is None:
        raise GradientError(f"the element type of {name!r} is unknown; declare it")
    return dtype


def positive(axis: int, rank: int) -> int:
    """Count an axis from the front."""
    return axis + rank if axis < 0 else axis


def sum_to(b: Builder, gradient: str, shape: Shape | None, x: str) -> str:
    """Sum a gradient of this shape over the axes along which `x` was broadcast to it."""
    own = b.shape(x)
    axes = _broadcast_axes(own, shape)
    if axes is None or own is None or shape is None:
        return _sum_at_run_time(b, gradient, x)
    if not axes:
        return gradient
    summed = b.reduce("ReduceSum", gradient, axes, keepdims=True)
    return b.squeeze(summed, range(len(shape) - len(own)))


def _broadcast_axes(own: Shape | None, shape: Shape | None) -> list[int] | None:
    """Axes of `shape` along which `own` is repeated; None if the dims do not decide it."""
    if own is None or shape is None:
        return None
    dropped = len(shape) - len(own)
    axes = list(range(dropped))
    for axis, (mine, full) in enumerate(zip(own, shape[dropped:], strict=True), start=dropped):
        if mine == 1:
            axes += [axis] if full != 1 else []
        elif not isinstance(mine, int) and full != 1 and (mine is None or mine != full):
            return None  # may be 1 here and more there
    return axes


def _sum_at_run_time(b: Builder, gradient: str, x: str) -> str:
    """Sum over broadcast axes found by comparing shapes at run time; ranks may be unknown."""
    own, full = b.op("Shape", x), b.op("Shape", gradient)
    missing = b.op("Sub", b.op("Shape", full), b.op("Shape", own))
    ones = b.op("ConstantOfShape", missing, value=onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1]))
    aligned = b.op("Concat", ones, own, axis=0)
    differs = b.op("Not", b.op("Equal", aligned, full))
    axes = b.reshape(b.op("NonZero", differs), [-1])
    return b.reshape(b.reduce("ReduceSum", gradient, axes, keepdims=True), own)


Rows = Mapping[tuple[str, str], GradientRule]
"""Rows by domain and op type; ai.onnx is ""."""

Family = Mapping[str, GradientRule]
"""Rows of ai.onnx operators by op type."""

END = (1 << 63) - 1
"""End of a Slice behind every axis."""

ALL_OUTPUTS = 1 << 30
"""`outputs` of a row in which every output may have a gradient."""
