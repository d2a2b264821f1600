"""Fusion of written-out attentions into the Attention operator of opset 23, with nodes to arrange its operands.

Rows without visible keys are the difficulty. With finite fills, the softmax of such a row gives all keys the same
weight. The operator returns 0 according to its errata, but runtimes have returned 0, NaN or the mean of all values. So
the operator never sees such a row: its mask shows every key instead, and its query becomes zero, which weighs all keys
equally. If the model returns 0 for such a row, a Where does so after the operator.
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
from amp_rewrite.rewrite.attention.legality import AttentionReplacement, FusibleAttention, fusible_attentions
from amp_rewrite.rewrite.attention.recognize import ABSORBING, NEGLIGIBLE
from amp_rewrite.rewrite.builder import NewNodes
from amp_rewrite.rewrite.equivalence import Trial, as_float64, difference
from amp_rewrite.rewrite.reference import Arrays
from amp_rewrite.rewrite.replacement import ATTENTION, Context, Outcome, Refusal, as_outcome, fused_node, too_old

_MAX_STORED = 1 << 24  # elements of a mask stored as a constant


def fuse_attention(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention with one operator, or refuse it."""
    first = FIRST_FUSED["Attention"]
    for last, attention in fusible_attentions(view, context):
        if isinstance(attention, str):
            yield Refusal(ATTENTION, last, attention)
        elif view.opset < first:
            yield Refusal(ATTENTION, last, too_old(view.opset, "Attention", first, context))
        else:
            replacement = write_attention(attention)
            yield as_outcome(ATTENTION, last, attention_mismatch(attention, replacement) or replacement)


def write_attention(attention: FusibleAttention) -> AttentionReplacement:
    """Return the replacement of an attention. All readers of a mask share the nodes computed from the mask only."""
    return _AttentionWriter(attention).written()


def _with_unread(view: View, ops: Iterable[OpId], moves: Iterable[OpId]) -> tuple[OpId, ...]:
    removed = set(ops)
    for op_id in sorted(moves, reverse=True):
        if confined(view, view.ops[op_id].outputs[0], removed):
            removed.add(op_id)
    return tuple(sorted(removed))


class AttentionNodes(NewNodes):
    """Nodes around one attention, including a test for rows of the mask with a visible key."""

    def __init__(self, attention: FusibleAttention, *, typed: bool = False) -> None:
        super().__init__(attention.view, attention.match.last, typed=typed)
        self.attention = attention

    def visible_keys(self) -> str:
        """Add a bool value, True for each visible key; return its name."""
        score_mask = self.attention.match.score_mask
        assert score_mask is not None
        stem = self.view.value_name(score_mask.value)
        if score_mask.graded:
            least = self.constant(f"{stem}_least", np.array(NEGLIGIBLE, np.float32))
            return self.before("Greater", (stem, least), f"{stem}_shown")
        return stem if score_mask.visible_if else self.before("Not", (stem,), f"{stem}_shown")

    def attending_rows(self, visible: str) -> str:
        """Add a bool value, True for each row with visible keys; return its name.

        A count beyond the range of the low type is infinite, which is also nonzero.
        """
        counted = self.before("Cast", (visible,), f"{visible}_counted", to=self.attention.low.code)
        keys = self.over_axis("ReduceSum", counted, -1, f"{visible}_keys", keepdims=1)
        return self.before("Cast", (keys,), f"{visible}_seeing", to=TensorProto.BOOL)

    def over_axis(self, op_type: str, source: str, axis: int, stem: str, **attributes: Any) -> str:
        """Add a node over one axis, in the opset's form; return the name of its result."""
        if self.view.opset < FIRST_AXES_INPUT:
            return self.before(op_type, (source,), stem, axes=[axis], **attributes)
        return self.before(op_type, (source, self.constant(f"{stem}_axis", np.array([axis]))), stem, **attributes)

    def zero(self, stem: str) -> str:
        return self.constant(f"{stem}_zero", np.zeros((), np.float32))


class _AttentionWriter(AttentionNodes):
    def __init__(self, attention: FusibleAttention) -> None:
        super().__init__(attention)
        self.visible: str | None = None

    def written(self) -> AttentionReplacement:
        attention, last = self.attention, self.attention.match.last
        result = last.node.output[0]
        queries = self._operand(attention.queries, "queries")
        keys = self._operand(attention.keys, "keys")
        values = self._operand(attention.values, "values")
        mask, attending = self._mask()
        zeroes_nan = attending is not None and attention.match.zeroes_nan and attention.infinite_fill
        if attending is not None and not zeroes_nan:
            queries = self.before("Where", (attending, queries, self.zero(attending)), f"{result}_queries")
        inputs = [queries, keys, values, *([mask] if mask is not None else [])]
        attended = self._result_name(result, attending if zeroes_nan else None)
        attributes = {"scale": attention.match.scale, **({"is_causal": 1} if attention.causal else {})}
        node = fused_node("Attention", last, inputs, [attended], attributes)
        ops = _with_unread(attention.view, attention.match.ops, (*attention.keys.ops, *attention.values.ops))
        return AttentionReplacement(ATTENTION, ops, last.id, node, **self.parts(), visible=self.visible)

    def _operand(self, source: OperandSource, suffix: str) -> str:
        name = self.view.value_name(source.value)
        if source.perm == (0, 1, 2, 3):
            return name
        (result,) = self.attention.match.last.node.output
        return self.before("Transpose", (name,), f"{result}_{suffix}", perm=source.perm)

    def _result_name(self, result: str, attending: str | None) -> str:
        if attending is None:
            return result
        attended = self.name(f"{result}_attended")
        self.after("Where", (attending, attended, self.zero(attending)), result)
        return attended

    # -- the mask ----------------------------------------------------------------------------------

    def _mask(self) -> tuple[str | None, str | None]:
        match, attending = self.attention.match, None
        mask = None
        for bias in (self.view.value_name(bias) for bias in match.biases):
            mask = bias if mask is None else self.before("Add", (mask, bias), f"{mask}_{bias}")
        if self.attention.needs_mask:
            visible, attending = self._mask_without_empty_rows()
            mask = self._masked_bias(mask, visible, attending) if mask is not None else visible
        return mask, attending

    def _masked_bias(self, bias: str, visible: str, attending: str | None) -> str:
        """Add a copy of a bias: far below any score at hidden keys, and 0 in rows without visible keys."""
        stem = f"{bias}_{visible}"
        if attending is not None and not self.attention.infinite_fill:
            bias = self.before("Where", (attending, bias, self.zero(stem)), f"{stem}_seeing")
        fill = self.constant(f"{stem}_fill", np.array(ABSORBING, np.float32))
        return self.before("Where", (visible, bias, fill), stem)

    def _mask_without_empty_rows(self) -> tuple[str, str | None]:
        """Add a bool mask with a visible key in each row, and return its name.

        Also return the name of a bool value that is True for rows with visible keys in the model's own mask; None if
        all rows have visible keys.
        """
        score_mask = self.attention.match.score_mask
        assert score_mask is not None
        stem = self.view.value_name(score_mask.value)
        stored = score_mask.visible if score_mask.visible is None or score_mask.visible.size <= _MAX_STORED else None
        if stored is not None and not (score_mask.visible_if and self.attention.boolean):
            visible = self.visible = self.constant(f"{stem}_shown", stored)
        else:
            visible = self.visible_keys()
        if not self.attention.has_empty_rows:
            return visible, None
        attending = self.attending_rows(visible)
        empty_rows = self.before("Not", (attending,), f"{stem}_blind")
        return self.before("Or", (visible, empty_rows), f"{stem}_seen"), attending


# -- verification ----------------------------------------------------------------------------------
# Ops and nodes run on small random operands. If the mask may have rows without visible keys, the random mask has some.

SPREADS = (1.0, 1e-3, 4.0)
QUERIES, KEYS = 3, 5
_BATCH, _HEADS, _WIDTH, _VALUES = 2, 2, 4, 6


def attention_mismatch(attention: FusibleAttention, replacement: AttentionReplacement) -> str | None:
    """Return how the nodes of a replacement differ from the ops; None if they agree."""
    sources = attention.queries, attention.keys, attention.values
    names = [attention.view.value_name(source.value) for source in sources]
    square = attention.causal or len(set(names)) < len(names)
    heads = (_HEADS * attention.keys.groups, _HEADS)
    sizes = AttentionSizes(heads, KEYS if square else QUERIES, _WIDTH, _WIDTH if square else _VALUES)

    def feeds(*operands: Array) -> tuple[Sequence[Array], Arrays]:
        stored = (x.transpose(np.argsort(source.perm)) for source, x in zip(sources, operands, strict=True))
        feed = dict(zip(names, stored, strict=True))  # the same value may be two operands
        q, k, v = (feed[name].transpose(source.perm) for source, name in zip(sources, names, strict=True))
        return (q, k, v), feed

    return compare(attention, replacement, sizes, feeds)


class AttentionSizes(NamedTuple):
    """The numbers of heads of queries and of keys, the number of queries, and the widths of keys and values."""

    heads: tuple[int, int]
    length: int
    width: int
    depth: int


def compare(
    attention: FusibleAttention,
    replacement: AttentionReplacement,
    sizes: AttentionSizes,
    feeds: Callable[..., tuple[Sequence[Array], Arrays]],
    layout: Callable[[Array], Array] = np.asarray,
) -> str | None:
    """Return how the nodes differ from the ops on random operands; None if they agree.

    `feeds` returns two things: queries, keys and values with separate heads, before keys are transposed and heads
    repeated; and the feed of the nodes. `layout` converts the result of the ops to the layout of the nodes' result.
    """
    result, nodes = attention.match.last.node.output[0], replacement.nodes
    trials = list(_trials(attention, replacement, sizes, feeds))
    ops = {*attention.match.ops, *attention.match.shared_ops}
    return difference(attention.view, ops, nodes, {result: nodes[-1].output[0]}, trials, layout=layout)


def _trials(
    attention: FusibleAttention,
    replacement: AttentionReplacement,
    sizes: AttentionSizes,
    feeds: Callable[..., tuple[Sequence[Array], Arrays]],
) -> Iterator[Trial]:
    """Yield the trials. For scores s, a relative error of UNIT in the scale changes a result by at most 2 |s| UNIT."""
    rng, match = np.random.default_rng(0), attention.match
    constants = {w.name: as_float64(to_array(w)) for w in replacement.weights}
    for spread in SPREADS:
        q = spread * rng.standard_normal((_BATCH, sizes.heads[0], sizes.length, sizes.width))
        k = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.width))
        v = rng.standard_normal((_BATCH, sizes.heads[1], KEYS, sizes.depth))
        (q, k, v), feed = feeds(q, k, v)
        groups = q.shape[1] // k.shape[1]
        keys, values = np.repeat(k.swapaxes(-1, -2), groups, 1), np.repeat(v, groups, 1)
        masks, visible = _masks(attention, rng, (*q.shape[:3], k.shape[2]))
        stored = {replacement.visible: visible} if replacement.visible is not None else {}
        after = {**constants, **feed, **masks, **stored}
        magnitude = np.abs(v).max() * max(1.0, np.abs(q @ keys).max() * match.scale)
        yield Trial({**_operand_feed(attention, q, keys, values), **masks}, after, float(magnitude))


def _operand_feed(attention: FusibleAttention, *operands: Array) -> dict[str, Array]:
    values = attention.match.queries, attention.match.keys, attention.match.values
    return {attention.view.value_name(value): array for value, array in zip(values, operands, strict=True)}


def random_operands(
    attention: FusibleAttention, rng: np.random.Generator
) -> tuple[dict[str, Array], tuple[int, ...], tuple[int, ...]]:
    """Return random operands of an attention by name, and the shapes of the biases of its keys and values."""
    length = KEYS if attention.causal else QUERIES
    shapes = (length, _WIDTH), (_WIDTH, KEYS), (KEYS, _VALUES)
    masks, _ = _masks(attention, rng, (_BATCH, _HEADS, length, KEYS))
    feed = _operand_feed(attention, *(rng.standard_normal((_BATCH, _HEADS, *shape)) for shape in shapes))
    return {**feed, **masks}, (1, _HEADS, _WIDTH, 1), (1, _HEADS, 1, _VALUES)


def _masks(
    attention: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]
) -> tuple[dict[str, Array], Array]:
    view, match = attention.view, attention.match
    visible = np.ones(scores[-2:], bool)
    feed: dict[str, Array] = {}
    mask = match.score_mask
    if mask is not None:
        if attention.causal:
            visible = np.tri(*scores[-2:], dtype=bool)
        elif attention.needs_mask:
            visible = _random_mask(attention, rng, scores)
        if mask.zero_operand is not None:
            feed[view.value_name(mask.zero_operand)] = np.zeros(())
        grades = rng.standard_normal(visible.shape) if mask.graded else 0.0
        added = np.where(visible, grades, mask.fill)
        feed[view.value_name(mask.value)] = visible == mask.visible_if if attention.boolean else added
    for bias in match.biases:
        if mask is None or bias != mask.value:
            feed[view.value_name(bias)] = rng.standard_normal(scores[-2:])
    return feed, visible


def _random_mask(attention: FusibleAttention, rng: np.random.Generator, scores: tuple[int, ...]) -> Array:
    full = (None, None, *attention.lengths)[-len(attention.mask_dims) :]
    sizes = zip(attention.mask_dims, full, scores[-len(attention.mask_dims) :], strict=True)
    shape = [1 if d == 1 and full != 1 else size for d, full, size in sizes]
    visible = rng.random(shape) < 0.6
    visible[..., 0] = True
    if attention.has_empty_rows:
        visible[(0,) * (len(shape) - 1)] = False
    return visible
