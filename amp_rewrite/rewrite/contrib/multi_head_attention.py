"""Fusion of written-out attentions into onnxruntime's MultiHeadAttention, at every opset.

The operator reads queries and returns its result as tokens by features, while exporters split and transpose the heads.
It adds a bias to the scores, while exporters apply a Boolean mask with Where. Rows without visible keys are handled as
in `attention`: a query of zeros weighs all keys equally, and if the model returns 0 for such a row, a Where does so
after the operator.

A causal attention that repeats each head of keys and values for several heads of queries becomes GroupQueryAttention,
which reads the heads unrepeated. CUDA only has low kernels for it, so `Context.low_only` must allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from onnx import NodeProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.dataflow import number, only_reader
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.attention.build import KEYS, QUERIES, AttentionNodes, AttentionSizes, compare
from amp_rewrite.rewrite.attention.layout import RANK, SWAP, head_split
from amp_rewrite.rewrite.attention.legality import AttentionReplacement, FusibleAttention, fusible_attentions
from amp_rewrite.rewrite.const_eval import permutation
from amp_rewrite.rewrite.reference import DOMAIN, Arrays, rotated
from amp_rewrite.rewrite.replacement import GROUPED_ATTENTION, Context, Outcome, Replacement, as_outcome, fused_node

KIND = "multi_head_attention"
ROTARY_KIND = f"{DOMAIN}::RotaryEmbedding"


def _packed(array: Array) -> Array:
    """Return [batch, heads, tokens, width] as tokens by features."""
    batch, heads, tokens, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, tokens, heads * width)


_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "packed": _packed,
    "heads": lambda array: array,
    "turned": lambda array: array.swapaxes(-1, -2),
}
"""Layouts: tokens by features; heads, tokens, width; heads, width, tokens."""


_OPERANDS = ("queries", "keys", "values")
_MAX_HEAD_WIDTH = 256  # for the fast kernels of GroupQueryAttention


def multi_head_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention with one node, or refuse it; `attention` reports other refusals."""
    for last, attention in fusible_attentions(view, context):
        if not isinstance(attention, str):
            yield as_outcome(KIND, last, _fused(attention, grouped=context.low_only))


def _fused(attention: FusibleAttention, *, grouped: bool) -> Replacement | str:
    match = attention.match
    queries, values = (dims_of(attention.view, value) for value in (match.queries, match.values))
    sizes = [shape[axis] if shape else None for shape, axis in ((queries, 1), (queries, 3), (values, 3))]
    heads, width, depth = (size if isinstance(size, int) else 0 for size in sizes)
    if not (heads and width and depth):
        return "the number and the width of its heads are not known"
    mask = match.score_mask
    added = [*([mask.value] if attention.needs_mask and mask is not None else []), *match.biases]
    if any(len(dims_of(attention.view, value)) != RANK for value in added):
        return "its mask does not have axes for batch and heads"
    testable = attention.boolean or (mask is not None and mask.graded)
    if attention.has_empty_rows and (attention.mask_dims[1] != 1 or not testable):
        return "a row of its mask may hide every key, but not in every head"
    if len({match.queries, match.keys, match.values}) < len(_OPERANDS):
        return "two of its operands are the same value"
    if grouped and (replacement := _MultiHeadWriter(attention, heads, width, depth).grouped()) is not None:
        return replacement
    return _MultiHeadWriter(attention, heads, width, depth).replacement()


class _MultiHeadWriter(AttentionNodes):
    """Writer of the nodes of one attention with `heads` query heads.

    `width` is the width of a head of queries or keys, and `depth` the width of a head of values. `bases`: the inputs of
    the nodes, each with its operand, "queries", "keys" or "values", and its layout.
    """

    def __init__(self, attention: FusibleAttention, heads: int, width: int, depth: int) -> None:
        super().__init__(attention, typed=True)
        self.heads, self.width, self.depth = heads, width, depth
        self.bases: dict[str, tuple[str, str]] = {}
        self.moves = self._moves()
        self.last = self.moves[-1] if self.moves else attention.match.last
        self.result = self.last.node.output[0]

    def replacement(self) -> Replacement | str:
        attention, match = self.attention, self.attention.match
        rows = self.attending_rows(self.visible_keys()) if attention.has_empty_rows else None
        attending = None if rows is None else self.over_axis("Squeeze", rows, 1, f"{rows}_of_all_heads")
        zeroes = match.zeroes_nan and attention.infinite_fill
        reads = [*self._operands(self.result, None if zeroes else attending), "", "", self._score_bias()]
        if ("values", "heads") in self.bases.values() and self.width != self.depth:
            return "its values have separate heads, and a different width from its keys"
        results = [self._result_name(self.result, attending if zeroes else None)]
        attributes = {"num_heads": self.heads, "scale": match.scale}
        attributes |= {"unidirectional": 1} if attention.causal else {}
        return self._verified(KIND, fused_node("MultiHeadAttention", self.last, reads, results, attributes, DOMAIN))

    def grouped(self) -> Replacement | None:
        attention, match = self.attention, self.attention.match
        groups, (batch, _, length, _) = attention.keys.groups, dims_of(self.attention.view, match.queries)
        kv_heads = self.heads // groups
        sources = ((match.queries, self.heads), (attention.keys.value, kv_heads), (attention.values.value, kv_heads))
        reads = [self._packed(value, heads) for value, heads in sources]
        if groups == 1 or not self.moves or not isinstance(batch, int) or not isinstance(length, int):
            return None
        if not attention.causal or None in reads or self.width != self.depth or self.width > _MAX_HEAD_WIDTH:
            return None
        rotations = [attention.view.producer(value, ROTARY_KIND) for value in reads[:2]]
        tables = _shared_tables(attention.view, rotations, (self.heads, kv_heads), self.width)
        if self.width % (16 if tables else 8) or (any(rotations) and not tables):
            return None  # otherwise onnxruntime itself fuses a single rotation, and crashes
        reads[:2] = [op.inputs[0] if op is not None else value for op, value in zip(rotations, reads, strict=False)]
        pairs = zip(reads, _OPERANDS, strict=True)
        inputs = [self._base(value, operand, "packed") for value, operand in pairs if value is not None]
        last = self.constant(f"last_token_{batch}_{length}", np.full(batch, length - 1, np.int32))
        tokens = self.constant(f"tokens_{length}", np.full(1, length, np.int32))
        results = [self.result, *(self.name(f"{self.result}_{operand}") for operand in _OPERANDS[1:])]
        attributes = {"num_heads": self.heads, "kv_num_heads": kv_heads, "scale": match.scale}
        attributes |= {"do_rotary": 1} if tables else {}
        operands = [*inputs, "", "", last, tokens, *tables]
        node = fused_node("GroupQueryAttention", self.last, operands, results, attributes, DOMAIN)
        replacement = self._verified(GROUPED_ATTENTION, node, groups, tables)
        return replacement if isinstance(replacement, Replacement) else None

    def _verified(self, kind: str, node: NodeProto, groups: int = 1, tables: Sequence[str] = ()) -> Replacement | str:
        """Return the replacement by a node, or how it differs from the ops on small random operands.

        `groups`: the number of query heads per key and value head. `tables`: the cosines and sines by which the node,
        but not the ops, rotates queries and keys.
        """
        ops = tuple(sorted({*self.attention.match.ops, *(op.id for op in self.moves)}))
        replacement = AttentionReplacement(kind, ops, self.last.id, node, **self.parts())

        def feeds(*operands: Array) -> tuple[Sequence[Array], Arrays]:
            feed = dict(zip(_OPERANDS, operands, strict=True))
            inputs = {name: _LAYOUTS[layout](feed[operand]) for name, (operand, layout) in self.bases.items()}
            q, k, v = operands
            if tables:  # in which case the width is even
                angles = np.arange(k.shape[2] * self.width // 2).reshape(k.shape[2], -1)
                inputs.update(zip(tables, (np.cos(angles), np.sin(angles)), strict=True))
                q, k = (rotated(x, *(inputs[name] for name in tables)) for x in (q, k))
            return (q, k, v), inputs

        heads = self.heads, self.heads // groups
        sizes = AttentionSizes(heads, KEYS if self.attention.causal else QUERIES, self.width, self.depth)
        layout = _LAYOUTS["packed" if self.moves else "heads"]
        return compare(self.attention, replacement, sizes, feeds, layout) or replacement

    # -- the result -------------------------------------------------------------------------------

    def _moves(self) -> tuple[Op, ...]:
        view, match = self.attention.view, self.attention.match
        transpose = only_reader(view, match.last.outputs[0], "Transpose")
        reshape = None if transpose is None else only_reader(view, transpose.outputs[0], "Reshape")
        if transpose is None or permutation(transpose) != SWAP or reshape is None or reshape.outputs[0] is None:
            return ()
        queries = dims_of(self.attention.view, match.queries)
        layout = dims_of(self.attention.view, reshape.outputs[0])
        fits = layout == (queries[0], queries[2], self.heads * self.depth) and None not in layout
        return (transpose, reshape) if fits else ()

    def _result_name(self, result: str, attending: str | None) -> str:
        packed = bool(self.moves)
        if packed and attending is None:
            return result
        attended = flat = self.name(f"{result}_attended")
        if attending is not None:
            flat = result if packed else self.name(f"{result}_seen")
            self.after("Where", (attending, attended, self.zero(result)), flat)
        if not packed:
            split = self.name(f"{result}_split")
            shape = self.constant(f"{result}_heads", np.array([0, 0, self.heads, self.depth]))
            self.after("Reshape", (flat, shape), split)
            self.after("Transpose", (split,), result, perm=SWAP)
        return attended

    # -- the operands -----------------------------------------------------------------------------

    def _operands(self, result: str, attending: str | None) -> list[str]:
        match, keys = self.attention.match, self.attention.keys
        queries, values = self._packed(match.queries, self.heads), self._packed(match.values, self.heads)
        if queries is None:
            base = self._base(match.queries, "queries", "heads")
            swapped = self.before("Transpose", (base,), f"{result}_q", perm=SWAP)
            flat = self.constant(f"{result}_flat", np.array([0, 0, self.heads * self.width]))
            query_input = self.before("Reshape", (swapped, flat), f"{result}_queries")
        else:
            query_input = self._base(queries, "queries", "packed")
        if attending is not None:
            query_input = self.before("Where", (attending, query_input, self.zero(result)), f"{result}_seeing")
        untransposed = keys.groups == 1 and keys.perm == (0, 1, 2, 3)
        packed = self._packed(keys.value, self.heads) if untransposed else None
        if keys.groups == 1 and keys.perm == SWAP:
            packed = self._merged(self.attention.view.producer(keys.value, "Reshape"), self.heads)
        if packed is not None and values is not None:
            return [query_input, self._base(packed, "keys", "packed"), self._base(values, "values", "packed")]
        if untransposed:
            return [query_input, self._base(keys.value, "keys", "heads"), self._base(match.values, "values", "heads")]
        transposed = self._base(match.keys, "keys", "turned")
        swapped = self.before("Transpose", (transposed,), f"{result}_keys", perm=(0, 1, 3, 2))
        return [query_input, swapped, self._base(match.values, "values", "heads")]

    def _packed(self, value: ValueId, heads: int) -> ValueId | None:
        """Return the source of a value with separate heads, as tokens by features."""
        return self._merged(head_split(self.attention.view, value), heads)

    def _merged(self, op: Op | None, heads: int) -> ValueId | None:
        if op is None:
            return None
        before, after = (dims_of(self.attention.view, value) for value in (op.inputs[0], op.outputs[0]))
        if len(before) != RANK - 1 or len(after) != RANK or None in before or before[:2] != after[:2]:
            return None
        width = after[3]
        return op.inputs[0] if isinstance(width, int) and after[2] == heads and before[2] == heads * width else None

    def _base(self, value: ValueId, operand: str, layout: str) -> str:
        name = self.attention.view.value_name(value)
        self.bases[name] = operand, layout
        return name

    # -- the mask ----------------------------------------------------------------------------------

    def _score_bias(self) -> str:
        view, match, score_mask = self.attention.view, self.attention.match, self.attention.match.score_mask
        bias, *others = [view.value_name(value) for value in match.biases] or [""]
        for other in others:
            bias = self.before("Add", (bias, other), f"{bias}_{other}")
        if not self.attention.needs_mask or score_mask is None or score_mask.graded:
            return bias
        stem = view.value_name(score_mask.value)
        if self.attention.boolean:
            base = bias or self.constant(f"{stem}_nothing", np.zeros((), np.float32))
            fill = self.constant(f"{stem}_fill", np.array(score_mask.fill, np.float32))
            branches = (base, fill) if score_mask.visible_if else (fill, base)
            return self.before("Where", (stem, *branches), f"{bias}{stem}_added")
        return self.before("Add", (bias, stem), f"{bias}{stem}_added") if bias else stem


def _shared_tables(view: View, rotations: Sequence[Op | None], heads: Sequence[int], width: int) -> list[str]:
    """Return the tables of cosines and sines shared by all rotations, starting at position 0; otherwise an empty list.

    Rotations with a different number of heads, or of only part of each head, do not qualify.
    """
    first, *others = [op.inputs[1:] if op is not None else () for op in rotations]
    plain = all(
        op is not None
        and {a.name for a in op.node.attribute} <= {"num_heads"}
        and int_attribute(op.node, "num_heads", 0) in (0, count)
        for op, count in zip(rotations, heads, strict=True)
    )
    if not plain or any(tables != first for tables in others) or number(view, first[0]) != 0:
        return []
    full_width = all(dims_of(view, value)[1:] == (width // 2,) for value in first[1:])
    return [view.value_name(value) for value in first[1:] if value is not None] if full_width else []
