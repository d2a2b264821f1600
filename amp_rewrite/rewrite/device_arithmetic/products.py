"""Products: one sum in the low type over all terms, in their order, each product rounded before it is added."""

from __future__ import annotations

from math import prod

import numpy as np

from amp_rewrite.ir.attributes import equation
from amp_rewrite.rewrite.device_arithmetic.low_op import LowBuilder, LowOp

_VECTOR = 4
"""Elements that a shader loads at once, where the sizes are multiples of it."""


def _added(b: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
    return [b.low("Add", states[0], b.low("Mul", *parts))]


def _by_four(b: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
    """Four products are added up among themselves first, as WGSL's dot does."""
    return [b.low("Add", states[0], b.summed(b.low("Mul", *parts), _VECTOR))]


def matmul(b: LowBuilder, site: LowOp) -> list[str] | None:
    """MatMul: a Scan over the terms, whose steps are outer products."""
    ranks = site.ranks(0, 1)
    if ranks is None or 0 in ranks:
        return None
    (x, w), shape = site.inputs, b.op("Shape", site.plain(b))
    if ranks[0] == 1:
        x, ranks[0] = b.shaped(x, [1, -1]), 2
    if ranks[1] == 1:
        w, ranks[1] = b.shaped(w, [-1, 1]), 2
    return [b.op("Reshape", _product(b, (x, ranks[0]), (w, ranks[1])), shape)]


def _product(b: LowBuilder, left: tuple[str, int], right: tuple[str, int]) -> str:
    (x, m), (w, n) = left, right
    start = b.zeros_like(b.op("MatMul", x, w))
    columns = b.shaped(x, [*[0] * (m - 1), 1, -1])
    rows = b.shaped(w, [*[0] * (n - 1), 1, -1])
    return b.scan([start], [(columns, m), (rows, n - 2)], _added, max(m, n))[0]


def gemm(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Gemm: as MatMul; in steps of four terms where the right side comes transposed in vectors of four."""
    x, w, bias = site.input(0), site.input(1), site.input(2)
    flipped, sizes = bool(site.attribute("transB", 0)), site.static(1)
    if site.attribute("transA", 0):
        x = b.op("Transpose", x, perm=[1, 0])
    if flipped and sizes is not None and all(size % _VECTOR == 0 for size in sizes):
        start = b.zeros_like(b.op("MatMul", x, b.op("Transpose", w, perm=[1, 0])))
        parts = [(b.shaped(x, [0, 1, -1, _VECTOR]), 2), (b.shaped(w, [1, sizes[0], -1, _VECTOR]), 2)]
        total = b.scan([start], parts, _by_four, 2)[0]
    else:
        right = b.op("Transpose", w, perm=[1, 0]) if flipped else w
        total = _product(b, (x, 2), (right, 2))
    if (alpha := site.attribute("alpha", 1.0)) != 1:
        total = b.low("Mul", total, b.number(alpha))
    if bias:
        beta = site.attribute("beta", 1.0)
        total = b.low("Add", total, b.low("Mul", bias, b.number(beta)) if beta != 1 else bias)
    return [total]


def conv(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Conv and ConvTranspose: over the positions of the kernel, and the channels of a group at each.

    ConvTranspose goes from the last position to the first.
    """
    weight, transposed = site.static(1), site.op.op_type == "ConvTranspose"
    if weight is None or len(weight) < 3:
        return None
    groups, taps = site.attribute("group", 1), prod(weight[2:])
    first, second = weight[0] // groups, weight[1]
    rows = b.shaped(site.input(1), [groups, first, second, taps])
    rows = b.op("Transpose", rows, perm=[0, 2, 3, 1] if transposed else [0, 1, 3, 2])
    outer, inner = (second, first) if transposed else (first, second)
    order = list(range(taps))[:: -1 if transposed else 1]
    if transposed:
        rows = b.op("Gather", rows, b.ints(order), axis=2)
    plain = b.op(site.op.op_type, *site.inputs[:2], **site.attributes())
    patches = b.shaped(taken_apart(b, site, groups * inner, weight[2:]), [0, groups, inner, taps, -1])
    if order[0]:
        patches = b.op("Gather", patches, b.ints(order), axis=3)
    patches = b.shaped(b.op("Transpose", patches, perm=[0, 1, 3, 2, 4]), [0, groups, 1, taps * inner, -1])
    weights = b.shaped(rows, [1, groups, outer, taps * inner, 1])
    start = b.zeros_like(b.shaped(plain, [0, groups, outer, -1]))
    total = b.scan([start], [(patches, 3), (weights, 3)], _added, 4)[0]
    if site.input(2):
        total = b.low("Add", total, b.shaped(site.input(2), [1, groups, outer, 1]))
    return [b.op("Reshape", total, b.op("Shape", plain))]


def taken_apart(b: LowBuilder, site: LowOp, channels: int, kernel: tuple[int, ...]) -> str:
    """Return what each position of the kernel contributes with weight 1: [batch, channels * taps, places …].

    By the op itself, channel by channel, with a kernel for each position that is 1 there and 0 elsewhere.
    """
    taps, kind = prod(kernel), "ConvTranspose" if site.op.op_type == "ConvTranspose" else "Conv"
    shape = (channels, taps) if kind == "ConvTranspose" else (channels * taps, 1)
    ones = np.tile(np.eye(taps, dtype=np.float32), (channels, 1)).reshape(*shape, *kernel)
    kept = {"auto_pad", "dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides"}
    attributes = {name: value for name, value in site.attributes().items() if name in kept}
    return b.op(kind, site.input(0), b.constant(ones), **attributes, group=channels)


def einsum(b: LowBuilder, site: LowOp) -> list[str] | None:
    """Einsum of one or two operands that sums over one label."""
    operands, result = equation(site.node)
    labels = dict.fromkeys("".join(operands))
    summed = [label for label in labels if label not in result]
    alone = all(len(set(labels)) == len(labels) for labels in operands)
    if not summed:
        return [b.rounded(site.plain(b))]
    if len(operands) > 2 or len(summed) != 1 or "." in labels or not alone:
        return None
    cut = [text.replace(summed[0], "") for text in operands]

    def step(body: LowBuilder, states: list[str], parts: list[str]) -> list[str]:
        slices = iter(parts)
        names = [
            next(slices) if text != whole else name
            for text, whole, name in zip(cut, operands, site.inputs, strict=True)
        ]
        term = body.low("Einsum", *names, equation=f"{','.join(cut)}->{result}")
        return [body.low("Add", states[0], term)]

    parts = [
        (name, whole.index(summed[0])) for name, whole in zip(site.inputs, operands, strict=True) if summed[0] in whole
    ]
    return b.scan([b.zeros_like(site.plain(b))], parts, step, len(result))
