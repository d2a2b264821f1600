"""Generated changes of precision that the CI gate must notice: pairs of models in classes.

Attributes and types come from the schemas of onnx and onnxruntime, so that operators and attributes of later releases
become cases automatically.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import onnx.parser
from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, all_nodes
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, contrib_schemas, parse_type
from amp_rewrite.ir.view import View
from amp_rewrite.reports.report_builder import PLACING

OPSET, IR = 23, 11
OPSETS = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("foreign", 1)]


@dataclass(frozen=True, slots=True)
class Case:
    """Two models that differ in precision. `op`: the op that the gate must name, if any."""

    name: str
    before: ModelProto
    after: ModelProto
    op: str = ""


def value(name: str, spelled: str) -> ValueInfoProto:
    """Declare a value of a type in a schema's spelling: "seq(tensor(float))"."""
    known = parse_type(spelled)
    assert known.dtype is not None, spelled
    tensor = helper.make_tensor_type_proto(known.dtype.code, (4, 4))
    protos = {
        "tensor": tensor,
        "seq": helper.make_sequence_type_proto(tensor),
        "optional": helper.make_optional_type_proto(tensor),
        "optional(seq)": helper.make_optional_type_proto(helper.make_sequence_type_proto(tensor)),
    }
    return helper.make_value_info(name, protos[known.container])


def sound(proto: ModelProto) -> bool:
    """True if this package can index the model."""
    try:
        View.of(Model.load(proto))
    except ModelError:
        return False
    return True


def parsed(text: str, opset: int = 21) -> ModelProto:
    imports = f'"": {opset}, "com.microsoft": 1, "foreign": 1, "local": 1, "ai.onnx.ml": 4'
    return onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{text}")


# -- operators by their schemas ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator's schema. Formal parameters: name, type variable or type, option."""

    domain: str
    name: str
    inputs: Sequence[Sequence[str]]
    outputs: Sequence[Sequence[str]]
    types: Mapping[str, Sequence[str]]
    attributes: Mapping[str, str]
    defaults: Mapping[str, AttributeProto]

    @property
    def kind(self) -> str:
        return f"{self.domain}::{self.name}" if self.domain else self.name

    @property
    def expected(self) -> str:
        """The op that a diff must name; casts and copies are reported by their readers or as casts."""
        return "" if self.name in ("Cast", "CastLike", "Identity") else self.kind

    def choices(self, variable: str) -> list[str]:
        """Return the dense types that a variable may have, floats first."""
        legal = sorted(self.types.get(variable, (variable,)))
        typed = [t for t in legal if (known := parse_type(t)).dtype is not None and known.container != "sparse_tensor"]
        return sorted(typed, key=lambda t: (not t.endswith("(float)"), "float" not in t, "int" not in t))

    def model(
        self, chosen: Mapping[str, str], attributes: Mapping[str, object], *, constants: bool = False
    ) -> ModelProto | None:
        """Build a model of only this operator with these types; its inputs are the model's or constants.

        None if that is not a valid model, because a schema does not state all requirements.
        """
        try:
            proto = self._alone(chosen, attributes, constants=constants)
        except (AssertionError, IndexError, KeyError):
            return None
        return proto if sound(proto) else None

    def _alone(self, chosen: Mapping[str, str], attributes: Mapping[str, object], *, constants: bool) -> ModelProto:
        present = [formal[2] != "Optional" or formal[1] in chosen for formal in self.inputs]
        read = [f"x{i}" if there else "" for i, there in enumerate(present)]
        while read and not read[-1]:
            read.pop()
        results = [f"y{i}" for i, _ in enumerate(self.outputs)]
        types = [chosen.get(formal[1]) or self.choices(formal[1])[0] for formal in self.inputs[: len(read)]]
        node = helper.make_node(self.name, read, results, domain=self.domain, name="the_op", **attributes)
        weights, fed = [], []
        for name, spelled in zip(read, types, strict=True):
            if not name:
                continue
            dtype = parse_type(spelled).dtype
            if constants and spelled.startswith("tensor(") and dtype is not None and dtype is not DType.STRING:
                weights.append(weight(name, dtype, (4, 4)))
            else:
                fed.append(value(name, spelled))
        graph = helper.make_graph([node], "g", fed, [ValueInfoProto(name=name) for name in results], weights)
        return helper.make_model(graph, opset_imports=OPSETS, ir_version=IR)


def operators() -> Iterator[Operator]:
    """Yield all operators of onnx and onnxruntime at the newest opset, except those with bodies."""
    history = [s for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.since_version <= OPSET]
    for schema in {s.name: s for s in sorted(history, key=lambda s: s.since_version)}.values():
        if schema.deprecated:
            continue
        kinds = {name: a.type.name for name, a in schema.attributes.items()}
        if "GRAPH" not in kinds.values() and schema.name != "Constant":
            yield Operator(
                "",
                schema.name,
                [(p.name, p.type_str, p.option.name) for p in schema.inputs],
                [(p.name, p.type_str, p.option.name) for p in schema.outputs],
                {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints},
                kinds,
                {name: a.default_value for name, a in schema.attributes.items() if a.default_value.type},
            )
    for key, row in contrib_schemas().items():
        domain, _, name = key.partition("::")
        if domain == "com.microsoft" and "GRAPH" not in row["attributes"].values():
            yield Operator(domain, name, row["inputs"], row["outputs"], row["types"], row["attributes"], {})


VALUES: Mapping[str, Sequence[object]] = {
    "INT": (1, 10, 16),  # as element types float32, float16, bfloat16
    "FLOAT": (0.25, 0.75, 1.5),
    "STRING": ("one", "two", "three"),
    "INTS": ([1, 2], [1, 3]),
    "FLOATS": ([0.5, 1.0], [0.5, 2.0]),
    "STRINGS": (["one", "two"], ["one", "three"]),
}
NEEDED = {**{kind: values[0] for kind, values in VALUES.items()}, "TENSOR": helper.make_tensor("t", 1, [1], [0.0])}


FLOAT8 = DType.FLOAT8E4M3FN
NEEDED_BY: Mapping[tuple[str, str], object] = {("Cast", "to"): FLOAT8.code}
"""A Cast only saturates to 8 bits."""


def base_of(op: Operator) -> dict[str, object]:
    """Return the required attributes of an operator; all, if onnxruntime's table does not tell."""
    if not op.domain:
        required = [n for n, a in onnx.defs.get_schema(op.name, OPSET, "").attributes.items() if a.required]
    else:
        required = [] if op.model({}, {}) is not None else list(op.attributes)
    kinds = {n: op.attributes[n] for n in required if op.attributes[n] in NEEDED}
    return {n: NEEDED_BY.get((op.name, n), NEEDED[kind]) for n, kind in kinds.items()}


def like(op: Operator) -> dict[str, str]:
    return {"T2": f"tensor({FLOAT8.onnx_name})"} if op.name == "CastLike" else {}


def attributes() -> Iterator[Case]:
    """Change and omit each attribute that affects an operator's computation."""
    for op in operators():
        needed = base_of(op)
        for name, kind in op.attributes.items():
            if name in PLACING or kind not in VALUES or DTYPE_ATTRIBUTES.get((op.domain, op.name)) == name:
                continue
            default = helper.get_attribute_value(op.defaults[name]) if name in op.defaults else None
            default = default.decode() if isinstance(default, bytes) else default
            one, other = [v for v in VALUES[kind] if v != default][:2]
            a, b = (op.model(like(op), {**needed, name: v}) for v in (one, other))
            without = op.model(like(op), {n: v for n, v in needed.items() if n != name})
            if a is not None and b is not None:
                yield Case(f"{op.kind}.{name}: {one} to {other}", a, b, op.expected)
            if b is not None and without is not None and name not in needed:
                yield Case(f"{op.kind}.{name}: {other} left out", b, without, op.expected)


def types_of_operands(*, constants: bool) -> Iterator[Case]:
    """Change each type variable of each operator between neighboring legal types."""
    for op in operators():
        needed = base_of(op)
        for variable in op.types:
            choices = op.choices(variable)
            if not any(formal[1] == variable for formal in op.inputs):
                continue
            for one, other in itertools.islice(itertools.pairwise(choices), 4):
                a, b = (op.model({variable: t}, needed, constants=constants) for t in (one, other))
                if a is not None and b is not None:
                    yield Case(f"{op.kind} {variable}: {one} to {other}", a, b, op.expected)


# -- types in texts ------------------------------------------------------------------------------------------

NUMBERS = [d for d in DType if d not in (DType.STRING, DType.COMPLEX64, DType.COMPLEX128, DType.FLOAT8E8M0)]
FLOATS = (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16)
CODES = (DType.INT8, DType.UINT8, DType.INT4, DType.UINT4, DType.INT16, DType.UINT16)
FLOAT_CODES = (DType.FLOAT8E4M3FN, DType.FLOAT8E5M2, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2FNUZ, DType.FLOAT4E2M1)


def typed(text: str, dtype: DType, opset: int = 23) -> ModelProto:
    """Parse a model in which `double` and 99 stand for a type; values that no node produces become weights."""
    proto = parsed(text, opset)
    for graph in all_graphs(proto.graph):
        for formal in (*graph.input, *graph.output, *graph.value_info):
            _retype(formal.type, dtype)
    for node in (*all_nodes(proto.graph.node), *(node for f in proto.functions for node in f.node)):
        for a in node.attribute:
            if a.i == 99:
                a.i = dtype.code
            if a.t.data_type == TensorProto.DOUBLE:
                a.t.CopyFrom(weight("", dtype, a.t.dims))
    results = {name for node in proto.graph.node for name in node.output}
    for info in [info for info in proto.graph.value_info if info.name not in results]:
        tensor = info.type.tensor_type
        array = weight(info.name, DType.of(tensor.elem_type), [d.dim_value for d in tensor.shape.dim])
        array.raw_data = bytes([len(proto.graph.initializer) + 1]) * len(array.raw_data)  # different numbers each
        proto.graph.initializer.append(array)
        proto.graph.value_info.remove(info)
    return proto


def _retype(kind: TypeProto, dtype: DType) -> None:
    if kind.tensor_type.elem_type == TensorProto.DOUBLE:
        kind.tensor_type.elem_type = dtype.code
    for container in ("sequence_type", "optional_type"):
        if kind.HasField(container):
            _retype(getattr(kind, container).elem_type, dtype)
    if kind.HasField("map_type"):
        _retype(kind.map_type.value_type, dtype)


def weight(name: str, dtype: DType | None, shape: Iterable[int]) -> TensorProto:
    assert dtype is not None
    size = int(np.prod(list(shape)))
    return TensorProto(name=name, data_type=dtype.code, dims=shape, raw_data=bytes(dtype.nbytes(size)))


X_TO_Y = "g (float[4, 4] x) => (float[4, 4] y)"
QUANTIZERS = {
    "a weight": "<float s, double zero, double[4, 4] w> { f = DequantizeLinear (w, s, zero) y = MatMul (x, f) }",
    "a weight without zero": "<float s, double[4, 4] w> { f = DequantizeLinear (w, s) y = MatMul (x, f) }",
    "values": "<float s, double zero> { q = QuantizeLinear (x, s, zero) y = DequantizeLinear (q, s, zero) }",
    "values without zero": "<float s> { q = QuantizeLinear <output_dtype = 99> (x, s) y = DequantizeLinear (q, s) }",
}
FUNCTION = """{ [call] y = local.f (x) } <domain: "local", opset_import: ["": 23]> f (a) => (b) {"""
DEEP_FUNCTION = """{ [call] y = local.f (x) }
<domain: "local", opset_import: ["": 23, "local": 1]> f (a) => (b) { b = local.inner (a) }
<domain: "local", opset_import: ["": 23]> inner (a) => (b) {"""
HANDED_IN = """{ [call] y = local.f <t = 99> (x) } <domain: "local", opset_import: ["": 23]> f <t> (a) => (b) {"""
STATES = """g (int64 n, bool c, double[4] s0, float[4] t0) => (double[4] s, float[4] t) {
    [loop] s, t = Loop (n, c, s0, t0) <body = b (int64 i, bool ci, double[4] si, float[4] ti)
        => (bool co, double[4] so, float[4] to) { co = Identity (ci) so = Identity (si) to = Add (ti, ti) }>
}"""
INNER_STATES = """g (int64 n, bool c, float[4] x) => (float[4] y) {
    s0 = Cast <to = 99> (x)
    [loop] s = Loop (n, c, s0) <body = b (int64 i, bool ci, double[4] si) => (bool co, double[4] so) {
        co = Identity (ci) so = Identity (si) }>
    y = Cast <to = 1> (s)
}"""
ROUNDED_STATES = """g (int64 n, bool c, float[4] x) => (float[4] y) {
    [loop] y = Loop (n, c, x) <body = b (int64 i, bool ci, float[4] si) => (bool co, float[4] so) {
        co = Identity (ci) z = Cast <to = 99> (si) so = Cast <to = 1> (z) }>
}"""
SCANS = """g (double[4] s0, float[3, 4] x) => (double[4] s, float[3, 4] y) {
    [scan] s, y = Scan <num_scan_inputs = 1, body = b (double[4] si, float[4] xi) => (double[4] so, float[4] yi) {
        so = Identity (si) yi = Identity (xi) }> (s0, x)
}"""
BRANCHES = """g (bool c, float[4] x) => (float[4] y) {
    [choose] r = If (c) <then_branch = t () => (double[4] a) { a = Cast <to = 99> (x) },
        else_branch = e () => (double[4] b) { z = Cast <to = 99> (x) b = Neg (z) }>
    y = Cast <to = 1> (r)
}"""
FOREIGN = "foreign::Op"

# By class: a description, the text, its types, and the op that the gate must name.
TYPED: Mapping[str, Sequence[tuple[str, str, Sequence[DType], str]]] = {
    "casts": [
        (
            f"a Cast of {source}",
            f"g ({source}[4, 4] x) => (int64[2] y) {{ [cast] c = Cast <to = 99> (x) y = Shape (c) }}",
            [dtype for dtype in NUMBERS if dtype.onnx_name != source],
            "",
        )
        for source in ("float", "float16", "int32", "uint8")
    ],
    "constants": [
        (what, f"g (int64[2] i) => (double[2, 2] y) {text}", NUMBERS, "Gather")
        for what, text in {
            "an initializer": "<double[2, 2] w> { y = Gather (w, i) }",
            "a Constant": "{ w = Constant <value = double[2, 2] {0, 0, 0, 0}> () y = Gather (w, i) }",
        }.items()
    ],
    "quantizers": [
        (what, f"{X_TO_Y} {text}", codes, "") for what, text in QUANTIZERS.items() for codes in (CODES, FLOAT_CODES)
    ],
    "functions": [
        (what, f"{X_TO_Y} {head} {text} }}", types, "")
        for head in (FUNCTION, DEEP_FUNCTION)
        for what, text, types in (
            ("a Cast and back", "z = Cast <to = 99> (a) b = Cast <to = 1> (z)", (*FLOATS, DType.DOUBLE, *CODES)),
            ("a normalization", "b = LayerNormalization <stash_type = 99> (a, a)", FLOATS),
            (
                "a quantizer",
                "o = Constant <value_float = 0.5> () q = QuantizeLinear <output_dtype = 99> (a, o)"
                " b = DequantizeLinear (q, o)",
                (*CODES[:4], *FLOAT_CODES),
            ),
        )
    ]
    + [
        (f"{what} handed in", f"{X_TO_Y} {HANDED_IN} {text} }}", FLOATS, "")
        for what, text in {
            "to": "z = Cast <to: int = @t> (a) b = Cast <to = 1> (z)",
            "stash_type": "b = LayerNormalization <stash_type: int = @t> (a, a)",
        }.items()
    ],
    "inputs and outputs": [
        *(
            (what, f"g ({kind} x) => ({kind} y) {{ y = Identity (x) }}", NUMBERS, "")
            for what, kind in {
                "a tensor": "double[4]",
                "a sequence": "seq(double[4])",
                "an optional": "optional(double[4])",
                "a map": "map(int64, double[4])",
            }.items()
        ),
        ("an unread input", "g (float[4] x, double[4] unread) => (int64[1] y) { y = Shape (x) }", NUMBERS, ""),
        ("an input for its shape", "g (double[4] x) => (int64[1] y) { y = Shape (x) }", NUMBERS, ""),
    ],
    "foreign operands": [
        ("a second output", f"{X_TO_Y} <double[4, 4] z> {{ [op] y, z = foreign.Op (x) }}", NUMBERS, FOREIGN),
        ("a second input", f"{X_TO_Y} <double[4, 4] w> {{ [op] y = foreign.Op (x, w) }}", NUMBERS, FOREIGN),
    ],
    "bodies": [
        ("a Loop state", STATES, (*FLOATS, DType.DOUBLE), ""),
        ("an inner Loop state", INNER_STATES, (*FLOATS, DType.DOUBLE), ""),
        ("a rounded Loop state", ROUNDED_STATES, (DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16), ""),
        ("a Scan state", SCANS, (*FLOATS, DType.DOUBLE), ""),
        ("the results of branches", BRANCHES, (*FLOATS, DType.DOUBLE), ""),
    ],
}


def of_texts(name: str) -> Iterator[Case]:
    for what, text, types, op in TYPED[name]:
        for one, other in itertools.pairwise([*types, types[0]]):
            yield Case(f"{what}: {one.spelling} to {other.spelling}", typed(text, one), typed(text, other), op)


# -- operators without a schema -----------------------------------------------------------------------------------

PAIRS: Mapping[str, tuple[object, object]] = {
    "bits": (8, 4),
    "axis": (0, 1),
    "scale": (0.5, 0.25),
    "accumulate": ("fp32", "fp16"),
    "per_layer_bits": ([8, 8, 8], [8, 4, 8]),
    "many": (list(range(40)), [*range(39), 50]),
    "scales": ([0.5, 0.5], [0.5, 0.25]),
    "types": (["fp16", "fp16"], ["fp16", "fp8"]),
    "table": (helper.make_tensor("t", 1, [2], [0.0, 0.0]), helper.make_tensor("t", 10, [2], [0.0, 0.0])),
    "cache": (helper.make_tensor_type_proto(1, [2]), helper.make_tensor_type_proto(10, [2])),
}


def foreign() -> Iterator[Case]:
    """Change and omit attributes of operators without a schema."""

    def op(**attributes: object) -> ModelProto:
        proto = parsed(f"{X_TO_Y} {{ [op] y = foreign.Op (x) }}")
        proto.graph.node[0].attribute.extend(helper.make_attribute(name, v) for name, v in attributes.items())
        return proto

    for name, (one, other) in PAIRS.items():
        yield Case(f"foreign attribute {name}", op(**{name: one}), op(**{name: other}), FOREIGN)
        yield Case(f"foreign attribute {name} left out", op(**{name: one}), op(), FOREIGN)


# -- branches ------------------------------------------------------------------------------------------------

ALIKE = """{0}w = Cast <to = {1}> (w{0}) {0}x = Cast <to = {1}> (x) {0}m = MatMul ({0}x, {0}w)
{0}r = Relu ({0}m) {0} = Cast <to = 1> ({0}r)"""


def branches() -> Iterator[Case]:
    """Exchange the precision of two similar branches, and their order in the file."""
    for outputs, join in (("float[4, 4] p, float[4, 4] q", ""), ("float[?, ?] y", "y = Concat <axis = 0> (p, q)")):
        for one, other in itertools.combinations((*FLOATS, DType.DOUBLE), 2):
            text = f"g (float[4, 4] x) => ({outputs}) <float[4, 4] wp, float[4, 4] wq> {{{{ {{}} {{}} {join} }}}}"
            before = text.format(ALIKE.format("p", one.code), ALIKE.format("q", other.code))
            after = text.format(ALIKE.format("q", one.code), ALIKE.format("p", other.code))
            models = (typed(each, DType.DOUBLE) for each in (before, after))
            yield Case(f"branches of {one.spelling} and {other.spelling}, {join or 'separate'}", *models)


CLASSES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "attributes": attributes,
    "types of operands": lambda: types_of_operands(constants=False),
    "types of constant operands": lambda: types_of_operands(constants=True),
    "foreign operators": foreign,
    "exchanged branches": branches,
    **{name: partial(of_texts, name) for name in TYPED},
}
