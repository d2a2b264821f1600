"""Functions of one value whose shader rounds each step to the low type."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2, sqrt

from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp, Recipe

Unary = Callable[[LowBuilder, str], str]

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
_ERF = (0.3275911, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def low_exp(b: LowBuilder, x: str) -> str:
    """A power of two, with the exponent rounded: the error grows with the argument."""
    exponent = b.low("Mul", x, b.number(log2(e)))
    return b.low("Exp", b.op("Mul", exponent, b.scalar(1 / log2(e), DType.FLOAT)))


def low_log(b: LowBuilder, x: str) -> str:
    """A logarithm to base two, rounded, times a constant."""
    binary = b.rounded(b.op("Mul", b.op("Log", x), b.scalar(log2(e), DType.FLOAT)))
    return b.low("Mul", binary, b.number(1 / log2(e)))


def low_erf(b: LowBuilder, x: str) -> str:
    """A polynomial times an exponential."""
    first, *rest = _ERF
    size, one = b.op("Abs", x), b.number(1.0)
    t = b.low("Div", one, b.low("Add", one, b.low("Mul", b.number(first), size)))
    total = b.low("Add", b.low("Mul", b.number(rest[-1]), t), b.number(rest[-2]))
    for factor in rest[-3::-1]:
        total = b.low("Add", b.low("Mul", total, t), b.number(factor))
    total = b.low("Mul", b.low("Mul", total, t), low_exp(b, b.low("Mul", b.op("Neg", size), size)))
    return b.op("Mul", b.op("Sign", x), b.low("Sub", one, total))


def low_tanh(b: LowBuilder, x: str) -> str:
    """A quotient of exponentials."""
    one = b.number(1.0)
    power = low_exp(b, b.low("Mul", b.number(-2.0), b.op("Abs", x)))
    return b.low("Div", b.op("Mul", b.op("Sign", x), b.low("Sub", one, power)), b.low("Add", one, power))


def low_sigmoid(b: LowBuilder, x: str) -> str:
    one = b.number(1.0)
    return b.low("Div", one, b.low("Add", one, low_exp(b, b.op("Neg", x))))


def rounded(op_type: str) -> Unary:
    """Return a function whose result alone is rounded."""
    return lambda b, x: b.low(op_type, x)


def softplus(exp: Unary, log: Unary) -> Unary:
    """A logarithm of one plus an exponential, on the side where that does not overflow."""

    def build(b: LowBuilder, x: str) -> str:
        one = b.number(1.0)
        below = log(b, b.low("Add", one, exp(b, x)))
        above = b.low("Add", x, log(b, b.low("Add", one, exp(b, b.op("Neg", x)))))
        return b.op("Where", b.op("Greater", x, b.number(0.0)), above, below)

    return build


def hard_swish(op_type: str, factor: float) -> Unary:
    """A line between 0 and 1, times x; its slope is a product or a quotient of x."""

    def build(b: LowBuilder, x: str) -> str:
        one, zero = b.number(1.0), b.number(0.0)
        line = b.low("Add", b.low(op_type, x, b.number(factor)), b.number(0.5))
        return b.low("Mul", x, b.op("Max", zero, b.op("Min", one, line)))

    return build


def unary(function: Unary) -> Recipe:
    """Return the recipe of a function of one value."""
    return lambda b, site: [function(b, site.input(0))]


def gelu(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Half of x, times one plus the error function."""
    x = site.input(0)
    if site.attribute("approximate", b"none") != b"none":
        return None
    scaled = low_erf(b, b.low("Mul", x, b.number(1 / sqrt(2))))
    return [b.low("Mul", b.low("Mul", b.number(0.5), x), b.low("Add", b.number(1.0), scaled))]


def elu(exp: Unary) -> Recipe:
    """An exponential less one below zero."""

    def build(b: LowBuilder, site: LowOp) -> list[str]:
        x, alpha = site.input(0), b.number(site.attribute("alpha", 1.0))
        below = b.low("Mul", alpha, b.low("Sub", exp(b, x), b.number(1.0)))
        return [b.op("Where", b.op("Less", x, b.number(0.0)), below, x)]

    return build
