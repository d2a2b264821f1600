"""Evaluation of nodes by onnx's reference evaluator within a size limit; formulas of onnxruntime's own operators.

Constants are computed during a conversion, and a node of a few bytes, such as a Tile or Pad, can produce a result of
any size. So the size of each result is inferred from its operands before it is computed.

The formulas follow the operator reference (docs/ContribOperators.md of onnxruntime 1.31), in the precision of the feed.
A test compares them with onnxruntime's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.shape_inference
from onnx import NodeProto, TensorProto
from onnx.numpy_helper import from_array

from amp_rewrite.errors import one_line
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.attributes import int_attribute
from amp_rewrite.ir.op_classes import BROADCASTS, RELABELS, SAME_SHAPE, SOFTMAXES
from amp_rewrite.ir.ops import row_of
from amp_rewrite.ir.schema import normal_domain, onnx_schema
from amp_rewrite.ir.versions import FIRST_ROW_SOFTMAX

DOMAIN = "com.microsoft"
MAX_ELEMENTS = 1 << 25
"""Maximum number of float64 elements in all results of a run, 256 MB; for bools, the maximum is eight times as high."""

Shape = tuple[int, ...]
Arrays = Mapping[str, Array]


def run(
    nodes: Sequence[NodeProto],
    result: str,
    feeds: Sequence[Arrays],
    opsets: Mapping[str, int],
    limit: int = MAX_ELEMENTS,
) -> list[Array] | str:
    """Run nodes; return `result` for each feed, or the reason why onnx's reference evaluator cannot run them.

    `limit`: the maximum number of float64 elements in all results of one feed.
    """
    from onnx.reference import ReferenceEvaluator  # late: this import takes as long as the rest of onnx

    codes = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds[0].items()}
    inputs = [onnx.helper.make_tensor_value_info(name, code, None) for name, code in codes.items()]
    output = onnx.helper.make_tensor_value_info(result, TensorProto.DOUBLE, None)
    graph = onnx.helper.make_graph(nodes, "fused", inputs, [output])
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in {DOMAIN: 1, **opsets}.items()]
    try:
        evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=imports), new_ops=_formulas())
        with np.errstate(all="ignore"):
            return [_evaluated(evaluator, feed, result, opsets, limit) for feed in feeds]
    except Exception as cause:  # noqa: BLE001 numpy, onnx and its reference raise all kinds of errors on mismatched operands
        return f"onnx's reference evaluator cannot run it: {one_line(cause)[:120]}"


@cache
def _formulas() -> list[type]:
    from onnx.reference.op_run import OpRun  # late, as in `run`

    def results(op: Any, *operands: Array | None, **_: object) -> tuple[Array, ...]:
        node: NodeProto = op.onnx_node
        arrays = contrib_results(node, dict(zip(node.input, operands, strict=True)))
        return tuple(arrays.get(name, np.zeros(())) for name in node.output)

    return [type(op_type, (OpRun,), {"op_domain": DOMAIN, "_run": results}) for op_type in FORMULAS]


def _evaluated(evaluator: Any, feed: Arrays, result: str, opsets: Mapping[str, int], limit: int) -> Array:
    """Run a `ReferenceEvaluator` on a feed; return one value.

    Raises ValueError if the results would exceed `limit` elements in total, or if the size of one cannot be inferred.
    """
    values, remaining = {"": None, **feed}, limit
    for node in evaluator.rt_nodes_:
        operands = [values[name] for name in node.input]
        if _differs(node, operands, opsets):
            raise ValueError(f"onnx's reference computes {node.op_type} differently from onnxruntime")
        remaining -= math.ceil(_elements(node, operands, opsets) * _relative_width(node, operands, opsets))
        if remaining < 0:
            raise ValueError(f"{node.op_type} would compute more than {limit} elements")
        context = {"context": values} if node.need_context() else {}
        values.update(zip(node.output, node.run(*operands, **context), strict=False))
    return np.asarray(values[result])


def _differs(op: Any, operands: Sequence[Any], opsets: Mapping[str, int]) -> bool:
    """True if onnx's reference violates the standard: a softmax over several axes, or a Slice with negative steps."""
    if op.op_type in SOFTMAXES and opsets.get("", 1) < FIRST_ROW_SOFTMAX:
        return int_attribute(op.onnx_node, "axis", 1) not in (-1, operands[0].ndim - 1)
    return op.op_type == "Slice" and bool((np.asarray(operands[4:]) < 0).any())


def _relative_width(op: Any, operands: Sequence[Any], opsets: Mapping[str, int]) -> float:
    """Return the element size of the first result relative to float64; 1 if it is unknown."""
    schema = onnx_schema(domain := normal_domain(op.domain), op.op_type, opsets.get(domain, 1))
    if schema is None:
        return 1
    result = schema.outputs[0]
    if result.types == {"tensor(bool)"}:
        return 1 / 8
    same_type = (x for formal, x in zip(schema.inputs, operands, strict=False) if formal.type_str == result.type_str)
    return next((x.dtype.itemsize / 8 for x in same_type if x is not None), 1)


def _elements(op: Any, operands: Sequence[Any], opsets: Mapping[str, int]) -> int:
    kind, domain = op.op_type, normal_domain(op.domain)
    shapes = [x.shape for x in operands if x is not None]
    if kind in SAME_SHAPE | RELABELS and shapes:
        return math.prod(shapes[0])
    if kind in BROADCASTS:
        return math.prod(np.broadcast_shapes(*shapes))
    if domain:  # one of FORMULAS; its results are not larger than its operands
        return sum(map(math.prod, shapes))
    if kind == "Conv":
        return _convolution_size(op, *shapes[:2])
    node, schema = op.onnx_node, onnx_schema(domain, kind, opsets.get(domain, 1))
    if schema is None:
        raise ValueError(f"the size of the result of {kind} is not known in advance")
    arrays = {name: x for name, x in zip(node.input, operands, strict=True) if x is not None}
    shape_operands = {node.input[slot] for slot in row_of(kind).shapes if slot < len(operands)}
    codes = {name: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in arrays.items()}
    inferred = onnx.shape_inference.infer_node_outputs(
        schema,
        node,
        {name: onnx.helper.make_tensor_type_proto(codes[name], x.shape) for name, x in arrays.items()},
        {name: from_array(x, name) for name, x in arrays.items() if name in shape_operands},
        opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    total = _dilated_kernel_size(op, *shapes[1:2])
    for tensor_type in (type_.tensor_type for name, type_ in inferred.items() if name):
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor_type.shape.dim]
        if not tensor_type.HasField("shape") or min(dims, default=0) < 0:
            raise ValueError(f"the size of the result of {kind} is not known in advance")
        total += math.prod(dims)
    return total


def _convolution_size(op: Any, x: Shape, weight: Shape) -> int:
    """Return an upper bound for the size of a convolution, one per padded input position, and its dilated kernel."""
    padded = [size + sum(map(abs, (op.pads or ())[axis :: len(x) - 2])) for axis, size in enumerate(x[2:])]
    return math.prod((x[0], weight[0], *padded)) + _dilated_kernel_size(op, weight)


def _dilated_kernel_size(op: Any, weight: Shape = ()) -> int:
    steps = getattr(op, "dilations", None) or ()
    if max(steps, default=1) <= 1:
        return 0
    return math.prod((*weight[:2], *(k * max(1, d) for k, d in zip(weight[2:], steps, strict=False))))


# -- formulas -------------------------------------------------------------------------------------

_Attributes = Mapping[str, Any]
_Results = tuple[Array | None, ...]


def contrib_results(node: NodeProto, feed: Mapping[str, Array | None]) -> dict[str, Array]:
    """Return the results of a node of DOMAIN by name, for operands by name.

    Raises KeyError for an operator without a formula or a missing operand, and ValueError for mismatched shapes.
    """
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    operands = [feed[name] if name else None for name in node.input]
    with np.errstate(all="ignore"):
        results = FORMULAS[node.op_type](attributes, *operands)
    return {name: array for name, array in zip(node.output, results, strict=False) if name and array is not None}


def _add(array: Array, other: Array | None) -> Array:
    return array if other is None else array + other


def _layer_norm(
    attributes: _Attributes, x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None
) -> _Results:
    """Normalize x + skip + bias over the last axis, times gamma, plus beta; also return the sum."""
    total = _add(x + skip, bias)
    centered = total - total.mean(-1, keepdims=True)
    return _add(_normalized(centered, attributes) * gamma, beta), None, None, total


def _rms_norm(attributes: _Attributes, x: Array, skip: Array, gamma: Array, bias: Array | None = None) -> _Results:
    """Divide x + skip + bias by its root mean square over the last axis, times gamma; also return the sum."""
    total = _add(x + skip, bias)
    return _normalized(total, attributes) * gamma, None, None, total


def _normalized(x: Array, attributes: _Attributes, axes: int | tuple[int, ...] = -1) -> Array:
    unit: Array = x / np.sqrt(np.mean(x**2, axes, keepdims=True) + attributes["epsilon"])
    return unit


def _gelu(attributes: _Attributes, x: Array, bias: Array | None = None) -> _Results:
    x = _add(x, bias)
    erf = np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))
    return (x * (1 + erf) / 2,)


def _fast_gelu(attributes: _Attributes, x: Array, bias: Array | None = None) -> _Results:
    """Apply GELU by tanh. The reference rounds √(2/π) and 0.044715 √(2/π) to six digits; the kernels do not."""
    x = _add(x, bias)
    root = math.sqrt(2 / math.pi)
    return (x * (1 + np.tanh(root * x + 0.044715 * root * x**3)) / 2,)


def _split_gelu(attributes: _Attributes, x: Array, bias: Array) -> _Results:
    """Multiply the first half of x + bias by the GELU of the second."""
    first, second = np.split(x + bias, 2, axis=-1)
    return (first * _gelu({}, second)[0],)


def _group_norm(
    attributes: _Attributes, x: Array, gamma: Array, beta: Array, skip: Array | None = None, bias: Array | None = None
) -> _Results:
    """Normalize x + skip + bias by groups of trailing channels, times gamma, plus beta; also return the sum."""
    x = _add(_add(x, bias), skip if skip is None or skip.ndim == x.ndim else skip[:, None, None, :])
    grouped = x.reshape(*x.shape[:-1], attributes["groups"], -1)
    normal = _normalized(grouped - grouped.mean((1, 2, 4), keepdims=True), attributes, (1, 2, 4))
    y = normal.reshape(x.shape) * gamma + beta
    return (y / (1 + np.exp(-y)) if attributes["activation"] else y), x


def _product(attributes: _Attributes, a: Array, b: Array) -> _Results:
    a = a.swapaxes(-1, -2) if attributes.get("transA") else a
    b = b.swapaxes(-1, -2) if attributes.get("transB") else b
    return (attributes.get("alpha", 1.0) * (a @ b),)


def _attention(attributes: _Attributes, *operands: Array | None) -> _Results:
    """Compute softmax(scale · Q Kᵀ + bias) V of each head; the heads of keys and values may already be split.

    `unidirectional` masks the tokens after the current token.
    """
    q, k, v = (_split_heads(operand, attributes["num_heads"]) for operand in operands[:3] if operand is not None)
    scores = attributes["scale"] * (q @ k.swapaxes(-1, -2))
    scores = _add(scores, operands[_BIAS_SLOT] if len(operands) > _BIAS_SLOT else None)
    if attributes.get("unidirectional"):
        scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True)) @ v
    batch, _, tokens, _ = attended.shape
    return (attended.swapaxes(1, 2).reshape(batch, tokens, -1),)


def _grouped(attributes: _Attributes, q: Array, k: Array, v: Array, *others: Array | None) -> _Results:
    """Compute causal attention with several heads of queries per head of keys and values, without cache or padding.

    `do_rotary` rotates queries and keys, starting at position 0.
    """
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    q, k, v = _split_heads(q, heads), _split_heads(k, kv_heads), _split_heads(v, kv_heads)
    if attributes.get("do_rotary"):
        cos, sin = (table for table in others[-2:] if table is not None)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    repeated = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    return _attention({**attributes, "unidirectional": 1}, q, *repeated)


def _rotary(attributes: _Attributes, x: Array, start: Array, cos: Array, sin: Array) -> _Results:
    """Rotate each head, starting at position `start`; the heads may already be split."""
    heads = x if x.ndim == _SPLIT_RANK else _split_heads(x, attributes["num_heads"])
    turned = rotated(heads, cos[int(start[0]) :], sin[int(start[0]) :])
    return (turned if x.ndim == _SPLIT_RANK else turned.swapaxes(1, 2).reshape(x.shape),)


def rotated(heads: Array, cos: Array, sin: Array) -> Array:
    """Return x · cos + (−second half, first half) · sin, for tables [positions, half of the features]."""
    a, b = np.split(heads, 2, axis=-1)
    cos, sin = cos[: heads.shape[2]], sin[: heads.shape[2]]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _split_heads(array: Array, heads: int) -> Array:
    if array.ndim == _SPLIT_RANK:
        return array
    batch, tokens, _ = array.shape
    return array.reshape(batch, tokens, heads, -1).swapaxes(1, 2)


_BIAS_SLOT = 5  # of the bias added to the scores
_SPLIT_RANK = 4  # axes: batch, heads, tokens, width

FORMULAS: Mapping[str, Callable[..., _Results]] = {
    "BiasGelu": _gelu,
    "BiasSplitGelu": _split_gelu,
    "FastGelu": _fast_gelu,
    "FusedMatMul": _product,
    "Gelu": _gelu,
    "GroupNorm": _group_norm,
    "GroupQueryAttention": _grouped,
    "MultiHeadAttention": _attention,
    "QuickGelu": lambda attributes, x: (x / (1 + np.exp(-attributes["alpha"] * x)),),
    "RotaryEmbedding": _rotary,
    "SkipGroupNorm": _group_norm,
    "SkipLayerNormalization": _layer_norm,
    "SkipSimplifiedLayerNormalization": _rms_norm,
}
