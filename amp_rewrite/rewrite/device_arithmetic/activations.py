"""Functions of one value whose kernel rounds each step to the low type."""

from __future__ import annotations

from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp


def softplus(b: LowBuilder, site: LowOp) -> list[str]:
    """A logarithm of one plus an exponential, on the side where that does not overflow."""
    x, one = site.input(0), b.number(1.0)
    below = b.low("Log", b.low("Add", one, b.low("Exp", x)))
    above = b.low("Add", x, b.low("Log", b.low("Add", one, b.low("Exp", b.op("Neg", x)))))
    return [b.op("Where", b.op("Greater", x, b.number(0.0)), above, below)]


def hard_swish(b: LowBuilder, site: LowOp) -> list[str]:
    """A line between 0 and 1 whose slope is a quotient, times x."""
    x, one, zero = site.input(0), b.number(1.0), b.number(0.0)
    line = b.low("Add", b.low("Div", x, b.number(6.0)), b.number(0.5))
    return [b.low("Mul", x, b.op("Max", zero, b.op("Min", one, line)))]


def elu(b: LowBuilder, site: LowOp) -> list[str]:
    """An exponential less one below zero."""
    x, alpha = site.input(0), b.number(site.attribute("alpha", 1.0))
    below = b.low("Mul", alpha, b.low("Sub", b.low("Exp", x), b.number(1.0)))
    return [b.op("Where", b.op("Less", x, b.number(0.0)), below, x)]
