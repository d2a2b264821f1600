"""onnx's reference, run node by node, and no node whose result would be large or take long.

Constants are computed while a model is converted, and a node of a few bytes can state a result of any size: a fill, a
repetition, a padding. So the size of each result is inferred from the numbers at hand before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx import NodeProto

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.op_classes import BROADCASTS, RELABELS, SAME_SHAPE, SHAPE_SLOTS
from amp_rewrite.ir.schema import normal_domain, onnx_schema

MOST_ELEMENTS = 1 << 25
"""Elements of all results of a run; in float64, 256 MB."""


def evaluate(evaluator: Any, feed: Mapping[str, Array], result: str, opsets: Mapping[str, int], most: int) -> Array:
    """Run an `onnx.reference.ReferenceEvaluator` on a feed; return one value.

    ValueError if results would exceed `most` elements together, or the size of one is not known before it is computed.
    """
    known: dict[str, Any] = {"": None, **feed}
    left = most
    for node in evaluator.rt_nodes_:
        operands = [known[name] for name in node.input]
        left -= _elements(node.onnx_node, operands, opsets)
        if left < 0:
            raise ValueError(f"{node.op_type} would compute more than {most} elements")
        more = {"context": known} if node.need_context() else {}
        known.update(zip(node.output, node.run(*operands, **more), strict=False))
    return np.asarray(known[result])


def _elements(node: NodeProto, operands: Sequence[Any], opsets: Mapping[str, int]) -> int:
    """Return the elements of a node's results, and of what it computes on the way."""
    shapes = [x.shape for x in operands if x is not None]
    if node.op_type in SAME_SHAPE | RELABELS and shapes:
        return math.prod(shapes[0])
    if node.op_type in BROADCASTS:
        return math.prod(np.broadcast_shapes(*shapes))
    domain = normal_domain(node.domain)
    if domain:  # a formula of ours, whose results are no larger than its operands
        return sum(map(math.prod, shapes))
    schema = onnx_schema(domain, node.op_type, opsets.get(domain, 1))
    if schema is None:
        raise ValueError(f"the size of what {node.op_type} computes is not known before")
    if node.op_type == "Conv":
        return _convolved(node, *operands[:2])
    named = {name: x for name, x in zip(node.input, operands, strict=True) if x is not None}
    read = {node.input[slot] for slot in SHAPE_SLOTS.get(node.op_type, ()) if slot < len(operands)}
    inferred = onnx.shape_inference.infer_node_outputs(
        schema,
        node,
        {name: _type(x) for name, x in named.items()},
        {name: onnx.numpy_helper.from_array(x, name) for name, x in named.items() if name in read},
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    return sum(_size(node, type_) for name, type_ in inferred.items() if name) + _kernel(node, operands)


def _type(array: Array) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _size(node: NodeProto, type_: onnx.TypeProto) -> int:
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in type_.tensor_type.shape.dim]
    if not type_.tensor_type.HasField("shape") or min(dims, default=0) < 0:
        raise ValueError(f"the size of what {node.op_type} computes is not known before")
    return math.prod(dims)


def _convolved(node: NodeProto, x: Array, weight: Array) -> int:
    """Return at least the elements of a convolution and of its kernel: one result for each place, padding included."""
    pads = next((a.ints for a in node.attribute if a.name == "pads"), ())
    padded = (size + sum(map(abs, pads[axis :: x.ndim - 2])) for axis, size in enumerate(x.shape[2:]))
    return math.prod((x.shape[0], weight.shape[0], *padded)) + _kernel(node, (x, weight))


def _kernel(node: NodeProto, operands: Sequence[Any]) -> int:
    """Return the elements of a kernel with its dilations, which the reference writes out."""
    steps = next((a.ints for a in node.attribute if a.name == "dilations"), ())
    shape = operands[1].shape if steps and len(operands) > 1 and operands[1] is not None else ()
    return math.prod((*shape[:2], *(k * max(1, abs(d)) for k, d in zip(shape[2:], steps, strict=False))))
