"""Schema checks of nodes beyond types, by onnx's checker and some of our own.

Violations are errors here, so that other modules may read `op.inputs[1]` or an attribute's `i` without a check.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx.checker
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from amp_rewrite.ir.schema import Signature

_FIELDS = {AttributeProto.GRAPH: "g", AttributeProto.TENSOR: "t"}
"""The fields of attributes that hold a message. A reader of a missing message would see an empty one."""
_STAND_INS = {
    AttributeProto.GRAPH: AttributeProto(type=AttributeProto.GRAPH, g=GraphProto(name="g")),
    AttributeProto.TENSOR: AttributeProto(
        type=AttributeProto.TENSOR, t=TensorProto(data_type=TensorProto.FLOAT, dims=[0])
    ),
}
_LARGEST_AXIS = 1 << 31


def violation(signature: Signature, node: NodeProto, stated: Sequence[AttributeProto]) -> str | None:
    """Return how a node of a graph (not of a function's body) breaks its schema, and the remedy; None if it is valid.

    `stated`: the attributes of the node.
    """
    read = node.input[:]
    missing = [slot for slot in signature.needed if slot >= len(read) or not read[slot]]
    if missing:
        return f"lacks input {missing[0]}; add it"
    fault = _crash(signature.op_type, len(read), stated)
    return fault or (_refusal(signature, node, read, stated) if signature.checked else None)


def unreadable(stated: Sequence[AttributeProto]) -> str | None:
    """Return an error for the first attribute without a value; None if all have one. Needs no schema."""
    for a in stated:
        if a.ref_attr_name:
            return f"has the attribute {a.name!r} refer to one of a function, but stands in none; state its value"
        if a.type in _FIELDS and not a.HasField(_FIELDS[a.type]):
            return f"has the attribute {a.name!r} hold nothing; export it again"
    return None


def _crash(op_type: str, inputs: int, stated: Sequence[AttributeProto]) -> str | None:
    """Return a fault that onnx's checker lets through, and of which its shape inference may die."""
    numbers = {a.name: a for a in stated}
    if op_type == "Constant" and not stated:
        return "holds no value; export it again"
    if "axis" in numbers and abs(numbers["axis"].i) >= _LARGEST_AXIS:
        return f"has the attribute 'axis' be {numbers['axis'].i}, which no tensor has; export it again"
    if op_type == "Transpose" and "perm" in numbers:
        perm = list(numbers["perm"].ints)
        valid = sorted(perm) == list(range(len(perm)))
        return None if valid else f"turns the axes by {perm[:10]}, which is not a permutation; correct perm"
    if op_type == "Scan" and "num_scan_inputs" in numbers:
        scanned = numbers["num_scan_inputs"].i
        return None if 0 < scanned <= inputs else f"scans {scanned} of its {inputs} inputs; correct num_scan_inputs"
    return None


def _refusal(
    signature: Signature, node: NodeProto, read: Sequence[str], stated: Sequence[AttributeProto]
) -> str | None:
    """Return the words of onnx's checker about a node, without a look into graphs and tensors."""
    light = node
    if node.domain != signature.domain or any(a.type in _STAND_INS for a in stated):
        light = NodeProto(name=node.name, op_type=node.op_type, domain=signature.domain, input=read, output=node.output)
        light.attribute.extend(_STAND_INS.get(a.type, a) for a in stated)
        for a, named in zip(light.attribute, stated, strict=True):
            a.name = named.name
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {signature.domain: signature.since}
    try:
        onnx.checker.check_node(light, context)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as words:  # the latter: of a name that is not UTF-8
        if "Unrecognized attribute" not in str(words):  # one of a later opset, perhaps
            return f"breaks its schema: {str(words).rstrip('.')}; correct it, or export the model again"
    return None
