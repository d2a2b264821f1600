"""Attributes of rows: those two ops of one kind must share to compute in the same precision.

Each attribute counts, except those that only place elements (`PLACING`): axes, shapes, windows, the order of
dimensions. They say what is computed, and exporters spell them in many ways: axis 2 or -1, a stated or an implied
kernel shape, an attribute or, from some opset on, an input. All others say how it is computed: a type, a number of
bits, the size of a block, a mode of rounding, an approximation, a number in the formula.

An attribute with the operator's default counts as left out. One that states the type of a result does not count,
because the type of the result does. All attributes of an operator without a schema count.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from functools import cache

from onnx import AttributeProto, TensorProto, TypeProto
from onnx.helper import get_attribute_value

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, INNER_DTYPE_ATTRIBUTES, Signature, default_attributes

NONE: Mapping[str, str] = {}

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
_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
_SHOWN = 8


def counting(domain: str, signature: Signature | None, attributes: Iterable[AttributeProto]) -> Mapping[str, str]:
    """Return the counting attributes of a node, spelled, without defaults."""
    defaults = _defaults(signature) if signature is not None else NONE
    counted = {}
    for a in attributes:
        name = a.name
        if a.type in _GRAPHS or (signature is not None and (name in PLACING or _states_type(signature, name))):
            continue
        if (spelling := _spell(domain, a)) != defaults.get(name):
            counted[name] = spelling
    return counted or NONE


def _states_type(signature: Signature, name: str) -> bool:
    if signature.op_type in ("Constant", "ConstantOfShape") and not signature.domain:
        return True
    return DTYPE_ATTRIBUTES.get((signature.domain, signature.op_type)) == name


@cache
def _defaults(signature: Signature) -> Mapping[str, str]:
    stated = default_attributes(signature).values()
    return {**dict.fromkeys(INNER_DTYPE_ATTRIBUTES, "0"), **{a.name: _spell(signature.domain, a) for a in stated}}


# -- spelling ------------------------------------------------------------------------------------------


def _spell(domain: str, a: AttributeProto) -> str:
    """Return the value of an attribute: numbers and texts in full, tensors by their type, long lists by a digest."""
    if a.type not in _TYPES:
        return "unknown"
    value = get_attribute_value(a)
    if a.type == AttributeProto.INT and a.name in INNER_DTYPE_ATTRIBUTES:
        return _element(value)
    if isinstance(value, TensorProto):
        return _element(value.data_type)
    if isinstance(value, TypeProto):
        return spell_type(value)
    if a.type in _LISTS:
        return _list(domain, [_number(item) for item in value])
    return _number(value) if a.type in _SIMPLE else AttributeProto.AttributeType.Name(a.type).lower()


_TYPES = frozenset(AttributeProto.AttributeType.values()) - {AttributeProto.UNDEFINED}
_SIMPLE = (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING)
_LISTS = (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS)


def _list(domain: str, items: list[str]) -> str:
    if domain == "ai.onnx.ml":  # weights, whose number depends on the data that a model was trained with
        return "a list" if items else "empty"
    if len(items) > _SHOWN:
        return f"{len(items)} items {zlib.crc32(chr(0).join(items).encode()):08x}"
    return ", ".join(items)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


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
