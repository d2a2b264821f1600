"""Norms: statistics in float32, then each step on the values in the low type."""

from __future__ import annotations

import numpy as np

from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp, Recipe


def norm(*, centered: bool, skips: bool = False) -> Recipe:
    """Return the recipe of a norm over the last axes: by deviation if `centered`, else by root mean square.

    `skips`: for onnxruntime's norms of a sum, which is rounded before it is normalized and is a result, too.
    """

    def build(b: LowBuilder, site: LowOp) -> list[str] | None:
        shape, x, first = site.shape(0), site.input(0), 1 + skips
        if shape is None:
            return None
        if skips:
            x = b.low("Add", x, site.input(1))
            if bias := site.input(first + 1 + centered):
                x = b.low("Add", x, bias)
        axes = list(range((-1 if skips else site.attribute("axis", -1)) % len(shape), len(shape)))
        epsilon = b.constant(np.array(site.attribute("epsilon", 1e-12 if skips else 1e-5), np.float32))
        variance = b.reduce("ReduceMean", b.op("Mul", x, x), axes, keepdims=True)
        value, mean = x, ""
        if centered:
            mean = b.reduce("ReduceMean", x, axes, keepdims=True)
            variance = b.op("Sub", variance, b.op("Mul", mean, mean))
            value = b.low("Sub", x, b.rounded(mean))
        inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", variance, epsilon)))
        value = b.low("Mul", b.low("Mul", value, b.rounded(inverse)), site.input(first))
        if centered and (shift := site.input(first + 1)):
            value = b.low("Add", value, shift)
        results = [value, mean, inverse] if centered else [value, inverse]
        return [*results, *[""] * (3 - len(results)), x] if skips else results

    return build


def instance_norm(b: LowBuilder, site: LowOp) -> list[str] | None:
    """InstanceNormalization: a factor and a summand for each channel, made in float32 and rounded."""
    shape = site.shape(0)
    if shape is None or len(shape) < 3:
        return None
    x, scale, bias = (site.input(slot) for slot in range(3))
    axes, wide = list(range(2, len(shape))), [1, -1, *[1] * (len(shape) - 2)]
    mean = b.reduce("ReduceMean", x, axes, keepdims=True)
    square = b.reduce("ReduceMean", b.op("Mul", x, x), axes, keepdims=True)
    epsilon = b.constant(np.array(site.attribute("epsilon", 1e-5), np.float32))
    variance = b.op("Add", b.op("Sub", square, b.op("Mul", mean, mean)), epsilon)
    factor = b.op("Div", b.shaped(scale, wide), b.op("Sqrt", variance))
    summand = b.op("Sub", b.shaped(bias, wide), b.op("Mul", mean, factor))
    return [b.low("Add", b.low("Mul", x, b.rounded(factor)), b.rounded(summand))]


def batch_norm(b: LowBuilder, site: LowOp) -> list[str] | None:
    """BatchNormalization, each step in the low type."""
    shape = site.shape(0)
    if shape is None or site.attribute("training_mode", 0) or len(site.node.output) > 1:
        return None
    x, scale, bias, mean, variance = (
        site.input(0),
        *[b.shaped(site.input(slot), [1, -1, *[1] * (len(shape) - 2)]) for slot in range(1, 5)],
    )
    sum_ = b.low("Add", variance, b.number(site.attribute("epsilon", 1e-5)))
    inverse = b.low("Reciprocal", b.low("Sqrt", sum_))
    return [b.low("Add", b.low("Mul", b.low("Mul", b.low("Sub", x, mean), inverse), scale), bias)]
