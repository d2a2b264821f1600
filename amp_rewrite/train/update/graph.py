"""The update of a training step as graph nodes: unscale, test, apply, select, adjust the loss scale.

All nodes here stay float32 under any policy: `step` pins them by the prefix `REGION` of their names. Gradients are
unscaled after widening, never in a low type, where 1 / scale or the quotient could underflow to 0.

The finite test sums g - g over all gradients: 0 if all are finite, else NaN. A maximum would not work:
onnxruntime's ReduceMax on the CPU ignores NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.train.builder import Builder
from amp_rewrite.train.update.loss_scale import FLOOR, Array, DynamicLossScale, FixedLossScale, LossScale
from amp_rewrite.train.update.optimizers import Optimizer

REGION = "amp.update"
NEW = "new/"
"""Prefix of the output that succeeds a state input of the same name."""


@dataclass(frozen=True, slots=True, eq=False)
class StateVariable:
    """A value carried from step to step: `output` of one step is `input` of the next.

    `name`: its path in checkpoints, "parameter/<name>", "slot/<name>/<slot>", "loss_scale" …
    """

    name: str
    input: str
    output: str
    initial: Array


class Operand:
    """A value of the graph under construction, as an operand of formulas; numbers become constants of their type."""

    __array_ufunc__ = None  # so that numpy leaves np.float32(2) * operand to __rmul__
    __slots__ = ("_b", "name")

    def __init__(self, b: Builder, name: str) -> None:
        self._b = b
        self.name = name

    def _do(self, op_type: str, *operands: Operand | np.generic) -> Operand:
        named = [o.name if isinstance(o, Operand) else self._b.constant(np.asarray(o)) for o in operands]
        return Operand(self._b, self._b.op(op_type, *named))

    def __add__(self, other: Operand | np.generic) -> Operand:
        return self._do("Add", self, other)

    def __radd__(self, other: np.generic) -> Operand:
        return self._do("Add", other, self)

    def __sub__(self, other: Operand | np.generic) -> Operand:
        return self._do("Sub", self, other)

    def __rsub__(self, other: np.generic) -> Operand:
        return self._do("Sub", other, self)

    def __mul__(self, other: Operand | np.generic) -> Operand:
        return self._do("Mul", self, other)

    def __rmul__(self, other: np.generic) -> Operand:
        return self._do("Mul", other, self)

    def __truediv__(self, other: Operand | np.generic) -> Operand:
        return self._do("Div", self, other)

    def __rtruediv__(self, other: np.generic) -> Operand:
        return self._do("Div", other, self)


class Graph:
    """The arithmetic of `optimizers` as graph nodes."""

    def __init__(self, b: Builder) -> None:
        self._b = b

    def _op(self, op_type: str, *inputs: Operand | str) -> Operand:
        return Operand(self._b, self._b.op(op_type, *[i.name if isinstance(i, Operand) else i for i in inputs]))

    def sqrt(self, x: Operand) -> Operand:
        return self._op("Sqrt", x)

    def maximum(self, x: Operand, bound: np.float32) -> Operand:
        return self._op("Max", x, self._b.constant(np.asarray(bound)))

    def clamp(self, x: Operand, bound: np.float32) -> Operand:
        return self._op("Clip", x, self._b.constant(np.asarray(-bound)), self._b.constant(np.asarray(bound)))

    def square_sum(self, x: Operand) -> Operand:
        return Operand(self._b, self._b.reduce("ReduceSumSquare", x.name, None, keepdims=False))

    def sum(self, xs: list[Operand]) -> Operand:
        return self._op("Sum", *xs) if len(xs) > 1 else xs[0]

    def bias_correction(self, beta: float, step: Operand) -> Operand:
        exponent = Operand(self._b, self._b.op("Cast", step.name, to=DType.DOUBLE.code))
        power = self._op("Pow", self._b.constant(np.array(beta, np.float64)), exponent)
        return Operand(self._b, self._b.op("Cast", (np.float64(1) - power).name, to=DType.FLOAT.code))


@dataclass(frozen=True)
class Scaling:
    """The loss scale of a graph: its rule, and the names of its values.

    `scale`: the name of a float32 scalar, None without loss scaling. `good_steps`: the name of an int64 scalar, for
    a dynamic scale.
    """

    rule: LossScale | None
    scale: str | None
    good_steps: str | None = None

    @classmethod
    def of(cls, b: Builder, rule: LossScale | None) -> Scaling:
        """Append a fixed scale as a constant, a dynamic one as two inputs."""
        if rule is None:
            return cls(None, None)
        if isinstance(rule, FixedLossScale):
            return cls(rule, b.scalar(rule.loss_scale_value, DType.FLOAT))
        return cls(rule, b.input("loss_scale", DType.FLOAT, ()), b.input("good_steps", DType.INT64, ()))

    def seed(self, b: Builder) -> str:
        """Name of the gradient of the loss: the scale, or 1."""
        return self.scale or b.scalar(1.0, DType.FLOAT)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Result of `append_update`: the state, and the names of single values.

    `finite`: bool, all gradients of the step are finite. `applied`: bool, the step changed the parameters.
    """

    state: tuple[StateVariable, ...]
    learning_rate: str
    finite: str
    applied: str


Buffers = Mapping[str, tuple[str, Array]]
"""State updated by the forward pass (running statistics), by input name: the name of the new value, the initial one."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardPass:
    """The forward passes of a step: their number, and the buffers that each one updates."""

    micro_batches: int = 1
    buffers: Buffers = field(default_factory=dict)


def append_update(
    b: Builder,
    variables: Mapping[str, Array],
    gradients: Mapping[str, str],
    optimizer: Optimizer,
    scaling: Scaling,
    forward: ForwardPass | None = None,
) -> Update:
    """Append the nodes that turn scaled gradients into new state.

    `variables`: initial values of the trained parameters, by the name of their float32 graph input; `gradients`: by
    the same names. Buffers are updated in every run. With micro-batches the last run makes the step, with the mean
    of all their gradients, and adjusts the scale once.

    With a dynamic scale, a step with nonfinite gradients changes only the scale. Without one, every step is applied.
    """
    forward = forward or ForwardPass()
    with b.region(REGION):
        return _Update(b, scaling, forward.micro_batches).append(variables, gradients, optimizer, forward.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class Unscaling:
    """Result of `append_unscaling`: names of the unscaled gradients, the finite flag, and the state of the scale."""

    gradients: Mapping[str, str]
    finite: str
    state: tuple[StateVariable, ...]


def append_unscaling(b: Builder, gradients: Mapping[str, str], scaling: Scaling) -> Unscaling:
    """Append only the loss scaling: unscale float32 gradients, test them, adjust the scale."""
    with b.region(REGION):
        update = _Update(b, scaling, 1)
        exact = update.unscaled(gradients)
        finite = update.finite(list(exact.values()))
        update.adjust_scale(finite)
        flag = update.public("finite", DType.BOOL, (), "Identity", finite)
        return Unscaling({name: operand.name for name, operand in exact.items()}, flag, tuple(update.state))


class _Update:
    def __init__(self, b: Builder, scaling: Scaling, micro_batches: int) -> None:
        self.b = b
        self.by = Graph(b)
        self.scaling = scaling
        self.micro_batches = micro_batches
        self.state: list[StateVariable] = []
        self.last: str | None = None
        """Name of a bool: this run is the last of its step. None if every run is a step."""

    def append(
        self,
        variables: Mapping[str, Array],
        gradients: Mapping[str, str],
        optimizer: Optimizer,
        buffers: Buffers,
    ) -> Update:
        rate = self.b.input("learning_rate", DType.FLOAT, ())
        step = self.b.input("step", DType.INT64, ())
        exact = self._accumulated(self.unscaled(gradients), variables)
        finite = self.finite(list(exact.values()))
        allowed = finite if isinstance(self.scaling.rule, DynamicLossScale) else None
        applied = self._both(allowed, self.last)
        number = Operand(self.b, step) + np.int64(1)
        self._step_variables(variables, exact, optimizer, Operand(self.b, rate), number, applied)
        for name, (new, initial) in buffers.items():
            self._give(f"buffer/{name}", name, Operand(self.b, new), initial, allowed)
        self._give("step", step, number, np.array(0, np.int64), applied)
        self.adjust_scale(finite)
        return Update(
            tuple(self.state),
            rate,
            self.public("finite", DType.BOOL, (), "Identity", finite),
            self.public("applied", DType.BOOL, (), "Identity", applied or self.b.constant(np.array(True))),
        )

    # -- gradients -------------------------------------------------------------------------------------

    def unscaled(self, gradients: Mapping[str, str]) -> dict[str, Operand]:
        scaled = {name: Operand(self.b, gradient) for name, gradient in gradients.items()}
        if self.scaling.scale is None:
            return scaled
        # not times 1 / scale: onnxruntime 1.31 fuses that into a Div, and with a single gradient can lose a node
        scale = Operand(self.b, self.scaling.scale)
        return {name: gradient / scale for name, gradient in scaled.items()}

    def _accumulated(self, gradients: dict[str, Operand], variables: Mapping[str, Array]) -> dict[str, Operand]:
        """Accumulate gradients over micro-batches; return the mean, which is valid in the last run of a step."""
        if self.micro_batches == 1:
            return gradients
        count = self.b.input("micro_batch", DType.INT64, ())
        number = Operand(self.b, count) + np.int64(1)
        self.last = self.b.op("Equal", number.name, self.b.constant(np.array(self.micro_batches, np.int64)))
        nothing = np.array(0, np.int64)
        self._give("micro_batch", count, Operand(self.b, self._where(self.last, nothing, number)), nothing, None)
        sums: dict[str, Operand] = {}
        for name, gradient in gradients.items():
            shape = variables[name].shape
            accumulator = self.b.input(f"{name}/accumulated", DType.FLOAT, shape)
            sums[name] = Operand(self.b, accumulator) + gradient
            zero = np.array(0, np.float32)
            left = Operand(self.b, self._where(self.last, zero, sums[name]))
            self._give(f"accumulated/{name}", accumulator, left, np.zeros(shape, np.float32), None)
        return {name: total * np.float32(1 / self.micro_batches) for name, total in sums.items()}

    def finite(self, gradients: Sequence[Operand]) -> str:
        zeros = [self.b.reduce("ReduceSum", (g - g).name, None, keepdims=False) for g in gradients]
        total = self.b.op("Sum", *zeros) if len(zeros) > 1 else zeros[0]
        return self.b.op("Equal", total, self.b.scalar(0.0, DType.FLOAT))

    # -- state -----------------------------------------------------------------------------------------

    def _step_variables(
        self,
        variables: Mapping[str, Array],
        gradients: Mapping[str, Operand],
        optimizer: Optimizer,
        rate: Operand,
        number: Operand,
        applied: str | None,
    ) -> None:
        clipped = optimizer.clipped(self.by, list(gradients.values()))
        for (name, initial), gradient in zip(variables.items(), clipped, strict=True):
            fill = optimizer.slots()
            inputs = {slot: self.b.input(f"{name}/{slot}", DType.FLOAT, initial.shape) for slot in fill}
            slots = {slot: Operand(self.b, read) for slot, read in inputs.items()}
            new, after = optimizer.updated(self.by, Operand(self.b, name), gradient, slots, rate, number)
            self._give(f"parameter/{name}", name, new, initial, applied)
            for slot, value in fill.items():
                start = np.full(initial.shape, value, np.float32)
                self._give(f"slot/{name}/{slot}", inputs[slot], after[slot], start, applied)

    def adjust_scale(self, finite: str) -> None:
        rule, scale, good_steps = self.scaling.rule, self.scaling.scale, self.scaling.good_steps
        if not isinstance(rule, DynamicLossScale):
            return
        assert scale is not None and good_steps is not None
        after, good = adjusted(self.b, rule, scale, good_steps, finite)
        self._give("loss_scale", scale, Operand(self.b, after), np.array(rule.initial.scale, np.float32), self.last)
        self._give("good_steps", good_steps, Operand(self.b, good), np.array(0, np.int64), self.last)

    def _give(self, path: str, before: str, after: Operand, initial: Array, condition: str | None) -> None:
        """Output the new value, or the old value if the condition is false."""
        dtype = DType(onnx.helper.np_dtype_to_tensor_dtype(initial.dtype))
        how = ("Identity", after.name) if condition is None else ("Where", condition, after.name, before)
        output = self.public(f"{NEW}{before}", dtype, initial.shape, *how)
        self.state.append(StateVariable(path, before, output, initial))

    def public(self, name: str, dtype: DType, shape: tuple[int, ...], op_type: str, *inputs: str) -> str:
        """Append a node whose result is a graph output; return its name."""
        output = self.b.fresh(name)
        self.b.append(onnx.helper.make_node(op_type, inputs, [output], name=self.b.fresh(f"{REGION}/{name}")))
        return self.b.output(output, dtype, shape)

    def _where(self, condition: str, yes: Array, no: Operand) -> str:
        return self.b.op("Where", condition, self.b.constant(yes), no.name)

    def _both(self, first: str | None, second: str | None) -> str | None:
        if first is None or second is None:
            return first or second
        return self.b.op("And", first, second)


def adjusted(b: Builder, rule: DynamicLossScale, scale: str, good_steps: str, finite: str) -> tuple[str, str]:
    """Append `DynamicLossScale.after` as nodes; return the names of the new scale and of the new good steps."""
    factor = b.scalar(rule.multiplier, DType.FLOAT)
    counted = b.op("Add", good_steps, b.constant(np.array(1, np.int64)))
    due = b.op("GreaterOrEqual", counted, b.constant(np.array(rule.increment_period, np.int64)))
    grown = b.op("Mul", scale, factor)
    fits = b.op("LessOrEqual", grown, b.scalar(DType.FLOAT.max, DType.FLOAT))
    up = b.op("Where", b.op("And", due, fits), grown, scale)
    down = b.op("Max", b.op("Div", scale, factor), b.constant(np.asarray(FLOOR)))
    going_on = b.op("And", finite, b.op("Not", due))
    return b.op("Where", finite, up, down), b.op("Where", going_on, counted, b.constant(np.array(0, np.int64)))
