"""Biases: split off their product, moved through linear ops to where they cost least, dropped where nothing sees them.

A low result of a product with a far larger bias holds the bias and little else. Split off, it is added in float32
behind the Cast that a float32 reader needs anyway. An InstanceNormalization subtracts it again, and so does a softmax
that of keys. The weights of values sum to one in each row, so that their bias passes through attention and the
projection behind it, into the bias there.

For onnxruntime's CUDA provider, which spreads the bias of a Gemm over the result before it multiplies, Gemms between
Reshapes become MatMul and Add, and biases get three axes, which its optimizer leaves to the Add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.builder import Surroundings, new_node
from amp_rewrite.ir.dataflow import OUTWEIGHS, alone, first_input_of, number, only_reader, orders, outweighs
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.node_check import node_check
from amp_rewrite.ir.op_classes import LAYERS, RELABELS
from amp_rewrite.ir.sizes import Dims
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.rewrite.equivalence import disagreement, mismatch, once_proved, plain_nodes, runs_of
from amp_rewrite.rewrite.reference import DOMAIN, run
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, judged, only_float32

_copies = first_input_of(RELABELS)
_SUBTRACTED = 2.0**5
"""How many times a bias is larger than the weights where only what is left without it counts."""


def split_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Split the bias off products before an output or a norm, or drop it. O(ops); reads the weights of suspects.

    A product whose schema needs a bias (Gemm below opset 11) is left alone, and so is a model that lists its weights as
    inputs (IR version 3).
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for op in view.of_kinds(LAYERS):
        if len(op.inputs) < 3 or op.outputs[0] is None or _needs_bias(op):
            continue
        reader = _reader(view, op.outputs[0])
        subtracts = reader == "InstanceNormalization"
        if not outweighs(view, op.inputs[2], op.inputs[1], context.to, by=_SUBTRACTED if subtracts else OUTWEIGHS):
            continue
        if subtracts:
            node = clone(op.node)
            del node.input[2:]
            words = "dropped, since the InstanceNormalization behind subtracts it"
            yield Replacement("bias", (op.id,), op.id, node, findings=_finding(op, words))
        elif reader == _OUTPUT or (reader is not None and reader.endswith("Normalization")):
            yield _split(view, op)


def _needs_bias(op: Op) -> bool:
    if op.signature is None:
        return True
    least, _ = node_check(op.domain, op.op_type, op.signature.since).inputs
    return least == len(op.inputs)


_OUTPUT = "an output"


def _reader(view: View, value: ValueId) -> str | None:
    while True:
        if value in view.yielded and not view.uses[value]:
            return _OUTPUT
        reader = only_reader(view, value)
        if reader is None or _copies(reader) != value or reader.outputs[0] is None:
            return reader.kind if reader is not None else None
        value = reader.outputs[0]


def _finding(op: Op, words: str) -> tuple[Finding, ...]:
    return (Finding("bias", op.name, f"its bias is far larger than its weights · {words}"),)


def _split(view: View, op: Op) -> Replacement:
    product, (result,) = clone(op.node), op.node.output
    product.output[0] = unused(f"{result}_unbiased", view.names)
    del product.input[2:]
    weight, tensor = view.constant(op.inputs[1]), view.constant(op.inputs[2])
    assert weight is not None and tensor is not None
    bias = view.model.array(tensor)
    if op.kind == "Gemm":
        bias = bias * np.float32(float_attribute(op.node, "beta", 1.0))
    else:
        bias = bias.reshape(-1, *[1] * (len(weight.dims) - 2))
    stored = from_array(bias, unused(f"{op.node.input[2]}_split", view.names))
    name = f"{op.node.name}_bias" if op.node.name else ""
    total = new_node("Add", [product.output[0], stored.name], result, name)
    words = "added in float32 behind it"
    return Replacement("bias", (op.id,), op.id, total, (stored,), ahead=(product,), findings=_finding(op, words))


# -- biases of attention ---------------------------------------------------------------------------

ATTENTION_BIAS = "attention_bias"
_ADDED = 5  # the operand of MultiHeadAttention that is added to scores
_TOKEN_AXES = 3  # batch, tokens, features
_ROWS = 1 << 6  # rows of a weight that are in float64 at once


@dataclass(frozen=True, slots=True)
class _Sum:
    """An Add of a value and a constant along the last axis, in the shape of the value."""

    add: Op
    source: ValueId
    bias: ValueId

    @classmethod
    def of(cls, view: View, add: Op | None, context: Context) -> _Sum | None:
        pairs = orders(add) if add is not None and add.kind == "Add" else ()
        return next((cls(add, a, b) for a, b in pairs if add and _along(view, context, a, b)), None)

    @classmethod
    def before(cls, view: View, value: ValueId | None, reader: Op, context: Context) -> _Sum | None:
        made_by = view.producer(value, "Add")
        near = made_by is not None and made_by.scope == reader.scope and alone(view, value, reader)
        return cls.of(view, made_by, context) if near else None


def _along(view: View, context: Context, source: ValueId, bias: ValueId) -> bool:
    """True if a flat constant has a number for each of the last axis of a value, and no more axes."""
    tensor, shape = view.constant(bias) if _flat(view, bias) else None, context.shape(view, source)
    if tensor is None or shape is None or _flat(view, source):
        return False
    return len(tensor.dims) <= len(shape) and tensor.dims[-1] in (1, shape[-1])


def _flat(view: View, value: ValueId) -> bool:
    tensor = view.constant(value)
    flat = tensor is not None and 1 <= len(tensor.dims) <= _TOKEN_AXES and all(d == 1 for d in tensor.dims[:-1])
    return flat and view.dtype(value) is DType.FLOAT


def _width(view: View, total: _Sum | None) -> int | None:
    tensor = view.constant(total.bias) if total is not None else None
    return tensor.dims[-1] if tensor is not None else None


@dataclass(frozen=True, slots=True)
class _Projection:
    """The readers of an attention's result: zeros in rows that see no key, a product with a weight, its bias."""

    zeroing: Op | None
    product: Op
    rows: int
    total: _Sum | None

    @classmethod
    def of(cls, view: View, op: Op, context: Context) -> _Projection | None:
        value = op.outputs[0]
        zeroing = only_reader(view, value, "Where")
        if zeroing is not None:
            if zeroing.inputs[1] != value or number(view, zeroing.inputs[2]) != 0:
                return None
            value = zeroing.outputs[0]
        product = only_reader(view, value, "MatMul")
        weight = view.constant(product.inputs[1]) if product is not None else None
        if product is None or weight is None or len(weight.dims) != 2 or not only_float32(view, (product.id,)):
            return None
        return cls(
            zeroing, product, weight.dims[0], _Sum.of(view, only_reader(view, product.outputs[0], "Add"), context)
        )

    @property
    def last(self) -> Op:
        return self.product if self.total is None else self.total.add


def part_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Add to each of queries, keys and values its part of a bias from before their Split. O(attentions).

    So that those of keys and values can go.
    """
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention",)):
        split = view.producer(op.inputs[0], "Split")
        total = _Sum.before(view, split.inputs[0], split, context) if split is not None else None
        if split is None or total is None or split.outputs != op.inputs[:3] or not only_float32(view, (split.id,)):
            continue
        shapes, bias = [context.shape(view, value) for value in split.outputs], view.array(total.bias)
        widths = [shape[-1] if shape and len(shape) == _TOKEN_AXES else None for shape in shapes]
        sizes = [width for width in widths if width is not None]
        last = int_attribute(split.node, "axis", 0) in (-1, _TOKEN_AXES - 1)
        if last and len(sizes) == len(widths) and bias is not None and sum(sizes) == bias.size:
            yield judged("bias", split.id, _parted(view, split, total, bias.reshape(-1), sizes))


def _parted(view: View, split: Op, total: _Sum, bias: Array, sizes: Sequence[int]) -> Replacement | str:
    around, node = Surroundings(view, split), clone(split.node)
    node.input[0] = view.value_name(total.source)
    for slot, part in enumerate(np.split(bias, np.cumsum(sizes)[:-1])):
        result = split.node.output[slot]
        node.output[slot] = around.name(f"{result}_unbiased")
        around.after("Add", (node.output[slot], around.constant(f"{result}_bias", part)), result)
    said = (Finding("bias", split.name, "the bias before a Split is added to each of its parts"),)
    fusion = Replacement("bias", (total.add.id, split.id), split.id, node, **around.parts(), findings=said)
    feed = {node.input[0]: np.random.default_rng(0).standard_normal((_BATCH, _TOKENS, bias.size))}
    return disagreement(view, fusion, feed) or fusion


def move_attention_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Drop the bias of keys, and move the one of values behind the projection. O(attentions).

    A softmax does not see what is added to all scores of a row. Where an op behind puts zeros in rows that see no key,
    it puts the negative bias there.
    """
    for op in view.of_kinds((f"{DOMAIN}::MultiHeadAttention",)):
        # A cache holds keys and values with their biases; the op's own bias is added to both.
        more = [*op.inputs[3:_ADDED], *op.inputs[_ADDED + 1 :], *op.outputs[1:]]
        if more.count(None) < len(more) or len(set(op.inputs[:3])) < 3 or not only_float32(view, (op.id,)):
            continue
        keys, values = (_Sum.before(view, value, op, context) for value in op.inputs[1:3])
        behind = _Projection.of(view, op, context) if values is not None else None
        if behind is not None and values is not None and _width(view, values) != behind.rows:
            behind = None
        if behind is not None or keys is not None:
            mover = _BiasMover(view, op, keys, values if behind is not None else None, behind, context.to)
            yield judged(ATTENTION_BIAS, op.id, mover.replacement())


class _BiasMover:
    """The nodes of an attention without biases of keys and values, and of the projection behind it."""

    def __init__(
        self, view: View, op: Op, keys: _Sum | None, values: _Sum | None, behind: _Projection | None, to: DType
    ) -> None:
        self.view, self.op, self.keys, self.values, self.behind, self.to = view, op, keys, values, behind, to
        self.last = op if behind is None else behind.last
        (result,) = self.last.node.output
        self.moved, self.negative = (unused(f"{result}_{word}", view.names) for word in ("bias", "negative_bias"))

    def replacement(self) -> Replacement | str:
        sums = [total for total in (self.keys, self.values) if total is not None]
        behind = [] if self.behind is None else [self.behind.zeroing, self.behind.product, self.behind.last]
        ops = sorted({op.id for op in (*(total.add for total in sums), self.op, *behind) if op is not None})
        nodes, words = list(self._nodes()), list[str]()
        if self.keys is not None:
            words.append("that of its keys is dropped, since a softmax does not see it")
        if self.values is not None:
            words.append("that of its values is added behind its projection")
        stored = self._stored(self.view.array)
        if not all(float(np.abs(array).max(initial=0)) <= self.to.max for array in stored.values()):
            return f"the bias behind its projection would leave the range of {self.to.spelling}"
        weights = tuple(from_array(array.astype(np.float32), name) for name, array in stored.items())
        said = (Finding("bias", self.op.name, f"biases of an attention · {', '.join(words)}"),)
        return self._mismatch(ops, nodes) or Replacement(
            ATTENTION_BIAS, tuple(ops), self.last.id, nodes[-1], weights, ahead=tuple(nodes[:-1]), findings=said
        )

    def _nodes(self) -> Iterator[NodeProto]:
        attention = clone(self.op.node)
        for slot, total in ((1, self.keys), (2, self.values)):
            if total is not None:
                attention.input[slot] = self.view.value_name(total.source)
        yield attention
        if self.behind is None:
            return
        if self.behind.zeroing is not None:
            zeroing = clone(self.behind.zeroing.node)
            zeroing.input[2] = self.negative
            yield zeroing
        product, total = clone(self.behind.product.node), self.behind.total
        if total is not None:
            node = clone(total.add.node)
            node.input[total.add.inputs.index(total.bias)] = self.moved
        else:
            (result,) = product.output
            product.output[0] = unused(f"{result}_unbiased", self.view.names)
            node = new_node("Add", [product.output[0], self.moved], result, f"{product.name}_bias")
        yield from (product, node)

    def _stored(self, numbers: Callable[[ValueId], Array | None]) -> dict[str, Array]:
        """Return the new constants by name: the bias of values times the weight is in the bias behind it."""
        if self.values is None or self.behind is None:
            return {}
        total = self.behind.total
        bias, weight = numbers(self.values.bias), numbers(self.behind.product.operands[1])
        after = numbers(total.bias) if total is not None else np.zeros(1)
        assert bias is not None and weight is not None and after is not None
        bias, rows = bias.reshape(-1), range(0, bias.size, _ROWS)
        parts = (bias[i : i + _ROWS].astype(np.float64) @ weight[i : i + _ROWS].astype(np.float64) for i in rows)
        stored: dict[str, Array] = {self.moved: sum(parts, after.reshape(-1).astype(np.float64))}
        return {**stored, self.negative: -bias} if self.behind.zeroing is not None else stored

    def _mismatch(self, ops: Sequence[OpId], nodes: Sequence[NodeProto]) -> str | None:
        """Return how the nodes differ from the ops on small random operands, weights included; None if both agree."""
        view = self.view
        shapes: dict[ValueId, tuple[int, ...]] = {}
        heads = int_attribute(self.op.node, "num_heads", 1)
        keys, values = (_width(view, total) or heads for total in (self.keys, self.values))
        for slot, width, total in ((0, keys, None), (1, keys, self.keys), (2, values, self.values)):
            shapes[self.op.operands[slot] if total is None else total.source] = (_BATCH, _TOKENS, width)
            if total is not None:
                shapes[total.bias] = (width,)
        if (added := self.op.inputs[_ADDED] if len(self.op.inputs) > _ADDED else None) is not None:
            shapes[added] = (_BATCH, 1, _TOKENS, _TOKENS)
        if self.behind is not None:
            total = self.behind.total
            columns = values if total is not None and total.bias in shapes else _COLUMNS
            shapes[self.behind.product.operands[1]] = (values, columns)
            shapes.update({total.bias: (columns,)} if total is not None else {})
        drawn = {view.value_name(value): shape for value, shape in shapes.items()}
        seen = None if self.behind is None or self.behind.zeroing is None else self.behind.zeroing.node.input[0]
        (result,) = self.last.node.output

        def tested() -> str | None:
            rng = np.random.default_rng(0)
            feed: dict[str, Array] = {name: rng.standard_normal(shape) for name, shape in drawn.items()}
            if seen is not None:
                feed[seen] = rng.random((_BATCH, _TOKENS, 1)) < _SEEING
            after = {**feed, **self._stored(lambda value: feed.get(view.value_name(value)))}
            before = runs_of(view, ops, result, [feed])
            magnitude = np.abs(before[0]).max() if not isinstance(before, str) else 0
            return mismatch(before, run(nodes, result, [after], view.opsets), [np.array(magnitude)])

        given = [*drawn.items(), (seen, "seen")] if seen is not None else [*drawn.items()]
        return once_proved([*plain_nodes(view, ops), *nodes], given, tuple(sorted(view.opsets.items())), tested)


_BATCH, _TOKENS, _COLUMNS = 2, 3, 7  # of random operands
_SEEING = 0.6  # the share of rows that see a key there


# -- biases before a table ------------------------------------------------------------------------


def move_into_tables(view: View, context: Context) -> Iterator[Outcome]:
    """Add a bias to the rows of a constant table that is added behind it, perhaps behind a Concat. O(Adds)."""
    for op in view.of_kinds(("Add",)):
        total = _Sum.of(view, op, context)
        if total is None or view.producer(total.source, "MatMul") is None or not only_float32(view, (op.id,)):
            continue
        joined = only_reader(view, op.outputs[0], "Concat")
        tokens = op.outputs[0] if joined is None else joined.outputs[0]
        behind = only_reader(view, tokens, "Add")
        if behind is not None and tokens is not None:
            found = _tabled(view, context, total, joined, behind, tokens)
            if found is not None:
                yield judged("bias", behind.id, found)


def _tabled(
    view: View, context: Context, total: _Sum, joined: Op | None, behind: Op, tokens: ValueId
) -> Replacement | str | None:
    (biased,) = total.add.results
    parts = (biased,) if joined is None else joined.operands
    value, shape = next(v for v in behind.operands if v != tokens), context.shape(view, tokens)
    shapes = [context.shape(view, part) or () for part in parts]
    lengths = [each[1] or 0 for each in shapes if len(each) == _TOKEN_AXES]
    table, bias = view.array(value) if view.dtype(value) is DType.FLOAT else None, view.array(total.bias)
    axis = 1 if joined is None else int_attribute(joined.node, "axis", 0)
    if table is None or bias is None or shape is None or len(lengths) < len(parts) or sum(lengths) != shape[1]:
        return None
    if table.shape[-2:] != shape[1:] or any(d != 1 for d in table.shape[:-2]) or axis not in (1, 1 - _TOKEN_AXES):
        return None
    place, moved = parts.index(biased), table.astype(np.float64)
    first = sum(lengths[:place])
    moved[..., first : first + lengths[place], :] += bias.reshape(-1)
    if not float(np.abs(moved).max()) <= context.to.max:
        return f"the table with the bias in it would leave the range of {context.to.spelling}"
    around, node, source = Surroundings(view, behind), clone(behind.node), view.value_name(total.source)
    stored = around.constant(f"{view.value_name(value)}_biased", moved.astype(np.float32))
    node.input[behind.inputs.index(value)] = stored
    reader, slot = (node, behind.inputs.index(biased)) if joined is None else (clone(joined.node), place)
    reader.input[slot] = source
    around.ahead += [reader] if joined is not None else []
    ops = tuple(op.id for op in (total.add, joined, behind) if op is not None)
    said = (Finding("bias", total.add.name, "a bias before a constant table is added to its rows"),)
    fusion = Replacement("bias", ops, behind.id, node, **around.parts(), findings=said)
    rng, names = np.random.default_rng(0), [source if part == biased else view.value_name(part) for part in parts]
    pairs = zip(names, lengths, strict=True)
    return (
        disagreement(view, fusion, {n: rng.standard_normal((_BATCH, d, table.shape[-1])) for n, d in pairs}) or fusion
    )


# -- biases of products ----------------------------------------------------------------------------


def spread_gemms(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each Gemm between Reshapes that join the axes before its columns, and part them again. O(Gemms).

    By MatMul, which needs no Reshape, and an Add, which norms and activations take in.
    """
    for op in view.of_kinds(("Gemm",)):
        plain = not any(int_attribute(op.node, name, 0) for name in ("transA", "transB"))
        scaled = any(float_attribute(op.node, name, 1.0) != 1 for name in ("alpha", "beta"))
        if not plain or scaled or len(op.operands) < 3 or not only_float32(view, (op.id,)):
            continue
        source, weight, bias = op.operands
        joins, parts = view.producer(source, "Reshape"), only_reader(view, op.outputs[0], "Reshape")
        tensor = view.constant(weight)
        if joins is None or parts is None or joins.scope != op.scope or tensor is None or not _flat(view, bias):
            continue
        result, read = parts.node.output[0], joins.node.input[0]
        dims, before = (context.dims(view).get((op.scope, name), ()) for name in (result, read))
        whole = (*dims[:-1], tensor.dims[0])
        if len(dims) < _TOKEN_AXES or None in dims or dims[-1] != tensor.dims[1]:
            continue
        around = Surroundings(view, parts)
        if before != whole:
            shape = _stated_shape(view, around, parts, whole, tensor.dims)
            if shape is None:
                continue
            read = around.before("Reshape", (read, shape), f"{result}_rows")
        product = around.before("MatMul", (read, view.value_name(weight)), f"{result}_product")
        node = new_node("Add", [product, view.value_name(bias)], result, parts.node.name)
        said = (Finding("fused", op.name, "a Gemm between Reshapes: MatMul and Add, of which others take the Add in"),)
        yield Replacement("gemm", (op.id, parts.id), parts.id, node, **around.parts(), findings=said)


def _stated_shape(view: View, around: Surroundings, parts: Op, whole: Dims, weight: Sequence[int]) -> str | None:
    if all(isinstance(d, int) for d in whole):
        return around.constant(f"{parts.node.output[0]}_rows_shape", np.array(whole, np.int64))
    return parts.node.input[1] if weight[0] == weight[1] and not _may_copy(view, parts.inputs[1]) else None


def _may_copy(view: View, shape: ValueId | None) -> bool:
    """True if a shape may hold 0, by which a Reshape copies an axis of what it reads."""
    if shape is not None and view.constant(shape) is not None:
        held = view.array(shape)
        return held is None or not np.all(held)
    made_by = view.producer(shape)
    if made_by is not None and made_by.kind in ("Concat", "Cast", "Identity"):
        return any(_may_copy(view, part) for part in made_by.operands)
    return made_by is None


def widen_biases(view: View, context: Context) -> Iterator[Replacement]:
    """Give each bias of one axis that is added to a MatMul of three axes three axes, too. O(Adds)."""
    for op in view.of_kinds(("Add",)):
        total = _Sum.of(view, op, context)
        product = view.producer(total.source, "MatMul") if total is not None else None
        tensor = view.constant(total.bias) if total is not None else None
        if total is None or product is None or tensor is None or len(tensor.dims) != 1:
            continue
        held = view.array(total.bias)
        if held is not None and len(context.shape(view, total.source) or ()) == _TOKEN_AXES:
            node = clone(op.node)
            stored = from_array(held.reshape(1, 1, -1), unused(f"{view.value_name(total.bias)}_wide", view.names))
            node.input[op.inputs.index(total.bias)] = stored.name
            yield Replacement("bias", (op.id,), op.id, node, (stored,), findings=())
