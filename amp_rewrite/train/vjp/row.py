"""What a row of the table of VJPs is made of, and what its functions are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.nodes import Op
from amp_rewrite.ir.schema import attribute
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.facts import Shape, known_dims


@dataclass(frozen=True, slots=True)
class Stop:
    """The derivative by this input is zero wherever it exists: no gradient passes, and that is no error."""

    because: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The derivative by this input is not zero and no rule gives it: an error, should it be needed."""

    because: str


@dataclass(frozen=True, slots=True)
class Joint:
    """The gradient of this input is made with those of all others, by the row's `together`."""


Partial = Callable[["Call", int], str]
"""Appends the gradient of one input; its name. Called with the op and the input's slot, only if it is needed."""

Entry = Partial | Joint | Stop | Refuse

Together = Callable[["Call", Sequence[int], Sequence[str]], Sequence[str]]
"""Appends the gradients of the inputs of these slots, and of these values that bodies read; their names."""


@dataclass(frozen=True, slots=True)
class Row:
    """How gradients pass one operator: an entry per formal input; the last one goes on for variadic inputs.

    `outputs`: gradients may arrive at that many outputs, counted from the first; at a later one they are an
    error. `together`, for ops with bodies: the gradients of inputs that are `Joint`, and of what the bodies read.
    """

    inputs: tuple[Entry, ...]
    outputs: int = 1
    together: Together | None = None

    def entry(self, slot: int) -> Entry:
        """The entry of an actual input."""
        if not self.inputs:
            return Refuse("the operator has no such input")
        return self.inputs[min(slot, len(self.inputs) - 1)]


def row(*inputs: Entry, outputs: int = 1) -> Row:
    """A row with an entry per input."""
    return Row(inputs, outputs)


Backward = Callable[[Builder, Mapping[str, str], Sequence[str]], Mapping[str, str]]
"""Appends a backward pass to a builder, from full gradients of some values to those of others, all by name."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op of the forward pass, whose outputs have gradients. Everything is appended through `b`.

    `gradients` holds one name per output, None where none arrived; at least one did.
    """

    b: Builder
    op: Op
    position: int
    """Where the op's node stands in the graph."""
    gradients: tuple[str | None, ...]
    backward: Backward
    """The backward pass itself, for ops with bodies."""

    # -- the op ----------------------------------------------------------------------------------------

    @property
    def g(self) -> str:
        """The gradient that arrived at the first output."""
        assert self.gradients[0] is not None
        return self.gradients[0]

    def x(self, slot: int) -> str:
        """The name of an input. Only for one that is there."""
        name: str = self.op.node.input[slot]
        assert name
        return name

    def has(self, slot: int) -> bool:
        """Whether an optional input is there."""
        return slot < len(self.op.inputs) and self.op.inputs[slot] is not None

    def y(self, slot: int = 0) -> str:
        """The name of an output; an optional one that was left out is added to the node."""
        return self.b.extra_output(self.position, slot)

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, text decoded; the default where it is absent."""
        found = attribute(self.op.node, name)
        if found is None:
            return default
        value = onnx.helper.get_attribute_value(found)
        return value.decode() if isinstance(value, bytes) else value

    def shape(self, slot: int) -> Shape | None:
        """The shape of an input; None where its rank is unknown."""
        return self.b.shape(self.x(slot))

    def dims(self, slot: int, what: str) -> tuple[int, ...]:
        """The shape of an input that must be known in full; GradientError says for what."""
        found = known_dims(self.shape(slot))
        if found is None:
            raise self.error(f"{what} needs the shape of input {self.x(slot)!r}; declare fixed dims for the inputs")
        return found

    def rank(self, slot: int = 0) -> int:
        """The rank of an input; GradientError where it is unknown."""
        found = self.shape(slot)
        if found is None:
            raise self.error(f"the rank of input {self.x(slot)!r} is unknown; declare the shapes of the inputs")
        return len(found)

    def axis(self, default: int, slot: int = 0) -> int:
        """The attribute `axis` as a position from the front of an input's shape."""
        return positive(self.attr("axis", default), self.rank(slot))

    def dtype(self, slot: int = 0) -> DType:
        """The element type of an input; GradientError where it is unknown."""
        found = self.b.dtype(self.x(slot))
        if found is None:
            raise self.error(f"the element type of input {self.x(slot)!r} is unknown; declare it")
        return found

    def constant(self, slot: int) -> Array | None:
        """The values of an input that is a constant; None if it is left out or none."""
        return self.b.constant_of(self.x(slot)) if self.has(slot) else None

    def error(self, fact: str) -> GradientError:
        """An error that names this op."""
        return GradientError(f"node {self.op.name!r} ({self.op.kind}): {fact}")

    # -- formulas --------------------------------------------------------------------------------------

    def do(self, op_type: str, *inputs: str | float, **attributes: Any) -> str:
        """Append an op; numbers become constants of the type of the op's first input."""
        return self.b.op(op_type, *[self.number(i) for i in inputs], **attributes)

    def number(self, value: str | float) -> str:
        """A constant of the type of the op's first input; a name stays what it is."""
        return value if isinstance(value, str) else self.b.scalar(value, self.dtype(0))

    def sum_to(self, gradient: str, slot: int, given: Shape | None = None) -> str:
        """A gradient that was broadcast from an input, summed to the input's shape.

        `given` is the shape of the gradient, that of output 0 by default. Axes that only run time tells are
        compared there.
        """
        given = self.b.shape(self.op.node.output[0]) if given is None else given
        return sum_to(self.b, gradient, given, self.x(slot))

    def shared(self, gradient: str, count: int | str) -> str:
        """A gradient of the type of input 0, divided by a number, or by the product of the dims that a value holds.

        That product is a sum of ones, not a product: so it is computed where the gradient is, and no copy from host
        to device waits in between. In float32 for a low type, which has no large whole numbers.
        """
        own = self.dtype(0)
        wide = DType.FLOAT if own.low else own
        if isinstance(count, str):
            divisor = self.b.reduce("ReduceSum", self.b.full(count, 1.0, wide), None, keepdims=False)
        else:
            divisor = self.b.scalar(float(count), wide)
        if wide is own:
            return self.b.op("Div", gradient, divisor)
        return self.b.op("Cast", self.b.op("Div", self.b.op("Cast", gradient, to=wide.code), divisor), to=own.code)

    def zeros(self, slot: int) -> str:
        """Zeros of the shape and type of an input."""
        return self.b.zeros_like(self.x(slot), self.dtype(slot))

    def arrived(self, slot: int) -> str:
        """The gradient of an output; zeros of its shape where none arrived."""
        found = self.gradients[slot]
        return found if found is not None else self.b.zeros_like(self.y(slot), self.dtype(0))


def positive(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def sum_to(b: Builder, gradient: str, given: Shape | None, x: str) -> str:
    """A gradient of shape `given`, summed over the axes along which `x` was broadcast to it; of the shape of `x`."""
    own = b.shape(x)
    axes = _broadcast_axes(own, given)
    if axes is None or own is None or given is None:
        return _sum_at_run_time(b, gradient, x)
    if not axes:
        return gradient
    summed = b.reduce("ReduceSum", gradient, axes, keepdims=True)
    dropped = len(given) - len(own)
    return b.squeeze(summed, range(dropped))


def _broadcast_axes(own: Shape | None, given: Shape | None) -> list[int] | None:
    """The axes of `given` along which `own` is repeated; None where the dims do not tell."""
    if own is None or given is None:
        return None
    dropped = len(given) - len(own)
    axes = list(range(dropped))
    for axis, (mine, full) in enumerate(zip(own, given[dropped:], strict=True), start=dropped):
        if mine == 1:
            axes += [axis] if full != 1 else []
        elif not isinstance(mine, int) and full != 1 and (mine is None or mine != full):
            return None  # may be 1 here and more there
    return axes


def _sum_at_run_time(b: Builder, gradient: str, x: str) -> str:
    """The same where shapes are compared while the graph runs. Ranks may be unknown, too."""
    own, full = b.op("Shape", x), b.op("Shape", gradient)
    missing = b.op("Sub", b.op("Shape", full), b.op("Shape", own))
    ones = b.op("ConstantOfShape", missing, value=onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1]))
    aligned = b.op("Concat", ones, own, axis=0)
    differs = b.op("Not", b.op("Equal", aligned, full))
    axes = b.reshape(b.op("NonZero", differs), [-1])
    return b.reshape(b.reduce("ReduceSum", gradient, axes, keepdims=True), own)


Rows = Mapping[tuple[str, str], Row]
"""Rows by domain and op type; ai.onnx is ""."""
