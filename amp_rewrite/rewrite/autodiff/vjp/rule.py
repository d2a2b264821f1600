"""Rows of the VJP table, the `Call` passed to their functions, and the ops on paths to a loss.

A row (`row(…)`) has one entry per formal input. An entry is one of these:

- A function `(v: Call, slot: int) -> str`, which appends the gradient of the input, with the input's shape and element
  type, and returns the gradient's name.
- `Stop(reason)`: the derivative is zero wherever it exists (Floor, indices, a mask), or the input is a setting.
- `Joint()`: the row's `joint_rule` computes the gradient along with those of other inputs and captured values (Scan,
  Loop).

`v` is the op, a `Call`. `v.g` is the gradient of its first output, and `v.x(i)` and `v.y(i)` name its inputs and
outputs; see also `v.attr(name, default)`, `v.shape(i)`, `v.rank(i)`, `v.axis(default)` and `v.constant(i)`.
`v.do(op, …)` appends an op, and turns numbers into constants of the first input's type. `v.b` is the `Builder`, with
methods for ops whose form depends on the opset. Equal nodes are appended once, so the entries of a row can repeat
common terms. `v.sum_to(gradient, slot)` reverses a broadcast, and `v.divided(gradient, count)` is for means. Dims
can be symbolic or unknown: use static dims, compute shapes in the graph (`v.b.shape_of`), or raise `v.error(…)`. An
integer or bool input needs an entry only as a placeholder.

Each family has a module with `ROWS`, and a test compares every row with central differences in float64. `gradients`
replaces an operator without a row with its function body, if onnx has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import GradientError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute
from amp_rewrite.ir.nodes import Op, OpId, ScopeId, ValueId
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder, Shape, fixed_dims

_TORCH_KEY = "pkg.torch.onnx.fx_node"
"""Metadata key used by PyTorch's exporter for the origin of a node."""
_ATEN_TARGET = re.compile(r"target=torch\.ops\.aten\.([\w.]+)")


@dataclass(frozen=True, slots=True)
class Stop:
    """An input without a gradient: the derivative is zero wherever it exists, or the input is a setting."""

    reason: str


@dataclass(frozen=True, slots=True)
class Joint:
    """An input differentiated together with all other joint inputs, by the row's `joint_rule`."""


Partial = Callable[["Call", int], str]
"""Appends the gradient of the input in a slot and returns its name; called only if needed."""

Entry = Partial | Joint | Stop

JointRule = Callable[["Call", Sequence[int], Sequence[str]], Sequence[str]]
"""Appends the gradients of the inputs in these slots and of these captured values; returns their names."""


@dataclass(frozen=True, slots=True)
class GradientRule:
    """Gradient rule of one operator: an entry per formal input; the last entry repeats for variadic inputs.

    `outputs`: number of leading outputs with gradients; a gradient through a later output is an error.
    `joint_rule`, for ops with bodies: computes the gradients of `Joint` inputs and of captured values.
    """

    inputs: tuple[Entry, ...]
    outputs: int = 1
    joint_rule: JointRule | None = None

    def entry(self, slot: int) -> Entry:
        """Return the entry of an actual input."""
        return self.inputs[min(slot, len(self.inputs) - 1)]


def row(*inputs: Entry, outputs: int = 1) -> GradientRule:
    """Make a row with one entry per input."""
    return GradientRule(inputs, outputs)


Backward = Callable[[Builder, Mapping[str, str], Sequence[str]], Mapping[str, str]]
"""Appends a backward pass: computes the gradients of some values from those of others, all by name."""


@dataclass(frozen=True)
class Forward:
    """One op of the forward pass, and the builder for new nodes."""

    b: Builder
    op: Op

    def x(self, slot: int) -> str:
        name: str = self.op.node.input[slot]
        assert name
        return name

    def has(self, slot: int) -> bool:
        return slot < len(self.op.inputs) and self.op.inputs[slot] is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, with text decoded; the default if it is absent."""
        proto = attribute(self.op.node, name)
        if proto is None:
            return default
        value = onnx.helper.get_attribute_value(proto)
        return value.decode() if isinstance(value, bytes) else value

    @property
    def torch_op(self) -> str:
        """The PyTorch operator exported as this op, such as "max.dim"; "" if it is not recorded."""
        text = next((entry.value for entry in self.op.node.metadata_props if entry.key == _TORCH_KEY), "")
        match = _ATEN_TARGET.search(text)
        return match[1] if match else ""

    def shape(self, slot: int) -> Shape | None:
        return self.b.shape(self.x(slot))

    def dims(self, slot: int, purpose: str) -> tuple[int, ...]:
        """Return the fixed shape of an input; raise GradientError, with `purpose` in the message, if it is unknown."""
        dims = fixed_dims(self.shape(slot))
        if dims is None:
            raise self.error(f"{purpose} needs the shape of input {self.x(slot)!r}; declare fixed dims for the inputs")
        return dims

    def rank(self, slot: int = 0) -> int:
        shape = self.shape(slot)
        if shape is None:
            raise self.error(f"the rank of input {self.x(slot)!r} is unknown; declare the shapes of the inputs")
        return len(shape)

    def axis(self, default: int) -> int:
        """Return the attribute `axis` as a nonnegative axis of the first input."""
        return from_front(self.attr("axis", default), self.rank())

    def dtype(self, slot: int = 0) -> DType:
        return self.b.element_type(self.x(slot))

    def constant(self, slot: int) -> Array | None:
        """Return the numbers of a constant input; None if it is absent or not constant."""
        return self.b.constant_of(self.x(slot)) if self.has(slot) else None

    def joined(self, parts: Sequence[str], axis: int) -> str:
        """Concatenate values along an axis; return a single value unchanged."""
        return parts[0] if len(parts) == 1 else self.b.op("Concat", *parts, axis=axis)

    def error(self, fact: str) -> GradientError:
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
        assert self.gradients[0] is not None
        return self.gradients[0]

    @property
    def unexpanded_g(self) -> str:
        """The gradient of the first output before any expansion, to broadcast with another operand."""
        return self.b.unexpanded(self.g)

    def y(self, slot: int = 0) -> str:
        """Return the name of an output; an absent optional output is added to the node."""
        return self.b.extra_output(self.position, slot)

    @property
    def out_shape(self) -> Shape | None:
        return self.b.shape(self.op.node.output[0])

    def do(self, op_type: str, *inputs: str | float, **attributes: Any) -> str:
        """Append an op; numbers become constants of the type of this op's first input."""
        return self.b.op(op_type, *[self.number(i) for i in inputs], **attributes)

    def number(self, value: str | float) -> str:
        """Append a constant of the type of the op's first input; a name is returned unchanged."""
        return value if isinstance(value, str) else self.b.scalar(value, self.dtype(0))

    def typed(self, x: str) -> str:
        """Append a Cast to the type of the op's first input."""
        return self.b.op("Cast", x, to=self.dtype(0).code)

    def shape_part(self, shape: str, begin: int, end: int) -> str:
        return self.b.op("Slice", shape, self.b.ints([begin]), self.b.ints([end]))

    def arange(self, count: int | str) -> str:
        """Append an int64 Range from 0 to a number or a value."""
        zero = self.b.scalar(0, DType.INT64)
        end = count if isinstance(count, str) else self.b.scalar(count, DType.INT64)
        return self.b.op("Range", zero, end, self.b.scalar(1, DType.INT64))

    def sum_to(self, gradient: str, slot: int) -> str:
        """Sum a gradient of output 0's shape over the broadcast axes of an input."""
        return sum_to(self.b, gradient, self.out_shape, self.x(slot))

    def divided(self, gradient: str, count: int | str) -> str:
        """Divide a gradient of the type of input 0 by a number, or by the product of the dims in a value.

        The product is computed as a sum of ones on the gradient's device, to avoid a copy from host to device. For low
        types, the division is in float32, since they cannot represent large integers.
        """
        dtype = self.dtype(0)
        wide_dtype = DType.FLOAT if dtype.low else dtype
        if isinstance(count, str):
            divisor = self.b.reduce("ReduceSum", self.b.full(count, 1.0, wide_dtype), None, keepdims=False)
        else:
            divisor = self.b.scalar(float(count), wide_dtype)
        return self.b.cast(self.b.op("Div", self.b.cast(gradient, wide_dtype, of=dtype), divisor), dtype, of=wide_dtype)

    def zeros(self, slot: int) -> str:
        return self.b.zeros_like(self.x(slot), self.dtype(slot))


def from_front(axis: int, rank: int) -> int:
    """Return an axis as a nonnegative number."""
    return axis + rank if axis < 0 else axis


def sum_to(b: Builder, gradient: str, shape: Shape | None, x: str) -> str:
    """Sum a gradient of this shape over the broadcast axes of `x`.

    Unknown dims are compared at run time.
    """
    target = b.shape(x)
    axes = _broadcast_axes(target, shape)
    if axes is not None and target is not None and shape is not None:
        summed = b.reduce("ReduceSum", gradient, axes, keepdims=True)
        return b.squeeze(summed, range(len(shape) - len(target)))
    # even the ranks may be unknown here
    x_shape, full = b.op("Shape", x), b.op("Shape", gradient)
    missing = b.op("Sub", b.op("Shape", full), b.op("Shape", x_shape))
    ones = b.op("ConstantOfShape", missing, value=onnx.helper.make_tensor("value", onnx.TensorProto.INT64, [1], [1]))
    aligned = b.op("Concat", ones, x_shape, axis=0)
    differs = b.op("Not", b.op("Equal", aligned, full))
    broadcast = b.reshape(b.op("NonZero", differs), [-1])
    return b.reshape(b.reduce("ReduceSum", gradient, broadcast, keepdims=True), x_shape)


def _broadcast_axes(operand: Shape | None, shape: Shape | None) -> list[int] | None:
    """Return the axes of a broadcast from `operand` to `shape`; None if they depend on unknown dims."""
    if operand is None or shape is None:
        return None
    dropped = len(shape) - len(operand)
    axes = list(range(dropped))
    for axis, (dim, full) in enumerate(zip(operand, shape[dropped:], strict=True), start=dropped):
        if dim == 1:
            axes += [axis] if full != 1 else []
        elif not isinstance(dim, int) and full != 1 and (dim is None or dim != full):
            return None  # one may be 1 and the other larger
    return axes


Rows = Mapping[str, GradientRule]
"""Rows by op kind."""

END = (1 << 63) - 1
"""The end of a Slice up to the last element of an axis of any size."""

ALL_OUTPUTS = 1 << 30
"""The value of `outputs` for an op with gradients for all its outputs."""


# -- paths from parameters to a loss ---------------------------------------------------------------

STOP_KEY = "amp_rewrite.stop_gradient"
"""Metadata key for a node without a gradient, like `detach` in PyTorch."""


@dataclass(frozen=True)
class Paths:
    """The ops of one scope on the paths of gradients, and the values with gradients.

    `slots`: for each op, the input slots that need a gradient. `captured`: for each op, the values captured by its
    bodies that need one.
    """

    view: View
    slots: Mapping[OpId, tuple[int, ...]]
    captured: Mapping[OpId, tuple[ValueId, ...]]
    reached: Mapping[ValueId, OpId | None]
    """The parameters and the values computed from them, each with its producer on the path (None for a parameter)."""
    readers: Mapping[ValueId, OpId | None]
    """The losses and the values upstream of them, each with the next op on the path (None for a loss)."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops on the paths, in topological order."""
        return tuple(self.view.ops[op] for op in sorted(self.slots))

    def through(self, op: Op) -> str:
        """Describe a path from a parameter to the loss through the op."""
        start = self._end(op, self.receivers, self.reached)
        end = self._end(op, lambda op: op.outputs, self.readers)
        return f"{start} → … → {op.kind} {op.name!r} → … → {end}"

    def receivers(self, op: Op) -> list[ValueId | None]:
        return [*[op.inputs[s] for s in self.slots[op.id]], *self.captured[op.id]]

    def _end(
        self, op: Op, neighbors: Callable[[Op], Iterable[ValueId | None]], next_ops: Mapping[ValueId, OpId | None]
    ) -> str:
        """Return the name of the parameter or loss at the end of a path."""
        while True:
            value = next(v for v in neighbors(op) if v is not None and v in next_ops)
            op_id = next_ops[value]
            if op_id is None:
                return str(self.view.value_name(value))
            op = self.view.ops[op_id]


def paths(view: View, scope: ScopeId, losses: Sequence[ValueId], wrt: Sequence[ValueId], rows: Rows) -> Paths:
    """Return the paths of gradients from `losses` to `wrt` inside one scope. O(nodes + uses).

    A path does not cross a `Stop` entry, a node marked with `STOP_KEY`, or a value that is not floating-point. It
    can cross an op without a row.
    """
    reached: dict[ValueId, OpId | None] = dict.fromkeys(wrt)
    slots: dict[OpId, tuple[int, ...]] = {}
    captured: dict[OpId, tuple[ValueId, ...]] = {}
    for op_id in view.scopes[scope].ops:
        op = view.ops[op_id]
        row = rows.get(op.kind)
        read = (i for i, v in enumerate(op.inputs) if v in reached)
        differentiable = tuple(i for i in read if not (row and isinstance(row.entry(i), Stop)))
        captured_here = tuple(v for v in captures(view, op) if v in reached) if op.bodies else ()
        if any(entry.key == STOP_KEY for entry in op.node.metadata_props):
            continue
        results = [v for v in op.outputs if v is not None and is_floating(view, v)]
        if (differentiable or captured_here) and results:
            slots[op_id], captured[op_id] = differentiable, captured_here
            for result in results:
                reached.setdefault(result, op_id)
    readers: dict[ValueId, OpId | None] = dict.fromkeys(losses)
    route = Paths(view, slots, captured, reached, readers)
    for op_id in reversed(view.scopes[scope].ops):
        op = view.ops[op_id]
        if op_id in slots and any(v in readers for v in op.outputs):
            for value in route.receivers(op):
                assert value is not None
                readers.setdefault(value, op_id)
        elif op_id in slots:
            del slots[op_id], captured[op_id]
    return route


def is_floating(view: View, value: ValueId) -> bool:
    """True if the value can have a gradient, because its type is floating-point or unknown."""
    dtype = view.dtype(value)
    return dtype is None or dtype.floating


def nested_scopes(view: View, scopes: Iterable[ScopeId]) -> Iterator[ScopeId]:
    """Yield these bodies and the bodies inside them, level by level."""
    pending = list(scopes)
    for scope in pending:
        yield scope
        pending.extend(body for op in view.scopes[scope].ops for body in view.ops[op].bodies)


def captures(view: View, op: Op) -> Iterator[ValueId]:
    """Return the outer values read by the bodies of an op, each once, in order of first use."""
    inner = list(nested_scopes(view, op.bodies))
    seen: dict[ValueId | None, None] = {}
    for scope in inner:
        for op_id in view.scopes[scope].ops:
            seen.update(dict.fromkeys(view.ops[op_id].inputs))
        seen.update(dict.fromkeys(view.scopes[scope].outputs))
    return (v for v in seen if v is not None and view.values[v].scope not in inner)
