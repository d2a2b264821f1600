"""Attention written out op by op, as the one operator that opset 23 has for it.

Rows that see no key are the trap. Softmax of finite fills gives every key the same weight; the operator, by its
errata, gives 0, and runtimes have given that, NaN or the mean of all values. So no such row ever reaches the operator:
it is shown every key by a query of zeros, which weighs all keys alike; where the model makes 0 of it, so does a Where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.files.tensors import Array
from amp_rewrite.fuse.attention_form import Form, form_of
from amp_rewrite.fuse.attention_layout import RANK, AllDims, Source, dims_at, keys_source, solved, ungrouped
from amp_rewrite.fuse.attention_nodes import write
from amp_rewrite.fuse.attention_proof import doubt_of
from amp_rewrite.fuse.cone import MOVES, numbers
from amp_rewrite.fuse.fusion import Fusion, Outcome, Refusal
from amp_rewrite.fuse.shapes import Dims
from amp_rewrite.view import Op, OpId, ValueId, View

KIND = "attention"
OPSET = 23
"""The opset from which the standard has Attention."""


def fuse_attention(view: View, to: DType, dims: Callable[[], AllDims]) -> Iterator[Outcome]:
    """Each attention that is written out, as one operator, or why not.

    `dims` is asked only where there is one. `to`: the low type in which it may come to be computed.
    """
    opset = view.opsets.get("", 1)
    if opset < OPSET:
        for last, form in forms(view):
            yield Refusal(
                KIND, last, form if isinstance(form, str) else f"opset {opset} has no Attention; opset {OPSET} has"
            )
        return
    for last, site in sites(view, to, dims):
        yield Refusal(KIND, last, site) if isinstance(site, str) else site.fusion()


def sites(view: View, to: DType, dims: Callable[[], AllDims]) -> Iterator[tuple[OpId, Site | str]]:
    """Each attention that is written out, by its last op: what one operator would read, or why it can not.

    Whatever the opset; nothing is proved yet.
    """
    known: AllDims | None = None
    for last, form in forms(view):
        if isinstance(form, str):
            yield last, form
        else:
            known = solved(view, dims()) if known is None else known
            yield last, _site(view, form, to, known)


def forms(view: View) -> Iterator[tuple[OpId, Form | str]]:
    """Each attention that is written out, by its last op, as far as structure tells; or why it is none."""
    for op in view.ops:
        form = form_of(view, op) if op.kind == "Softmax" else None
        if form is not None:
            yield (op.id, form) if isinstance(form, str) else (form.last.id, form)


@dataclass(frozen=True, slots=True)
class Site:
    """An attention that one operator can compute, as far as structure and shapes tell.

    `causal`: a query sees the keys up to its own, and that is all that its mask says. `hides`: it has a mask to read,
    of the dimensions `mask`, over `lengths` queries and keys. `empty`: a row may see no key. `narrow`: mask or bias
    do not state every query and key.
    """

    view: View
    form: Form
    keys: Source
    values: Source
    lengths: Dims
    mask: Dims = ()
    hides: bool = False
    causal: bool = False
    empty: bool = False
    narrow: bool = False

    @property
    def infinite(self) -> bool:
        """Whether a hidden score is −inf, so that a row without keys is NaN."""
        return self.form.hiding is not None and np.isinf(self.form.hiding.fill)

    def fusion(self) -> Outcome:
        """The operator in place of the ops, or how it differs from them on random inputs."""
        written = write(self)
        why = doubt_of(self, written)
        last = self.form.last
        if why is not None:
            return Refusal(KIND, last.id, why)
        ops = tuple(sorted({*self.form.ops, *_freed(self.view, (*self.keys.ops, *self.values.ops), self.form.ops)}))
        return Fusion(KIND, ops, last.id, written.node, written.weights, ahead=written.ahead, behind=written.behind)


def _freed(view: View, moves: tuple[OpId, ...], ops: tuple[OpId, ...]) -> set[OpId]:
    """The moves that nothing reads any more once the ops are gone."""
    gone = set(ops)
    for op_id in sorted(moves, reverse=True):
        made = view.ops[op_id].outputs[0]
        if made is not None and made not in view.yielded and all(use.op in gone for use in view.uses[made]):
            gone.add(op_id)
    return gone


def _site(view: View, form: Form, to: DType, dims: AllDims) -> Site | str:
    keys, values = keys_source(view, dims, form.keys), Source(form.values)
    shared = ungrouped(view, dims, keys), ungrouped(view, dims, values)
    if shared[0].groups == shared[1].groups:
        keys, values = shared
    queries, at = dims_at(view, dims, form.queries), _moved(dims_at(view, dims, keys.value), keys.perm)
    fault = _misfit(queries, at, dims_at(view, dims, values.value), keys)
    if fault or queries is None:
        return fault or "its rank is not known"
    return _masked(Site(view, form, keys, values, (queries[2], at[2])), dims, queries, to)


def _moved(dims: Dims | None, perm: tuple[int, ...]) -> Dims:
    return tuple(dims[axis] for axis in perm) if dims is not None and len(dims) == len(perm) else ()


def _misfit(queries: Dims | None, keys: Dims, values: Dims | None, source: Source) -> str | None:
    """Why batch and heads of the operands may not be what the operator wants; it broadcasts neither."""
    if not (queries and keys and values) or not len(queries) == len(keys) == len(values) == RANK:
        return "its queries, keys and values are not known to have four axes"
    heads = keys[1] * source.groups if isinstance(keys[1], int) else keys[1] if source.groups == 1 else None
    for words, *sizes in (("batch", queries[0], keys[0], values[0]), ("heads", queries[1], heads)):
        if None in sizes or len(set(sizes)) > 1:
            return f"its queries, keys and values are not known to agree in {words}"
    if keys[1] != values[1] or keys[2] != values[2] or keys[2] is None:
        return "its keys and values are not known to be as many"
    return None


def _masked(site: Site, dims: AllDims, queries: Dims, to: DType) -> Site | str:
    """The site with what is known of its mask and its bias."""
    view, form, hiding, bias = site.view, site.form, site.form.hiding, site.form.bias
    shown = hiding.shown if hiding is not None else None
    if shown is not None and bool(shown.all()):
        hiding = None
    if hiding is not None:
        causal = shown is not None and bias is None and site.lengths == shown.shape[-2:] and _triangular(shown)
        empty = shown is None or not bool(shown.any(axis=-1).all())
        if empty and np.isinf(hiding.fill) and not form.zeroed:
            return "a row of its mask may hide every key: it would give 0 instead of NaN"
        site = replace(site, hides=not causal, causal=causal, empty=empty)
    if bias is not None and (fault := _unbounded(view, bias, to)):
        return fault
    read = [value for value in (form.hiding.value if form.hiding else None, bias) if value is not None]
    for value in read:
        held = numbers(view, value)
        found = held.shape if held is not None else dims_at(view, dims, value)
        if found is None or not 1 <= len(found) <= RANK:
            return "the rank of its mask is not known"
        if not (_broadcasts(found, queries) or _settled(view, dims, form, queries)):
            return "its mask is not known to have the batch, heads and length of its queries, or one"
    stated = [shown.shape if shown is not None else dims_at(view, dims, hiding.value)] if site.hides and hiding else []
    stated += [dims_at(view, dims, bias)] if bias is not None else []
    whole = all(found is not None and _whole(found, site.lengths) for found in stated)
    return replace(site, mask=stated[0] if stated and stated[0] is not None else (), narrow=not whole)


def _broadcasts(mask: Dims, queries: Dims) -> bool:
    """Whether batch, heads and length of a mask are those of the queries, or one."""
    outer = zip(reversed(mask[:-1]), reversed(queries[:-1]), strict=False)
    return all(d is not None and d in (1, whole) for d, whole in outer)


def _settled(view: View, dims: AllDims, form: Form, queries: Dims) -> bool:
    """Whether the result is laid out as [batch, queries, heads · width] of the queries and values themselves.

    A mask of more than their batch, heads or queries would make more elements than that.
    """
    result = form.last.outputs[0]
    for kind in ("Transpose", "Reshape"):
        moves = [op for op in view.readers(result) if op.kind == kind] if result is not None else []
        if len(moves) != 1:
            return False
        result = moves[0].outputs[0]
    laid = dims_at(view, dims, result) if result is not None else None
    values = dims_at(view, dims, form.values)
    if laid is None or values is None or not isinstance(queries[1], int) or not isinstance(values[3], int):
        return False
    readers = view.readers(result) if result is not None else ()
    widths = {laid[-1], *(_rows(view, dims, op) for op in readers if op.inputs[0] == result)}
    known = len(laid) == 3 and None not in (queries[0], queries[2]) and laid[:2] == (queries[0], queries[2])
    return known and queries[1] * values[3] in widths


def _rows(view: View, dims: AllDims, product: Op) -> int | str | None:
    """How many rows the second operand of a product has; None of what is no product."""
    second = product.inputs[1] if product.kind == "MatMul" else None
    found = dims_at(view, dims, second) if second is not None else None
    return found[-2] if found is not None and len(found) > 1 else None


def _whole(found: Dims, lengths: Dims) -> bool:
    """Whether a mask states every query and every key: the runtime's kernels broadcast neither."""
    return len(found) > 1 and None not in lengths and found[-2:] == lengths


def _triangular(shown: Array) -> bool:
    rows, keys = shown.shape[-2:] if shown.ndim > 1 else (0, 1)
    return rows == keys and shown.size == rows * keys and bool((shown == np.tri(rows, dtype=bool)).all())


def _unbounded(view: View, bias: ValueId, to: DType) -> str | None:
    """Why a bias may hold what is not finite in the low type; None where it is made of numbers that are."""
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
        elif op is None or op.kind not in _BOUNDED or len(seen) > _MOST_VALUES:
            return (
                f"the bias of its scores comes from {view.value_name(value)}, which may hold −inf: NaN would become 0"
            )
        else:
            fresh = [v for v in op.inputs if v is not None and v not in seen]
            pending.extend(fresh)
            seen.update(fresh)
    return None


_MOST_VALUES = 64
_BOUNDED = frozenset(
    (*MOVES, "Add", "Cast", "Concat", "Constant", "Gather", "GatherND", "Mul", "Neg", "Slice", "Sub", "Where")
)
"""Ops that make finite numbers of finite ones, if those are small: they are, at most the largest of the low type."""
