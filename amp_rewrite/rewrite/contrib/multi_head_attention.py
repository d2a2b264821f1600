"""Attention written out, as onnxruntime's MultiHeadAttention, at every opset.

It reads queries, and gives its result, as tokens by features, where exporters split the heads off and move them; and it
adds numbers to the scores, where they select by a bool. Rows that see no key are kept from it as in `attention`: a
query of zeros weighs all keys alike, and where the model makes 0 of such a row, so does a Where.

A causal attention whose keys and values serve several heads of queries each is a GroupQueryAttention, which reads them
unrepeated. CUDA has it in the low types alone, so that `Context.grouped` says whether it is low for certain.
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
from amp_rewrite.rewrite.attention.build import KEYS, QUERIES, AttentionSizes, SeenRows, compared
from amp_rewrite.rewrite.attention.layout import RANK, SWAP, split_behind
from amp_rewrite.rewrite.attention.legality import FusibleAttention, WrittenAttention, sites
from amp_rewrite.rewrite.const_eval import permutation
from amp_rewrite.rewrite.reference import DOMAIN, Arrays, rotated
from amp_rewrite.rewrite.replacement import GROUPED_ATTENTION, Context, Outcome, Replacement, as_outcome, fused_node

KIND = "multi_head_attention"
ROTARY_KIND = f"{DOMAIN}::RotaryEmbedding"


def _packed(array: Array) -> Array:
    """Return the tokens by features behind heads split off and moved."""
    batch, heads, tokens, width = array.shape
    return array.swapaxes(1, 2).reshape(batch, tokens, heads * width)


_LAYOUTS: Mapping[str, Callable[[Array], Array]] = {
    "packed": _packed,
    "heads": lambda array: array,
    "turned": lambda array: array.swapaxes(-1, -2),
}
"""Tokens by features; heads, tokens, width; heads, width, tokens."""


_OPERANDS = ("queries", "keys", "values")
_WIDEST = 256  # of heads that the fast kernels of GroupQueryAttention take


def multi_head_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each written-out attention by one node, or refuse it. `attention` reports its own."""
    for last, site in sites(view, context):
        if not isinstance(site, str):
            yield as_outcome(KIND, last, _written(site, grouped=context.grouped))


def _written(site: FusibleAttention, *, grouped: bool) -> Replacement | str:
    form = site.form
    queries, values = (dims_of(site.view, value) for value in (form.queries, form.values))
    sizes = [shape[axis] if shape else None for shape, axis in ((queries, 1), (queries, 3), (values, 3))]
    heads, width, depth = (size if isinstance(size, int) else 0 for size in sizes)
    if not (heads and width and depth):
        return "how many heads it has, and how wide they are, is not known"
    hiding = form.hiding
    read = [*([hiding.value] if site.hides and hiding is not None else []), *form.biases]
    stated = all(len(dims_of(site.view, value)) == RANK for value in read)
    if not stated:
        return "its mask does not state batch and heads"
    if site.empty and (site.mask[1] != 1 or not (site.boolean or (hiding is not None and hiding.counts))):
        return "a row of its mask may hide every key, and not in each head alike"
    if len({form.queries, form.keys, form.values}) < len(_OPERANDS):
        return "two of its operands are one"
    if grouped and (found := _MultiHeadWriter(site, heads, width, depth).grouped()) is not None:
        return found
    return _MultiHeadWriter(site, heads, width, depth).replacement()


class _MultiHeadWriter(SeenRows):
    """The nodes of one attention. `heads` of queries, `width` of each, `depth` of each of the values.

    `bases`: what the nodes read, with the one of queries, keys and values that it is, and how it lies there.
    """

    def __init__(self, site: FusibleAttention, heads: int, width: int, depth: int) -> None:
        super().__init__(site, typed=True)
        self.heads, self.width, self.depth = heads, width, depth
        self.bases: dict[str, tuple[str, str]] = {}
        self.moves = self._moves()
        self.last = self.moves[-1] if self.moves else site.form.last
        self.result = self.last.node.output[0]

    def replacement(self) -> Replacement | str:
        site, form = self.site, self.site.form
        rows = self.rows(self.bools()) if site.empty else None
        seeing = None if rows is None else self.over("Squeeze", rows, 1, f"{rows}_of_all_heads")
        zeroed = form.zeroed and site.infinite
        reads = [*self._operands(self.result, None if zeroed else seeing), "", "", self._added()]
        if ("values", "heads") in self.bases.values() and self.width != self.depth:
            return "its values are not as wide as its keys, and their heads are split off"
        results = [self._ended(self.result, seeing if zeroed else None)]
        attributes = {"num_heads": self.heads, "scale": form.scale, **({"unidirectional": 1} if site.causal else {})}
        return self._proved(KIND, fused_node("MultiHeadAttention", self.last, reads, results, attributes, DOMAIN))

    def grouped(self) -> Replacement | None:
        """Return the node for keys and values shared by several heads, if there is one and it agrees."""
        site, form = self.site, self.site.form
        groups, (batch, _, length, _) = site.keys.groups, dims_of(self.site.view, form.queries)
        fewer = self.heads // groups
        sources = ((form.queries, self.heads), (site.keys.value, fewer), (site.values.value, fewer))
        reads = [self._packed(value, heads) for value, heads in sources]
        if groups == 1 or not self.moves or not isinstance(batch, int) or not isinstance(length, int):
            return None
        if not site.causal or None in reads or self.width != self.depth or self.width > _WIDEST:
            return None
        rotations = [site.view.producer(value, ROTARY_KIND) for value in reads[:2]]
        tables = _shared_tables(site.view, rotations, (self.heads, fewer), self.width)
        if self.width % (16 if tables else 8) or (any(rotations) and not tables):
            return None  # one rotation alone onnxruntime would fuse by itself, and crashes
        reads[:2] = [op.inputs[0] if op is not None else value for op, value in zip(rotations, reads, strict=False)]
        names = [
            self._base(value, what, "packed") for value, what in zip(reads, _OPERANDS, strict=True) if value is not None
        ]
        last = self.constant(f"last_token_{batch}_{length}", np.full(batch, length - 1, np.int32))
        tokens = self.constant(f"tokens_{length}", np.full(1, length, np.int32))
        results = [self.result, *(self.name(f"{self.result}_{what}") for what in _OPERANDS[1:])]
        attributes = {"num_heads": self.heads, "kv_num_heads": fewer, "scale": form.scale}
        attributes |= {"do_rotary": 1} if tables else {}
        operands = [*names, "", "", last, tokens, *tables]
        node = fused_node("GroupQueryAttention", self.last, operands, results, attributes, DOMAIN)
        found = self._proved(GROUPED_ATTENTION, node, groups, tables)
        return found if isinstance(found, Replacement) else None

    def _proved(self, kind: str, node: NodeProto, groups: int = 1, tables: Sequence[str] = ()) -> Replacement | str:
        """Return the replacement by a node, or how it differs from the ops on small random operands.

        `groups`: heads of queries for one of keys and values. `tables`: cosines and sines by which the node rotates
        queries and keys, and the ops do not.
        """
        ops = tuple(sorted({*self.site.form.ops, *(op.id for op in self.moves)}))
        written = WrittenAttention(kind, ops, self.last.id, node, **self.parts())

        def feeds(*operands: Array) -> tuple[Sequence[Array], Arrays]:
            feed = dict(zip(_OPERANDS, operands, strict=True))
            read = {name: _LAYOUTS[layout](feed[what]) for name, (what, layout) in self.bases.items()}
            q, k, v = operands
            if tables:  # of an even width
                angles = np.arange(k.shape[2] * self.width // 2).reshape(k.shape[2], -1)
                read.update(zip(tables, (np.cos(angles), np.sin(angles)), strict=True))
                q, k = (rotated(x, *(read[name] for name in tables)) for x in (q, k))
            return (q, k, v), read

        heads = self.heads, self.heads // groups
        sizes = AttentionSizes(heads, KEYS if self.site.causal else QUERIES, self.width, self.depth)
        return compared(self.site, written, sizes, feeds, _LAYOUTS["packed" if self.moves else "heads"]) or written

    # -- its result -------------------------------------------------------------------------------

    def _moves(self) -> tuple[Op, ...]:
        view, form = self.site.view, self.site.form
        transpose = only_reader(view, form.last.outputs[0], "Transpose")
        reshape = None if transpose is None else only_reader(view, transpose.outputs[0], "Reshape")
        if transpose is None or permutation(transpose) != SWAP or reshape is None or reshape.outputs[0] is None:
            return ()
        queries = dims_of(self.site.view, form.queries)
        layout = dims_of(self.site.view, reshape.outputs[0])
        fits = layout == (queries[0], queries[2], self.heads * self.depth) and None not in layout
        return (transpose, reshape) if fits else ()

    def _ended(self, result: str, seeing: str | None) -> str:
        packed = bool(self.moves)
        if packed and seeing is None:
            return result
        attended = flat = self.name(f"{result}_attended")
        if seeing is not None:
            flat = result if packed else self.name(f"{result}_seen")
            self.after("Where", (seeing, attended, self.zero(result)), flat)
        if not packed:
            split = self.name(f"{result}_split")
            shape = self.constant(f"{result}_heads", np.array([0, 0, self.heads, self.depth]))
            self.after("Reshape", (flat, shape), split)
            self.after("Transpose", (split,), result, perm=SWAP)
        return attended

    # -- its operands -----------------------------------------------------------------------------

    def _operands(self, result: str, seeing: str | None) -> list[str]:
        form, keys = self.site.form, self.site.keys
        queries, values = self._packed(form.queries, self.heads), self._packed(form.values, self.heads)
        if queries is None:
            base = self._base(form.queries, "queries", "heads")
            swapped = self.before("Transpose", (base,), f"{result}_q", perm=SWAP)
            flat = self.constant(f"{result}_flat", np.array([0, 0, self.heads * self.width]))
            read = self.before("Reshape", (swapped, flat), f"{result}_queries")
        else:
            read = self._base(queries, "queries", "packed")
        if seeing is not None:
            read = self.before("Where", (seeing, read, self.zero(result)), f"{result}_seeing")
        upright = keys.groups == 1 and keys.perm == (0, 1, 2, 3)
        packed = self._packed(keys.value, self.heads) if upright else None
        if keys.groups == 1 and keys.perm == SWAP:
            packed = self._merged(self.site.view.producer(keys.value, "Reshape"), self.heads)
        if packed is not None and values is not None:
            return [read, self._base(packed, "keys", "packed"), self._base(values, "values", "packed")]
        if upright:
            return [read, self._base(keys.value, "keys", "heads"), self._base(form.values, "values", "heads")]
        turned = self._base(form.keys, "keys", "turned")
        swapped = self.before("Transpose", (turned,), f"{result}_keys", perm=(0, 1, 3, 2))
        return [read, swapped, self._base(form.values, "values", "heads")]

    def _packed(self, value: ValueId, heads: int) -> ValueId | None:
        """Return the tokens by features behind heads split off and moved."""
        return self._merged(split_behind(self.site.view, value), heads)

    def _merged(self, op: Op | None, heads: int) -> ValueId | None:
        if op is None:
            return None
        before, after = (dims_of(self.site.view, value) for value in (op.inputs[0], op.outputs[0]))
        if len(before) != RANK - 1 or len(after) != RANK or None in before or before[:2] != after[:2]:
            return None
        width = after[3]
        return op.inputs[0] if isinstance(width, int) and after[2] == heads and before[2] == heads * width else None

    def _base(self, value: ValueId, what: str, layout: str) -> str:
        name = self.site.view.value_name(value)
        self.bases[name] = what, layout
        return name

    # -- its mask ----------------------------------------------------------------------------------

    def _added(self) -> str:
        view, form, hiding = self.site.view, self.site.form, self.site.form.hiding
        bias, *more = [view.value_name(value) for value in form.biases] or [""]
        for other in more:
            bias = self.before("Add", (bias, other), f"{bias}_{other}")
        if not self.site.hides or hiding is None or hiding.counts:
            return bias
        stem = view.value_name(hiding.value)
        if self.site.boolean:
            base = bias or self.constant(f"{stem}_nothing", np.zeros((), np.float32))
            fill = self.constant(f"{stem}_fill", np.array(hiding.fill, np.float32))
            branches = (base, fill) if hiding.shows else (fill, base)
            return self.before("Where", (stem, *branches), f"{bias}{stem}_added")
        return self.before("Add", (bias, stem), f"{bias}{stem}_added") if bias else stem


def _shared_tables(view: View, rotations: Sequence[Op | None], heads: Sequence[int], width: int) -> list[str]:
    """Return the cosines and sines of rotations from the first position on, if all have the same; else none.

    Rotations of other heads, or of a part of each, have none in common with the attention.
    """
    first, *others = [op.inputs[1:] if op is not None else () for op in rotations]
    plain = all(
        op is not None
        and {a.name for a in op.node.attribute} <= {"num_heads"}
        and int_attribute(op.node, "num_heads", 0) in (0, count)
        for op, count in zip(rotations, heads, strict=True)
    )
    if not plain or any(read != first for read in others) or number(view, first[0]) != 0:
        return []
    whole = all(dims_of(view, value)[1:] == (width // 2,) for value in first[1:])
    return [view.value_name(value) for value in first[1:] if value is not None] if whole else []
