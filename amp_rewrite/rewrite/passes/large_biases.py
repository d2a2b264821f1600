"""Biases that are far larger than the product that they are added to.

A low result of such a product holds the bias and little else. Split off, the bias is added in float32 behind the Cast
that a float32 reader needs anyway. An InstanceNormalization subtracts it again, so before one it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx.numpy_helper import from_array

from amp_rewrite.errors import Finding
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.attributes import float_attribute
from amp_rewrite.ir.builder import new_node
from amp_rewrite.ir.dataflow import first_input_of, only_reader
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.node_check import node_check
from amp_rewrite.ir.op_classes import LAYERS, RELABELS
from amp_rewrite.ir.versions import FIRST_IR_WITH_FREE_INITIALIZERS
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.ir.weights import OUTWEIGHS, outweighs
from amp_rewrite.rewrite.replacement import Context, Outcome, Replacement

_copies = first_input_of(RELABELS)
_SUBTRACTED = 2.0**5
"""How many times a bias is larger than the weights where only what is left without it counts."""


def split_biases(view: View, context: Context) -> Iterator[Outcome]:
    """Split the bias off products that an output or a norm reads, or drop it. O(ops); reads the weights of suspects.

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
    """Return the kind of the only reader behind copies, or `_OUTPUT`; None for several."""
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
