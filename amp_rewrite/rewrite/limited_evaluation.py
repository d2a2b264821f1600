"""Evaluation of nodes within a limit of elements: by numpy what transformers are made of, the rest by onnx's reference.

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
from amp_rewrite.rewrite.reference import DOMAIN, computed

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


# -- by numpy: to load onnx's reference would take longer than to look at most models ----------------------


# Errors of numpy for shapes and axes that do not fit, and of a table without an entry.
_FAULTS = (ValueError, TypeError, IndexError, KeyError)


def evaluate_plain(
    nodes: Iterable[NodeProto], result: str, feed: Mapping[str, Array], most: int = MOST_ELEMENTS
) -> Array | None:
    """Run nodes on a feed of their inputs; return `result`.

    None where the form of one is not in the tables, would give more than `most` elements together, or cannot be run:
    onnx's reference may tell why.
    """
    known = dict(feed)
    try:
        with np.errstate(all="ignore"):
            for node in nodes:
                made = _formula(node, known, most) if normal_domain(node.domain) else _plain(node, known, most)
                most -= sum(array.size for array in made.values())
                if most < 0:
                    return None
                known.update(made)
        return known[result]
    except _FAULTS:
        return None


def _formula(node: NodeProto, known: Mapping[str, Array], most: int) -> Mapping[str, Array]:
    if node.domain != DOMAIN or sum(known[name].size for name in node.input if name) > most:
        raise KeyError(node.domain)
    return computed(node, known)


def _plain(node: NodeProto, known: Mapping[str, Array], most: int) -> Mapping[str, Array]:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    operands = [known[name] for name in node.input]
    if len(node.output) != 1 or _bound(node.op_type, operands) > most:
        raise KeyError(node.op_type)
    return {node.output[0]: _ROWS[node.op_type](attributes, *operands)}


def _bound(op_type: str, operands: Sequence[Array]) -> int:
    """Return the most elements of a result."""
    shapes = [x.shape for x in operands]
    if op_type == "Concat":
        return sum(map(math.prod, shapes))
    if op_type == "MatMul":
        (*outer, rows, _), (*others, _, columns) = shapes
        return math.prod((*np.broadcast_shapes(tuple(outer), tuple(others)), rows, columns))
    return math.prod(np.broadcast_shapes(*shapes)) if op_type in BROADCASTS else 0


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


def _last_axis(attributes: Attributes, default: int = 0) -> None:
    if attributes.get("axis", default) != -1:
        raise KeyError("axis")


def _softmax(attributes: Attributes, x: Array) -> Array:
    _last_axis(attributes)  # before opset 13, other axes are flattened
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _layer_norm(attributes: Attributes, x: Array, scale: Array, bias: Array | float = 0.0) -> Array:
    _last_axis(attributes, -1)
    centered = x - x.mean(-1, keepdims=True)
    normal = centered / np.sqrt(np.mean(centered**2, -1, keepdims=True) + attributes.get("epsilon", 1e-5))
    return np.asarray(normal * scale + bias)


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x))


def _gelu(attributes: Attributes, x: Array) -> Array:
    if attributes.get("approximate", b"none") != b"none":
        raise KeyError("approximate")
    return np.asarray(x * (1 + _erf(x / math.sqrt(2))) / 2)


def _reduced(attributes: Attributes, x: Array, *axes: Array) -> Array:
    if (axis := _axes(attributes, *axes)) is None:
        raise KeyError("axes")
    return np.asarray(x.sum(axis, keepdims=bool(attributes.get("keepdims", 1))))


_ROWS: Mapping[str, Callable[..., Array]] = {
    "Add": lambda _, x, y: x + y,
    "Cast": lambda attributes, x: x.astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])),
    "Concat": lambda attributes, *parts: np.concatenate(parts, axis=attributes["axis"]),
    "Div": lambda _, x, y: x / y,
    "Erf": lambda _, x: _erf(x),
    "Expand": lambda attributes, x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, _integers(shape))),
    "Gelu": _gelu,
    "Identity": lambda attributes, x: x,
    "IsNaN": lambda _, x: np.isnan(x),
    "LayerNormalization": _layer_norm,
    "MatMul": lambda _, x, y: x @ y,
    "Mul": lambda _, x, y: x * y,
    "ReduceSum": _reduced,
    "Reshape": _reshape,
    "Shape": lambda attributes, x: np.array(x.shape[attributes.get("start", 0) : attributes.get("end")], np.int64),
    "Slice": _slice,
    "Softmax": _softmax,
    "Squeeze": lambda attributes, x, *axes: x.squeeze(_axes(attributes, *axes)),
    "Sub": lambda _, x, y: x - y,
    "Tanh": lambda _, x: np.tanh(x),
    "Transpose": lambda attributes, x: x.transpose(attributes.get("perm")),
    "Unsqueeze": lambda attributes, x, *axes: np.expand_dims(x, _axes(attributes, *axes)),
    "Where": lambda _, chosen, x, y: np.asarray(np.where(chosen, x, y)),
}
"""By op: the function of its attributes and its inputs."""
