"""VJPs of matrix products, of Einsum and of Resize."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import equation
from amp_rewrite.rewrite.autodiff.builder import Shape
from amp_rewrite.rewrite.autodiff.vjp.rule import Call, Rows, Stop, positive, row, sum_to
from amp_rewrite.rewrite.builder import set_attribute

_ELLIPSIS = "..."


def _einsum(v: Call, slot: int) -> str:
    """Sum over labels absent from the operand; expand labels that only it has; sum over its broadcast dims."""
    terms, out = _spelled(v)
    own = terms[slot]
    others = [(v.x(i), term) for i, term in enumerate(terms) if i != slot]
    seen = set(out).union(*[term for _, term in others])
    kept = "".join(label for label in own if label in seen)
    equation = ",".join([out, *[term for _, term in others]]) + "->" + kept
    gradient = v.do("Einsum", v.g, *[x for x, _ in others], equation=equation)
    missing = [axis for axis, label in enumerate(own) if label not in seen]
    if missing:
        gradient = v.do("Expand", v.b.unsqueeze(gradient, missing), v.b.shape_of(v.x(slot)))
    return sum_to(v.b, gradient, _dims(v, terms, own), v.x(slot))


def _spelled(v: Call) -> tuple[list[str], str]:
    """Labels of each operand and of the output, with letters for an ellipsis."""
    terms, out = equation(v.op.node)
    hidden = [v.rank(i) - len(t.replace(_ELLIPSIS, "")) for i, t in enumerate(terms)]
    free = [letter for letter in ascii_letters if letter not in "".join(terms)][: max(hidden, default=0)]
    spelled = [t.replace(_ELLIPSIS, "".join(free[len(free) - n :])) for t, n in zip(terms, hidden, strict=True)]
    for term in spelled:
        if len(set(term)) < len(term):
            raise v.error(
                f"no gradient of a diagonal: {v.attr('equation')!r} repeats an axis of one operand; replace the op"
            )
    return spelled, out.replace(_ELLIPSIS, "".join(free))


def _dims(v: Call, terms: Sequence[str], own: str) -> Shape:
    """Shape of the gradient before the sum over broadcast dims."""
    size: dict[str, int | str | None] = {}
    for i, term in enumerate(terms):
        for label, dim in zip(term, v.shape(i) or (None,) * len(term), strict=True):
            if size.get(label, 1) == 1:
                size[label] = dim
    return tuple(size[label] for label in own)


def _matmul(v: Call, slot: int) -> str:
    """dA = G·Bᵀ, dB = Aᵀ·G. Operands of rank 1 are matrices of one row or one column, as in numpy.matmul."""
    ranks = (v.rank(0), v.rank(1))
    if ranks[0] > 2 and ranks[1] == 2 and slot == 1:
        return _folded(v)
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
    """Shape of G·Bᵀ or Aᵀ·G: the batch dims of the output, then the operand's last dims."""
    own, out = v.shape(slot), v.out_shape
    if own is None or out is None:
        return None
    kept = sum(v.rank(i) > 1 for i in range(2))  # number of output axes that are not batch
    return (*out[: len(out) - kept], *own[-2:])


def _folded(v: Call) -> str:
    """dB for a batch of A and a single matrix B: one product of 2-D matrices, not one per batch item."""
    rows, width = v.shape(0) or (), v.shape(1) or ()
    flat = [_flat(v, v.x(0), rows[-1], width[0]), _flat(v, v.g, width[1], None)]
    return v.do("MatMul", v.do("Transpose", flat[0], perm=[1, 0]), flat[1])


def _flat(v: Call, x: str, last: int | str | None, also: int | str | None) -> str:
    size = next((d for d in (last, also) if isinstance(d, int)), None)
    if size is not None and size > 0:
        return v.b.reshape(x, [-1, size])
    # −1 does not work beside a dim that is 0 or unknown: multiply the dims instead
    shape = v.do("Shape", x)
    ends = [v.part(shape, 0, -1), v.part(shape, -1, 1 << 62)]
    return v.b.reshape(x, v.b.op("Concat", v.b.op("ReduceProd", ends[0], keepdims=1), ends[1], axis=0))


def _gemm(v: Call, slot: int) -> str:
    """Gradient of A or B in Y = α·A'·B' + β·C, where ' is the transposition set by transA and transB."""
    a, b = bool(v.attr("transA", 0)), bool(v.attr("transB", 0))
    if slot == 0:  # G·B'ᵀ, or B'·Gᵀ for a transposed A
        left, right, turned = (v.x(1), v.g, (b, True)) if a else (v.g, v.x(1), (False, not b))
    else:  # A'ᵀ·G, or Gᵀ·A' for a transposed B
        left, right, turned = (v.g, v.x(0), (True, a)) if b else (v.x(0), v.g, (not a, False))
    return v.do("Gemm", left, right, transA=int(turned[0]), transB=int(turned[1]), alpha=v.attr("alpha", 1.0))


def _gemm_c(v: Call, slot: int) -> str:
    beta, summed = v.attr("beta", 1.0), v.sum_to(v.g, slot)
    return summed if beta == 1.0 else v.do("Mul", summed, beta)


# -- Resize: a product with a matrix per axis, what the op itself makes of the unit vectors -----------


_SCALES, _SIZES = 2, 3


def _resize(v: Call, slot: int) -> str:
    """Multiply each axis by its transposed matrix."""
    cropped = v.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    if cropped or v.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise v.error(
            "no gradient with tf_crop_and_resize or keep_aspect_ratio_policy; compute the region and the sizes"
        )
    rank, gradient = v.rank(), v.g
    for axis in _resized(v):
        perm = [*(a for a in range(rank) if a != axis), axis]
        last = v.do("Transpose", gradient, perm=perm) if axis != rank - 1 else gradient
        product = v.do("MatMul", last, v.do("Transpose", _unit_results(v, axis), perm=[1, 0]))
        gradient = v.do("Transpose", product, perm=[int(i) for i in np.argsort(perm)]) if axis != rank - 1 else product
    return gradient


def _resizable(v: Call) -> list[int]:
    return [positive(a, v.rank()) for a in v.attr("axes") or range(v.rank())]


def _resized(v: Call) -> list[int]:
    """Resizable axes."""
    constant, own = v.constant(_SCALES), v.shape(0) or ()
    if constant is not None and constant.size:
        return [axis for axis, scale in zip(_resizable(v), constant, strict=True) if scale != 1]
    out = v.out_shape or (None,) * v.rank()
    return [axis for axis in _resizable(v) if own[axis] is None or own[axis] != out[axis]]


def _unit_results(v: Call, axis: int) -> str:
    """Rows of the inputs and columns of the outputs of an axis, by the op itself in two dimensions."""
    b, node, at = v.b, clone(v.op.node), v.b.ints([_resizable(v).index(axis)])
    set_attribute(node, "axes")

    size = b.op("Gather", b.shape_of(v.x(0)), b.ints([axis]))
    places = v.counted(b.op("Squeeze", size))
    dtype = DType.FLOAT if v.dtype().low else v.dtype()
    unit = b.op("Cast", b.op("Equal", b.unsqueeze(places, [1]), places), to=dtype.code)
    slot = _SIZES if v.has(_SIZES) else _SCALES
    first = size if slot == _SIZES else b.constant(np.ones(1, np.float32))
    inputs = [unit, *node.input[1:slot], b.op("Concat", first, b.op("Gather", v.x(slot), at), axis=0)]
    return b.cast(b.like(node, inputs)[0], v.dtype(), of=dtype)


_SETTINGS = Stop("regions, scales and sizes are settings")

ROWS: Rows = {
    "Einsum": row(_einsum),
    "Resize": row(_resize, _SETTINGS, _SETTINGS, _SETTINGS),
    "MatMul": row(_matmul, _matmul),
    "Gemm": row(_gemm, _gemm, _gemm_c),
}
