"""Biases: split off their product, and moved to where they cost least.

A low result of a product with a far larger bias holds the bias and little else. Split off, it is added in float32
behind the Cast that a float32 reader needs anyway.

For onnxruntime's CUDA provider, which spreads the bias of a Gemm over the result before it multiplies, Gemms between
Reshapes become MatMul and Add, and biases get three axes, which its optimizer leaves to the Add.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import OUTWEIGHS, first_input_of, is_only_reader, only_reader, orders, outweighs
from amp_rewrite.ir.op_classes import LAYERS, RELABELS
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.builder import Surroundings, new_node
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, only_float32

_copies = first_input_of(RELABELS)


def split_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Split the bias off products before an output or a norm. O(ops); reads the weights of suspects.

    A product whose schema needs a bias (Gemm below opset 11) is left alone, and so is a model that lists its weights as
    inputs (IR version 3).
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for op in view.of_kinds(LAYERS):
        needed = op.signature is None or len(op.inputs) - 1 in op.signature.required
        if len(op.inputs) < 3 or op.outputs[0] is None or needed:
            continue
        most = _largest_bias(view, op.outputs[0])
        if most is not None and outweighs(view, op.inputs[2], op.inputs[1], context.to, by=most):
            yield _split(view, op)


def _largest_bias(view: View, value: ValueId) -> float | None:
    """Return how many times a bias may be larger than the weights before a norm, or an output; None before other ops.

    The value may be copied in between. An InstanceNormalization subtracts all of the bias.
    """
    while (reader := only_reader(view, value)) is not None and _copies(reader) == value and reader.results:
        (value,) = reader.results
    if reader is None:
        return OUTWEIGHS if value in view.yielded and not view.uses[value] else None
    if reader.kind == "InstanceNormalization":
        return 2.0**5
    return OUTWEIGHS if reader.kind.endswith("Normalization") else None


def _split(view: View, op: Op) -> Replacement:
    product, (result,), around = clone(op.node), op.node.output, Surroundings(view, op)
    product.output[0] = around.name(f"{result}_unbiased")
    del product.input[2:]
    weight, bias = view.constant(op.inputs[1]), view.array(op.inputs[2])
    assert weight is not None and bias is not None
    if op.kind == "Gemm":
        bias = bias * np.float32(float_attribute(op.node, "beta", 1.0))
    else:
        bias = bias.reshape(-1, *[1] * (len(weight.dims) - 2))
    name = f"{op.node.name}_bias" if op.node.name else ""
    total = new_node("Add", [product.output[0], around.constant(f"{op.node.input[2]}_split", bias)], result, name)
    around.ahead.append(product)
    said = (Finding("bias", op.name, "its bias is far larger than its weights · added in float32 behind it"),)
    return Replacement("bias", (op.id,), op.id, total, findings=said, **around.parts())


TOKEN_AXES = 3  # batch, tokens, features


@dataclass(frozen=True, slots=True)
class BiasSum:
    """An Add of a value and a constant along the last axis, in the shape of the value."""

    add: Op
    source: ValueId
    bias: ValueId

    @classmethod
    def of(cls, view: View, add: Op | None, context: Context) -> BiasSum | None:
        pairs = orders(add) if add is not None and add.kind == "Add" else ()
        return next((cls(add, a, b) for a, b in pairs if add and _along(view, context, a, b)), None)

    @classmethod
    def before(cls, view: View, value: ValueId | None, reader: Op, context: Context) -> BiasSum | None:
        producer = view.producer(value, "Add")
        near = producer is not None and producer.scope == reader.scope and is_only_reader(view, value, reader)
        return cls.of(view, producer, context) if near else None


def _along(view: View, context: Context, source: ValueId, bias: ValueId) -> bool:
    """True if a flat constant has a number for each of the last axis of a value, and no more axes."""
    tensor = view.constant(bias)
    if tensor is None or not _flat(view, bias) or _flat(view, source):
        return False
    shape = context.shape(view, source)
    return shape is not None and len(tensor.dims) <= len(shape) and tensor.dims[-1] in (1, shape[-1])


def _flat(view: View, value: ValueId) -> bool:
    tensor = view.constant(value)
    flat = tensor is not None and 1 <= len(tensor.dims) <= TOKEN_AXES and all(d == 1 for d in tensor.dims[:-1])
    return flat and view.dtype(value) is DType.FLOAT


# -- biases before a table ------------------------------------------------------------------------


def move_into_tables(view: View, context: Context) -> Iterator[Outcome]:
    """Add a bias to the rows of a constant table that is added behind it, perhaps behind a Concat. O(Adds)."""
    for op in view.of_kinds(("Add",)):
        total = BiasSum.of(view, op, context)
        if total is None or view.producer(total.source, "MatMul") is None or not only_float32(view, (op.id,)):
            continue
        joined = only_reader(view, op.outputs[0], "Concat")
        tokens = op.outputs[0] if joined is None else joined.outputs[0]
        behind = only_reader(view, tokens, "Add")
        if behind is not None and tokens is not None:
            found = _tabled(view, context, total, joined, behind, tokens)
            if found is not None:
                yield as_outcome("bias", behind.id, found)


def _tabled(
    view: View, context: Context, total: BiasSum, joined: Op | None, behind: Op, tokens: ValueId
) -> Replacement | str | None:
    (biased,) = total.add.results
    parts = (biased,) if joined is None else joined.operands
    value, shape = next(v for v in behind.operands if v != tokens), context.shape(view, tokens)
    shapes = [context.shape(view, part) or () for part in parts]
    lengths = [each[1] or 0 for each in shapes if len(each) == TOKEN_AXES]
    table, bias = view.array(value) if view.dtype(value) is DType.FLOAT else None, view.array(total.bias)
    axis = 1 if joined is None else int_attribute(joined.node, "axis", 0)
    if table is None or bias is None or shape is None or len(lengths) < len(parts) or sum(lengths) != shape[1]:
        return None
    if table.shape[-2:] != shape[1:] or any(d != 1 for d in table.shape[:-2]) or axis not in (1, 1 - TOKEN_AXES):
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
    feed = {n: rng.standard_normal((2, d, table.shape[-1])) for n, d in zip(names, lengths, strict=True)}
    return disagreement(view, fusion, [Trial(feed, {})]) or fusion


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
        dims, before = (dims_of(view, value) for value in (parts.outputs[0], joins.inputs[0]))
        whole = (*dims[:-1], tensor.dims[0])
        if len(dims) < TOKEN_AXES or None in dims or dims[-1] != tensor.dims[1]:
            continue
        around = Surroundings(view, parts)
        if before != whole:
            if not all(isinstance(d, int) for d in whole):
                continue
            shape = around.constant(f"{result}_rows_shape", np.array(whole, np.int64))
            read = around.before("Reshape", (read, shape), f"{result}_rows")
        product = around.before("MatMul", (read, view.value_name(weight)), f"{result}_product")
        node = new_node("Add", [product, view.value_name(bias)], result, parts.node.name)
        said = (Finding("fused", op.name, "a Gemm between Reshapes: MatMul and Add, of which others take the Add in"),)
        yield Replacement("gemm", (op.id, parts.id), parts.id, node, **around.parts(), findings=said)


def widen_biases(view: View, context: Context) -> Iterator[Replacement]:
    """Give each bias of one axis that is added to a MatMul of three axes three axes, too. O(Adds)."""
    for op in view.of_kinds(("Add",)):
        total = BiasSum.of(view, op, context)
        product = view.producer(total.source, "MatMul") if total is not None else None
        tensor = view.constant(total.bias) if total is not None else None
        if total is None or product is None or tensor is None or len(tensor.dims) != 1:
            continue
        held, around, node = view.array(total.bias), Surroundings(view, op), clone(op.node)
        if held is not None and len(context.shape(view, total.source) or ()) == TOKEN_AXES:
            slot = op.inputs.index(total.bias)
            node.input[slot] = around.constant(f"{view.value_name(total.bias)}_wide", held.reshape(1, 1, -1))
            yield Replacement("bias", (op.id,), op.id, node, findings=(), **around.parts())
