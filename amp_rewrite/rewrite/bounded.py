"""onnx's reference, run node by node, and no node whose result would be large or take long.

Constants are computed while a model is converted, and a node of a few bytes can state a result of any size: a fill, a
repetition, a padding. So the size of each result is inferred from the numbers at hand before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.shape_inference
from onnx import NodeProto

from amp_rewrite.files.arrays import dtype_of, from_array
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.op_classes import BROADCASTS, RELABELS, SAME_SHAPE, SHAPE_SLOTS
from amp_rewrite.ir.schema import normal_domain, onnx_schema

Shape = tuple[int, ...]
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
        left -= _elements(node, operands, opsets)
        if left < 0:
            raise ValueError(f"{node.op_type} would compute more than {most} elements")
        more = {"context": known} if node.need_context() else {}
        known.update(zip(node.output, node.run(*operands, **more), strict=False))
    return np.asarray(known[result])


def _elements(op: Any, operands: Sequence[Any], opsets: Mapping[str, int]) -> int:
    """Return the elements of an op's results, and of what the reference computes on the way."""
    kind, domain = op.op_type, normal_domain(op.domain)
    shapes = [x.shape for x in operands if x is not None]
    if kind in SAME_SHAPE | RELABELS and shapes:
        return math.prod(shapes[0])
    if kind in BROADCASTS:
        return math.prod(np.broadcast_shapes(*shapes))
    if domain:  # a formula of ours, whose results are no larger than its operands
        return sum(map(math.prod, shapes))
    if kind == "Conv":
        return _convolved(op, *shapes[:2])
    node, schema = op.onnx_node, onnx_schema(domain, kind, opsets.get(domain, 1))
    if schema is None:
        raise ValueError(f"the size of what {kind} computes is not known before")
    named = {name: x for name, x in zip(node.input, operands, strict=True) if x is not None}
    read = {node.input[slot] for slot in SHAPE_SLOTS.get(kind, ()) if slot < len(operands)}
    inferred = onnx.shape_inference.infer_node_outputs(
        schema,
        node,
        {name: _type(x) for name, x in named.items()},
        {name: from_array(x, name) for name, x in named.items() if name in read},
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    return sum(_size(node, type_) for name, type_ in inferred.items() if name) + _kernel(op, *shapes[1:2])


def _type(array: Array) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype_of(array).code, array.shape)


def _size(node: NodeProto, type_: onnx.TypeProto) -> int:
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in type_.tensor_type.shape.dim]
    if not type_.tensor_type.HasField("shape") or min(dims, default=0) < 0:
        raise ValueError(f"the size of what {node.op_type} computes is not known before")
    return math.prod(dims)


def _convolved(op: Any, x: Shape, weight: Shape) -> int:
    """Return at least the elements of a convolution and of its kernel: one result for each place, padding included."""
    padded = [size + sum(map(abs, (op.pads or ())[axis :: len(x) - 2])) for axis, size in enumerate(x[2:])]
    return math.prod((x[0], weight[0], *padded)) + _kernel(op, weight)


def _kernel(op: Any, weight: Shape = ()) -> int:
    """Return the elements of a kernel with its dilations, if the reference writes it out."""
    steps = getattr(op, "dilations", None) or ()
    if max(steps, default=1) <= 1:
        return 0
    return math.prod((*weight[:2], *(k * max(1, d) for k, d in zip(weight[2:], steps, strict=False))))
