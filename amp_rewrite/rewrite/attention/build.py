"""Attention written out op by op, as the one operator that opset 23 has for it, with nodes that arrange its operands.

Rows that see no key are the trap. Softmax of finite fills gives every key the same weight; the operator, by its
errata, gives 0, and runtimes have given that, NaN or the mean of all values. So no such row ever reaches the operator:
it is shown every key by a query of zeros, which weighs all keys alike; where the model makes 0 of it, so does a Where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import TensorProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.builder import Surroundings
from amp_rewrite.ir.dataflow import confined
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.equivalence import mismatch_of
from amp_rewrite.rewrite.attention.layout import OperandSource
from amp_rewrite.rewrite.attention.legality import FusibleAttention, WrittenAttention, forms, sites
from amp_rewrite.rewrite.attention.masks import LOST, OUT_OF_REACH
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, fused_node, judged, too_old

KIND = "attention"
_QUERY_AXIS = 2


def fuse_attention(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention by one operator, or refuse it."""
    opset = view.opset
    first = FIRST_FUSED["Attention"]
    if opset < first:
        for last, form in forms(view):
            yield Refusal(KIND, last, form if isinstance(form, str) else too_old(opset, "Attention", first, context))
        return
    for last, site in sites(view, context):
        if isinstance(site, str):
            yield Refusal(KIND, last, site)
        else:
            written = write(site)
            yield judged(KIND, last, mismatch_of(site, written) or written)


def write(site: FusibleAttention) -> WrittenAttention:
    """Return the nodes of a site. Those of its mask alone have the same names wherever that mask is read."""
    return _AttentionWriter(site).written()


def _with_freed(view: View, ops: Iterable[OpId], moves: Iterable[OpId]) -> tuple[OpId, ...]:
    gone = set(ops)
    for op_id in sorted(moves, reverse=True):
        if confined(view, view.ops[op_id].outputs[0], gone):
            gone.add(op_id)
    return tuple(sorted(gone))


class _AttentionWriter(Surroundings):
    def __init__(self, site: FusibleAttention) -> None:
        super().__init__(site.view, site.form.last)
        self.view, self.site = site.view, site
        self.shown: str | None = None

    def constant(self, stem: str, values: Array) -> str:
        return super().constant(stem, np.ascontiguousarray(values))

    def written(self) -> WrittenAttention:
        site, last = self.site, self.site.form.last
        result = last.node.output[0]
        queries = self._operand(site.queries, "queries")
        keys = self._operand(site.keys, "keys")
        values = self._operand(site.values, "values")
        mask, seeing = self._mask(queries, keys)
        zeroed = seeing is not None and site.form.zeroed and site.infinite
        if seeing is not None and not zeroed:
            queries = self.before("Where", (seeing, queries, self._zero(seeing)), f"{result}_queries")
        reads = [queries, keys, values, *([mask] if mask is not None else [])]
        attended = self._ended(result, seeing if zeroed else None)
        attributes = {"scale": site.form.scale, **({"is_causal": 1} if site.causal else {})}
        node = fused_node("Attention", last, reads, [attended], attributes)
        ops = _with_freed(site.view, site.form.ops, (*site.keys.ops, *site.values.ops))
        return WrittenAttention(KIND, ops, last.id, node, **self.parts(), shown=self.shown)

    def _operand(self, source: OperandSource, words: str) -> str:
        name = self.view.value_name(source.value)
        if source.perm == (0, 1, 2, 3):
            return name
        return self.before("Transpose", (name,), f"{self.site.form.last.node.output[0]}_{words}", perm=source.perm)

    def _ended(self, result: str, seeing: str | None) -> str:
        if seeing is None:
            return result
        attended = self.name(f"{result}_attended")
        self.after("Where", (seeing, attended, self._zero(seeing)), result)
        return attended

    def _zero(self, stem: str) -> str:
        return self.constant(f"{stem}_zero", np.zeros((), np.float32))

    # -- the mask ----------------------------------------------------------------------------------

    def _mask(self, queries: str, keys: str) -> tuple[str | None, str | None]:
        form, seeing = self.site.form, None
        mask = None
        for bias in (self.view.value_name(bias) for bias in form.biases):
            mask = bias if mask is None else self.before("Add", (mask, bias), f"{mask}_{bias}")
        if self.site.hides:
            shown, seeing = self._shown()
            mask = self._masked(mask, shown, seeing) if mask is not None else shown
        if mask is not None and self.site.narrow:
            mask = self._widened(mask, queries, keys)
        return mask, seeing

    def _masked(self, bias: str, shown: str, seeing: str | None) -> str:
        """Return a bias with a number far below any score at hidden keys; 0 in rows without keys."""
        stem = f"{bias}_{shown}"
        if seeing is not None and not self.site.infinite:
            bias = self.before("Where", (seeing, bias, self._zero(stem)), f"{stem}_seeing")
        fill = self.constant(f"{stem}_fill", np.array(LOST, np.float32))
        return self.before("Where", (shown, bias, fill), stem)

    def _shown(self) -> tuple[str, str | None]:
        """Return a bool that shows some key in each row; and, if the model's may show none, the rows where it does."""
        hiding = self.site.form.hiding
        assert hiding is not None
        stem = self.view.value_name(hiding.value)
        if hiding.shown is not None and not (hiding.shows and self.site.boolean):
            shown = self.shown = self.constant(f"{stem}_shown", hiding.shown)
        elif hiding.counts:
            least = self.constant(f"{stem}_least", np.array(OUT_OF_REACH, np.float32))
            shown = self.before("Greater", (stem, least), f"{stem}_shown")
        elif hiding.shown is not None or hiding.shows:
            shown = stem
        else:
            shown = self.before("Not", (stem,), f"{stem}_shown")
        if not self.site.empty:
            return shown, None
        axis = self.constant(f"{stem}_keys_axis", np.array([-1], np.int64))
        counted = self.before("Cast", (shown,), f"{stem}_counted", to=TensorProto.INT32)
        most = self.before("ReduceMax", (counted, axis), f"{stem}_most", keepdims=1)
        seeing = self.before("Cast", (most,), f"{stem}_seeing", to=TensorProto.BOOL)
        blind = self.before("Not", (seeing,), f"{stem}_blind")
        return self.before("Or", (shown, blind), f"{stem}_seen"), seeing

    def _widened(self, mask: str, queries: str, keys: str) -> str:
        lengths = self.site.lengths
        stem = f"{self.site.form.last.node.output[0]}_mask" if None in lengths else f"{mask}_{lengths[0]}_{lengths[1]}"
        stated = [
            self.before("Shape", (read,), f"{stem}_{words}", start=_QUERY_AXIS, end=_QUERY_AXIS + 1)
            for read, words in ((queries, "queries"), (keys, "keys"))
        ]
        shape = self.before("Concat", stated, f"{stem}_lengths", axis=0)
        return self.before("Expand", (mask, shape), f"{stem}_whole")
