"""Operands and masks of written-out attentions, and the conditions for replacing them with one operator.

This module judges structure and shapes; `equivalence` verifies that the operator computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx.numpy_helper import to_array

from amp_rewrite.decide.needs.forward import find_facts
from amp_rewrite.dtypes import DType
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.dataflow import number
from amp_rewrite.ir.dims import Dims, times
from amp_rewrite.ir.op_classes import PAIR_SUMS
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.attention.layout import (
    RANK,
    OperandSource,
    broadcasts,
    keys_source,
    ungrouped,
)
from amp_rewrite.rewrite.attention.recognize import AttentionMatch, match_attention
from amp_rewrite.rewrite.const_eval import TRACED_MOVES, numbers
from amp_rewrite.rewrite.replacement import Context, Replacement


@dataclass(frozen=True, slots=True)
class FusibleAttention:
    """A fusible attention, judging by structure and shapes.

    `low` is the type to which it may be lowered. `causal`: its mask only hides the keys after each query. `needs_mask`:
    it has another mask, with the dimensions `mask_dims`, over `lengths` queries and keys. `has_empty_rows`: some row
    may not have visible keys.
    """

    view: View
    match: AttentionMatch
    low: DType
    queries: OperandSource
    keys: OperandSource
    values: OperandSource
    lengths: Dims
    mask_dims: Dims = ()
    needs_mask: bool = False
    causal: bool = False
    has_empty_rows: bool = False

    @property
    def infinite_fill(self) -> bool:
        """True if hidden scores are −inf, so rows without visible keys are NaN."""
        return self.match.score_mask is not None and np.isinf(self.match.score_mask.fill)

    @property
    def boolean(self) -> bool:
        return self.match.score_mask is not None and self.view.dtype(self.match.score_mask.value) is DType.BOOL


@dataclass(frozen=True, slots=True)
class AttentionReplacement(Replacement):
    """A replacement with one operator. `visible` is the name of its constant for a mask of known numbers."""

    visible: str | None = None


def fusible_attentions(view: View, context: Context) -> Iterator[tuple[OpId, FusibleAttention | str]]:
    """Yield the last op of each written-out attention with the attention, or the reason why it is not fusible.

    Covers all opsets. Equivalence is not yet verified.
    """
    for op in view.of_kinds(("Softmax",)):
        match = match_attention(view, op, context.to)
        if isinstance(match, str):
            yield op.id, match
        elif match is not None and any(find_facts(view, context.to).counts_far(bias) for bias in match.biases):
            reason = f"the bias of its scores grows with the position, and would be added in {context.to.spelling}"
            yield match.last.id, reason
        elif match is not None:
            yield match.last.id, _fusible(view, match, context)


def _fusible(view: View, match: AttentionMatch, context: Context) -> FusibleAttention | str:
    axis = int_attribute(match.softmax.node, "axis", -1 if view.opset >= FIRST_ROW_SOFTMAX else 1)
    if axis not in (-1, RANK - 1):
        return "its softmax is not over the last axis"
    queries, values = OperandSource(match.queries), OperandSource(match.values)
    keys = keys_source(view, match.keys)
    ungrouped_sources = ungrouped(view, keys), ungrouped(view, values)
    if ungrouped_sources[0].groups == ungrouped_sources[1].groups:
        keys, values = ungrouped_sources
    q, k, v = (operand.dims(view) for operand in (queries, keys, values))
    reason = _operand_mismatch(q, k, v, keys.groups)
    if reason:
        return reason
    return _with_mask(FusibleAttention(view, match, context.to, queries, keys, values, (q[2], k[2])), context, q)


def _operand_mismatch(queries: Dims, keys: Dims, values: Dims, groups: int) -> str | None:
    """Return why batch or heads of the operands may not match; the operator does not broadcast them."""
    if not (queries and keys and values):
        return "its queries, keys and values are not known to have four axes"
    heads = times(keys[1], groups) if isinstance(keys[1], int) or groups == 1 else None
    for axis, *sizes in (("batch", queries[0], keys[0], values[0]), ("heads", queries[1], heads)):
        if None in sizes or len(set(sizes)) > 1:
            return f"its queries, keys and values are not known to agree in {axis}"
    if keys[1] != values[1] or keys[2] != values[2] or keys[2] is None:
        return "its keys and values are not known to be equal in number"
    return None


def _with_mask(attention: FusibleAttention, context: Context, queries: Dims) -> FusibleAttention | str:
    view, match, biases = attention.view, attention.match, attention.match.biases
    mask = match.score_mask
    visible = mask.visible if mask is not None else None
    needed = mask is not None and not (visible is not None and bool(visible.all()))
    if mask is not None and needed:
        causal = visible is not None and not biases and attention.lengths == visible.shape[-2:] and _triangular(visible)
        if visible is not None:
            attends = bool(visible.any(axis=-1).all())
        else:
            boolean = attention.boolean and _every_row_contains(view, mask.value, mask.visible_if)
            attends = context.every_row_attends or boolean
        if not attends and np.isinf(mask.fill) and not match.zeroes_nan:
            return "a row of its mask may hide every key, and would become 0 instead of NaN"
        attention = replace(attention, needs_mask=not causal, causal=causal, has_empty_rows=not attends)
    for bias in biases:
        is_mask = mask is not None and mask.graded and bias == mask.value
        if not is_mask and (reason := _possible_infinity(view, bias, context.to)):
            return reason
    shapes = {value: _summand_shape(attention, value) for value in (*([mask.value] if mask else []), *biases)}
    for shape in shapes.values():
        if not 1 <= len(shape) <= RANK:
            return "the rank of its mask is not known"
        if not (broadcasts(shape[:-1], queries[:-1]) or _result_fixes_mask(view, match, queries)):
            return "its mask is not known to have the batch, heads and length of its queries, or 1 in their place"
    summands = [shapes[bias] for bias in biases]
    if attention.needs_mask and mask is not None:
        summands.insert(0, visible.shape if visible is not None else shapes[mask.value])
    if summands and not _covers_lengths(summands, attention.lengths):
        return "its mask does not cover every query and every key"
    return replace(attention, mask_dims=summands[0] if summands else ())


def _every_row_contains(view: View, value: ValueId, element: bool, depth: int = 8) -> bool:
    """True if each row of a bool value is known to contain `element`."""
    array = numbers(view, value)
    if array is not None:
        return bool((array == element).any(axis=-1).all()) if array.ndim else bool(array == element)
    op = view.producer(value)
    if op is None or depth == 0:
        return False
    if op.kind == "Not":
        return _every_row_contains(view, op.operands[0], not element, depth - 1)
    if op.kind in ("Identity", "Expand"):
        return _every_row_contains(view, op.operands[0], element, depth - 1)
    if op.kind != ("Or" if element else "And"):
        return False
    return any(_every_row_contains(view, operand, element, depth - 1) for operand in op.operands)


def _summand_shape(attention: FusibleAttention, value: ValueId) -> Dims:
    array = numbers(attention.view, value)
    return array.shape if array is not None else dims_of(attention.view, value)


def _result_fixes_mask(view: View, match: AttentionMatch, queries: Dims) -> bool:
    """True if the result is reshaped to [batch, queries, heads · width] of the queries and values.

    If the mask broadcast the scores to a larger batch, more heads or more queries, the result would have more elements.
    """
    result = match.last.outputs[0]
    for kind in ("Transpose", "Reshape"):
        moves = [op for op in view.readers(result) if op.kind == kind] if result is not None else []
        if len(moves) != 1:
            return False
        result = moves[0].outputs[0]
    dims, values = dims_of(view, result), dims_of(view, match.values)
    batch, heads, length, _ = queries
    width = values[3] if len(values) == RANK else None
    if result is None or len(dims) != RANK - 1 or not isinstance(heads, int) or not isinstance(width, int):
        return False
    readers = (op for op in view.readers(result) if op.kind == "MatMul" and op.inputs[0] == result)
    rows = {shape[-2] for op in readers if len(shape := dims_of(view, op.inputs[1])) > 1}
    return None not in (batch, length) and dims[:2] == (batch, length) and heads * width in {dims[-1], *rows}


def _covers_lengths(shapes: Sequence[Dims], lengths: Dims) -> bool:
    """True if mask and biases together cover every query and key; the runtime's kernels do not broadcast them."""
    sizes = [{shape[axis] for shape in shapes if len(shape) >= -axis} for axis in (-2, -1)]
    return None not in lengths and all(length in covered for length, covered in zip(lengths, sizes, strict=True))


def _triangular(visible: Array) -> bool:
    rows, keys = visible.shape[-2:] if visible.ndim > 1 else (0, 1)
    return rows == keys and all(bool((visible[..., row, :] == (np.arange(keys) <= row)).all()) for row in range(rows))


def _possible_infinity(view: View, bias: ValueId, to: DType) -> str | None:
    """Return why a bias may be infinite in the low type; None if its sources are finite in that type."""
    pending, seen = [bias], {bias}
    while pending:
        value = pending.pop()
        dtype = view.dtype(value)
        if dtype is not None and not dtype.floating:
            continue
        tensor, op = view.constant(value), view.producer(value)
        if tensor is not None:
            array = numbers(view, value)
            largest = float(np.abs(array).max(initial=0)) if array is not None else np.inf
            if not largest <= to.max:
                return f"the bias of its scores reaches {largest:.3g}, beyond the range of {to.spelling}"
        elif op is not None and _is_finite(op):
            continue
        elif op is None or not _keeps_finite(view, op) or len(seen) > _MAX_VALUES:
            name = view.value_name(value)
            return f"the bias of its scores comes from {name}, which may contain −inf, so a NaN would become 0"
        else:
            unseen = [v for v in op.operands if v not in seen]
            pending.extend(unseen)
            seen.update(unseen)
    return None


def _is_finite(op: Op) -> bool:
    fill = attribute(op.node, "value") if op.kind == "ConstantOfShape" else None
    array = to_array(fill.t) if fill is not None else np.zeros(1)
    return op.kind in _SMALL or (op.kind == "ConstantOfShape" and bool(np.isfinite(array).all()))


def _keeps_finite(view: View, op: Op) -> bool:
    """True if an op returns finite numbers for small inputs, such as constants and the results of a norm."""
    divisor = number(view, op.inputs[1], axes=1) if op.kind == "Div" else None
    return op.kind in _FINITE_FROM_SMALL or (divisor is not None and abs(divisor) >= 1)


_MAX_VALUES = 64
_PICKS = ("Gather", "GatherElements", "GatherND", "Slice")
_FINITE_FROM_SMALL = frozenset((*TRACED_MOVES, *_PICKS, *PAIR_SUMS, "Cast", "Concat", "MatMul", "Mul", "Neg", "Where"))
_SMALL = frozenset(("LayerNormalization", "RMSNormalization", "Sigmoid", "Softmax", "Tanh"))
"""Ops with finite, small results for all inputs."""
