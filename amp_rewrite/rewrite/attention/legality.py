"""Attentions that are written out and that one operator can compute: their operands and their masks.

Structure and shapes decide here; `equivalence` proves that the operator computes the same.
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
from amp_rewrite.rewrite.attention.recognize import AttentionForm, form_of
from amp_rewrite.rewrite.const_eval import TRACED_MOVES, numbers
from amp_rewrite.rewrite.replacement import Context, Replacement


@dataclass(frozen=True, slots=True)
class FusibleAttention:
    """An attention for one operator, as far as structure and shapes tell.

    `low`: the type to which it will fall. `causal`: a query sees the keys up to its own, and that is all that its mask
    says. `hides`: it has a mask to read, of the dimensions `mask`, over `lengths` queries and keys. `empty`: a row may
    see no key.
    """

    view: View
    form: AttentionForm
    low: DType
    queries: OperandSource
    keys: OperandSource
    values: OperandSource
    lengths: Dims
    mask: Dims = ()
    hides: bool = False
    causal: bool = False
    empty: bool = False

    @property
    def infinite(self) -> bool:
        """True if a hidden score is −inf, and a row without keys NaN."""
        return self.form.hiding is not None and np.isinf(self.form.hiding.fill)

    @property
    def boolean(self) -> bool:
        """True if its mask is a bool."""
        return self.form.hiding is not None and self.view.dtype(self.form.hiding.value) is DType.BOOL


@dataclass(frozen=True, slots=True)
class WrittenAttention(Replacement):
    """A replacement by one operator. `shown`: its constant that stands for a mask whose numbers are known."""

    shown: str | None = None


def sites(view: View, context: Context) -> Iterator[tuple[OpId, FusibleAttention | str]]:
    """Yield each attention that is written out, at any opset, by its last op: its site, or why one operator cannot
    compute it. Equivalence is not proved yet."""
    for op in view.of_kinds(("Softmax",)):
        form = form_of(view, op, context.to)
        if isinstance(form, str):
            yield op.id, form
        elif form is not None and any(find_facts(view, context.to).counts_far(bias) for bias in form.biases):
            why = f"the bias of its scores grows with the position, and would be added in {context.to.spelling}"
            yield form.last.id, why
        elif form is not None:
            yield form.last.id, _site_of(view, form, context)


def _site_of(view: View, form: AttentionForm, context: Context) -> FusibleAttention | str:
    """Return the site of a form, or why one operator cannot compute it."""
    axis = int_attribute(form.softmax.node, "axis", -1 if view.opset >= FIRST_ROW_SOFTMAX else 1)
    if axis not in (-1, RANK - 1):
        return "its softmax is not over the last axis"
    queries, values = OperandSource(form.queries), OperandSource(form.values)
    keys = keys_source(view, form.keys)
    shared = ungrouped(view, keys), ungrouped(view, values)
    if shared[0].groups == shared[1].groups:
        keys, values = shared
    q, k, v = (operand.dims(view) for operand in (queries, keys, values))
    fault = _misfit(q, k, v, keys.groups)
    if fault:
        return fault
    return _masked(FusibleAttention(view, form, context.to, queries, keys, values, (q[2], k[2])), context, q)


def _misfit(queries: Dims, keys: Dims, values: Dims, groups: int) -> str | None:
    """Return why batch and heads of the operands may not fit the operator, which broadcasts neither."""
    if not (queries and keys and values):
        return "its queries, keys and values are not known to have four axes"
    heads = times(keys[1], groups) if isinstance(keys[1], int) or groups == 1 else None
    for words, *sizes in (("batch", queries[0], keys[0], values[0]), ("heads", queries[1], heads)):
        if None in sizes or len(set(sizes)) > 1:
            return f"its queries, keys and values are not known to agree in {words}"
    if keys[1] != values[1] or keys[2] != values[2] or keys[2] is None:
        return "its keys and values are not known to be as many"
    return None


def _masked(site: FusibleAttention, context: Context, queries: Dims) -> FusibleAttention | str:
    view, form, hiding, biases = site.view, site.form, site.form.hiding, site.form.biases
    shown = hiding.shown if hiding is not None else None
    if shown is not None and bool(shown.all()):
        hiding = None
    if hiding is not None:
        causal = shown is not None and not biases and site.lengths == shown.shape[-2:] and _triangular(shown)
        boolean = view.dtype(hiding.value) is DType.BOOL
        sees = context.every_row_attends or (boolean and _shows(view, hiding.value, hiding.shows))
        sees = sees if shown is None else bool(shown.any(axis=-1).all())
        if not sees and np.isinf(hiding.fill) and not form.zeroed:
            return "a row of its mask may hide every key: it would give 0 instead of NaN"
        site = replace(site, hides=not causal, causal=causal, empty=not sees)
    for bias in biases:
        counted = form.hiding is not None and form.hiding.counts and bias == form.hiding.value
        if not counted and (fault := _unbounded(view, bias, context.to)):
            return fault
    laid = {value: _stated(site, value) for value in (*([form.hiding.value] if form.hiding else []), *biases)}
    for shape in laid.values():
        if not 1 <= len(shape) <= RANK:
            return "the rank of its mask is not known"
        if not (broadcasts(shape[:-1], queries[:-1]) or _settled(view, form, queries)):
            return "its mask is not known to have the batch, heads and length of its queries, or one"
    stated = [shown.shape if shown is not None else laid[hiding.value]] if site.hides and hiding else []
    stated += [laid[bias] for bias in biases]
    if stated and not _whole(stated, site.lengths):
        return "its mask does not state every query and every key"
    return replace(site, mask=stated[0] if stated else ())


def _shows(view: View, value: ValueId, shows: bool, depth: int = 8) -> bool:
    """True if some element of each row of a bool is known to be `shows`, whatever the others are."""
    held = numbers(view, value)
    if held is not None:
        return bool((held == shows).any(axis=-1).all()) if held.ndim else bool(held == shows)
    op = view.producer(value)
    if op is None or depth == 0:
        return False
    if op.kind == "Not":
        return _shows(view, op.operands[0], not shows, depth - 1)
    if op.kind in ("Identity", "Expand"):
        return _shows(view, op.operands[0], shows, depth - 1)
    return op.kind == ("Or" if shows else "And") and any(_shows(view, each, shows, depth - 1) for each in op.operands)


def _stated(site: FusibleAttention, value: ValueId) -> Dims:
    held = numbers(site.view, value)
    return held.shape if held is not None else dims_of(site.view, value)


def _settled(view: View, form: AttentionForm, queries: Dims) -> bool:
    """True if the result is laid out as [batch, queries, heads · width] of the queries and values themselves.

    A mask of more than their batch, heads or queries would make more elements than that.
    """
    result = form.last.outputs[0]
    for kind in ("Transpose", "Reshape"):
        moves = [op for op in view.readers(result) if op.kind == kind] if result is not None else []
        if len(moves) != 1:
            return False
        result = moves[0].outputs[0]
    laid, values = dims_of(view, result), dims_of(view, form.values)
    batch, heads, length, _ = queries
    width = values[3] if len(values) == RANK else None
    if result is None or len(laid) != RANK - 1 or not isinstance(heads, int) or not isinstance(width, int):
        return False
    readers = (op for op in view.readers(result) if op.kind == "MatMul" and op.inputs[0] == result)
    rows = {shape[-2] for op in readers if len(shape := dims_of(view, op.inputs[1])) > 1}
    return None not in (batch, length) and laid[:2] == (batch, length) and heads * width in {laid[-1], *rows}


def _whole(stated: Sequence[Dims], lengths: Dims) -> bool:
    """True if mask and biases together state every query and every key: the runtime's kernels broadcast neither."""
    ends = [{shape[axis] for shape in stated if len(shape) >= -axis} for axis in (-2, -1)]
    return None not in lengths and all(length in end for length, end in zip(lengths, ends, strict=True))


def _triangular(shown: Array) -> bool:
    rows, keys = shown.shape[-2:] if shown.ndim > 1 else (0, 1)
    return rows == keys and all(bool((shown[..., row, :] == (np.arange(keys) <= row)).all()) for row in range(rows))


def _unbounded(view: View, bias: ValueId, to: DType) -> str | None:
    """Return why a bias may be infinite in the low type; None if it is made of numbers that are finite there."""
    pending, seen = [bias], {bias}
    while pending:
        value = pending.pop()
        dtype = view.dtype(value)
        if dtype is not None and not dtype.floating:
            continue
        tensor, op = view.constant(value), view.producer(value)
        if tensor is not None:
            held = numbers(view, value)
            most = float(np.abs(held).max(initial=0)) if held is not None else np.inf
            if not most <= to.max:
                return f"the bias of its scores reaches {most:.3g}, beyond the range of {to.spelling}"
        elif op is not None and _within_bounds(op):
            continue
        elif op is None or not _bounded(view, op) or len(seen) > _MAX_VALUES:
            return (
                f"the bias of its scores comes from {view.value_name(value)}, which may hold −inf: NaN would become 0"
            )
        else:
            fresh = [v for v in op.operands if v not in seen]
            pending.extend(fresh)
            seen.update(fresh)
    return None


def _within_bounds(op: Op) -> bool:
    fill = attribute(op.node, "value") if op.kind == "ConstantOfShape" else None
    held = to_array(fill.t) if fill is not None else np.zeros(1)
    return op.kind in _SMALL or (op.kind == "ConstantOfShape" and bool(np.isfinite(held).all()))


def _bounded(view: View, op: Op) -> bool:
    """True if an op makes finite numbers of small ones, such as constants and the results of a norm."""
    divisor = number(view, op.inputs[1], axes=1) if op.kind == "Div" else None
    return op.kind in _BOUNDED or (divisor is not None and abs(divisor) >= 1)


_MAX_VALUES = 64
_PICKS = ("Gather", "GatherElements", "GatherND", "Slice")
_BOUNDED = frozenset((*TRACED_MOVES, *_PICKS, *PAIR_SUMS, "Cast", "Concat", "MatMul", "Mul", "Neg", "Where"))
_SMALL = frozenset(("LayerNormalization", "RMSNormalization", "Sigmoid", "Softmax", "Tanh"))
"""Ops whose results are finite and small for all inputs."""
