"""VJPs of matrix products, Einsum and Resize."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import equation
from amp_rewrite.rewrite.autodiff.builder import Shape
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Rows, Stop, from_front, row, sum_to
from amp_rewrite.rewrite.builder import set_attribute

_ELLIPSIS = "..."


def _einsum(v: Call, slot: int) -> str:
    """Sum over labels missing from the operand, expand labels unique to it, and sum over its broadcast dims."""
    terms, out = _labels(v)
    labels = terms[slot]
    others = [(v.x(i), term) for i, term in enumerate(terms) if i != slot]
    seen = set(out).union(*[term for _, term in others])
    shared = "".join(label for label in labels if label in seen)
    equation = ",".join([out, *[term for _, term in others]]) + "->" + shared
    gradient = v.do("Einsum", v.g, *[x for x, _ in others], equation=equation)
    missing = [axis for axis, label in enumerate(labels) if label not in seen]
    if missing:
        gradient = v.do("Expand", v.b.unsqueeze(gradient, missing), v.b.shape_of(v.x(slot)))
    return sum_to(v.b, gradient, _dims(v, terms, labels), v.x(slot))


def _labels(v: Call) -> tuple[list[str], str]:
    """Return the labels of each operand and of the output, with letters in place of any ellipsis."""
    terms, out = equation(v.op.node)
    ranks = [v.rank(i) - len(t.replace(_ELLIPSIS, "")) for i, t in enumerate(terms)]
    letters = [letter for letter in ascii_letters if letter not in "".join(terms)][: max(ranks, default=0)]
    pairs = zip(terms, ranks, strict=True)
    expanded = [term.replace(_ELLIPSIS, "".join(letters[len(letters) - rank :])) for term, rank in pairs]
    for term in expanded:
        if len(set(term)) < len(term):
            raise v.error(f"the diagonal of an operand in {v.attr('equation')!r} has no gradient rule; replace the op")
    return expanded, out.replace(_ELLIPSIS, "".join(letters))


def _dims(v: Call, terms: Sequence[str], labels: str) -> Shape:
    """Return the shape of the gradient before the sum over broadcast dims."""
    size: dict[str, int | str | None] = {}
    for i, term in enumerate(terms):
        for label, dim in zip(term, v.shape(i) or (None,) * len(term), strict=True):
            if size.get(label, 1) == 1:
                size[label] = dim
    return tuple(size[label] for label in labels)


def _matmul(v: Call, slot: int) -> str:
    """Append dA = G·Bᵀ or dB = Aᵀ·G. An operand of rank 1 is one row or one column, as in numpy.matmul."""
    ranks = (v.rank(0), v.rank(1))
    if ranks[0] > 2 and ranks[1] == 2 and slot == 1:
        return _batched_weight_gradient(v)
    matrices = [v.x(i) if rank > 1 else v.b.unsqueeze(v.x(i), [i]) for i, rank in enumerate(ranks)]
    g = v.g
    if ranks[1] == 1:
        g = v.b.unsqueeze(g, [-1])
    if ranks[0] == 1:
        g = v.b.unsqueeze(g, [-2])
    rank = max(ranks[1 - slot], 2)
    other = v.do("Transpose", matrices[1 - slot], perm=[*range(rank - 2), rank - 1, rank - 2])
    product = v.do("MatMul", *((g, other) if slot == 0 else (other, g)))
    if ranks[slot] == 1:
        product = v.b.squeeze(product, [-2 if slot == 0 else -1])
    return sum_to(v.b, product, _product_shape(v, slot), v.x(slot))


def _product_shape(v: Call, slot: int) -> Shape | None:
    """Return the shape of G·Bᵀ or Aᵀ·G: the batch dims of the output, then the operand's last dims."""
    operand, out = v.shape(slot), v.out_shape
    if operand is None or out is None:
        return None
    matrix_axes = sum(v.rank(i) > 1 for i in range(2))  # the number of output axes that are not batch axes
    return (*out[: len(out) - matrix_axes], *operand[-2:])


def _batched_weight_gradient(v: Call) -> str:
    """Append dB for a batch of matrices A and one matrix B, as a single product of 2-D matrices."""
    rows, width = v.shape(0) or (), v.shape(1) or ()
    flat = [_as_matrix(v, v.x(0), rows[-1], width[0]), _as_matrix(v, v.g, width[1], None)]
    return v.do("MatMul", v.do("Transpose", flat[0], perm=[1, 0]), flat[1])


def _as_matrix(v: Call, x: str, last: int | str | None, fallback: int | str | None) -> str:
    size = next((d for d in (last, fallback) if isinstance(d, int)), None)
    if size is not None and size > 0:
        return v.b.reshape(x, [-1, size])
    # Reshape does not support −1 if another dim is 0 or unknown, so multiply the dims
    shape = v.do("Shape", x)
    ends = [v.shape_part(shape, 0, -1), v.shape_part(shape, -1, 1 << 62)]
    return v.b.reshape(x, v.b.op("Concat", v.b.op("ReduceProd", ends[0], keepdims=1), ends[1], axis=0))


def _gemm(v: Call, slot: int) -> str:
    """Append the gradient of A or B in Y = α·A'·B' + β·C; ' is the transposition by transA or transB."""
    a, b = bool(v.attr("transA", 0)), bool(v.attr("transB", 0))
    if slot == 0:  # G·B'ᵀ, or B'·Gᵀ for a transposed A
        left, right, transposed = (v.x(1), v.g, (b, True)) if a else (v.g, v.x(1), (False, not b))
    else:  # A'ᵀ·G, or Gᵀ·A' for a transposed B
        left, right, transposed = (v.g, v.x(0), (True, a)) if b else (v.x(0), v.g, (not a, False))
    return v.do("Gemm", left, right, transA=int(transposed[0]), transB=int(transposed[1]), alpha=v.attr("alpha", 1.0))


def _gemm_c(v: Call, slot: int) -> str:
    beta, summed = v.attr("beta", 1.0), v.sum_to(v.g, slot)
    return summed if beta == 1.0 else v.do("Mul", summed, beta)


# -- Resize: a product with one matrix per axis, found by running the op on unit vectors ---------------


_SCALES, _SIZES = 2, 3


def _resize(v: Call, slot: int) -> str:
    """Multiply the gradient along each axis by the transpose of the axis's matrix."""
    crops = v.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crops or v.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise v.error(
            "tf_crop_and_resize and keep_aspect_ratio_policy have no gradient rule; compute them with other ops"
        )
    rank, gradient = v.rank(), v.g
    for axis in _resized_axes(v):
        perm = [*(a for a in range(rank) if a != axis), axis]
        last = v.do("Transpose", gradient, perm=perm) if axis != rank - 1 else gradient
        product = v.do("MatMul", last, v.do("Transpose", _axis_matrix(v, axis), perm=[1, 0]))
        gradient = v.do("Transpose", product, perm=[int(i) for i in np.argsort(perm)]) if axis != rank - 1 else product
    return gradient


def _axes(v: Call) -> list[int]:
    return [from_front(a, v.rank()) for a in v.attr("axes") or range(v.rank())]


def _resized_axes(v: Call) -> list[int]:
    constant, dims = v.constant(_SCALES), v.shape(0) or ()
    if constant is not None and constant.size:
        return [axis for axis, scale in zip(_axes(v), constant, strict=True) if scale != 1]
    out = v.out_shape or (None,) * v.rank()
    return [axis for axis in _axes(v) if dims[axis] is None or dims[axis] != out[axis]]


def _axis_matrix(v: Call, axis: int) -> str:
    """Append the matrix of an axis, with one row per input element, by running the op on an identity matrix."""
    b, node, index = v.b, clone(v.op.node), v.b.ints([_axes(v).index(axis)])
    set_attribute(node, "axes")

    size = b.op("Gather", b.shape_of(v.x(0)), b.ints([axis]))
    positions = v.arange(b.op("Squeeze", size))
    dtype = DType.FLOAT if v.dtype().low else v.dtype()
    identity = b.op("Cast", b.op("Equal", b.unsqueeze(positions, [1]), positions), to=dtype.code)
    slot = _SIZES if v.has(_SIZES) else _SCALES
    first = size if slot == _SIZES else b.constant(np.ones(1, np.float32))
    inputs = [identity, *node.input[1:slot], b.op("Concat", first, b.op("Gather", v.x(slot), index), axis=0)]
    return b.cast(b.like(node, inputs)[0], v.dtype(), of=dtype)


_SETTINGS = Stop("regions, scales and sizes are settings")

ROWS: Rows = {
    "Einsum": row(_einsum),
    "Resize": row(_resize, _SETTINGS, _SETTINGS, _SETTINGS),
    "MatMul": row(_matmul, _matmul),
    "Gemm": row(_gemm, _gemm, _gemm_c),
}
