"""Passes to split biases off products, and to move them to the cheapest place.

If a bias is far larger than its product, almost all digits of a low result represent the bias. Once split off, the bias
is added in float32, after the Cast that a float32 reader needs anyway.

onnxruntime's CUDA provider broadcasts the bias of a Gemm over the result before it multiplies. So a Gemm between
Reshapes becomes a MatMul and an Add. Its bias gets three axes, because onnxruntime's optimizer then leaves the Add
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute, int_attribute
from amp_rewrite.ir.dataflow import OUTWEIGHS, first_input, is_only_reader, only_reader, orders, outweighs
from amp_rewrite.ir.op_classes import LAYERS, RELABELS
from amp_rewrite.ir.shapes import dims_of
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.builder import NewNodes, new_node
from amp_rewrite.rewrite.equivalence import Trial, disagreement
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement, as_outcome, only_float32

_relabel_source = first_input(RELABELS)


def split_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Split large biases off products before an output or a norm. O(ops); reads the weights of candidates.

    Products whose schema requires a bias (Gemm below opset 11) and models that list their weights as inputs (IR
    version 3) are not changed.
    """
    if view.model.proto.ir_version < FIRST_IR_WITH_FREE_INITIALIZERS:
        return
    for op in view.of_kinds(LAYERS):
        bias_required = op.signature is None or len(op.inputs) - 1 in op.signature.required
        if len(op.inputs) < 3 or op.outputs[0] is None or bias_required:
            continue
        limit = _bias_limit(view, op.outputs[0])
        if limit is not None and outweighs(view, op.inputs[2], op.inputs[1], context.to, by=limit):
            yield _without_bias(view, op)


def _bias_limit(view: View, value: ValueId) -> float | None:
    """Return the largest acceptable ratio of bias to weights for a product before a norm or an output.

    None if another op reads it. Copies in between are skipped. An InstanceNormalization subtracts the whole bias.
    """
    while (reader := only_reader(view, value)) is not None and _relabel_source(reader) == value and reader.results:
        (value,) = reader.results
    if reader is None:
        return OUTWEIGHS if value in view.yielded and not view.uses[value] else None
    if reader.kind == "InstanceNormalization":
        return 2.0**5
    return OUTWEIGHS if reader.kind.endswith("Normalization") else None


def _without_bias(view: View, op: Op) -> Replacement:
    product, (result,), new = clone(op.node), op.node.output, NewNodes(view, op)
    product.output[0] = new.name(f"{result}_unbiased")
    del product.input[2:]
    weight, bias = view.constant(op.inputs[1]), view.array(op.inputs[2])
    assert weight is not None and bias is not None
    if op.kind == "Gemm":
        bias = bias * np.float32(float_attribute(op.node, "beta", 1.0))
    else:
        bias = bias.reshape(-1, *[1] * (len(weight.dims) - 2))
    name = f"{op.node.name}_bias" if op.node.name else ""
    total = new_node("Add", [product.output[0], new.constant(f"{op.node.input[2]}_split", bias)], result, name)
    new.leading.append(product)
    text = "its bias is far larger than its weights · now added in float32 after the product"
    return Replacement("bias", (op.id,), op.id, total, findings=(Finding("bias", op.name, text),), **new.parts())


TOKEN_AXES = 3  # batch, tokens, features


@dataclass(frozen=True, slots=True)
class BiasSum:
    """An Add of a value and a constant vector along the last axis; the result has the value's shape."""

    add: Op
    source: ValueId
    bias: ValueId

    @classmethod
    def of(cls, view: View, add: Op | None, context: Context) -> BiasSum | None:
        pairs = orders(add) if add is not None and add.kind == "Add" else ()
        return next((cls(add, a, b) for a, b in pairs if add and _adds_along_last_axis(view, context, a, b)), None)

    @classmethod
    def before(cls, view: View, value: ValueId | None, reader: Op, context: Context) -> BiasSum | None:
        producer = view.producer(value, "Add")
        private = producer is not None and producer.scope == reader.scope and is_only_reader(view, value, reader)
        return cls.of(view, producer, context) if private else None


def _adds_along_last_axis(view: View, context: Context, source: ValueId, bias: ValueId) -> bool:
    """True if a constant varies only along the last axis of a value, and has no more axes than the value."""
    tensor = view.constant(bias)
    if tensor is None or not _is_vector(view, bias) or _is_vector(view, source):
        return False
    shape = context.shape(view, source)
    return shape is not None and len(tensor.dims) <= len(shape) and tensor.dims[-1] in (1, shape[-1])


def _is_vector(view: View, value: ValueId) -> bool:
    tensor = view.constant(value)
    flat = tensor is not None and 1 <= len(tensor.dims) <= TOKEN_AXES and all(d == 1 for d in tensor.dims[:-1])
    return flat and view.dtype(value) is DType.FLOAT


# -- biases before a table ------------------------------------------------------------------------


def move_into_tables(view: View, context: Context) -> Iterator[Outcome]:
    """Move a bias into a constant table added after the bias, such as position embeddings. O(Adds).

    There may be a Concat between the two Adds.
    """
    for op in view.of_kinds(("Add",)):
        total = BiasSum.of(view, op, context)
        if total is None or view.producer(total.source, "MatMul") is None or not only_float32(view, (op.id,)):
            continue
        concat = only_reader(view, op.outputs[0], "Concat")
        tokens = op.outputs[0] if concat is None else concat.outputs[0]
        table_add = only_reader(view, tokens, "Add")
        if table_add is not None and tokens is not None:
            outcome = _moved_into_table(view, context, total, concat, table_add, tokens)
            if outcome is not None:
                yield as_outcome("bias", table_add.id, outcome)


def _moved_into_table(
    view: View, context: Context, total: BiasSum, concat: Op | None, table_add: Op, tokens: ValueId
) -> Replacement | str | None:
    (biased,) = total.add.results
    parts = (biased,) if concat is None else concat.operands
    value, shape = next(v for v in table_add.operands if v != tokens), context.shape(view, tokens)
    shapes = [context.shape(view, part) or () for part in parts]
    lengths = [sizes[1] or 0 for sizes in shapes if len(sizes) == TOKEN_AXES]
    table, bias = view.array(value) if view.dtype(value) is DType.FLOAT else None, view.array(total.bias)
    axis = 1 if concat is None else int_attribute(concat.node, "axis", 0)
    if table is None or bias is None or shape is None or len(lengths) < len(parts) or sum(lengths) != shape[1]:
        return None
    if table.shape[-2:] != shape[1:] or any(d != 1 for d in table.shape[:-2]) or axis not in (1, 1 - TOKEN_AXES):
        return None
    position, biased_table = parts.index(biased), table.astype(np.float64)
    first = sum(lengths[:position])
    biased_table[..., first : first + lengths[position], :] += bias.reshape(-1)
    if not float(np.abs(biased_table).max()) <= context.to.max:
        return f"adding the bias would take the table out of the range of {context.to.spelling}"
    new, node, source = NewNodes(view, table_add), clone(table_add.node), view.value_name(total.source)
    stored = new.constant(f"{view.value_name(value)}_biased", biased_table.astype(np.float32))
    node.input[table_add.inputs.index(value)] = stored
    reader, slot = (node, table_add.inputs.index(biased)) if concat is None else (clone(concat.node), position)
    reader.input[slot] = source
    new.leading += [reader] if concat is not None else []
    ops = tuple(op.id for op in (total.add, concat, table_add) if op is not None)
    findings = (Finding("bias", total.add.name, "a bias added ahead of a table is folded into the table's rows"),)
    fusion = Replacement("bias", ops, table_add.id, node, **new.parts(), findings=findings)
    rng, names = np.random.default_rng(0), [source if part == biased else view.value_name(part) for part in parts]
    feed = {name: rng.standard_normal((2, d, table.shape[-1])) for name, d in zip(names, lengths, strict=True)}
    return disagreement(view, fusion, [Trial(feed, {})]) or fusion


# -- biases of products ----------------------------------------------------------------------------


def replace_gemms(view: View, context: Context) -> Iterator[Replacement]:
    """Replace each Gemm between two Reshapes, for merging and for splitting leading axes. O(Gemms).

    It becomes a MatMul, which does not need the Reshapes, and an Add, which can be fused with norms and activations.
    """
    for op in view.of_kinds(("Gemm",)):
        untransposed = not any(int_attribute(op.node, name, 0) for name in ("transA", "transB"))
        scaled = any(float_attribute(op.node, name, 1.0) != 1 for name in ("alpha", "beta"))
        if not untransposed or scaled or len(op.operands) < 3 or not only_float32(view, (op.id,)):
            continue
        source, weight, bias = op.operands
        merge, split = view.producer(source, "Reshape"), only_reader(view, op.outputs[0], "Reshape")
        tensor = view.constant(weight)
        if merge is None or split is None or merge.scope != op.scope or tensor is None or not _is_vector(view, bias):
            continue
        result, source_name = split.node.output[0], merge.node.input[0]
        dims, before = (dims_of(view, value) for value in (split.outputs[0], merge.inputs[0]))
        full_shape = (*dims[:-1], tensor.dims[0])
        if len(dims) < TOKEN_AXES or None in dims or dims[-1] != tensor.dims[1]:
            continue
        new = NewNodes(view, split)
        if before != full_shape:
            if not all(isinstance(d, int) for d in full_shape):
                continue
            shape = new.constant(f"{result}_rows_shape", np.array(full_shape, np.int64))
            source_name = new.before("Reshape", (source_name, shape), f"{result}_rows")
        product = new.before("MatMul", (source_name, view.value_name(weight)), f"{result}_product")
        node = new_node("Add", [product, view.value_name(bias)], result, split.node.name)
        text = "a Gemm between Reshapes becomes MatMul and Add, because the Add can then be fused with other ops"
        findings = (Finding("fused", op.name, text),)
        yield Replacement("gemm", (op.id, split.id), split.id, node, **new.parts(), findings=findings)


def expand_biases(view: View, context: Context) -> Iterator[Replacement]:
    """Reshape each one-axis bias of a three-axis MatMul to three axes. O(Adds)."""
    for op in view.of_kinds(("Add",)):
        total = BiasSum.of(view, op, context)
        product = view.producer(total.source, "MatMul") if total is not None else None
        tensor = view.constant(total.bias) if total is not None else None
        if total is None or product is None or tensor is None or len(tensor.dims) != 1:
            continue
        array, new, node = view.array(total.bias), NewNodes(view, op), clone(op.node)
        if array is not None and len(context.shape(view, total.source) or ()) == TOKEN_AXES:
            slot = op.inputs.index(total.bias)
            node.input[slot] = new.constant(f"{view.value_name(total.bias)}_wide", array.reshape(1, 1, -1))
            yield Replacement("bias", (op.id,), op.id, node, findings=(), **new.parts())
