"""Random numbers as state: Dropout in training mode and random ops become integer arithmetic on a state.

Kernels draw from a generator inside the session, which cannot be saved in a checkpoint. Here, the numbers of a run are
computed from a state of 12 integers. Each run advances every integer by one step of a Lehmer generator with its own
multiplier (Park and Miller, 1988; the multipliers are theirs, Fishman's and L'Ecuyer's). Neighboring integers are
combined into the coefficients of three polynomials R, C and T modulo the prime p = 2^31 - 1. The values of a polynomial
with n random coefficients are n-wise independent (Carter and Wegman, Universal classes of hash functions, 1979).
Element (i, j) of a value is the fractional part of R(i)/p C(j) + T(j)/p, where i starts at a different offset in each
op. This takes few operations per element. Integer arithmetic is exact and IEEE 754 defines the rounding of the float64
operations, so every provider draws the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import refill
from amp_rewrite.ir.nodes import MAIN, Op
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.autodiff.builder import Builder, Shape
from amp_rewrite.rewrite.autodiff.vjp.rule import Forward
from amp_rewrite.rewrite.passes.inline import inlined

PRIME = 2**31 - 1
MULTIPLIERS = (
    *(16807, 48271, 69621, 39373, 630360016, 742938285),
    *(950706376, 1226874159, 62089911, 1343714438, 40014, 40692),
)
"""One multiplier per integer of the state: primitive roots modulo the prime, or other multipliers of long period."""
_COEFFICIENTS = 4
_ROWS_PER_OP = 1 << 20
_RANDOM_OPS = RANDOM - {"Multinomial"}
_DROPOUT_RATIO = 0.5


def initial_random_state(seed: int) -> Array:
    """Return the state before the first run: int64 [12], each from 1 to PRIME - 1."""
    integers = np.random.SeedSequence(seed).generate_state(len(MULTIPLIERS), np.uint64)
    return np.array(integers % np.uint64(PRIME - 1) + np.uint64(1), np.int64)


def with_random_state(model: Model) -> tuple[Model, str | None]:
    """Decompose a model's random ops; return the model and its state input's name, or None without random ops.

    The random ops are the ops of the main graph that draw numbers, including each Dropout in training mode.
    """
    model = inlined(model)
    view = View.of(model)
    ops = [view.ops[op] for op in view.scopes[MAIN].ops]
    if not any(_is_random(view, op) for op in ops):
        return model, None
    b, nodes, index = Builder.of(model, region="random"), list[NodeProto](), 0
    state = b.input("random", DType.INT64, (len(MULTIPLIERS),))
    for op, node in zip(ops, b.graph.node, strict=True):
        if _is_random(view, op):
            draw = _Draw(b, state, Forward(b, op), index)
            draw.dropout() if op.kind == "Dropout" else draw.numbers()
            nodes, b.nodes, index = nodes + b.nodes, [], index + 1
        else:
            nodes.append(node)
    refill(b.graph, "node", nodes)
    return b.model(), state


def _is_random(view: View, op: Op) -> bool:
    if op.kind != "Dropout":
        return op.kind in _RANDOM_OPS
    training = view.array(op.inputs[2]) if len(op.inputs) > 2 else None
    return training is not None and bool(training)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Decomposes one random op; `index` is its position among the random ops."""

    b: Builder
    state: str
    v: Forward
    index: int

    def integer(self, value: int) -> str:
        return self.b.scalar(value, DType.INT64)

    def modulo(self, x: str) -> str:
        return self.b.op("Mod", x, self.integer(PRIME))

    def uniform(self, shape: str, width: str) -> str:
        """Append independent float64 numbers in [0, 1) with this shape, computed as a matrix with `width` columns."""
        b = self.b
        count = b.op("ReduceProd", shape, keepdims=0)
        rows = b.op("Range", self.integer(0), b.op("Div", count, width), self.integer(1))
        positions = b.op("Add", rows, self.integer(self.index * _ROWS_PER_OP))
        columns = b.op("Range", self.integer(0), width, self.integer(1))
        row = b.unsqueeze(self.fraction(self.polynomial(positions, 0)), [1])
        factor, term = (self.polynomial(columns, part) for part in (1, 2))
        products = b.op("Mul", row, b.op("Cast", factor, to=DType.DOUBLE.code))
        sums = b.op("Add", products, self.fraction(term))
        return b.reshape(b.op("Sub", sums, b.op("Floor", sums)), shape)

    def fraction(self, x: str) -> str:
        """Divide integers by the prime, in float64."""
        as_double = self.b.op("Cast", x, to=DType.DOUBLE.code)
        return self.b.op("Div", as_double, self.b.scalar(PRIME, DType.DOUBLE))

    def polynomial(self, positions: str, part: int) -> str:
        """Evaluate one of the three polynomials at some positions, by Horner's method."""
        b, state, first = self.b, self.state, part * _COEFFICIENTS
        rotated = b.op("Gather", state, b.ints([*range(1, len(MULTIPLIERS)), 0]))
        mixed = self.modulo(b.op("Add", self.modulo(b.op("Mul", state, state)), rotated))  # c[i]² + c[i + 1]
        coefficients = [b.op("Gather", mixed, self.integer(first + i)) for i in range(_COEFFICIENTS)]
        value = coefficients[0]
        for coefficient in coefficients[1:]:
            value = self.modulo(b.op("Add", b.op("Mul", value, positions), coefficient))
        return value

    # -- ops -------------------------------------------------------------------------------------------

    def dropout(self) -> None:
        """Replace a Dropout: y = x / (1 - ratio) if the random number is at least the ratio, else 0."""
        b, node = self.b, self.v.op.node
        x, dtype = self.v.x(0), self.v.dtype(0)
        shape = b.op("Shape", x)
        constant = self.v.constant(1) if self.v.has(1) else np.array(_DROPOUT_RATIO)
        if constant is None:
            threshold = b.op("Cast", self.v.x(1), to=DType.DOUBLE.code)
            kept_share = b.op("Cast", b.op("Sub", b.scalar(1, DType.DOUBLE), threshold), to=dtype.code)
            scaled = b.op("Div", x, kept_share)
        else:
            ratio = float(constant)
            threshold = b.scalar(ratio, DType.DOUBLE)
            scaled = b.op("Mul", x, b.scalar(1 / (1 - ratio) if ratio < 1 else 0.0, dtype))
        dropped = b.op("Less", self.uniform(shape, self.columns(shape, self.v.shape(0))), threshold)
        b.name(b.op("Where", dropped, b.scalar(0, dtype), scaled), node.output[0])
        if len(node.output) > 1 and node.output[1]:
            b.name(b.op("Not", dropped), node.output[1])

    def numbers(self) -> None:
        """Replace an op for uniform numbers, normal numbers (Box and Muller, 1958) or Bernoulli samples."""
        b, v, node = self.b, self.v, self.v.op.node
        has_input = v.has(0)
        if has_input:
            shape, dims = b.op("Shape", v.x(0)), v.shape(0)
        else:
            sizes = [int(dim) for dim in v.attr("shape")]
            shape, dims = b.ints(sizes), tuple(sizes)
        columns = self.columns(shape, dims)
        default = v.dtype(0).code if has_input else DType.FLOAT.code
        u = self.uniform(shape, columns)
        if v.op.kind == "Bernoulli":
            sample = b.op("Less", u, b.op("Cast", v.x(0), to=DType.DOUBLE.code))
        elif "Uniform" in v.op.kind:
            low, high = v.attr("low", 0.0), v.attr("high", 1.0)
            sample = b.op("Add", b.op("Mul", u, b.scalar(high - low, DType.DOUBLE)), b.scalar(low, DType.DOUBLE))
        else:
            angle = _Draw(b, self.state, v, -1 - self.index).uniform(shape, columns)
            positive = b.op("Add", u, b.scalar(2.0**-23, DType.DOUBLE))  # u has at least 22 bits, and may be 0
            radius = b.op("Sqrt", b.op("Mul", b.op("Log", positive), b.scalar(-2, DType.DOUBLE)))
            cosine = b.op("Cos", b.op("Cast", b.op("Mul", angle, b.scalar(2 * math.pi, DType.DOUBLE)), to=1))
            scaled = b.op("Mul", radius, b.op("Cast", cosine, to=DType.DOUBLE.code))
            mean, scale = v.attr("mean", 0.0), v.attr("scale", 1.0)
            sample = b.op("Add", b.op("Mul", scaled, b.scalar(scale, DType.DOUBLE)), b.scalar(mean, DType.DOUBLE))
        b.name(b.op("Cast", sample, to=v.attr("dtype", default)), node.output[0])

    def columns(self, shape: str, dims: Shape | None) -> str:
        """Return the size of the last axis of a shape, but at least 1."""
        last = dims[-1] if dims else 1
        if last is None or isinstance(last, str):
            return self.b.op("Max", self.b.op("Gather", shape, self.integer(-1)), self.integer(1))
        return self.integer(max(last, 1))
