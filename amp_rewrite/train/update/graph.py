"""The update of a training step as graph nodes: unscale and test gradients, apply them, adjust the loss scale.

All of these nodes are kept in float32 under any policy, because their names start with `REGION`.
Gradients are cast to float32 before they are unscaled, since 1 / scale or the quotient could underflow in a low type.

The finite test sums g - g over all gradients: the sum is 0 if all are finite, and NaN otherwise. A maximum would not
work, because onnxruntime's ReduceMax ignores NaN on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx.helper
from numpy.lib.mixins import NDArrayOperatorsMixin

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.lowering.random_numbers import MULTIPLIERS, PRIME
from amp_rewrite.train.loss_scale import DynamicLossScale, FixedLossScale, LossScale, scale_after
from amp_rewrite.train.update.optimizer import Optimizer, initial_slots

REGION = "amp.update"
NEW = "new/"
"""Prefix of the output with the new value of a state input."""


@dataclass(frozen=True, slots=True, eq=False)
class StateVariable:
    """A value carried from step to step: `output` of one step feeds `input` of the next.

    `name`: its path in checkpoints, such as "parameter/<name>", "slot/<name>/<slot>" or "loss_scale".
    """

    name: str
    input: str
    output: str
    initial: Array


_OPS: Mapping[Any, str] = {
    np.add: "Add",
    np.subtract: "Sub",
    np.multiply: "Mul",
    np.true_divide: "Div",
    np.power: "Pow",
    np.negative: "Neg",
    np.sqrt: "Sqrt",
    np.exp: "Exp",
    np.log: "Log",
    np.abs: "Abs",
    np.sign: "Sign",
    np.tanh: "Tanh",
    np.maximum: "Max",
    np.minimum: "Min",
    np.clip: "Clip",
    np.where: "Where",
    np.greater_equal: "GreaterOrEqual",
    np.less_equal: "LessOrEqual",
    np.equal: "Equal",
    np.bitwise_and: "And",
    np.invert: "Not",
}
"""The ONNX op types of the numpy functions that accept an `Operand`."""


@dataclass(frozen=True, slots=True, eq=False)
class Operand(NDArrayOperatorsMixin):
    """A value of a graph under construction: Python operators and numpy functions on it append ops.

    Numpy numbers become constants of their type.
    """

    b: Builder
    name: str

    def op(self, op_type: str, *operands: Operand | np.generic | Array) -> Operand:
        inputs = [o.name if isinstance(o, Operand) else self.b.constant(np.asarray(o)) for o in operands]
        return Operand(self.b, self.b.op(op_type, *inputs))

    def __array_ufunc__(self, function: np.ufunc, method: str, *operands: Any, **options: Any) -> Operand:
        return self._append(function, operands, {"method": method, **options} if method != "__call__" else options)

    def __array_function__(self, function: Any, types: Any, operands: Any, options: Any) -> Operand:
        return self._append(function, operands, options)

    def _append(self, function: Any, operands: Any, options: Any) -> Operand:
        if function is np.square:
            return self.op("Mul", self, self)
        if function not in _OPS or options:
            raise TrainingError(
                f"the optimizer's formula calls np.{function.__name__}, which a step cannot compute; use operators and"
                f" {', '.join(sorted(f.__name__ for f in _OPS))}"
            )
        return self.op(_OPS[function], *operands)

    def astype(self, dtype: Any) -> Operand:
        return Operand(self.b, self.b.op("Cast", self.name, to=DType.parse(np.dtype(dtype)).code))

    def reduced(self, op_type: str) -> Operand:
        return Operand(self.b, self.b.reduce(op_type, self.name, None, keepdims=False))

    def total(self, parts: Sequence[Operand]) -> Operand:
        """Append one op for the sum of operands."""
        return self.op("Sum", *parts) if len(parts) > 1 else parts[0]

    def norm(self, parts: Sequence[Operand]) -> Operand:
        """Append the Euclidean norm of all parts taken together."""
        squares = [part.reduced("ReduceSumSquare") for part in parts]
        return np.sqrt(self.total(squares))  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Scaling:
    """The loss scale of a graph: its rule, and the names of its float32 value and int64 count of finite steps."""

    rule: LossScale | None
    scale: str | None = None
    good_steps: str | None = None

    @classmethod
    def of(cls, b: Builder, rule: LossScale | None) -> Scaling:
        """Append a fixed scale as a constant, or a dynamic scale as two inputs."""
        if rule is None:
            return cls(None)
        if isinstance(rule, FixedLossScale):
            return cls(rule, b.scalar(rule.loss_scale_value, DType.FLOAT))
        return cls(rule, b.input("loss_scale", DType.FLOAT, ()), b.input("good_steps", DType.INT64, ()))


@dataclass(frozen=True, eq=False)
class Update:
    """Result of `append_update`: the state, and the names of other values.

    `finite`: a bool, True if all gradients of the step are finite. `applied`: a bool, True if the step changed the
    parameters. `gradients`: the values that the finite test reads, by parameter.
    """

    state: tuple[StateVariable, ...]
    learning_rate: str
    finite: str
    applied: str
    gradients: Mapping[str, str]


Buffers = Mapping[str, tuple[str, Array]]
"""Running statistics, which the forward pass updates: the name of the new value and the initial value, by input."""


def append_update(
    b: Builder,
    variables: Mapping[str, Array],
    gradients: Mapping[str, str],
    optimizer: Optimizer,
    scaling: Scaling,
    micro_batches: int = 1,
    buffers: Buffers = MappingProxyType({}),
    random: tuple[str, Array] | None = None,
) -> Update:
    """Append an update: the new state, computed from scaled gradients.

    `variables`: initial values of the trained parameters, by the name of their float32 graph input. `gradients`: names
    of the gradients, by the same names. `random`: the input with the random state, and its initial value. Buffers are
    updated in every run. With micro-batches, the last run takes the step with the mean of all gradients, and adjusts
    the scale once.

    With a dynamic scale, a step with nonfinite gradients changes only the scale. Without one, every step is applied.
    """
    with b.region(REGION):
        update = _Update(b, scaling)
        rate = b.input("learning_rate", DType.FLOAT, ())
        step = b.input("step", DType.INT64, ())
        means = update.accumulated(update.unscaled(gradients), variables, micro_batches)
        finite = update.finite(means)
        allowed = finite if isinstance(scaling.rule, DynamicLossScale) else None
        applied = b.op("And", allowed, update.last) if allowed and update.last else allowed or update.last
        number = Operand(b, step) + np.int64(1)
        starts = initial_slots(optimizer, variables)
        clipped = optimizer.clipped(list(means.values()))
        for name, gradient in zip(means, clipped, strict=True):
            initial = variables[name]
            slots = {
                slot: Operand(b, b.input(f"{name}/{slot}", DType.FLOAT, s.shape)) for slot, s in starts[name].items()
            }
            new, after = optimizer.updated(Operand(b, name), gradient, slots, Operand(b, rate), number)
            update.carry(f"parameter/{name}", name, new, initial, applied)
            for slot, start in starts[name].items():
                update.carry(f"slot/{name}/{slot}", slots[slot].name, after[slot], start, applied)
        for name, (result, initial) in buffers.items():
            update.carry(f"buffer/{name}", name, Operand(b, result), initial, allowed)
        if random is not None:  # unconditional, so the step after a skipped one draws new numbers
            moved = b.op("Mul", random[0], b.constant(np.array(MULTIPLIERS, np.int64)))
            after_draw = Operand(b, b.op("Mod", moved, b.scalar(PRIME, DType.INT64)))
            update.carry("random", random[0], after_draw, random[1], None)
        update.carry("step", step, number, np.array(0, np.int64), applied)
        finite = update.adjust_scale(finite)
        applied = update.add_output("applied", DType.BOOL, (), "Identity", applied or b.constant(np.array(True)))
        names = {name: gradient.name for name, gradient in means.items()}
        return Update(tuple(update.state), rate, finite, applied, names)


def append_unscaling(
    b: Builder, gradients: Mapping[str, str], scaling: Scaling
) -> tuple[dict[str, str], str, tuple[StateVariable, ...]]:
    """Append loss scaling without an optimizer: unscale float32 gradients, test them, adjust the scale.

    Return the names of the unscaled gradients, the finite flag, and the state of the scale.
    """
    with b.region(REGION):
        update = _Update(b, scaling)
        unscaled = update.unscaled(gradients)
        flag = update.adjust_scale(update.finite(unscaled))
        return {name: operand.name for name, operand in unscaled.items()}, flag, tuple(update.state)


@dataclass
class _Update:
    """An update under construction. `last`: name of a bool, True in a step's last run; None if every run is a step."""

    b: Builder
    scaling: Scaling
    state: list[StateVariable] = field(default_factory=list)
    last: str | None = None

    def unscaled(self, gradients: Mapping[str, str]) -> dict[str, Operand]:
        scaled = {name: Operand(self.b, gradient) for name, gradient in gradients.items()}
        if self.scaling.scale is None:
            return scaled
        # do not multiply by 1 / scale: onnxruntime 1.31 fuses that into a Div, and can lose a node of a single gradient
        scale = Operand(self.b, self.scaling.scale)
        return {name: gradient / scale for name, gradient in scaled.items()}

    def accumulated(
        self, gradients: dict[str, Operand], variables: Mapping[str, Array], micro_batches: int
    ) -> dict[str, Operand]:
        """Accumulate gradients over micro-batches. Return their mean, valid in the last run of a step."""
        if micro_batches == 1:
            return gradients
        count = self.b.input("micro_batch", DType.INT64, ())
        number = Operand(self.b, count) + np.int64(1)
        last = number.op("Equal", number, np.int64(micro_batches))
        self.last = last.name
        reset = last.op("Where", last, np.int64(0), number)
        self.carry("micro_batch", count, reset, np.array(0, np.int64), None)
        sums: dict[str, Operand] = {}
        for name, gradient in gradients.items():
            shape = variables[name].shape
            accumulator = self.b.input(f"{name}/accumulated", DType.FLOAT, shape)
            sums[name] = Operand(self.b, accumulator) + gradient
            reset = last.op("Where", last, np.float32(0), sums[name])
            self.carry(f"accumulated/{name}", accumulator, reset, np.zeros(shape, np.float32), None)
        return {name: total * np.float32(1 / micro_batches) for name, total in sums.items()}

    def finite(self, gradients: Mapping[str, Operand]) -> str:
        parts = [g.op("Sub", g, g).reduced("ReduceSum") for g in gradients.values()]
        total: Operand = parts[0].total(parts)
        return total.op("Equal", total, np.float32(0)).name

    def adjust_scale(self, finite: str) -> str:
        """Append the adjustment of a dynamic scale; return the finite flag as an output."""
        b, rule = self.b, self.scaling.rule
        if isinstance(rule, DynamicLossScale):
            assert self.scaling.scale is not None and self.scaling.good_steps is not None
            scale, good_steps = Operand(b, self.scaling.scale), Operand(b, self.scaling.good_steps)
            after, good = scale_after(rule, scale, good_steps, Operand(b, finite))
            self.carry("loss_scale", scale.name, after, np.array(rule.initial.scale, np.float32), self.last)
            self.carry("good_steps", good_steps.name, good, np.array(0, np.int64), self.last)
        return self.add_output("finite", DType.BOOL, (), "Identity", finite)

    def carry(self, path: str, before: str, after: Operand, initial: Array, condition: str | None) -> None:
        """Add a state variable: its next value is `after`, or the old value if `condition` is false."""
        op = ("Identity", after.name) if condition is None else ("Where", condition, after.name, before)
        output = self.add_output(f"{NEW}{before}", DType.parse(initial.dtype), initial.shape, *op)
        self.state.append(StateVariable(path, before, output, initial))

    def add_output(self, name: str, dtype: DType, shape: tuple[int, ...], op_type: str, *inputs: str) -> str:
        output = self.b.fresh(name)
        self.b.nodes.append(onnx.helper.make_node(op_type, inputs, [output], name=self.b.fresh(f"{REGION}/{name}")))
        return self.b.output(output, dtype, shape)
