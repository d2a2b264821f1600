"""Biases of keys and values: the first dropped, the second moved behind the projection of an attention.

A softmax subtracts what is added to all scores of a row, and so the bias of keys. The weights of values sum to one in
each row, so that their bias passes through attention and the projection behind it, into the bias there.
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
from amp_rewrite.rewrite.attention.build import drawn_operands
from amp_rewrite.rewrite.attention.layout import RANK, carried
from amp_rewrite.rewrite.attention.legality import FusibleAttention, sites
from amp_rewrite.rewrite.builder import Surroundings, new_node
from amp_rewrite.rewrite.const_eval import TRACED_MOVES
from amp_rewrite.rewrite.equivalence import Trial, difference, disagreement, plain_nodes
from amp_rewrite.rewrite.passes.biases import TOKEN_AXES, BiasSum
from amp_rewrite.rewrite.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, only_float32

_KIND = "attention_bias"
_ADDED = 5  # the operand of MultiHeadAttention that is added to scores
_ROWS = 1 << 6  # rows of a weight that are in float64 at once


def part_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Add to each of queries, keys and values its part of a bias from before their Split. O(attentions).

    So that those of keys and values can go.
    """
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention",)):
        split = view.producer(op.inputs[0], "Split")
        total = BiasSum.before(view, split.inputs[0], split, context) if split is not None else None
        if split is None or total is None or split.outputs != op.inputs[:3] or not only_float32(view, (split.id,)):
            continue
        shapes, bias = [context.shape(view, value) for value in split.outputs], view.array(total.bias)
        widths = [shape[-1] if shape and len(shape) == TOKEN_AXES else None for shape in shapes]
        sizes = [width for width in widths if width is not None]
        last = int_attribute(split.node, "axis", 0) in (-1, TOKEN_AXES - 1)
        if last and len(sizes) == len(widths) and bias is not None and sum(sizes) == bias.size:
            yield as_outcome("bias", split.id, _parted(view, split, total, bias.reshape(-1), sizes))


def _parted(view: View, split: Op, total: BiasSum, bias: Array, sizes: Sequence[int]) -> Replacement | str:
    around, node = Surroundings(view, split), clone(split.node)
    node.input[0] = view.value_name(total.source)
    for slot, part in enumerate(np.split(bias, np.cumsum(sizes)[:-1])):
        result = split.node.output[slot]
        node.output[slot] = around.name(f"{result}_unbiased")
        around.after("Add", (node.output[slot], around.constant(f"{result}_bias", part)), result)
    said = (Finding("bias", split.name, "the bias before a Split is added to each of its parts"),)
    fusion = Replacement("bias", (total.add.id, split.id), split.id, node, **around.parts(), findings=said)
    feed = {node.input[0]: np.random.default_rng(0).standard_normal((_BATCH, _TOKENS, bias.size))}
    return disagreement(view, fusion, [Trial(feed, {})]) or fusion


def move_attention_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Drop the bias of keys, and move the one of values behind the projection. O(attentions).

    A softmax does not see what is added to all scores of a row. Where an op behind puts zeros in rows that see no key,
    it puts the negative bias there.
    """
    for core in _cores(view, context):
        keys = _Bias.before(view, context, core.keys)
        values = _Bias.before(view, context, core.values) if core.sums else None
        behind = _Projection.of(view, context, core, values) if values is not None else None
        if keys is not None or behind is not None:
            mover = _BiasMover(view, core, keys, behind)
            yield as_outcome(_KIND, core.last.id, mover.replacement(context.to))


@dataclass(frozen=True, slots=True)
class _Port:
    """A value that an attention reads, the op that does, and its axes other than batch and tokens."""

    value: ValueId | None
    reader: Op
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Core:
    """An attention as one op, or written out. `ops`: all of it. `last`: the op that makes the result.

    `heads` of queries and of values, of one op. `sums`: all weights of a row sum to one. `site`: of one written out.
    """

    ops: tuple[OpId, ...]
    last: Op
    keys: _Port
    values: _Port
    heads: tuple[int, int] = (1, 1)
    sums: bool = True
    site: FusibleAttention | None = None

    def of_result(self, values: Array) -> Array:
        """Return numbers of the axes of the values as the result has them: repeated for the heads of queries."""
        heads, fewer = self.heads
        return np.repeat(values.reshape(fewer, -1), heads // fewer, axis=0).reshape(-1)


def _cores(view: View, context: Context) -> Iterator[_Core]:
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention", "Attention")):
        own = op.kind == "Attention"
        # A cache holds keys and values with their biases; the runtime's own bias is added to both.
        read = op.inputs[4:] if own else [*op.inputs[3:_ADDED], *op.inputs[_ADDED + 1 :]]
        shapes = [context.shape(view, v) or () for v in op.inputs[:3]]
        packed = len(shapes[0]) == TOKEN_AXES
        stated = [int_attribute(op.node, f"{word}_num_heads", 0) for word in ("q", "kv")] if own else [1, 1]
        heads, fewer = stated if packed else ((shape[1] or 0) if len(shape) == RANK else 0 for shape in shapes[:2])
        fits = len({len(shape) for shape in shapes}) == 1 and heads > 0 and fewer > 0 and heads % fewer == 0
        plain = all(v is None for v in (*read, *op.outputs[1:])) and not float_attribute(op.node, "softcap", 0.0)
        if fits and plain and len(set(op.inputs[:3])) == 3 and only_float32(view, (op.id,)):
            keys, values = (_Port(op.inputs[slot], op, (2,) if packed else (1, 3)) for slot in (1, 2))
            masked = own and len(op.inputs) > 3 and op.inputs[3] is not None  # a row without keys is 0
            yield _Core((op.id,), op, keys, values, (heads, fewer), not masked or context.every_row_attends)
    for _, site in sites(view, context):
        if isinstance(site, str) or len({site.form.queries, site.form.keys, site.form.values}) < 3:
            continue
        form = site.form
        reader = next(op for op in view.readers(form.keys) if op.id in form.ops)
        sums = not (site.empty and form.zeroed and site.infinite)
        ports = _Port(form.keys, reader, (1, 2)), _Port(form.values, form.last, (1, 3))
        yield _Core(tuple(sorted({*form.ops, *form.beside})), form.last, *ports, sums=sums, site=site)


def _only(view: View, value: ValueId | None, reader: Op) -> bool:
    """True if one op alone reads the numbers of a value; others may read its shape."""
    if value is None or exposed(view, value):
        return False
    readers = [view.ops[use.op] for use in view.uses[value]]
    return [op.id for op in readers if op.kind != "Shape"] == [reader.id] and {op.scope for op in readers} == {
        reader.scope
    }


@dataclass(frozen=True, slots=True)
class _Bias:
    """A sum with a bias that only moves part from an attention: the op that reads it, the element at each place."""

    total: BiasSum
    reader: Op
    marks: Array

    @classmethod
    def before(cls, view: View, context: Context, port: _Port) -> _Bias | None:
        value, reader, moves = port.value, port.reader, list[Op]()
        while (op := view.producer(value)) is not None and op.kind in TRACED_MOVES and _only(view, value, reader):
            moves.insert(0, op)
            value, reader = op.inputs[0], op
        total = BiasSum.before(view, value, reader, context)
        shape = context.shape(view, total.source) if total is not None else None
        if total is None or shape is None or value is None or shape[-1] is None:
            return None
        marks = carried(view, value, np.arange(shape[-1]), moves, port.axes)
        return cls(total, reader, marks.reshape(-1)) if marks is not None else None


@dataclass(frozen=True, slots=True)
class _Projection:
    """The readers of an attention's result: zeros in rows that see no key, a product with a weight, its bias.

    `values`: what moves there. `marks`: the element of that bias in each row of the weight.
    """

    values: _Bias
    zeroing: Op | None
    product: Op
    total: BiasSum | None
    marks: Array

    @classmethod
    def of(cls, view: View, context: Context, core: _Core, values: _Bias) -> _Projection | None:
        value, moves = core.last.outputs[0], list[Op]()
        while (op := only_reader(view, value, *TRACED_MOVES)) is not None:
            moves.append(op)
            value = op.outputs[0]
        zeroing, marks = only_reader(view, value, "Where"), core.of_result(values.marks)
        packed = not moves and len(core.values.axes) == 1
        rows = marks if packed else _moved(view, context, core, marks, moves)
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
        """Return the bias behind with that of values times the weight, and the negative bias for zeroed rows."""
        rows = range(0, bias.size, _ROWS)
        parts = (bias[i : i + _ROWS] @ weight[i : i + _ROWS].astype(np.float64) for i in rows)
        moved = sum(parts, after.reshape(-1).astype(np.float64))
        return {"bias": moved, **({"negative_bias": -bias} if self.zeroing is not None else {})}


def _moved(view: View, context: Context, core: _Core, marks: Array, moves: Sequence[Op]) -> Array | None:
    """Return marks of a result behind moves, along the last axis; None if they do not fit."""
    (result,) = core.last.results
    shape = context.shape(view, result)
    rank = len(context.shape(view, moves[-1].outputs[0]) or ()) if moves else 0
    sizes = [(d or 0) if axis in core.values.axes else 1 for axis, d in enumerate(shape or ())]
    if not rank or math.prod(sizes) != marks.size:
        return None
    return carried(view, result, marks.reshape(sizes), moves, (rank - 1,))


class _BiasMover:
    """The ops around an attention without biases of keys and values, and of the projection behind it."""

    def __init__(self, view: View, core: _Core, keys: _Bias | None, behind: _Projection | None) -> None:
        self.view, self.core, self.behind = view, core, behind
        self.moved = keys, behind.values if behind is not None else None
        self.sums = [each for each in self.moved if each is not None]
        self.last = behind.ops[-1] if behind is not None else self.sums[0].reader

    def replacement(self, to: DType) -> Replacement | str:
        view, instead, around = self.view, dict[OpId, NodeProto](), Surroundings(self.view, self.last)
        for each in self.sums:
            node = instead.setdefault(each.reader.id, clone(each.reader.node))
            slot = next(slot for slot, v in enumerate(each.reader.inputs) if v in each.total.add.outputs)
            node.input[slot] = view.value_name(each.total.source)
        ops = {each.total.add.id for each in self.sums} | instead.keys()
        words = ["that of its keys is dropped, since a softmax does not see it"] if self.moved[0] is not None else []
        why = None
        if self.behind is None:
            node = instead.pop(self.last.id)
        else:
            words.append("that of its values is added behind its projection")
            stored = self._stored(self.behind)
            if not all(float(np.abs(array).max(initial=0)) <= to.max for array in stored.values()):
                return f"the bias behind its projection would leave the range of {to.spelling}"
            stem = self.last.node.output[0]
            names = {w: around.constant(f"{stem}_{w}", array.astype(np.float32)) for w, array in stored.items()}
            *zeroing, product, node = nodes = self._nodes(self.behind, around, names)
            ops |= {op.id for op in self.behind.ops}
            around.ahead.append(product)
            instead.update((self.behind.ops[0].id, each) for each in zeroing)
            why = self._misplaced(self.behind, nodes, names)
        said = (Finding("bias", self.core.last.name, f"biases of an attention · {', '.join(words)}"),)
        fusion = Replacement(
            _KIND, tuple(sorted(ops)), self.last.id, node, instead=instead, findings=said, **around.parts()
        )
        return self._unseen() or why or fusion

    def _stored(self, behind: _Projection) -> dict[str, Array]:
        weight, held = self.view.array(behind.product.operands[1]), self.view.array(behind.values.total.bias)
        after = self.view.array(behind.total.bias) if behind.total is not None else np.zeros(1)
        assert held is not None and weight is not None and after is not None
        whole = np.broadcast_to(held.reshape(-1), behind.values.marks.max() + 1)
        return behind.constants(whole[behind.marks].astype(np.float64), weight, after)

    def _nodes(self, behind: _Projection, around: Surroundings, names: Mapping[str, str]) -> list[NodeProto]:
        *zeroing, product = (clone(op.node) for op in (behind.zeroing, behind.product) if op is not None)
        for node in zeroing:
            node.input[2] = names["negative_bias"]
        if behind.total is not None:
            total = clone(behind.total.add.node)
            total.input[behind.total.add.inputs.index(behind.total.bias)] = names["bias"]
        else:
            (result,) = product.output
            product.output[0] = around.name(f"{result}_unbiased")
            total = new_node("Add", [product.output[0], names["bias"]], result, f"{product.name}_bias")
        return [*zeroing, product, total]

    # -- proof -------------------------------------------------------------------------------------

    def _unseen(self) -> str | None:
        """Return how an attention of biased operands differs from that of others, plus the bias of values; or None."""
        view, core, rng = self.view, self.core, np.random.default_rng(0)
        result = core.last.node.output[0]
        feed, *shapes = self._operands(rng) if core.site is None else drawn_operands(core.site, rng)
        pairs = zip(shapes, self.moved, strict=True)
        bias = [rng.standard_normal(shape) * (moved is not None) for shape, moved in pairs]
        names = [view.value_name(port.value) for port in (core.keys, core.values) if port.value is not None]
        biased = {**feed, **{name: feed[name] + b for name, b in zip(names, bias, strict=True)}}

        def unbiased(array: Array) -> Array:
            own = [d if axis in core.values.axes else 1 for axis, d in enumerate(array.shape)]
            return array - (core.of_result(bias[1]) if core.site is None else bias[1].reshape(-1)).reshape(own)

        trial = Trial(biased, feed, float(max(np.abs(array).max() for array in biased.values())))
        return difference(view, core.ops, plain_nodes(view, core.ops), {result: result}, [trial], layout=unbiased)

    def _operands(self, rng: np.random.Generator) -> tuple[dict[str, Array], tuple[int, ...], tuple[int, ...]]:
        op, (heads, fewer) = self.core.last, self.core.heads
        if op.kind != "Attention":
            heads = fewer = int_attribute(op.node, "num_heads", 1)
        packed = len(self.core.keys.axes) == 1
        sizes = [(_BATCH, _TOKENS, 4 * h) if packed else (_BATCH, h, _TOKENS, 4) for h in (heads, fewer, fewer)]
        feed: dict[str, Array] = {op.node.input[slot]: rng.standard_normal(d) for slot, d in enumerate(sizes)}
        for name, value in zip(op.node.input[3:], op.inputs[3:], strict=True):
            if value is not None:
                seen = rng.random((_BATCH, 1, _TOKENS, _TOKENS)) < _SEEING
                feed[name] = seen if self.view.dtype(value) is DType.BOOL else rng.standard_normal(seen.shape)
        bias = (1, 1, 4 * fewer) if packed else (1, fewer, 1, 4)
        return feed, bias, bias

    def _misplaced(self, behind: _Projection, nodes: Sequence[NodeProto], names: Mapping[str, str]) -> str | None:
        """Return how a projection of biased rows differs from that with the moved bias; None if both agree."""
        rng, first, (result,) = np.random.default_rng(0), behind.ops[0].node, self.last.node.output
        weight, bias = rng.standard_normal((_TOKENS, _COLUMNS)), rng.standard_normal(_TOKENS)
        after, rows = rng.standard_normal(_COLUMNS), rng.standard_normal((_BATCH, _TOKENS, _TOKENS))
        feed: dict[str, Array] = {behind.product.node.input[1]: weight}
        if behind.zeroing is not None:
            feed[first.input[0]] = rng.random((_BATCH, _TOKENS, 1)) < _SEEING
        if behind.total is not None:
            feed[self.view.value_name(behind.total.bias)] = after
        stored = behind.constants(bias, weight, after if behind.total is not None else np.zeros(1))
        read = first.input[1 if behind.zeroing is not None else 0]
        written = {read: rows, **{names[word]: array for word, array in stored.items()}}
        ops = {op.id for op in behind.ops}
        return difference(self.view, ops, nodes, {result: result}, [Trial({**feed, read: rows + bias}, written)])


_BATCH, _TOKENS, _COLUMNS = 2, 3, 7  # of random operands
_SEEING = 0.6  # the share of rows that see a key there
