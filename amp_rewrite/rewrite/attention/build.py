"""Attention written out op by op, as the one operator that opset 23 has for it, with nodes that arrange its operands.

Rows that see no key are the trap. Softmax of finite fills gives every key the same weight; the operator, by its
errata, gives 0, and runtimes have given that, NaN or the mean of all values. So no such row ever reaches the operator:
it is shown every key by a query of zeros, which weighs all keys alike; where the model makes 0 of it, so does a Where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto
from onnx.numpy_helper import to_array

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.dataflow import confined
from amp_rewrite.ir.versions import FIRST_AXES_INPUT, FIRST_FUSED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.layout import OperandSource
from amp_rewrite.rewrite.attention.legality import FusibleAttention, WrittenAttention, sites
from amp_rewrite.rewrite.attention.recognize import LOST, OUT_OF_REACH
from amp_rewrite.rewrite.builder import Surroundings
from amp_rewrite.rewrite.equivalence import Trial, as_float64, difference
from amp_rewrite.rewrite.reference import Arrays
from amp_rewrite.rewrite.replacement import ATTENTION, Context, Outcome, Refusal, as_outcome, fused_node, too_old

_MAX_STORED = 1 << 24  # flags of a mask that a file gets as a constant


def fuse_attention(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention by one operator, or refuse it."""
    first = FIRST_FUSED["Attention"]
    for last, site in sites(view, context):
        if isinstance(site, str):
            yield Refusal(ATTENTION, last, site)
        elif view.opset < first:
            yield Refusal(ATTENTION, last, too_old(view.opset, "Attention", first, context))
        else:
            written = write(site)
            yield as_outcome(ATTENTION, last, mismatch_of(site, written) or written)


def write(site: FusibleAttention) -> WrittenAttention:
    """Return the nodes of a site. Those of its mask alone have the same names wherever that mask is read."""
    return _AttentionWriter(site).written()


def _with_freed(view: View, ops: Iterable[OpId], moves: Iterable[OpId]) -> tuple[OpId, ...]:
    gone = set(ops)
    for op_id in sorted(moves, reverse=True):
        if confined(view, view.ops[op_id].outputs[0], gone):
            gone.add(op_id)
    return tuple(sorted(gone))


class SeenRows(Surroundings):
    """Nodes around one attention, with a test of the rows of its mask that show a key."""

    def __init__(self, site: FusibleAttention, *, typed: bool = False) -> None:
        super().__init__(site.view, site.form.last, typed=typed)
        self.site = site

    def bools(self) -> str:
        """Return a bool, true for the visible keys of the mask."""
        hiding = self.site.form.hiding
        assert hiding is not None
        stem = self.view.value_name(hiding.value)
        if hiding.counts:
            least = self.constant(f"{stem}_least", np.array(OUT_OF_REACH, np.float32))
            return self.before("Greater", (stem, least), f"{stem}_shown")
        return stem if hiding.shows else self.before("Not", (stem,), f"{stem}_shown")

    def rows(self, shown: str) -> str:
        """Return a bool of the rows in which a mask shows a key. A count beyond the low type is infinite, and not 0."""
        counted = self.before("Cast", (shown,), f"{shown}_counted", to=self.site.low.code)
        keys = self.over("ReduceSum", counted, -1, f"{shown}_keys", keepdims=1)
        return self.before("Cast", (keys,), f"{shown}_seeing", to=TensorProto.BOOL)

    def over(self, op_type: str, read: str, axis: int, stem: str, **stated: Any) -> str:
        """Add a node over one axis, in the form of the opset."""
        if self.view.opset < FIRST_AXES_INPUT:
            return self.before(op_type, (read,), stem, axes=[axis], **stated)
        return self.before(op_type, (read, self.constant(f"{stem}_axis", np.array([axis]))), stem, **stated)

    def zero(self, stem: str) -> str:
        """Return a constant 0."""
        return self.constant(f"{stem}_zero", np.zeros((), np.float32))


class _AttentionWriter(SeenRows):
    def __init__(self, site: FusibleAttention) -> None:
        super().__init__(site)
        self.shown: str | None = None

    def written(self) -> WrittenAttention:
        site, last = self.site, self.site.form.last
        result = last.node.output[0]
        queries = self._operand(site.queries, "queries")
        keys = self._operand(site.keys, "keys")
        values = self._operand(site.values, "values")
        mask, seeing = self._mask()
        zeroed = seeing is not None and site.form.zeroed and site.infinite
        if seeing is not None and not zeroed:
            queries = self.before("Where", (seeing, queries, self.zero(seeing)), f"{result}_queries")
        reads = [queries, keys, values, *([mask] if mask is not None else [])]
        attended = self._ended(result, seeing if zeroed else None)
        attributes = {"scale": site.form.scale, **({"is_causal": 1} if site.causal else {})}
        node = fused_node("Attention", last, reads, [attended], attributes)
        ops = _with_freed(site.view, site.form.ops, (*site.keys.ops, *site.values.ops))
        return WrittenAttention(ATTENTION, ops, last.id, node, **self.parts(), shown=self.shown)

    def _operand(self, source: OperandSource, words: str) -> str:
        name = self.view.value_name(source.value)
        if source.perm == (0, 1, 2, 3):
            return name
        return self.before("Transpose", (name,), f"{self.site.form.last.node.output[0]}_{words}", perm=source.perm)

    def _ended(self, result: str, seeing: str | None) -> str:
        if seeing is None:
            return result
        attended = self.name(f"{result}_attended")
        self.after("Where", (seeing, attended, self.zero(seeing)), result)
        return attended

    # -- the mask ----------------------------------------------------------------------------------

    def _mask(self) -> tuple[str | None, str | None]:
        form, seeing = self.site.form, None
        mask = None
        for bias in (self.view.value_name(bias) for bias in form.biases):
            mask = bias if mask is None else self.before("Add", (mask, bias), f"{mask}_{bias}")
        if self.site.hides:
            shown, seeing = self._shown()
            mask = self._masked(mask, shown, seeing) if mask is not None else shown
        return mask, seeing

    def _masked(self, bias: str, shown: str, seeing: str | None) -> str:
        """Return a bias with a number far below any score at hidden keys; 0 in rows without keys."""
        stem = f"{bias}_{shown}"
        if seeing is not None and not self.site.infinite:
            bias = self.before("Where", (seeing, bias, self.zero(stem)), f"{stem}_seeing")
        fill = self.constant(f"{stem}_fill", np.array(LOST, np.float32))
        return self.before("Where", (shown, bias, fill), stem)

    def _shown(self) -> tuple[str, str | None]:
        """Return a bool that shows some key in each row; and, if the model's may show none, the rows where it does."""
        hiding = self.site.form.hiding
        assert hiding is not None
        stem = self.view.value_name(hiding.value)
        known = hiding.shown if hiding.shown is None or hiding.shown.size <= _MAX_STORED else None
        if known is not None and not (hiding.shows and self.site.boolean):
            shown = self.shown = self.constant(f"{stem}_shown", known)
        else:
            shown = self.bools()
        if not self.site.empty:
            return shown, None
        seeing = self.rows(shown)
        blind = self.before("Not", (seeing,), f"{stem}_blind")
        return self.before("Or", (shown, blind), f"{stem}_seen"), seeing


# -- proof -----------------------------------------------------------------------------------------
# Both are run on small random operands, with rows whose mask hides every key wherever the mask may have one.

SPREADS = (1.0, 1e-3, 4.0)
QUERIES, KEYS = 3, 5
_BATCH, _HEADS, _WIDTH, _VALUES = 2, 2, 4, 6


def mismatch_of(site: FusibleAttention, written: WrittenAttention) -> str | None:
    """Return how the written nodes differ from the ops; None if both agree."""
    sources = site.queries, site.keys, site.values
    names = [site.view.value_name(source.value) for source in sources]
    square = site.causal or len(set(names)) < len(names)
    heads = (_HEADS * site.keys.groups, _HEADS)
    sizes = AttentionSizes(heads, KEYS if square else QUERIES, _WIDTH, _WIDTH if square else _VALUES)

    def feeds(*operands: Array) -> tuple[Sequence[Array], Arrays]:
        stored = (x.transpose(np.argsort(source.perm)) for source, x in zip(sources, operands, strict=True))
        read = dict(zip(names, stored, strict=True))  # one value may be two operands
        q, k, v = (read[name].transpose(source.perm) for source, name in zip(sources, names, strict=True))
        return (q, k, v), read

    return compared(site, written, sizes, feeds)


class AttentionSizes(NamedTuple):
    """The heads of queries and of keys, the number of queries, and the width of keys and of values."""

    heads: tuple[int, int]
    length: int
    width: int
    depth: int


def compared(
    site: FusibleAttention,
    written: WrittenAttention,
    sizes: AttentionSizes,
    feeds: Callable[..., tuple[Sequence[Array], Arrays]],
    layout: Callable[[Array], Array] = np.asarray,
) -> str | None:
    """Return how the nodes differ from the ops on random operands; None if both agree.

    `feeds` returns queries, keys and values with heads apart as the ops have them, keys not transposed and heads not
    repeated, and feeds of the nodes. `laid` lays the result of the ops out as the nodes have it.
    """
    result, nodes = site.form.last.node.output[0], written.nodes
    trials = list(_trials(site, written, sizes, feeds))
    ops = {*site.form.ops, *site.form.beside}
    return difference(site.view, ops, nodes, {result: nodes[-1].output[0]}, trials, layout=layout)


def _trials(
    site: FusibleAttention,
    written: WrittenAttention,
    sizes: AttentionSizes,
    feeds: Callable[..., tuple[Sequence[Array], Arrays]],
) -> Iterator[Trial]:
    """Yield the trials. An error of UNIT in a score s, by the scale, is one of 2 |s| UNIT in the result at most."""
    rng, form = np.random.default_rng(0), site.form
    constants = {w.name: as_float64(to_array(w)) for w in written.weights}
    for spread in SPREADS:
        q = spread * rng.standard_normal((_BATCH, sizes.heads[0], sizes.length, sizes.width))
        k = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.width))
        v = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.depth))
        (q, k, v), read = feeds(q, k, v)
        groups = q.shape[1] // k.shape[1]
        turned, whole = np.repeat(k.swapaxes(-1, -2), groups, 1), np.repeat(v, groups, 1)
        masks, shown = _masks(site, rng, (*q.shape[:3], k.shape[2]))
        after = {**constants, **read, **masks, **({written.shown: shown} if written.shown is not None else {})}
        magnitude = np.abs(v).max() * max(1.0, np.abs(q @ turned).max() * form.scale)
        yield Trial({**_operands_of(site, q, turned, whole), **masks}, after, float(magnitude))


def _operands_of(site: FusibleAttention, *operands: Array) -> dict[str, Array]:
    values = site.form.queries, site.form.keys, site.form.values
    return {site.view.value_name(value): array for value, array in zip(values, operands, strict=True)}


def drawn_operands(
    site: FusibleAttention, rng: np.random.Generator
) -> tuple[dict[str, Array], tuple[int, ...], tuple[int, ...]]:
    """Return random operands of the ops of an attention by name, and the shapes of biases of its keys and values."""
    length = KEYS if site.causal else QUERIES
    shapes = (length, _WIDTH), (_WIDTH, KEYS), (KEYS, _VALUES)
    masks, _ = _masks(site, rng, (_BATCH, _HEADS, length, KEYS))
    feed = _operands_of(site, *(rng.standard_normal((_BATCH, _HEADS, *shape)) for shape in shapes))
    return {**feed, **masks}, (1, _HEADS, _WIDTH, 1), (1, _HEADS, 1, _VALUES)


def _masks(site: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]) -> tuple[dict[str, Array], Array]:
    view, form = site.view, site.form
    shown = np.ones(scores[-2:], bool)
    fed: dict[str, Array] = {}
    if form.hiding is not None:
        if site.causal:
            shown = np.tri(*scores[-2:], dtype=bool)
        elif site.hides:
            shown = _random_mask(site, rng, scores)
        hiding = form.hiding
        if hiding.nothing is not None:
            fed[view.value_name(hiding.nothing)] = np.zeros(())
        seen = rng.standard_normal(shown.shape) if hiding.counts else 0.0
        fed[view.value_name(hiding.value)] = (
            shown == hiding.shows if site.boolean else np.where(shown, seen, hiding.fill)
        )
    for bias in form.biases:
        if form.hiding is not None and bias == form.hiding.value:
            continue
        fed[view.value_name(bias)] = rng.standard_normal(scores[-2:])
    return fed, shown


def _random_mask(site: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]) -> Array:
    whole = (None, None, *site.lengths)[-len(site.mask) :]
    sizes = zip(site.mask, whole, scores[-len(site.mask) :], strict=True)
    shape = [1 if d == 1 and full != 1 else size for d, full, size in sizes]
    shown = rng.random(shape) < 0.6
    shown[..., 0] = True
    if site.empty:
        shown[(0,) * (len(shape) - 1)] = False
    return shown
