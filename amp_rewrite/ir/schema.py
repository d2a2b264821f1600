"""What an operator's schema says: type variables, legal types, and attributes that carry a type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import onnx
from onnx import NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.names import normal_domain as normal_domain
from amp_rewrite.ir.op_classes import GENERATORS, RANDOM

TENSOR = "tensor"


class ValueType(NamedTuple):
    """The type of a value: a container ("tensor", "seq", "optional", "optional(seq)", "map" …) of elements.

    `dtype` is None where the element type is unknown or no single one exists (maps, opaque types).
    """

    container: str
    dtype: DType | None

    def __str__(self) -> str:
        inner = self.dtype.spelling if self.dtype else "unknown"
        return inner if self.container == TENSOR else f"{self.container}({inner})"

    @property
    def onnx_spelling(self) -> str:
        """As schemas spell it: "tensor(float16)", "seq(tensor(float))", "optional(seq(tensor(float)))"."""
        return _spell(self.container, self.dtype)

    def of(self, dtype: DType | None) -> ValueType:
        """The same container with elements of another type."""
        return ValueType(self.container, dtype)


def unknown(found: ValueType | None) -> bool:
    """Whether a type, or its element type, is still to be found out; maps have no single one."""
    return found is None or (found.dtype is None and found.container != "map")


@cache
def _spell(container: str, dtype: DType | None) -> str:
    inner = f"tensor({dtype.onnx_name})" if dtype else "unknown"
    if container == TENSOR:
        return inner
    return f"optional(seq({inner}))" if container == "optional(seq)" else f"{container}({inner})"


@cache
def parse_type(spelling: str) -> ValueType:
    """The type behind a schema's type string."""
    for opening, container in (("optional(seq(tensor(", "optional(seq)"), ("optional(tensor(", "optional")):
        if spelling.startswith(opening):
            return ValueType(container, _BY_ONNX_NAME.get(spelling[len(opening) :].rstrip(")")))
    for opening in ("tensor(", "sparse_tensor("):
        if spelling.startswith(opening):
            return ValueType(opening[:-1], _BY_ONNX_NAME.get(spelling[len(opening) : -1]))
    if spelling.startswith("seq(tensor("):
        return ValueType("seq", _BY_ONNX_NAME.get(spelling[11:-2]))
    return ValueType(spelling.split("(", 1)[0], None)


_BY_ONNX_NAME = {d.onnx_name: d for d in DType}


def type_of_proto(proto: onnx.TypeProto) -> ValueType | None:
    """The type that a TypeProto states; None when it states none."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return ValueType(TENSOR, DType.of(proto.tensor_type.elem_type)) if proto.tensor_type.elem_type else None
    if kind == "sequence_type":
        inner = type_of_proto(proto.sequence_type.elem_type)
        return ValueType("seq", inner.dtype if inner and inner.container == TENSOR else None)
    if kind == "optional_type":
        inner = type_of_proto(proto.optional_type.elem_type)
        if inner is None:
            return ValueType("optional", None)
        return ValueType("optional(seq)" if inner.container == "seq" else "optional", inner.dtype)
    if kind == "sparse_tensor_type":
        return ValueType("sparse_tensor", DType.of(proto.sparse_tensor_type.elem_type))
    return ValueType("map", None) if kind else None


def set_element_type(proto: onnx.TypeProto, dtype: DType) -> None:
    """Change the element type inside a TypeProto of tensors, sequences and optionals of tensors."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        proto.tensor_type.elem_type = dtype.code
    elif kind == "sequence_type":
        set_element_type(proto.sequence_type.elem_type, dtype)
    elif kind == "optional_type":
        set_element_type(proto.optional_type.elem_type, dtype)


@dataclass(frozen=True, slots=True)
class Param:
    """One formal input or output. `variable` is its type, or the variable that this one is linked with."""

    name: str
    type: str
    variadic: bool
    homogeneous: bool
    variable: str


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """An operator's schema at one version, as far as types are concerned. There is one object for each."""

    domain: str
    op_type: str
    since: int
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]
    types: Mapping[str, frozenset[str]]
    expandable: bool
    """Whether the schema has a function body."""

    @property
    def kind(self) -> str:
        """The operator with its domain, as lists spell it: "Conv", "com.microsoft::FusedMatMul"."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def input(self, slot: int) -> Param | None:
        """The formal input behind an actual one; None past the last."""
        return _formal(self.inputs, slot)

    def output(self, slot: int) -> Param | None:
        """The formal output behind an actual one; None past the last."""
        return _formal(self.outputs, slot)

    def input_variable(self, slot: int) -> str | None:
        """The type variable of an actual input: the schema's own name, `V[2]` in a heterogeneous list.

        A port of one fixed type has that type as its variable. None past the last formal input.
        """
        params = self.inputs  # asked for several times per input of a model
        return params[slot].variable if slot < len(params) and not params[slot].variadic else _variable(params, slot)

    def output_variable(self, slot: int) -> str | None:
        """The same for an actual output."""
        params = self.outputs
        return params[slot].variable if slot < len(params) and not params[slot].variadic else _variable(params, slot)

    def legal(self, variable: str) -> frozenset[str]:
        """The type strings that a variable may take; a fixed type is its own only choice."""
        return self.types.get(variable.split("[", 1)[0], frozenset((variable,)))

    def admits(self, variable: str, dtype: DType) -> bool:
        """Whether tensors (or sequences, for a sequence variable) of this element type are legal."""
        return any(parse_type(t).dtype is dtype for t in self.legal(variable))


def _formal(params: tuple[Param, ...], slot: int) -> Param | None:
    if slot < len(params):
        return params[slot]
    return params[-1] if params and params[-1].variadic else None


def _variable(params: tuple[Param, ...], slot: int) -> str | None:
    formal = _formal(params, slot)
    if formal is None or not formal.variadic or formal.homogeneous:
        return formal.variable if formal is not None else None
    return f"{formal.type}[{slot - len(params) + 1}]"


def onnx_schema(domain: str, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return onnx's schema in force at an opset version of a domain; None for an operator that onnx does not know."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


@cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """The schema in force at an opset version of a domain; None for an operator that no schema here knows."""
    domain = normal_domain(domain)
    schema = onnx_schema(domain, op_type, opset)
    if schema is None:
        return _contrib_signature(domain, op_type)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    linked = _LINKED.get((domain, op_type), {})

    def params(formals: Any) -> tuple[Param, ...]:
        return tuple(
            Param(p.name, p.type_str, p.option == variadic, p.is_homogeneous, linked.get(p.type_str, p.type_str))
            for p in formals
        )

    return Signature(
        domain,
        op_type,
        schema.since_version,
        params(schema.inputs),
        params(schema.outputs),
        {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints},
        schema.has_function or schema.has_context_dependent_function,  # type: ignore[attr-defined]
    )


def _contrib_signature(domain: str, op_type: str) -> Signature | None:
    row = contrib_schemas().get(f"{domain or 'ai.onnx'}::{op_type}")
    if row is None:
        return None

    def params(formals: list[list[Any]]) -> tuple[Param, ...]:
        return tuple(Param(p[0], p[1], p[2] == "Variadic", len(p) < 4 or bool(p[3]), p[1]) for p in formals)

    types = {name: frozenset(legal) for name, legal in row["types"].items()}
    return Signature(domain, op_type, row["since"], params(row["inputs"]), params(row["outputs"]), types, False)


@cache
def contrib_schemas() -> Mapping[str, Any]:
    """onnxruntime's own operators by "domain::Op", from the table that ships with the package."""
    text = resources.files("amp_rewrite").joinpath("runtime", "_tables", "contrib_schemas.json").read_text("utf-8")
    ops: dict[str, Any] = json.loads(text)["ops"]
    return ops


# Variables that name one element type twice: once bare, once inside a container.
_LINKED: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("", "SequenceAt"): {"S": "T"},
    ("", "SequenceInsert"): {"S": "T"},
    ("", "SequenceConstruct"): {"S": "T"},
    ("", "SplitToSequence"): {"S": "T"},
    ("", "ConcatFromSequence"): {"S": "T"},
    ("", "Optional"): {"O": "V"},
    ("", "OptionalGetElement"): {"O": "V"},
}

# Variables that stay float32 by choice, because the operator computes or reads there in float32 anyway.
KEPT_VARIABLES: Mapping[tuple[str, str], frozenset[str]] = {
    ("", "LayerNormalization"): frozenset({"U"}),
    ("", "Dropout"): frozenset({"T1"}),
    ("", "Resize"): frozenset({"T2"}),
    ("com.microsoft", "BitmaskDropout"): frozenset({"T1"}),
    ("com.microsoft", "BiasDropout"): frozenset({"T1"}),
    ("com.microsoft", "BitmaskBiasDropout"): frozenset({"T1"}),
    ("com.microsoft", "EmbedLayerNormalization"): frozenset({"U"}),
    ("com.microsoft", "GroupNorm"): frozenset({"M"}),
    ("com.microsoft", "SkipGroupNorm"): frozenset({"M"}),
    ("com.microsoft", "SkipLayerNormalization"): frozenset({"U"}),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): frozenset({"U"}),
    ("", "SimplifiedLayerNormalization"): frozenset({"U"}),
}

# The attribute that states the element type of the output, by operator; all hold a DataType code.
DTYPE_ATTRIBUTES: Mapping[tuple[str, str], str] = {
    **{("", op): "output_datatype" for op in GENERATORS},
    **{("", op): "dtype" for op in (*RANDOM, "EyeLike", "SequenceEmpty")},
    ("", "Cast"): "to",
    ("", "BitCast"): "to",
    ("", "DequantizeLinear"): "output_dtype",
    ("", "QuantizeLinear"): "output_dtype",
    ("com.microsoft", "GemmFloat8"): "dtype",
}

# Attributes that choose the type of a computation inside an operator; they hold a DataType code.
INNER_DTYPE_ATTRIBUTES = frozenset({"stash_type", "softmax_precision", "precision"})

# Without the attribute, these give the type of this input; the others give float32.
IMPLIED_BY_INPUT: Mapping[str, int] = {
    **dict.fromkeys(("EyeLike", "Bernoulli", "RandomNormalLike", "RandomUniformLike"), 0),
    "DequantizeLinear": 1,
    "QuantizeLinear": 2,
}


def attribute(node: NodeProto, name: str) -> onnx.AttributeProto | None:
    """A node's attribute by name; None when it is absent."""
    return next((a for a in node.attribute[:] if a.name == name), None)  # a slice is iterated over in half the time


def float_attribute(node: NodeProto, name: str, default: float) -> float:
    """A number among a node's attributes."""
    found = attribute(node, name)
    return default if found is None else found.f


def int_attribute(node: NodeProto, name: str, default: int) -> int:
    """A whole number among a node's attributes."""
    found = attribute(node, name)
    return default if found is None else found.i


def stated_dtype(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    """The element type of an output that no input binds: stated by an attribute, or by the operator's rule.

    None where the schema's own constraint must decide.
    """
    domain, op = normal_domain(node.domain), node.op_type
    name = DTYPE_ATTRIBUTES.get((domain, op))
    if name is not None:
        found = attribute(node, name)
        if found is not None and (found.i or found.s):
            # Cast-1 wrote the type as a string, "FLOAT".
            code = TensorProto.DataType.Value(found.s.decode()) if found.s else found.i
            return DType.of(code)
        slot = IMPLIED_BY_INPUT.get(op)
        if slot is not None and len(inputs) > slot and (found_type := inputs[slot]):
            return found_type.dtype
        if slot is not None:
            return DType.UINT8 if op == "QuantizeLinear" else None
        return DType.INT32 if op == "Multinomial" else DType.FLOAT
    rule = _STATED.get((domain, op))
    return rule(node, inputs) if rule else None


def _constant_of_shape(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    found = attribute(node, "value")
    return DType.of(found.t.data_type) if found is not None else DType.FLOAT


def _constant(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    for a in node.attribute:
        if a.name == "value":
            return DType.of(a.t.data_type)
        if a.name == "sparse_value":
            return DType.of(a.sparse_tensor.values.data_type)
        if a.name in _CONSTANT_ATTRIBUTES:
            return _CONSTANT_ATTRIBUTES[a.name]
    return None


_CONSTANT_ATTRIBUTES = {
    "value_float": DType.FLOAT,
    "value_floats": DType.FLOAT,
    "value_int": DType.INT64,
    "value_ints": DType.INT64,
    "value_string": DType.STRING,
    "value_strings": DType.STRING,
}


def _stash(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    found = attribute(node, "stash_type")
    return DType.of(found.i) if found is not None else DType.FLOAT


def _optional(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    if inputs and inputs[0]:
        return inputs[0].dtype
    found = attribute(node, "type")
    stated = type_of_proto(found.tp) if found is not None else None
    return stated.dtype if stated else None


def _labels(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    """ai.onnx.ml writes the type of its labels in the name of the attribute that lists them."""
    names = {a.name for a in node.attribute}
    tensor = attribute(node, "values_tensor")
    if tensor is not None:
        return DType.of(tensor.t.data_type)
    if "values_floats" in names:
        return DType.FLOAT
    if "classes_strings" in names:  # LabelEncoder-1 turns strings into integers and back
        return DType.INT64 if inputs and inputs[0] and inputs[0].dtype is DType.STRING else DType.STRING
    if names & {"values_strings", "classlabels_strings"}:
        return DType.STRING
    return DType.INT64 if names & {"values_int64s", "classlabels_int64s", "classlabels_ints"} else None


def _first(node: NodeProto, inputs: list[ValueType | None]) -> DType | None:
    return inputs[0].dtype if inputs and inputs[0] else None


_STATED = {
    **{("ai.onnx.ml", op): _labels for op in ("LabelEncoder", "LinearClassifier", "SVMClassifier")},
    ("ai.onnx.ml", "TreeEnsembleClassifier"): _labels,
    ("", "Constant"): _constant,
    ("", "ConstantOfShape"): _constant_of_shape,
    ("", "LayerNormalization"): _stash,
    ("", "Optional"): _optional,
    ("", "LinearAttention"): _first,
    ("com.microsoft", "GroupQueryAttention"): _first,
    ("com.microsoft", "MultiHeadAttention"): _first,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): _first,
}
