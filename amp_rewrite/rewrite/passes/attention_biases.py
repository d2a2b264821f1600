"""Passes to drop the bias of keys, and to move the bias of values past the projection after an attention.

The bias of keys adds the same number to all scores of a row, which does not change a softmax. The softmax weights of a
row sum to one, so the bias of values passes through the attention and can be added after the projection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import exposed, number, only_reader
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.attention.build import random_operands
from amp_rewrite.rewrite.attention.layout import RANK, moved_marks
from amp_rewrite.rewrite.attention.legality import FusibleAttention, fusible_attentions
from amp_rewrite.rewrite.builder import NewNodes, new_node
from amp_rewrite.rewrite.const_eval import TRACED_MOVES
from amp_rewrite.rewrite.equivalence import Trial, difference, disagreement, float64_nodes
from amp_rewrite.rewrite.passes.biases import TOKEN_AXES, BiasSum
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, only_float32

_KIND = "attention_bias"
_BIAS_SLOT = 5  # of the bias added to the scores of a MultiHeadAttention
_CHUNK_ROWS = 1 << 6  # rows of a weight converted to float64 at a time


def split_attention_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Replace a bias added before the Split into queries, keys and values with one bias for each. O(attentions).

    The biases of keys and values can then be dropped or moved.
    """
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention",)):
        split = view.producer(op.inputs[0], "Split")
        total = BiasSum.before(view, split.inputs[0], split, context) if split is not None else None
        if split is None or total is None or split.outputs != op.inputs[:3] or not only_float32(view, (split.id,)):
            continue
        shapes, bias = [context.shape(view, value) for value in split.outputs], view.array(total.bias)
        widths = [shape[-1] if shape and len(shape) == TOKEN_AXES else None for shape in shapes]
        sizes = [width for width in widths if width is not None]
        last_axis = int_attribute(split.node, "axis", 0) in (-1, TOKEN_AXES - 1)
        if last_axis and len(sizes) == len(widths) and bias is not None and sum(sizes) == bias.size:
            yield as_outcome("bias", split.id, _with_split_bias(view, split, total, bias.reshape(-1), sizes))


def _with_split_bias(view: View, split: Op, total: BiasSum, bias: Array, sizes: Sequence[int]) -> Replacement | str:
    new, node = NewNodes(view, split), clone(split.node)
    node.input[0] = view.value_name(total.source)
    for slot, part in enumerate(np.split(bias, np.cumsum(sizes)[:-1])):
        result = split.node.output[slot]
        node.output[slot] = new.name(f"{result}_unbiased")
        new.after("Add", (node.output[slot], new.constant(f"{result}_bias", part)), result)
    findings = (Finding("bias", split.name, "the bias added before a Split is now added to each part after the Split"),)
    fusion = Replacement("bias", (total.add.id, split.id), split.id, node, **new.parts(), findings=findings)
    feed = {node.input[0]: np.random.default_rng(0).standard_normal((_BATCH, _TOKENS, bias.size))}
    return disagreement(view, fusion, [Trial(feed, {})]) or fusion


def move_attention_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Drop the bias of keys, and move the bias of values past the projection. O(attentions).

    If a Where writes zeros into rows without visible keys, it writes the negative bias of values instead.
    """
    for attention in _attentions(view, context):
        keys = _Bias.before(view, context, attention.keys)
        values = _Bias.before(view, context, attention.values) if attention.rows_sum_to_one else None
        projection = _Projection.of(view, context, attention, values) if values is not None else None
        if keys is not None or projection is not None:
            mover = _BiasMover(view, attention, keys, projection)
            yield as_outcome(_KIND, attention.last.id, mover.replacement(context.to))


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand of an attention, its reader, and its axes other than batch and tokens."""

    value: ValueId | None
    reader: Op
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Attention:
    """An attention, as one op or written out: its ops, the last of them, and its keys and values.

    `heads`: the numbers of heads of queries and values, if it is one op. `rows_sum_to_one`: the softmax weights of
    every row sum to one.
    """

    ops: tuple[OpId, ...]
    last: Op
    keys: _Operand
    values: _Operand
    heads: tuple[int, int] = (1, 1)
    rows_sum_to_one: bool = True
    written_out: FusibleAttention | None = None

    def result_row(self, values: Array) -> Array:
        """Return a row of values in the layout of the result, repeated for the heads of queries."""
        heads, kv_heads = self.heads
        return np.repeat(values.reshape(kv_heads, -1), heads // kv_heads, axis=0).reshape(-1)


def _attentions(view: View, context: Context) -> Iterator[_Attention]:
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention", "Attention")):
        standard = op.kind == "Attention"
        # A cache contains keys and values with biases; MultiHeadAttention's own bias input is added to both.
        unsupported = op.inputs[4:] if standard else [*op.inputs[3:_BIAS_SLOT], *op.inputs[_BIAS_SLOT + 1 :]]
        shapes = [context.shape(view, v) or () for v in op.inputs[:3]]
        packed = len(shapes[0]) == TOKEN_AXES
        if not packed:
            heads, kv_heads = ((shape[1] or 0) if len(shape) == RANK else 0 for shape in shapes[:2])
        else:
            default = 0 if standard else 1
            heads, kv_heads = (int_attribute(op.node, f"{name}_num_heads", default) for name in ("q", "kv"))
        fits = len({len(shape) for shape in shapes}) == 1 and heads > 0 and kv_heads > 0 and heads % kv_heads == 0
        plain = all(v is None for v in (*unsupported, *op.outputs[1:])) and not float_attribute(op.node, "softcap", 0.0)
        if fits and plain and len(set(op.inputs[:3])) == 3 and only_float32(view, (op.id,)):
            keys, values = (_Operand(op.inputs[slot], op, (2,) if packed else (1, 3)) for slot in (1, 2))
            masked = standard and len(op.inputs) > 3 and op.inputs[3] is not None  # a row without visible keys is 0
            yield _Attention((op.id,), op, keys, values, (heads, kv_heads), not masked or context.every_row_attends)
    for _, attention in fusible_attentions(view, context):
        if isinstance(attention, str):
            continue
        match = attention.match
        if len({match.queries, match.keys, match.values}) < 3:
            continue
        reader = next(op for op in view.readers(match.keys) if op.id in match.ops)
        zeroes_rows = attention.has_empty_rows and match.zeroes_nan and attention.infinite_fill
        keys, values = _Operand(match.keys, reader, (1, 2)), _Operand(match.values, match.last, (1, 3))
        ops = tuple(sorted({*match.ops, *match.shared_ops}))
        yield _Attention(ops, match.last, keys, values, rows_sum_to_one=not zeroes_rows, written_out=attention)


def _only_data_reader(view: View, value: ValueId | None, reader: Op) -> bool:
    """True if `reader` is the only reader of a value's data; others may read its shape."""
    if value is None or exposed(view, value):
        return False
    readers = [view.ops[use.op] for use in view.uses[value]]
    return [op.id for op in readers if op.kind != "Shape"] == [reader.id] and {op.scope for op in readers} == {
        reader.scope
    }


@dataclass(frozen=True, slots=True)
class _Bias:
    """A sum with a bias before an attention, with only moves in between.

    `reader` is the op that reads the sum. `elements` contains the index in the bias for each position of the operand.
    """

    total: BiasSum
    reader: Op
    elements: Array

    @classmethod
    def before(cls, view: View, context: Context, operand: _Operand) -> _Bias | None:
        value, reader, moves = operand.value, operand.reader, list[Op]()
        while (op := view.producer(value, *TRACED_MOVES)) is not None and _only_data_reader(view, value, reader):
            moves.insert(0, op)
            value, reader = op.inputs[0], op
        total = BiasSum.before(view, value, reader, context)
        shape = context.shape(view, total.source) if total is not None else None
        if total is None or shape is None or value is None or shape[-1] is None:
            return None
        elements = moved_marks(view, value, np.arange(shape[-1]), moves, operand.axes)
        return cls(total, reader, elements.reshape(-1)) if elements is not None else None


@dataclass(frozen=True, slots=True)
class _Projection:
    """The ops after an attention: a Where for rows without visible keys, a product with a weight, the product's bias.

    `values` is the bias to move. `elements` contains the index in that bias for each row of the weight.
    """

    values: _Bias
    zeroing: Op | None
    product: Op
    total: BiasSum | None
    elements: Array

    @classmethod
    def of(cls, view: View, context: Context, attention: _Attention, values: _Bias) -> _Projection | None:
        value, moves = attention.last.outputs[0], list[Op]()
        while (op := only_reader(view, value, *TRACED_MOVES)) is not None:
            moves.append(op)
            value = op.outputs[0]
        zeroing, elements = only_reader(view, value, "Where"), attention.result_row(values.elements)
        packed = not moves and len(attention.values.axes) == 1
        rows = elements if packed else _row_elements(view, context, attention, elements, moves)
        if zeroing is not None:
            if zeroing.inputs[1] != value or number(view, zeroing.inputs[2]) != 0:
                return None
            value = zeroing.outputs[0]
        product = only_reader(view, value, "MatMul")
        weight = view.constant(product.inputs[1]) if product is not None else None
        if product is None or weight is None or len(weight.dims) != 2 or not only_float32(view, (product.id,)):
            return None
        if rows is None or rows.size != weight.dims[0]:
            return None
        total = BiasSum.of(view, only_reader(view, product.outputs[0], "Add"), context)
        return cls(values, zeroing, product, total, rows.reshape(-1))

    @property
    def ops(self) -> list[Op]:
        total = self.total.add if self.total is not None else None
        return [op for op in (self.zeroing, self.product, total) if op is not None]

    def constants(self, bias: Array, weight: Array, after: Array) -> dict[str, Array]:
        """Return the projection's bias plus the weighted bias of values, and the fill of the Where."""
        rows = range(0, bias.size, _CHUNK_ROWS)
        parts = (bias[i : i + _CHUNK_ROWS] @ weight[i : i + _CHUNK_ROWS].astype(np.float64) for i in rows)
        moved = sum(parts, after.reshape(-1).astype(np.float64))
        return {"bias": moved, **({"negative_bias": -bias} if self.zeroing is not None else {})}


def _row_elements(
    view: View, context: Context, attention: _Attention, elements: Array, moves: Sequence[Op]
) -> Array | None:
    """Return the elements along the last axis after the moves; None if shapes do not match."""
    (result,) = attention.last.results
    shape = context.shape(view, result)
    rank = len(context.shape(view, moves[-1].outputs[0]) or ()) if moves else 0
    sizes = [(d or 0) if axis in attention.values.axes else 1 for axis, d in enumerate(shape or ())]
    if not rank or math.prod(sizes) != elements.size:
        return None
    return moved_marks(view, result, elements.reshape(sizes), moves, (rank - 1,))


class _BiasMover:
    """Writer of the ops before an attention without the biases, and of the projection after it."""

    def __init__(self, view: View, attention: _Attention, keys: _Bias | None, projection: _Projection | None) -> None:
        self.view, self.attention, self.projection = view, attention, projection
        self.biases = keys, projection.values if projection is not None else None
        self.present = [each for each in self.biases if each is not None]
        self.last = projection.ops[-1] if projection is not None else self.present[0].reader

    def replacement(self, to: DType) -> Replacement | str:
        view, substitutes, new = self.view, dict[OpId, NodeProto](), NewNodes(self.view, self.last)
        for each in self.present:
            node = substitutes.setdefault(each.reader.id, clone(each.reader.node))
            slot = next(slot for slot, v in enumerate(each.reader.inputs) if v in each.total.add.outputs)
            node.input[slot] = view.value_name(each.total.source)
        ops = {each.total.add.id for each in self.present} | substitutes.keys()
        changes = ["the bias of its keys is dropped because it does not change a softmax"] if self.biases[0] else []
        reason = None
        if self.projection is None:
            node = substitutes.pop(self.last.id)
        else:
            changes.append("the bias of its values is added after its projection")
            stored = self._constants(self.projection)
            if not all(float(np.abs(array).max(initial=0)) <= to.max for array in stored.values()):
                return f"the bias after its projection would exceed the range of {to.spelling}"
            stem = self.last.node.output[0]
            names = {w: new.constant(f"{stem}_{w}", array.astype(np.float32)) for w, array in stored.items()}
            *zeroing, product, node = nodes = self._nodes(self.projection, new, names)
            ops |= {op.id for op in self.projection.ops}
            new.leading.append(product)
            substitutes.update((self.projection.ops[0].id, each) for each in zeroing)
            reason = self._projection_difference(self.projection, nodes, names)
        findings = (Finding("bias", self.attention.last.name, " · ".join(changes)),)
        fusion = Replacement(
            _KIND, tuple(sorted(ops)), self.last.id, node, substitutes=substitutes, findings=findings, **new.parts()
        )
        return self._attention_difference() or reason or fusion

    def _constants(self, projection: _Projection) -> dict[str, Array]:
        weight, stored = (self.view.array(v) for v in (projection.product.operands[1], projection.values.total.bias))
        after = self.view.array(projection.total.bias) if projection.total is not None else np.zeros(1)
        assert stored is not None and weight is not None and after is not None
        full = np.broadcast_to(stored.reshape(-1), projection.values.elements.max() + 1)
        return projection.constants(full[projection.elements].astype(np.float64), weight, after)

    def _nodes(self, projection: _Projection, new: NewNodes, names: Mapping[str, str]) -> list[NodeProto]:
        *zeroing, product = (clone(op.node) for op in (projection.zeroing, projection.product) if op is not None)
        for node in zeroing:
            node.input[2] = names["negative_bias"]
        if projection.total is not None:
            total = clone(projection.total.add.node)
            total.input[projection.total.add.inputs.index(projection.total.bias)] = names["bias"]
        else:
            (result,) = product.output
            product.output[0] = new.name(f"{result}_unbiased")
            total = new_node("Add", [product.output[0], names["bias"]], result, f"{product.name}_bias")
        return [*zeroing, product, total]

    # -- verification ------------------------------------------------------------------------------

    def _attention_difference(self) -> str | None:
        """Return how attention to biased keys and values differs from unbiased attention plus the bias of values."""
        view, attention, rng = self.view, self.attention, np.random.default_rng(0)
        result = attention.last.node.output[0]
        match = attention.written_out
        feed, *shapes = self._operands(rng) if match is None else random_operands(match, rng)
        pairs = zip(shapes, self.biases, strict=True)
        bias = [rng.standard_normal(shape) * (moved is not None) for shape, moved in pairs]
        operands = [attention.keys.value, attention.values.value]
        names = [view.value_name(value) for value in operands if value is not None]
        biased = {**feed, **{name: feed[name] + b for name, b in zip(names, bias, strict=True)}}

        def unbiased(array: Array) -> Array:
            shape = [d if axis in attention.values.axes else 1 for axis, d in enumerate(array.shape)]
            return array - (attention.result_row(bias[1]) if match is None else bias[1]).reshape(shape)

        trial = Trial(biased, feed, float(max(np.abs(array).max() for array in biased.values())))
        nodes = float64_nodes(view, attention.ops)
        return difference(view, attention.ops, nodes, {result: result}, [trial], layout=unbiased)

    def _operands(self, rng: np.random.Generator) -> tuple[dict[str, Array], tuple[int, ...], tuple[int, ...]]:
        op, (heads, kv_heads) = self.attention.last, self.attention.heads
        if op.kind != "Attention":
            heads = kv_heads = int_attribute(op.node, "num_heads", 1)
        packed = len(self.attention.keys.axes) == 1
        sizes = [(_BATCH, _TOKENS, 4 * h) if packed else (_BATCH, h, _TOKENS, 4) for h in (heads, kv_heads, kv_heads)]
        feed: dict[str, Array] = {op.node.input[slot]: rng.standard_normal(d) for slot, d in enumerate(sizes)}
        for name, value in zip(op.node.input[3:], op.inputs[3:], strict=True):
            if value is not None:
                visible = rng.random((_BATCH, 1, _TOKENS, _TOKENS)) < _VISIBLE_SHARE
                feed[name] = visible if self.view.dtype(value) is DType.BOOL else rng.standard_normal(visible.shape)
        bias = (1, 1, 4 * kv_heads) if packed else (1, kv_heads, 1, 4)
        return feed, bias, bias

    def _projection_difference(
        self, projection: _Projection, nodes: Sequence[NodeProto], names: Mapping[str, str]
    ) -> str | None:
        """Return how a projection of biased rows differs from one with the moved bias; None if they agree."""
        rng, first, (result,) = np.random.default_rng(0), projection.ops[0].node, self.last.node.output
        weight, bias = rng.standard_normal((_TOKENS, _COLUMNS)), rng.standard_normal(_TOKENS)
        output_bias, rows = rng.standard_normal(_COLUMNS), rng.standard_normal((_BATCH, _TOKENS, _TOKENS))
        feed: dict[str, Array] = {projection.product.node.input[1]: weight}
        if projection.zeroing is not None:
            feed[first.input[0]] = rng.random((_BATCH, _TOKENS, 1)) < _VISIBLE_SHARE
        if projection.total is not None:
            feed[self.view.value_name(projection.total.bias)] = output_bias
        stored = projection.constants(bias, weight, output_bias if projection.total is not None else np.zeros(1))
        data = first.input[1 if projection.zeroing is not None else 0]
        after_feed = {data: rows, **{names[role]: array for role, array in stored.items()}}
        ops = {op.id for op in projection.ops}
        return difference(self.view, ops, nodes, {result: result}, [Trial({**feed, data: rows + bias}, after_feed)])


_BATCH, _TOKENS, _COLUMNS = 2, 3, 7  # sizes of random operands
_VISIBLE_SHARE = 0.6  # share of visible keys and rows in random masks
