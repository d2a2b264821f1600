"""Operator schemas: type variables, legal types, and type-setting attributes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import onnx
import onnx.helper
from onnx import NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.ir.attributes import attribute, int_attribute
from amp_rewrite.ir.names import normal_domain as normal_domain
from amp_rewrite.ir.op_classes import GENERATORS, RANDOM

TENSOR = "tensor"


class ValueType(NamedTuple):
    """The type of a value: a container ("tensor", "seq", "optional", "optional(seq)", "map" …) of elements.

    `dtype` is None if the element type is unknown, or if there are several (maps, opaque types).
    """

    container: str
    dtype: DType | None

    def __str__(self) -> str:
        inner = self.dtype.spelling if self.dtype else "unknown"
        return inner if self.container == TENSOR else f"{self.container}({inner})"

    @property
    def onnx_spelling(self) -> str:
        """The name in schemas: "tensor(float16)", "seq(tensor(float))", "optional(seq(tensor(float)))"."""
        inner = f"tensor({self.dtype.onnx_name})" if self.dtype else "unknown"
        if self.container == TENSOR:
            return inner
        return f"optional(seq({inner}))" if self.container == "optional(seq)" else f"{self.container}({inner})"

    def of(self, dtype: DType | None) -> ValueType:
        return ValueType(self.container, dtype)


def unknown(value_type: ValueType | None) -> bool:
    """True if a type or its element type is unknown. A map counts as known."""
    return value_type is None or (value_type.dtype is None and value_type.container != "map")


def parse_type(spelling: str) -> ValueType:
    container = "optional(seq)" if spelling.startswith("optional(seq(") else spelling.split("(", 1)[0]
    return _BY_SPELLING.get(spelling) or ValueType(container, None)


_BY_SPELLING = {
    **{f"sparse_tensor({d.onnx_name})": ValueType("sparse_tensor", d) for d in DType},
    **{(t := ValueType(c, d)).onnx_spelling: t for c in (TENSOR, "seq", "optional", "optional(seq)") for d in DType},
}


def type_of_proto(proto: onnx.TypeProto) -> ValueType | None:
    """Return the type in a TypeProto; None for an empty one."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return ValueType(TENSOR, DType.of(proto.tensor_type.elem_type)) if proto.tensor_type.elem_type else None
    if kind == "sparse_tensor_type":
        return ValueType("sparse_tensor", DType.of(proto.sparse_tensor_type.elem_type))
    if kind not in ("sequence_type", "optional_type"):
        return ValueType("map", None) if kind else None
    inner = type_of_proto(getattr(proto, kind).elem_type) or ValueType(TENSOR, None)
    if kind == "sequence_type":
        return ValueType("seq", inner.dtype if inner.container == TENSOR else None)
    return ValueType("optional(seq)" if inner.container == "seq" else "optional", inner.dtype)


def set_element_type(proto: onnx.TypeProto, dtype: DType) -> None:
    """Change the element type in a TypeProto of a tensor, or of a sequence or an optional of tensors."""
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    if kind == "tensor_type":
        proto.tensor_type.elem_type = dtype.code


@dataclass(frozen=True, slots=True)
class Param:
    """A formal input or output. `variable`: its type variable, a linked variable, or the name of the type `fixed`."""

    type: str
    variable: str
    fixed: ValueType | None
    variadic: bool
    homogeneous: bool


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The types in one version of an operator's schema. Equal schemas are the same object."""

    domain: str
    op_type: str
    since: int
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]
    types: Mapping[str, frozenset[ValueType]]
    expandable: bool
    """True if the schema has a function body."""
    checked: bool
    """True if onnx's checker knows the schema."""
    required: tuple[int, ...]
    """Positions of the required inputs."""

    @property
    def kind(self) -> str:
        """The operator with its domain, as in op lists: "Conv", "com.microsoft::FusedMatMul"."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def input(self, slot: int) -> Param | None:
        """Return the formal input for a slot; None past the last one."""
        return _formal(self.inputs, slot)

    def output(self, slot: int) -> Param | None:
        return _formal(self.outputs, slot)

    def input_variable(self, slot: int) -> str | None:
        """Return the type variable of an input, such as `T`, or `V[2]` for a heterogeneous variadic input.

        For an input with a fixed type, this is the name of the type. None past the last formal input.
        """
        formal = _formal(self.inputs, slot)
        return formal.variable if formal is not None else None

    def output_variable(self, slot: int) -> str | None:
        formal = _formal(self.outputs, slot)
        return formal.variable if formal is not None else None

    def admits(self, variable: str, dtype: DType) -> bool:
        """True if tensors (or sequences, for a sequence variable) of this element type are legal."""
        legal = self.types.get(variable.split("[", 1)[0]) or (parse_type(variable),)
        return any(vtype.dtype is dtype for vtype in legal)


def _formal(params: tuple[Param, ...], slot: int) -> Param | None:
    if slot < len(params) and not params[slot].variadic:
        return params[slot]
    if not params or not params[-1].variadic:
        return None
    last = params[-1]
    return last if last.homogeneous else replace(last, variable=f"{last.type}[{slot - len(params) + 1}]")


def onnx_schema(domain: str, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return onnx's schema of an operator at an opset version of its domain; None if it is unknown to onnx."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


@cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """Return the signature of an operator at an opset version of its domain; None for an unknown operator."""
    domain = normal_domain(domain)
    schema = onnx_schema(domain, op_type, opset)
    if schema is not None:
        sides: Any = (schema.inputs, schema.outputs)
        sides = [[(p.name, p.type_str, p.option.name, p.is_homogeneous) for p in side] for side in sides]
        legal = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        expandable = schema.has_function or schema.has_context_dependent_function  # type: ignore[attr-defined]
        since, checked = schema.since_version, not schema.deprecated
    elif (row := contrib_schemas().get(_contrib_name(domain, op_type))) is not None:
        sides, legal, since = [row["inputs"], row["outputs"]], row["types"], row["since"]
        expandable = checked = False
    else:
        return None
    types = {name: frozenset(map(parse_type, spellings)) for name, spellings in legal.items()}
    linked = _LINKED.get((domain, op_type), {})

    def param(_: str, spelling: str, option: str, homogeneous: bool = True) -> Param:
        fixed = None if spelling in types else parse_type(spelling)
        return Param(spelling, linked.get(spelling, spelling), fixed, option == "Variadic", homogeneous)

    inputs, outputs = (tuple([param(*formal) for formal in side]) for side in sides)
    required = tuple([slot for slot, (_, _, option, *_) in enumerate(sides[0]) if option == "Single"])
    return Signature(domain, op_type, since, inputs, outputs, types, expandable, checked, required)


def _contrib_name(domain: str, op_type: str) -> str:
    return f"{domain or 'ai.onnx'}::{op_type}"


def is_refused_by_onnx(domain: str, op_type: str, opset: int) -> bool:
    """True for an operator of ai.onnx that onnx's checker rejects, but a runtime may accept.

    The operator is unknown to onnx at this opset, or deprecated with a function that runtimes still compute.
    """
    if normal_domain(domain):
        return False
    schema = onnx_schema("", op_type, opset)
    return schema is None or bool(schema.deprecated and schema.has_context_dependent_function)  # type: ignore[attr-defined]


def is_runtime_only(domain: str, op_type: str, opset: int) -> bool:
    """True for an operator of ai.onnx known to onnxruntime at this opset, but not to onnx.

    Onnxruntime's optimizers write LayerNormalization before opset 17, and SimplifiedLayerNormalization at any opset.
    """
    in_runtime = _contrib_name("", op_type) in contrib_schemas()
    return in_runtime and not normal_domain(domain) and onnx_schema("", op_type, opset) is None


def contrib_schemas() -> Mapping[str, Any]:
    return _table("contrib_schemas")


@cache
def _table(name: str) -> Mapping[str, Any]:
    text = resources.files("amp_rewrite").joinpath("runtime", "_tables", f"{name}.json").read_text("utf-8")
    ops: dict[str, Any] = json.loads(text)["ops"]
    return ops


# Pairs of variables with the same element type: one is a tensor type, the other a container of tensors.
_SEQUENCES = ("SequenceAt", "SequenceInsert", "SequenceConstruct", "SplitToSequence", "ConcatFromSequence")
_LINKED: Mapping[tuple[str, str], Mapping[str, str]] = {
    **{("", op): {"S": "T"} for op in _SEQUENCES},
    **{("", op): {"O": "V"} for op in ("Optional", "OptionalGetElement")},
}

# Attributes that set the element type of the output, by operator; the value is a DataType code.
DTYPE_ATTRIBUTES: Mapping[tuple[str, str], str] = {
    **{("", op): "output_datatype" for op in GENERATORS},
    **{("", op): "dtype" for op in (*RANDOM, "EyeLike", "SequenceEmpty")},
    ("", "Cast"): "to",
    ("", "BitCast"): "to",
    ("", "DequantizeLinear"): "output_dtype",
    ("", "QuantizeLinear"): "output_dtype",
    ("com.microsoft", "GemmFloat8"): "dtype",
}

# Attributes that set the type of a computation inside an operator; the value is a DataType code.
INNER_DTYPE_ATTRIBUTES = frozenset({"stash_type", "softmax_precision", "precision"})

# Without the attribute, the output has the type of this input; for operators not listed, it is float32.
IMPLIED_BY_INPUT: Mapping[str, int] = {
    **dict.fromkeys(("EyeLike", "Bernoulli", "RandomNormalLike", "RandomUniformLike"), 0),
    "DequantizeLinear": 1,
    "QuantizeLinear": 2,
}


# Attributes of Constant for plain numbers or strings: the element type, and the field of the attribute.
PLAIN_CONSTANTS: Mapping[str, tuple[DType, str]] = {
    "value_float": (DType.FLOAT, "f"),
    "value_floats": (DType.FLOAT, "floats"),
    "value_int": (DType.INT64, "i"),
    "value_ints": (DType.INT64, "ints"),
    "value_string": (DType.STRING, "s"),
    "value_strings": (DType.STRING, "strings"),
}


@cache
def default_attributes(signature: Signature) -> Mapping[str, onnx.AttributeProto]:
    schema = onnx_schema(signature.domain, signature.op_type, signature.since)
    if schema is not None:
        return {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type}
    defaults = _table("contrib_defaults").get(_contrib_name(signature.domain, signature.op_type), {})
    return {name: onnx.helper.make_attribute(name, value) for name, value in defaults.items()}


InputTypes = Sequence[ValueType | None]


def explicit_dtype(node: NodeProto, inputs: InputTypes) -> DType | None:
    """Return the element type of an output if an attribute or a rule of the operator sets it.

    None if the type follows from the type constraints of the schema.
    """
    key = _, op = normal_domain(node.domain), node.op_type
    name = DTYPE_ATTRIBUTES.get(key)
    if name is None:
        rule = _OUTPUT_RULES.get(key)
        return rule(node, inputs) if rule else None
    explicit = attribute(node, name)
    if explicit is not None and (explicit.i or explicit.s):  # before opset 6, Cast gives the type as text
        code = _CODES.get(explicit.s.decode("utf-8", "replace"), 0) if explicit.s else explicit.i
        if code in _CODES.values() and code:
            return DType.of(code)
        what = f"{explicit.s[:80] or explicit.i!r}, which is not an element type"
        raise ModelError(f"node {node.name or node.output[0]!r} ({op}) has {name}={what}; export the model again")
    slot = IMPLIED_BY_INPUT.get(op)
    if slot is None:
        return DType.INT32 if op == "Multinomial" else DType.FLOAT
    implied = inputs[slot] if len(inputs) > slot else None
    if implied is not None:
        return implied.dtype
    return DType.UINT8 if op == "QuantizeLinear" else None


_CODES = dict(TensorProto.DataType.items())


def _dtype_in_attributes(node: NodeProto, inputs: InputTypes) -> DType | None:
    """Return the type of the values or labels in an attribute; for labels, the attribute's name determines it."""
    for a in node.attribute:
        if a.name in ("value", "values_tensor"):
            return DType.of(a.t.data_type)
        if a.name == "sparse_value":
            return DType.of(a.sparse_tensor.values.data_type)
        if a.name == "classes_strings":  # LabelEncoder-1 turns strings into integers and back
            return DType.INT64 if _first_input_dtype(node, inputs) is DType.STRING else DType.STRING
        if a.name in _DTYPE_BY_ATTRIBUTE:
            return _DTYPE_BY_ATTRIBUTE[a.name]
    return DType.FLOAT if node.op_type == "ConstantOfShape" else None


def _first_input_dtype(_: NodeProto, inputs: InputTypes) -> DType | None:
    return inputs[0].dtype if inputs and inputs[0] else None


def _optional_dtype(node: NodeProto, inputs: InputTypes) -> DType | None:
    declared = attribute(node, "type")
    content = type_of_proto(declared.tp) if declared is not None and not inputs else None
    return content.dtype if content else _first_input_dtype(node, inputs)


_DTYPE_BY_ATTRIBUTE = {
    **{name: dtype for name, (dtype, _) in PLAIN_CONSTANTS.items()},
    "values_floats": DType.FLOAT,
    **dict.fromkeys(("values_strings", "classlabels_strings"), DType.STRING),
    **dict.fromkeys(("values_int64s", "classlabels_int64s", "classlabels_ints"), DType.INT64),
}
_CLASSIFIERS = ("LabelEncoder", "LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier")
_ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "DecoderMaskedMultiHeadAttention")
_OUTPUT_RULES: Mapping[tuple[str, str], Callable[[NodeProto, InputTypes], DType | None]] = {
    **{("ai.onnx.ml", op): _dtype_in_attributes for op in _CLASSIFIERS},
    **{("com.microsoft", op): _first_input_dtype for op in _ATTENTIONS},
    **{("", op): _dtype_in_attributes for op in ("Constant", "ConstantOfShape")},
    **dict.fromkeys(
        (("", "LayerNormalization"), ("", "SimplifiedLayerNormalization")),
        lambda node, _: DType.of(int_attribute(node, "stash_type", DType.FLOAT.code)),
    ),
    ("", "LinearAttention"): _first_input_dtype,
    ("", "Optional"): _optional_dtype,
}
