"""Running sums and means that are written as products with a constant matrix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import rule
from amp_rewrite.decide.hazards.steps import in_float32, summed_length
from amp_rewrite.decide.pin import Pin
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import Flow, float32
from amp_rewrite.ir.op_classes import COPIES, HEAVY, PRODUCTS
from amp_rewrite.ir.view import Op, OpId, View


@rule(reasons.DISGUISE, "A running sum or mean that is written as a product is computed in float32.")
def disguises(view: View, to: DType) -> Iterator[Pin]:
    """Pin products with a triangle of ones or a matrix of 1/n, unless another product reads them. O(nodes + uses).

    What it protects: CumSum and ReduceMean, spelled MatMul, Gemm or Einsum. A triangle that masks is not meant.
    Why: A running sum is read by differences, a mean by deviations: both are small beside it.
    Example: Windows as differences of running sums, LayerNorm by products.
    How to override: `--lower 'op=MatMul'` or the name of the product.
    Source: CumSum and ReduceMean are on the deny list.
    """
    products: dict[OpId, str] = {}
    for op in view.ops:
        for slot in (0, 1) if op.kind in PRODUCTS else ():
            if name := _disguised(view, op, slot, to):
                products[op.id] = name
    if not products:
        return
    copies = Flow.of(view, COPIES)
    for op_id, name in in_float32(view, products).items():
        if not _feeds_products(copies, view.ops[op_id]):
            yield Pin(op_id, reasons.DISGUISE, None, f"a {name} by a product")


def _disguised(view: View, op: Op, slot: int, to: DType) -> str:
    """Return "running sum" for a triangle of ones, "mean" for a matrix of 1/n, n terms; else an empty string."""
    value = op.inputs[slot] if slot < len(op.inputs) else None
    tensor = view.constant(value)
    if tensor is None or value is None or len(tensor.dims) < 2 or max(tensor.dims[-2:]) < 3:
        return ""
    fit, (rows, columns) = view.fit(value, to), tensor.dims[-2:]
    if fit.absmax != fit.absmin or fit.nonfinite:
        return ""
    lengths = (rows, columns) if op.kind == "Einsum" else (summed_length(op, slot, tuple(tensor.dims)),)
    if np.float32(fit.absmax) in [np.float32(1 / length) for length in lengths if length]:
        elements = view.array(value)
        return "mean" if elements is not None and (elements == elements.flat[0]).all() else ""
    if fit.absmax != 1 or rows != columns:
        return ""
    elements = view.array(value)
    if elements is None:
        return ""
    ones = np.tri(rows, dtype=elements.dtype)
    return "running sum" if any((elements == t).all() for t in (ones, ones.T)) else ""


def _feeds_products(copies: Flow, op: Op) -> bool:
    """True if products alone read a result, or its copies."""
    view = copies.view
    reached = copies.forth(dict.fromkeys(op.results), float32(view))
    readers = [reader for value in reached for reader in view.readers(value) if not copies.through(reader)]
    return bool(readers) and all(reader.kind in HEAVY for reader in readers) and view.yielded.isdisjoint(reached)
