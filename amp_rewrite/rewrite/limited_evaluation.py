"""Evaluation of nodes within a limit of elements: by onnx's reference, and of mere movement by numpy.

Constants are computed while a model is converted, and a node of a few bytes can state a result of any size: a fill, a
repetition, a padding. So the size of each result is inferred from the numbers at hand before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.shape_inference
from onnx import NodeProto
from onnx.numpy_helper import from_array

from amp_rewrite.files.casting import Array
from amp_rewrite.ir.op_classes import BROADCASTS, RELABELS, SAME_SHAPE, SHAPE_SLOTS
from amp_rewrite.ir.schema import normal_domain, onnx_schema

Shape = tuple[int, ...]
Attributes = Mapping[str, Any]
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
    """Return the number of elements that the reference computes for an op, intermediates included."""
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
        raise ValueError(f"the size of the result of {kind} is not known in advance")
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
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _size(node: NodeProto, type_: onnx.TypeProto) -> int:
    dims = [d.dim_value if d.HasField("dim_value") else -1 for d in type_.tensor_type.shape.dim]
    if not type_.tensor_type.HasField("shape") or min(dims, default=0) < 0:
        raise ValueError(f"the size of the result of {node.op_type} is not known in advance")
    return math.prod(dims)


def _convolved(op: Any, x: Shape, weight: Shape) -> int:
    """Return at least the elements of a convolution and of its kernel: one result for each place, padding included."""
    padded = [size + sum(map(abs, (op.pads or ())[axis :: len(x) - 2])) for axis, size in enumerate(x[2:])]
    return math.prod((x[0], weight[0], *padded)) + _kernel(op, weight)


def _kernel(op: Any, weight: Shape = ()) -> int:
    steps = getattr(op, "dilations", None) or ()
    if max(steps, default=1) <= 1:
        return 0
    return math.prod((*weight[:2], *(k * max(1, d) for k, d in zip(weight[2:], steps, strict=False))))


# -- movement: to load onnx's reference for it would take longer than to look at most models -------------


# Errors of numpy for shapes and axes that do not fit, and of a table without an entry.
_FAULTS = (ValueError, TypeError, IndexError, KeyError)


def evaluate_movement(
    nodes: Iterable[NodeProto], result: str, feed: Mapping[str, Array], most: int = MOST_ELEMENTS
) -> Array | None:
    """Run nodes on a feed of their inputs; return `result`. None where one does more than move its input, would give
    more than `most` elements together, or cannot be run: onnx's reference may tell why."""
    known = dict(feed)
    try:
        for node in nodes:
            row = _ROWS[node.op_type] if normal_domain(node.domain) == "" else None
            if row is None or len(node.output) != 1:
                return None
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            operands = [known[name] for name in node.input]
            if node.op_type == "Concat" and sum(x.size for x in operands) > most:
                return None
            array = known[node.output[0]] = row(attributes, *operands)
            most -= array.size
            if most < 0:
                return None
        return known[result]
    except _FAULTS:
        return None


def _reshape(attributes: Attributes, x: Array, shape: Array) -> Array:
    kept = not attributes.get("allowzero", 0)
    return x.reshape([x.shape[i] if size == 0 and kept else size for i, size in enumerate(_integers(shape))])


def _axes(attributes: Attributes, *listed: Array) -> Any:
    axes = _integers(*listed) if listed else attributes.get("axes")
    return None if axes is None else tuple(axes)


def _slice(attributes: Attributes, x: Array, starts: Array, ends: Array, *more: Array) -> Array:
    axes = _integers(more[0]) if more else tuple(range(len(starts)))
    steps = _integers(more[1]) if len(more) > 1 else (1,) * len(axes)
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, _integers(starts), _integers(ends), steps, strict=True):
        cut[axis] = slice(start, end, step)
    return x[tuple(cut)]


def _integers(values: Array) -> tuple[int, ...]:
    return tuple(values.astype(np.int64).reshape(-1).tolist())


_ROWS: Mapping[str, Callable[..., Array]] = {
    "Concat": lambda attributes, *parts: np.concatenate(parts, axis=attributes["axis"]),
    "Expand": lambda attributes, x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, _integers(shape))),
    "Identity": lambda attributes, x: x,
    "Reshape": _reshape,
    "Shape": lambda attributes, x: np.array(x.shape[attributes.get("start", 0) : attributes.get("end")], np.int64),
    "Slice": _slice,
    "Squeeze": lambda attributes, x, *axes: x.squeeze(_axes(attributes, *axes)),
    "Transpose": lambda attributes, x: x.transpose(attributes.get("perm")),
    "Unsqueeze": lambda attributes, x, *axes: np.expand_dims(x, _axes(attributes, *axes)),
}
"""By op: the function of its attributes and its inputs."""
