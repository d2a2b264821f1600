"""Attributes that say how an op computes: what two ops of one kind must share to compute in the same precision.

One principle: each attribute counts, except those that only place elements (`PLACING`): axes, shapes, windows, the
order of dimensions. They say what is computed, and exporters spell them in many ways: axis 2 or -1, a stated or an
implied kernel shape, an attribute or, from some opset on, an input. All others say how it is computed: a type, a number
of bits, the size of a block, a mode of rounding, an approximation, a number in the formula.

- An attribute with the operator's default counts as left out.
- An attribute that states the type of a result does not count, because the type of the result does.
- Tensors count by their element type; the long lists of ai.onnx.ml, which are weights, by their kind.
- All attributes of an operator without a schema count, and the shapes of the constants that it reads.
- A quantizer's granularity counts: the number of axes of each constant scale, and the axis if it is one; also whether a
  constant zero point is another number than 0.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache

from onnx import AttributeProto, NodeProto, TypeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.op_classes import QUANTIZERS
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, INNER_DTYPE_ATTRIBUTES, Signature, default_attributes
from amp_rewrite.ir.view import Op, View

NONE: Mapping[str, str] = {}
Shape = tuple[int, ...]
Plain = Sequence[tuple[AttributeProto, str, object]]
"""Attributes of a node, each with its name and plain value; None for a graph, a sparse tensor or a type."""

_PLACING = """
allowzero auto_pad axes axis batch_axis batch_dims blocksize broadcast ceil_mode channels_last consumed_inputs dilation
dilations end ends exclusive gather_axis group groups height_scale hidden_size input_as_shape is_test k keepdims
kernel_shape kv_num_heads layout max min K N new_axis noop_with_empty_axes num_groups num_heads num_outputs
num_scan_inputs output_height output_padding output_shape output_width paddings pads perm q_num_heads ratio reverse
scales scan_input_axes scan_output_axes seed select_last_index shape spatial split start starts storage_order strides
time_axis transA transB transBatchA transBatchB upper width_scale
"""
PLACING = frozenset(_PLACING.split())
"""Attributes of known operators that place elements, and those that a later opset made an input or took away."""

_SHOWN = 8
_QUANTIZED = frozenset(
    d.spelling for d in DType if d.name.startswith(("FLOAT8", "FLOAT4")) or d.name.endswith(("INT2", "INT4", "INT8"))
)
_QUANTIZED_16 = frozenset({DType.INT16.spelling, DType.UINT16.spelling})


def plain(node: NodeProto) -> Plain:
    """Return the attributes of a node with their plain values. Each access to a field costs, so this is read once."""
    return [(a, a.name, _PLAIN[a.type](a) if a.type in _PLAIN else None) for a in node.attribute[:]]


_PLAIN: dict[int, Callable[[AttributeProto], object]] = {
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.INTS: lambda a: list(a.ints),
    AttributeProto.FLOAT: lambda a: a.f,
    AttributeProto.FLOATS: lambda a: list(a.floats),
    AttributeProto.STRING: lambda a: a.s,
    AttributeProto.STRINGS: lambda a: list(a.strings),
    AttributeProto.TENSOR: lambda a: tuple(a.t.dims),
}


def counting(domain: str, signature: Signature | None, attributes: Plain) -> Mapping[str, str]:
    """Return the counting attributes, spelled, without defaults."""
    if not attributes:
        return NONE
    if signature is None:
        return {name: _spell(domain, a, name, value) for a, name, value in attributes if a.type not in _GRAPHS}
    counted = {}
    for a, name, value in attributes:
        if name in PLACING or a.type in _GRAPHS or _states_type(signature, name):
            continue
        spelling = _spell(domain, a, name, value)
        if spelling != _defaults(signature).get(name):
            counted[name] = spelling
    return counted or NONE


def granularity(
    view: View, op: Op, attributes: Plain, types: Sequence[str], shapes: Mapping[int, Shape]
) -> Mapping[str, str]:
    """Return the granularity of a quantizer with several scales, per axis or per block, and a mark if it is asymmetric.

    `types`: of inputs and outputs; `shapes`: of the constants among the inputs, by slot.
    """
    signature, quantizer = op.signature, op.kind in QUANTIZERS
    if not shapes and not quantizer:
        return NONE
    if signature is None:
        return {f"constant {slot}": "×".join(map(str, shape)) or "scalar" for slot, shape in shapes.items()}
    slots = _scales(signature)
    if not slots or not any(t in _QUANTIZED or t in _QUANTIZED_16 for t in types):
        return NONE
    grains = {}
    for slot, name in slots:
        shape = shapes.get(slot)
        if shape is not None and any(dim != 1 for dim in shape):
            grains[name] = "per axis" if len(shape) == 1 else "per block"
    if quantizer:
        axis = next((value for _, name, value in attributes if name == "axis"), 1)
        rank = len(shapes[0]) if 0 in shapes else 0
        if isinstance(axis, int) and (grains or (1 not in shapes and axis != 1)):
            grains["axis"] = str(axis % rank if rank else axis)
        zero_point = view.constant(op.inputs[2]) if 2 in shapes else None
        if zero_point is not None and view.model.array(zero_point).any():
            grains["zero point"] = "not 0"
    return grains


def key_of(kind: str, attributes: Plain, weights: Mapping[int, tuple[int, ...]]) -> str:
    """Return the key of an op, of its kind and the shapes of its weights by input slot. 12 hex digits.

    Tensors among the attributes count by their shapes; bodies do not count.
    """
    if not attributes:
        return _plain_key(kind, tuple(weights.items()))
    stated = sorted([f"{name}={value}" for _, name, value in attributes if name not in _TYPE_ATTRIBUTES])
    shapes = (f"{slot}:{shape}" for slot, shape in weights.items())
    return _digest("\n".join((kind, *stated, *shapes)))


@lru_cache(maxsize=1 << 12)
def _plain_key(kind: str, weights: Iterable[tuple[int, tuple[int, ...]]]) -> str:
    return _digest("\n".join((kind, *(f"{slot}:{shape}" for slot, shape in weights))))


@lru_cache(maxsize=1 << 12)  # most ops of a model are like many others
def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


# They name an element type, which is what a conversion changes.
_TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype", "stash_type", "saturate", "round_mode"}


@cache
def _scales(signature: Signature) -> tuple[tuple[int, str], ...]:
    return tuple((slot, p.name) for slot, p in enumerate(signature.inputs) if "scale" in p.name.lower())


def _states_type(signature: Signature, name: str) -> bool:
    if signature.op_type in ("Constant", "ConstantOfShape") and not signature.domain:
        return True
    return DTYPE_ATTRIBUTES.get((signature.domain, signature.op_type)) == name


@cache
def _defaults(signature: Signature) -> Mapping[str, str]:
    node = NodeProto(attribute=default_attributes(signature).values())
    spelled = {name: _spell(signature.domain, a, name, value) for a, name, value in plain(node)}
    return {**dict.fromkeys(INNER_DTYPE_ATTRIBUTES, "0"), **spelled}


# -- spelling ------------------------------------------------------------------------------------------

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _spell(domain: str, a: AttributeProto, name: str, value: object) -> str:
    if a.type == AttributeProto.INT:
        dtype = DType.of(a.i) if name in INNER_DTYPE_ATTRIBUTES else None
        return dtype.spelling if dtype is not None else str(value)
    if a.type == AttributeProto.FLOAT:
        return _number(value)
    if a.type == AttributeProto.STRING:
        return a.s.decode("utf-8", "backslashreplace")
    if isinstance(value, list):
        return _list(domain, value)
    if a.type == AttributeProto.TENSOR:
        return _element(a.t.data_type)
    if a.type == AttributeProto.SPARSE_TENSOR:
        return f"sparse_tensor({_element(a.sparse_tensor.values.data_type)})"
    if a.type == AttributeProto.TYPE_PROTO:
        return spell_type(a.tp)
    return AttributeProto.AttributeType.Name(a.type).lower() if a.type in _TYPES else "unknown"


_TYPES = frozenset(AttributeProto.AttributeType.values())


def _list(domain: str, items: Sequence[object]) -> str:
    if domain == "ai.onnx.ml":  # weights, whose number depends on the data that a model was trained with
        return f"a list of {type(items[0]).__name__}" if items else "empty"
    spelled = [_number(item) if isinstance(item, float) else _text(item) for item in items]
    if len(items) > _SHOWN:
        return f"{len(items)} items {zlib.crc32(chr(0).join(spelled).encode()):08x}"
    return ", ".join(spelled)


def _text(item: object) -> str:
    return item.decode("utf-8", "backslashreplace") if isinstance(item, bytes) else str(item)


def _number(value: object) -> str:
    return f"{value:.7g}"


def _element(code: int) -> str:
    dtype = DType.of(code)
    return dtype.spelling if dtype is not None else f"type {code}"


def spell_type(proto: TypeProto) -> str:
    """Return a type in full: "float16", "map(int64, float32)", "seq(map(string, float32))"."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return _element(proto.tensor_type.elem_type)
    if kind == "sparse_tensor_type":
        return f"sparse_tensor({_element(proto.sparse_tensor_type.elem_type)})"
    if kind == "map_type":
        return f"map({_element(proto.map_type.key_type)}, {spell_type(proto.map_type.value_type)})"
    if kind == "sequence_type":
        return f"seq({spell_type(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({spell_type(proto.optional_type.elem_type)})"
    return "unknown"
