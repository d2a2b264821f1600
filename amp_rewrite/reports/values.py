"""Values of a model in a report: their types once a plan is carried out, and the rows behind them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from onnx import AttributeProto, TensorProto, TypeProto
from onnx.helper import get_attribute_value

from amp_rewrite.decide.coloring.paint import Coloring
from amp_rewrite.decide.plan import Plan
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import casts_floats, keeps_type, read_variable
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, INNER_DTYPE_ATTRIBUTES, Signature, ValueType, default_attributes
from amp_rewrite.ir.view import MAIN, Op, OpId, ValueId, View
from amp_rewrite.reports.rows import FIRST_INPUT, NO_ROW


class RowTypes(NamedTuple):
    """Types in a row."""

    dtype: str
    variables: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class PlannedTypes:
    """Types in a view after a coloring and a plan; those of the model itself without them."""

    view: View
    coloring: Coloring | None
    plan: Plan | None

    @cached_property
    def made(self) -> Sequence[ValueType | None]:
        """Type of each value at its producer, once the plan is carried out."""
        made = list(self.view.types)
        for changed in (self.plan.retype, self._baked) if self.plan else ():
            for value, dtype in changed.items():
                made[value] = retyped(self.view.types[value], dtype)
        return made

    def row_types(self, op: Op) -> RowTypes:
        """Return the types in the row of an op."""
        inputs = tuple([self.read(op, slot) for slot in range(len(op.inputs))])
        outputs = tuple([self.written(op, slot) for slot in range(len(op.outputs))])
        variables = self._variables(op, inputs, outputs)
        return RowTypes(
            _main_dtype(op, variables, outputs, inputs),
            {name: dtype.spelling for name, dtype in variables.items()},
            tuple(spell(t) for t in inputs),
            tuple(spell(t) for t in outputs),
        )

    def _painted(self, variable: tuple[OpId, str] | None) -> DType | None:
        return self.coloring.dtype(*variable) if self.coloring is not None and variable is not None else None

    def _variables(
        self, op: Op, inputs: tuple[ValueType | None, ...], outputs: tuple[ValueType | None, ...]
    ) -> dict[str, DType]:
        dtypes = {}
        for variable in self.view.variables[op.id]:
            ports = (*(inputs[i] for i in variable.inputs), *(outputs[o] for o in variable.outputs))
            dtype = next((port.dtype for port in ports if port is not None and port.dtype is not None), None)
            if dtype is not None and dtype.floating:
                dtypes[variable.name] = dtype
        free = {name: dtype for name, dtype in dtypes.items() if "(" not in name}
        return free or dtypes  # without ports of one fixed type, "tensor(float)", if there are others

    def read(self, op: Op, slot: int) -> ValueType | None:
        """Return the type of an input as the op reads it."""
        value = op.inputs[slot]
        if value is None:
            return None
        if op.kind == "Cast":
            return self.made[value]
        return retyped(self.view.types[value], self._painted(read_variable(op, slot)))

    def written(self, op: Op, slot: int) -> ValueType | None:
        """Return the type of a result as the op writes it."""
        value = op.outputs[slot]
        return None if value is None else self.made[value]

    @cached_property
    def _baked(self) -> Mapping[ValueId, DType]:
        bakes = self.plan.bakes if self.plan else ()
        return {bake.value: bake.to for bake in bakes if not bake.keeps_original}


def retyped(known: ValueType | None, dtype: DType | None) -> ValueType | None:
    """Return a type with another element type; the same for None."""
    return known if known is None or dtype is None or known.dtype is dtype else known.of(dtype)


def spell(known: ValueType | None) -> str:
    """Return a type as rows spell it; empty for an unknown one."""
    return str(known) if known is not None else ""


def _main_dtype(
    op: Op, variables: Mapping[str, DType], outputs: tuple[ValueType | None, ...], inputs: tuple[ValueType | None, ...]
) -> str:
    written = next((t for t in outputs if t is not None), None)
    if op.kind in CASTS and written is not None:
        return str(written)
    floating = list(variables.values()) or [
        t.dtype for t in (*outputs, *inputs) if t is not None and t.dtype is not None and t.dtype.floating
    ]
    chosen = next((d for d in floating if d.low), floating[0] if floating else None)
    if chosen is not None:
        return chosen.spelling
    return str(written) if written is not None else "unknown"


# -- ways ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lineage:
    """Lineage of the values of a view, by id. `identities`: Casts to replace by copies. O(nodes) each."""

    view: View
    identities: Collection[OpId] = frozenset()

    @cached_property
    def casts(self) -> frozenset[OpId]:
        """Casts between floats in the result, which the model has itself."""
        casting = (op for op in self.view.ops if op.kind in CASTS and op.id not in self.identities)
        return frozenset(op.id for op in casting if casts_floats(self.view, op))

    @cached_property
    def source(self) -> Sequence[ValueId]:
        """Value behind each value, through copies and Casts between floats; mostly the value itself."""
        source = [value.id for value in self.view.values]
        for op in self.view.ops:
            copies = op.kind == "Identity" or (op.kind in CASTS and self._copies(op))
            if copies and op.inputs[0] is not None and op.outputs[0] is not None:
                source[op.outputs[0]] = source[op.inputs[0]]
        return source

    def _copies(self, cast: Op) -> bool:
        return cast.id in self.identities or cast.id in self.casts or keeps_type(self.view, cast)

    @cached_property
    def rows(self) -> Sequence[int]:
        """Source of each value, as in `Row.reads`."""
        rows = []
        inputs = {value: FIRST_INPUT - i for i, value in enumerate(self.inputs)}
        for source in self.source:
            producer = self.view.producer(source)
            row = inputs.get(source, NO_ROW) if producer is None else producer.id
            rows.append(NO_ROW if producer is not None and producer.kind == "Constant" else row)
        return rows

    @cached_property
    def inputs(self) -> Sequence[ValueId]:
        """Inputs of the model, without those with an initializer as default."""
        return [v for v in self.view.scopes[MAIN].inputs if self.view.values[v].tensor is None]


# -- attributes -------------------------------------------------------------------------------------------------


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
