"""The update of a training step as graph nodes: unscale, test, apply, select, adjust the loss scale.

All nodes here stay float32 under any policy: `step` pins them by the prefix `REGION` of their names. Gradients are
unscaled after widening, never in a low type, where 1 / scale or the quotient could underflow to 0.

The finite test sums g - g over all gradients: 0 if all are finite, else NaN. A maximum would not work:
onnxruntime's ReduceMax on the CPU ignores NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx.helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import MULTIPLIERS, PRIME
from amp_rewrite.settings.loss_scale import DynamicLossScale, FixedLossScale, LossScale, ScaleArithmetic, scale_after
from amp_rewrite.train.update.optimizer import Arithmetic, Optimizer, initial_slots

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


def _operator(op_type: str, *, reflected: bool = False) -> Callable[[Operand, Operand | np.generic], Operand]:
    def apply(own: Operand, other: Operand | np.generic) -> Operand:
        return own.op(op_type, *((other, own) if reflected else (own, other)))

    return apply


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A value of the graph under construction, as an operand of formulas; numbers become constants of their type."""

    __array_ufunc__ = None  # so that numpy leaves np.float32(2) * operand to __rmul__
    b: Builder
    name: str

    def op(self, op_type: str, *operands: Operand | np.generic | Array) -> Operand:
        """Append an op on these operands."""
        inputs = [o.name if isinstance(o, Operand) else self.b.constant(np.asarray(o)) for o in operands]
        return Operand(self.b, self.b.op(op_type, *inputs))

    def cast(self, to: DType) -> Operand:
        return Operand(self.b, self.b.op("Cast", self.name, to=to.code))

    def __invert__(self) -> Operand:
        return self.op("Not", self)

    def reduced(self, op_type: str) -> Operand:
        """Reduce to a scalar."""
        return Operand(self.b, self.b.reduce(op_type, self.name, None, keepdims=False))

    __add__ = _operator("Add")
    __sub__ = _operator("Sub")
    __mul__ = _operator("Mul")
    __truediv__ = _operator("Div")
    __ge__ = _operator("GreaterOrEqual")
    __le__ = _operator("LessOrEqual")
    __and__ = _operator("And")
    __rsub__ = _operator("Sub", reflected=True)
    __rmul__ = _operator("Mul", reflected=True)
    __rtruediv__ = _operator("Div", reflected=True)


def _bias_correction(beta: float, step: Operand) -> Operand:
    exponent = step.cast(DType.DOUBLE)
    return (np.float64(1) - exponent.op("Pow", np.float64(beta), exponent)).cast(DType.FLOAT)


NODES = Arithmetic(
    sqrt=lambda x: x.op("Sqrt", x),
    maximum=lambda x, bound: x.op("Max", x, bound),
    clamp=lambda x, bound: x.op("Clip", x, -bound, bound),
    square_sum=lambda x: x.reduced("ReduceSumSquare"),
    sum=lambda xs: xs[0].op("Sum", *xs) if len(xs) > 1 else xs[0],
    bias_correction=_bias_correction,
)
"""The arithmetic of `optimizers` as graph nodes."""


@dataclass(frozen=True)
class Scaling:
    """The loss scale of a graph: its rule, and the names of its float32 scale and its int64 count of good steps."""

    rule: LossScale | None
    scale: str | None = None
    good_steps: str | None = None

    @classmethod
    def of(cls, b: Builder, rule: LossScale | None) -> Scaling:
        """Append a fixed scale as a constant, a dynamic one as two inputs."""
        if rule is None:
            return cls(None)
        if isinstance(rule, FixedLossScale):
            return cls(rule, b.scalar(rule.loss_scale_value, DType.FLOAT))
        return cls(rule, b.input("loss_scale", DType.FLOAT, ()), b.input("good_steps", DType.INT64, ()))


@dataclass(frozen=True, eq=False)
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
    """The forward passes of a step: their number, the buffers that each one updates, and the random numbers it draws.

    `random`: the input of the random state, with its initial value.
    """

    micro_batches: int = 1
    buffers: Buffers = field(default_factory=dict)
    random: tuple[str, Array] | None = None


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
        update = _Update(b, scaling, forward.micro_batches)
        rate = b.input("learning_rate", DType.FLOAT, ())
        step = b.input("step", DType.INT64, ())
        exact = update.accumulated(update.unscaled(gradients), variables)
        finite = update.finite(exact)
        allowed = finite if isinstance(scaling.rule, DynamicLossScale) else None
        applied = b.op("And", allowed, update.last) if allowed and update.last else allowed or update.last
        number = Operand(b, step) + np.int64(1)
        starts = initial_slots(optimizer, variables)
        clipped = optimizer.clipped(NODES, list(exact.values()))
        for name, gradient in zip(exact, clipped, strict=True):
            initial = variables[name]
            slots = {
                slot: Operand(b, b.input(f"{name}/{slot}", DType.FLOAT, s.shape)) for slot, s in starts[name].items()
            }
            own = optimizer.for_parameter(name, initial.shape)
            new, after = own.updated(NODES, Operand(b, name), gradient, slots, Operand(b, rate), number)
            update.give(f"parameter/{name}", name, new, initial, applied)
            for slot, start in starts[name].items():
                update.give(f"slot/{name}/{slot}", slots[slot].name, after[slot], start, applied)
        for name, (result, initial) in forward.buffers.items():
            update.give(f"buffer/{name}", name, Operand(b, result), initial, allowed)
        if forward.random is not None:
            update.advance(*forward.random)
        update.give("step", step, number, np.array(0, np.int64), applied)
        update.adjust_scale(finite)
        flags = (
            update.public("finite", DType.BOOL, (), "Identity", finite),
            update.public("applied", DType.BOOL, (), "Identity", applied or b.constant(np.array(True))),
        )
        b.name_outputs_directly(REGION)
        return Update(tuple(update.state), rate, *flags)


def append_unscaling(
    b: Builder, gradients: Mapping[str, str], scaling: Scaling
) -> tuple[dict[str, str], str, tuple[StateVariable, ...]]:
    """Append only the loss scaling: unscale float32 gradients, test them, adjust the scale.

    Return the names of the unscaled gradients, the finite flag, and the state of the scale.
    """
    with b.region(REGION):
        update = _Update(b, scaling, 1)
        exact = update.unscaled(gradients)
        finite = update.finite(exact)
        update.adjust_scale(finite)
        flag = update.public("finite", DType.BOOL, (), "Identity", finite)
        return {name: operand.name for name, operand in exact.items()}, flag, tuple(update.state)


class _Update:
    def __init__(self, b: Builder, scaling: Scaling, micro_batches: int) -> None:
        self.b = b
        self.scaling = scaling
        self.micro_batches = micro_batches
        self.state: list[StateVariable] = []
        self.last: str | None = None
        """Name of a bool: this run is the last of its step. None if every run is a step."""

    def unscaled(self, gradients: Mapping[str, str]) -> dict[str, Operand]:
        scaled = {name: Operand(self.b, gradient) for name, gradient in gradients.items()}
        if self.scaling.scale is None:
            return scaled
        # not times 1 / scale: onnxruntime 1.31 fuses that into a Div, and with a single gradient can lose a node
        scale = Operand(self.b, self.scaling.scale)
        return {name: gradient / scale for name, gradient in scaled.items()}

    def accumulated(self, gradients: dict[str, Operand], variables: Mapping[str, Array]) -> dict[str, Operand]:
        """Accumulate gradients over micro-batches; return the mean, which is valid in the last run of a step."""
        if self.micro_batches == 1:
            return gradients
        count = self.b.input("micro_batch", DType.INT64, ())
        number = Operand(self.b, count) + np.int64(1)
        last = number.op("Equal", number, np.int64(self.micro_batches))
        self.last = last.name
        left = last.op("Where", last, np.int64(0), number)
        self.give("micro_batch", count, left, np.array(0, np.int64), None)
        sums: dict[str, Operand] = {}
        for name, gradient in gradients.items():
            shape = variables[name].shape
            accumulator = self.b.input(f"{name}/accumulated", DType.FLOAT, shape)
            sums[name] = Operand(self.b, accumulator) + gradient
            left = last.op("Where", last, np.float32(0), sums[name])
            self.give(f"accumulated/{name}", accumulator, left, np.zeros(shape, np.float32), None)
        return {name: total * np.float32(1 / self.micro_batches) for name, total in sums.items()}

    def finite(self, gradients: Mapping[str, Operand]) -> str:
        total: Operand = NODES.sum([(g - g).reduced("ReduceSum") for g in gradients.values()])
        return total.op("Equal", total, np.float32(0)).name

    def advance(self, random: str, initial: Array) -> None:
        """Append the next random state; a skipped step draws other numbers the next time."""
        b = self.b
        moved = b.op("Mul", random, b.constant(np.array(MULTIPLIERS, np.int64)))
        after = Operand(b, b.op("Mod", moved, b.scalar(PRIME, DType.INT64)))
        self.give("random", random, after, initial, None)

    def adjust_scale(self, finite: str) -> None:
        b, rule = self.b, self.scaling.rule
        if not isinstance(rule, DynamicLossScale):
            return
        assert self.scaling.scale is not None and self.scaling.good_steps is not None
        scale, good_steps = Operand(b, self.scaling.scale), Operand(b, self.scaling.good_steps)
        nodes = ScaleArithmetic(
            number=lambda x: Operand(b, b.constant(np.asarray(x))),
            where=lambda test, a, b: test.op("Where", test, a, b),
            maximum=NODES.maximum,
            double=lambda x: x.cast(DType.DOUBLE),
            single=lambda x: x.cast(DType.FLOAT),
        )
        after, good = scale_after(rule, nodes, scale, good_steps, Operand(b, finite))
        self.give("loss_scale", scale.name, after, np.array(rule.initial.scale, np.float32), self.last)
        self.give("good_steps", good_steps.name, good, np.array(0, np.int64), self.last)

    def give(self, path: str, before: str, after: Operand, initial: Array, condition: str | None) -> None:
        """Output the new value, or the old value if the condition is false."""
        how = ("Identity", after.name) if condition is None else ("Where", condition, after.name, before)
        output = self.public(f"{NEW}{before}", DType.parse(initial.dtype), initial.shape, *how)
        self.state.append(StateVariable(path, before, output, initial))

    def public(self, name: str, dtype: DType, shape: tuple[int, ...], op_type: str, *inputs: str) -> str:
        output = self.b.fresh(name)
        self.b.append(onnx.helper.make_node(op_type, inputs, [output], name=self.b.fresh(f"{REGION}/{name}")))
        return self.b.output(output, dtype, shape)
