"""Changes of precision that the CI gate must see, generated: pairs of models of one class, each pair a case.

Attributes and types are not listed by hand: they are read out of the schemas of onnx and onnxruntime, so that an
operator or attribute that a later release brings is a case by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, contrib_schemas, parse_type
from amp_rewrite.ir.view import View
from amp_rewrite.reports.values import PLACING

OPSET, IR = 23, 11
OPSETS = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("foreign", 1)]


@dataclass(frozen=True, slots=True)
class Case:
    """Two models that differ in precision. `op`: the op that must be told, if one must."""

    name: str
    before: ModelProto
    after: ModelProto
    op: str = ""


def value(name: str, dtype: DType | str, shape: Sequence[int] | None = (4, 4)) -> ValueInfoProto:
    """A tensor of a type, or what a schema spells: "seq(tensor(float))"."""
    if isinstance(dtype, DType):
        return helper.make_tensor_value_info(name, dtype.code, shape)
    known = parse_type(dtype)
    assert known.dtype is not None, dtype
    tensor = helper.make_tensor_type_proto(known.dtype.code, shape)
    made = {
        "tensor": lambda: tensor,
        "seq": lambda: helper.make_sequence_type_proto(tensor),
        "optional": lambda: helper.make_optional_type_proto(tensor),
        "optional(seq)": lambda: helper.make_optional_type_proto(helper.make_sequence_type_proto(tensor)),
        "sparse_tensor": lambda: helper.make_sparse_tensor_type_proto(known.dtype.code if known.dtype else 1, shape),
    }[known.container]()
    return helper.make_value_info(name, made)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    infos: Sequence[ValueInfoProto] = (),
) -> ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers, value_info=infos)
    opsets = [*OPSETS, *([helper.make_opsetid("local", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR, functions=functions)


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


def untyped(name: str) -> ValueInfoProto:
    return ValueInfoProto(name=name)


# -- operators by their schemas ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as its schema has it. Formals: name, type variable or type, option."""

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
    def told(self) -> str:
        """The op that a difference names: casts and copies are told by what reads them, or as casts."""
        return "" if self.name in ("Cast", "CastLike", "Identity") else self.kind

    def choices(self, variable: str) -> list[str]:
        """The types of a variable that a tensor may have, floats first."""
        legal = sorted(self.types.get(variable, (variable,)))
        typed = [t for t in legal if (known := parse_type(t)).dtype is not None and known.container != "sparse_tensor"]
        return sorted(typed, key=lambda t: (not t.endswith("(float)"), "float" not in t, "int" not in t))

    def model(
        self, chosen: Mapping[str, str], stated: Mapping[str, object], *, constants: bool = False
    ) -> ModelProto | None:
        """The operator alone, its variables of these types, its inputs those of the model or constants.

        None if that is not a model: a schema does not say all that an operator asks for.
        """
        try:
            made = self._alone(chosen, stated, constants=constants)
        except (AssertionError, IndexError):
            return None
        return made if sound(made) else None

    def _alone(self, chosen: Mapping[str, str], stated: Mapping[str, object], *, constants: bool) -> ModelProto:
        wanted = [formal[2] != "Optional" or formal[1] in chosen for formal in self.inputs]
        read = [f"x{i}" if there else "" for i, there in enumerate(wanted)]
        while read and not read[-1]:
            read.pop()
        made = [f"y{i}" for i, _ in enumerate(self.outputs)]
        types = [chosen.get(formal[1]) or self.choices(formal[1])[0] for formal in self.inputs[: len(read)]]
        node = helper.make_node(self.name, read, made, domain=self.domain, name="the_op", **stated)
        held, fed = [], []
        for name, spelled in zip(read, types, strict=True):
            if not name:
                continue
            dtype = parse_type(spelled).dtype
            if constants and spelled.startswith("tensor(") and dtype is not None and dtype is not DType.STRING:
                held.append(TensorProto(name=name, data_type=dtype.code, dims=[4, 4], raw_data=bytes(dtype.nbytes(16))))
            else:
                fed.append(value(name, spelled))
        return model([node], fed, [untyped(name) for name in made], held)


def operators() -> Iterator[Operator]:
    """All operators that onnx and onnxruntime define, at the newest opset, without those with bodies."""
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
"""A Cast saturates towards 8 bits alone."""


def base_of(op: Operator) -> dict[str, object]:
    """The attributes that an operator cannot do without; all, if onnxruntime's table does not say which these are."""
    if not op.domain:
        required = [n for n, a in onnx.defs.get_schema(op.name, OPSET, "").attributes.items() if a.required]
    else:
        required = [] if op.model({}, {}) is not None else list(op.attributes)
    kinds = {n: op.attributes[n] for n in required if op.attributes[n] in NEEDED}
    return {n: NEEDED_BY.get((op.name, n), NEEDED[kind]) for n, kind in kinds.items()}


def like(op: Operator) -> dict[str, str]:
    return {"T2": f"tensor({FLOAT8.onnx_name})"} if op.name == "CastLike" else {}


def attributes() -> Iterator[Case]:
    """Each attribute that says how an operator computes: with another value, and left out."""
    for op in operators():
        needed = base_of(op)
        for name, kind in op.attributes.items():
            if name in PLACING or kind not in VALUES or DTYPE_ATTRIBUTES.get((op.domain, op.name)) == name:
                continue
            default = helper.get_attribute_value(op.defaults[name]) if name in op.defaults else None
            default = default.decode() if isinstance(default, bytes) else default
            one, other = [v for v in VALUES[kind] if v != default][:2]
            made = [op.model(like(op), {**needed, name: v}) for v in (one, other)]
            without = op.model(like(op), {n: v for n, v in needed.items() if n != name})
            if made[0] is not None and made[1] is not None:
                yield Case(f"{op.kind}.{name}: {one} to {other}", made[0], made[1], op.told)
            if made[1] is not None and without is not None and name not in needed:
                yield Case(f"{op.kind}.{name}: {other} left out", made[1], without, op.told)


def types_of_operands(*, constants: bool) -> Iterator[Case]:
    """Each type variable of each operator, in each pair of neighbouring legal types."""
    for op in operators():
        needed = base_of(op)
        for variable in op.types:
            choices = op.choices(variable)
            if not any(formal[1] == variable for formal in op.inputs):
                continue
            for one, other in itertools.islice(itertools.pairwise(choices), 4):
                made = [op.model({variable: t}, needed, constants=constants) for t in (one, other)]
                if made[0] is not None and made[1] is not None:
                    yield Case(f"{op.kind} {variable}: {one} to {other}", made[0], made[1], op.told)


# -- casts, constants, quantizers -------------------------------------------------------------------------------

SPELLED = {dtype: dtype.onnx_name for dtype in DType}
NUMBERS = [d for d in DType if d not in (DType.STRING, DType.COMPLEX64, DType.COMPLEX128, DType.FLOAT8E8M0)]


def casts() -> Iterator[Case]:
    """A Cast between any two types that becomes one to a third."""
    for source in (DType.FLOAT, DType.FLOAT16, DType.INT32, DType.UINT8):
        others = [dtype for dtype in NUMBERS if dtype is not source]
        for one, other in itertools.pairwise(others):
            made = [
                model(
                    [helper.make_node("Cast", ["x"], ["c"], to=to.code, name="cast"), reader("c", "y")],
                    [value("x", source)],
                    [value("y", DType.INT64, (2,))],
                )
                for to in (one, other)
            ]
            yield Case(f"Cast of {source.spelling}: {one.spelling} to {other.spelling}", made[0], made[1])


def reader(name: str, result: str) -> NodeProto:
    return helper.make_node("Shape", [name], [result], name=f"reads_{name}")


def constants() -> Iterator[Case]:
    """A constant of another type, as an initializer and as a Constant, behind a reader that takes any."""
    for node in (False, True):
        for one, other in itertools.pairwise(NUMBERS):
            made = []
            for dtype in (one, other):
                tensor = TensorProto(name="w", data_type=dtype.code, dims=[4, 4], raw_data=bytes(dtype.nbytes(16)))
                held = [helper.make_node("Constant", [], ["w"], value=tensor)] if node else []
                nodes = [*held, helper.make_node("Gather", ["w", "i"], ["y"], name="look_up")]
                stored = [] if node else [tensor]
                made.append(model(nodes, [value("i", DType.INT64, (2,))], [value("y", dtype)], stored))
            where = "Constant" if node else "initializer"
            yield Case(f"{where} {one.spelling} to {other.spelling}", made[0], made[1], "Gather")


QUANTIZED = (
    *itertools.permutations(("int8", "uint8", "int4", "uint4", "int16", "uint16", "int2"), 2),
    *itertools.permutations(("float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz", "float4e2m1"), 2),
)


def dtype_of(name: str) -> DType:
    return next(dtype for dtype in DType if dtype.spelling == name)


def weight(name: str, dtype: DType, shape: Sequence[int]) -> TensorProto:
    return TensorProto(name=name, data_type=dtype.code, dims=shape, raw_data=bytes(dtype.nbytes(int(np.prod(shape)))))


def quantizer(
    low: str, scale: Sequence[int] = (), zero: bool = True, kind: str = "DequantizeLinear", **stated: int
) -> ModelProto:
    """A weight-only product, or an activation that is quantized and dequantized."""
    dtype = dtype_of(low)
    held = [
        numpy_helper.from_array(np.ones(scale, np.float32), "scale"),
        *([weight("zero", dtype, scale)] if zero else []),
    ]
    points = ["scale", "zero"] if zero else ["scale"]
    if kind == "DequantizeLinear":
        held.append(weight("w", dtype, (8, 8)))
        nodes = [
            helper.make_node("DequantizeLinear", ["w", *points], ["f"], name="dequantize", **stated),
            helper.make_node("MatMul", ["x", "f"], ["y"], name="product"),
        ]
    else:
        stated = stated if zero else {**stated, "output_dtype": dtype.code}
        nodes = [
            helper.make_node("QuantizeLinear", ["x", *points], ["q"], name="quantize", **stated),
            helper.make_node("DequantizeLinear", ["q", *points], ["y"], name="dequantize"),
        ]
    return model(nodes, [value("x", DType.FLOAT, (8, 8))], [value("y", DType.FLOAT, (8, 8))], held)


def quantizers() -> Iterator[Case]:
    """Types of quantizers, with a zero point and without one."""
    for one, other in QUANTIZED:
        for kind in ("DequantizeLinear", "QuantizeLinear"):
            yield Case(f"{kind} {one} to {other}", quantizer(one, kind=kind), quantizer(other, kind=kind))
            bare = (quantizer(low, zero=False, kind=kind) for low in (one, other))
            yield Case(f"{kind} {one} to {other} without zero point", *bare)


# -- functions ------------------------------------------------------------------------------------------------


BODIES = {
    "a Cast and back": ("z = Cast <to = {}> (a) b = Cast <to = 1> (z)", ("1", "10", "16", "11")),
    "a Cast to integers and back": ("z = Cast <to = {}> (a) b = Cast <to = 1> (z)", ("7", "3", "6", "22")),
    "the type of a sum": (
        "s = CastLike (a, t) b0 = Add (s, s) b = Cast <to = 1> (b0)",
        (),
    ),
    "a normalization": ("b = LayerNormalization <stash_type = {}> (a, a)", ("1", "10", "16")),
    "a quantizer": (
        "q = QuantizeLinear <output_dtype = {}> (a, o) b = DequantizeLinear (q, o)",
        ("2", "3", "4", "5", "17", "19", "22"),
    ),
}


def functions() -> Iterator[Case]:
    """Types inside local functions, also two calls deep, and types that a call hands in."""
    for what, (body, choices) in BODIES.items():
        for deep in (False, True):
            for one, other in itertools.permutations(choices, 2):
                made = [calling(body.format(choice), deep=deep) for choice in (one, other)]
                yield Case(f"{what}, {one} to {other}{', two calls deep' if deep else ''}", made[0], made[1])
    for attribute, body in HANDED_IN.items():
        for one, other in itertools.permutations((1, 10, 16, 11), 2):
            made = [
                parsed(
                    f"""g (float[4, 4] x) => (float[4, 4] y) {{ [call] y = local.f <t = {code}> (x) }}
                    <domain: "local", opset_import: ["": 21]> f <t> (a) => (b) {{ {body} }}"""
                )
                for code in (one, other)
            ]
            yield Case(f"{attribute} handed in, {one} to {other}", made[0], made[1])


HANDED_IN = {
    "to": "z = Cast <to: int = @t> (a) b = Cast <to = 1> (z)",
    "stash_type": "b = LayerNormalization <stash_type: int = @t> (a, a)",
}


def calling(body: str, *, deep: bool) -> ModelProto:
    head = "g (float[4, 4] x) => (float[4, 4] y) { [call] y = local.f (x) }"
    constant = "o = Constant <value_float = 0.5> ()"
    inner = f'<domain: "local", opset_import: ["": 21]> {"inner" if deep else "f"} (a) => (b) {{ {constant} {body} }}'
    outer = '<domain: "local", opset_import: ["": 21, "local": 1]> f (a) => (b) { b = local.inner (a) }'
    return parsed(f"{head} {inner} {outer if deep else ''}", opset=21)


# -- operators that nobody knows ----------------------------------------------------------------------------------


def foreign() -> Iterator[Case]:
    """Attributes, inputs and outputs of operators without a schema."""
    x, y = [value("x", DType.FLOAT)], [value("y", DType.FLOAT)]

    def op(**stated: object) -> ModelProto:
        return model([helper.make_node("Op", ["x"], ["y"], domain="foreign", name="op", **stated)], x, y)

    pairs: dict[str, tuple[object, object]] = {
        "bits": (8, 4),
        "axis": (0, 1),
        "group_size": (128, 64),
        "scale": (0.5, 0.25),
        "accumulate": ("fp32", "fp16"),
        "per_layer_bits": ([8, 8, 8], [8, 4, 8]),
        "many": (list(range(40)), [*range(39), 50]),
        "scales": ([0.5, 0.5], [0.5, 0.25]),
        "types": (["fp16", "fp16"], ["fp16", "fp8"]),
        "table": (helper.make_tensor("t", 1, [2], [0.0, 0.0]), helper.make_tensor("t", 10, [2], [0.0, 0.0])),
        "cache": (helper.make_tensor_type_proto(1, [2]), helper.make_tensor_type_proto(10, [2])),
    }
    for name, (one, other) in pairs.items():
        yield Case(f"foreign attribute {name}", op(**{name: one}), op(**{name: other}), "foreign::Op")
        yield Case(f"foreign attribute {name} left out", op(**{name: one}), op(), "foreign::Op")
    for one, other in itertools.pairwise(NUMBERS):
        made = [
            model(
                [helper.make_node("Op", ["x"], ["y", "z"], domain="foreign", name="op")],
                x,
                y,
                infos=[value("z", dtype)],
            )
            for dtype in (one, other)
        ]
        yield Case(f"foreign second output {one.spelling} to {other.spelling}", made[0], made[1], "foreign::Op")
        made = [
            model(
                [helper.make_node("Op", ["x", "w"], ["y"], domain="foreign", name="op")],
                x,
                y,
                [weight("w", dtype, (4, 4))],
            )
            for dtype in (one, other)
        ]
        yield Case(f"foreign second input {one.spelling} to {other.spelling}", made[0], made[1], "foreign::Op")


# -- containers, inputs and outputs --------------------------------------------------------------------------------

CONTAINERS: Mapping[str, Callable[[TypeProto], TypeProto]] = {
    "a tensor": lambda t: t,
    "a sequence": helper.make_sequence_type_proto,
    "an optional": helper.make_optional_type_proto,
    "a map": lambda t: helper.make_map_type_proto(TensorProto.INT64, t),
}


def inputs_and_outputs() -> Iterator[Case]:
    """Inputs and outputs without a float op between them, in all containers."""
    for container, make in CONTAINERS.items():
        for one, other in itertools.pairwise(NUMBERS):
            made = []
            for dtype in (one, other):
                kind = make(helper.make_tensor_type_proto(dtype.code, [4]))
                fed, given = helper.make_value_info("x", kind), helper.make_value_info("y", kind)
                made.append(model([helper.make_node("Identity", ["x"], ["y"])], [fed], [given]))
            yield Case(f"{container} of {one.spelling} to {other.spelling}", made[0], made[1])
    for one, other in itertools.pairwise(NUMBERS):
        made = [
            model([reader("z", "y")], [value("z", DType.FLOAT), value("unread", d)], [value("y", DType.INT64, (2,))])
            for d in (one, other)
        ]
        yield Case(f"unread input {one.spelling} to {other.spelling}", made[0], made[1])
        made = [model([reader("x", "y")], [value("x", d)], [value("y", DType.INT64, (2,))]) for d in (one, other)]
        yield Case(f"input of which only the shape is read {one.spelling} to {other.spelling}", made[0], made[1])
        made = []
        for dtype in (one, other):
            sparse = onnx.SparseTensorProto(dims=[8])
            sparse.values.CopyFrom(weight("w", dtype, (2,)))
            sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 3]), "w_indices"))
            held = model(
                [helper.make_node("Gather", ["w", "i"], ["y"])], [value("i", DType.INT64, (2,))], [value("y", dtype)]
            )
            held.graph.sparse_initializer.append(sparse)
            made.append(held)
        yield Case(f"sparse weight {one.spelling} to {other.spelling}", made[0], made[1], "Gather")
    key = helper.make_tensor_type_proto(1, [4])
    for one, other in (("INT64", "STRING"), ("INT32", "INT64"), ("UINT8", "INT8")):
        made = []
        for name in (one, other):
            kind = helper.make_map_type_proto(TensorProto.DataType.Value(name), key)
            ports = helper.make_value_info("x", kind), helper.make_value_info("y", kind)
            made.append(model([helper.make_node("Identity", ["x"], ["y"])], ports[:1], ports[1:]))
        yield Case(f"keys of a map {one} to {other}", made[0], made[1])


# -- the graph -------------------------------------------------------------------------------------------------

STATES = """g (int64 n, bool c, {0}[4] s0, float[4] t0) => ({0}[4] s, float[4] t) {{
    [loop] s, t = Loop (n, c, s0, t0) <body = b (int64 i, bool ci, {0}[4] si, float[4] ti)
        => (bool co, {0}[4] so, float[4] to) {{ co = Identity (ci) so = Identity (si) to = Add (ti, ti) }}>
}}"""
INNER_STATES = """g (int64 n, bool c, float[4] x) => (float[4] y) {{
    s0 = Cast <to = {1}> (x)
    [loop] s = Loop (n, c, s0) <body = b (int64 i, bool ci, {0}[4] si) => (bool co, {0}[4] so) {{
        co = Identity (ci) so = Identity (si) }}>
    y = Cast <to = 1> (s)
}}"""
ROUNDED_STATES = """g (int64 n, bool c, float[4] x) => (float[4] y) {{
    [loop] y = Loop (n, c, x) <body = b (int64 i, bool ci, float[4] si) => (bool co, float[4] so) {{
        co = Identity (ci) {0} }}>
}}"""
SCANS = """g ({0}[4] s0, float[3, 4] x) => ({0}[4] s, float[3, 4] y) {{
    [scan] s, y = Scan <num_scan_inputs = 1, body = b ({0}[4] si, float[4] xi) => ({0}[4] so, float[4] yi) {{
        so = Identity (si) yi = Identity (xi) }}> (s0, x)
}}"""
BRANCHES = """g (bool c, float[4] x) => (float[4] y) {{
    [choose] r = If (c) <then_branch = t () => ({0}[4] a) {{ a = Cast <to = {1}> (x) }},
        else_branch = e () => ({0}[4] b) {{ z = Cast <to = {1}> (x) b = Neg (z) }}>
    y = Cast <to = 1> (r)
}}"""
TYPES = {"float": 1, "float16": 10, "bfloat16": 16, "double": 11}


def bodies() -> Iterator[Case]:
    """States that a body passes through, and what it hands out."""
    for one, other in itertools.permutations(TYPES, 2):
        for what, text in (("a Loop state", STATES), ("a Scan state", SCANS)):
            yield Case(f"{what}, {one} to {other}", *(parsed(text.format(name)) for name in (one, other)))
        for what, text in (("an inner Loop state", INNER_STATES), ("what branches hand out", BRANCHES)):
            made = (parsed(text.format(name, TYPES[name])) for name in (one, other))
            yield Case(f"{what}, {one} to {other}", *made)
    ways = {name: f"z = Cast <to = {code}> (si) so = Cast <to = 1> (z)" for name, code in TYPES.items()}
    ways["float"] = "so = Identity (si)"
    for one, other in itertools.permutations(ways, 2):
        if {one, other} != {"float", "double"}:  # widening rounds nothing
            made = (parsed(ROUNDED_STATES.format(ways[name])) for name in (one, other))
            yield Case(f"a state is rounded on its way, {one} to {other}", *made)


def exchanged(names: str, join: str) -> Iterator[Case]:
    """Two alike branches that exchange precision, and their order in the file."""
    for one, other in itertools.combinations(TYPES, 2):
        made = []
        for swap in (False, True):
            branches = []
            for branch, dtype in (("p", other if swap else one), ("q", one if swap else other)):
                label = f"[{branch}]" if names == "named" else ""
                code = TYPES[dtype]
                branches.append(
                    f"""{branch}w = Cast <to = {code}> (w{branch}) {branch}x = Cast <to = {code}> (x)
                    {label} {branch}m = MatMul ({branch}x, {branch}w) {branch}r = Relu ({branch}m)
                    {branch} = Cast <to = 1> ({branch}r)"""
                )
            order = reversed(branches) if swap else branches
            outputs = "float[4, 4] p, float[4, 4] q" if join == "outputs" else "float[?, ?] y"
            last = {
                "outputs": "",
                "a sum": "y = Add (p, q)",
                "a sum in the other order": "y = Add (q, p)" if swap else "y = Add (p, q)",
                "a Concat": "y = Concat <axis = 0> (p, q)",
            }[join]
            proto = parsed(
                f"g (float[4, 4] x) => ({outputs}) <float[4, 4] wp, float[4, 4] wq> {{ {' '.join(order)} {last} }}"
            )
            made.append(weighted(proto))
        yield Case(f"{names} branches of {one} and {other} into {join}", made[0], made[1])


def weighted(proto: ModelProto) -> ModelProto:
    """The model with its value_info of weights made initializers."""
    for info in list(proto.graph.value_info):
        if info.name.startswith("w"):
            numbers = np.full((4, 4), 0.1 * len(proto.graph.initializer) + 0.1, np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(numbers, info.name))
            proto.graph.value_info.remove(info)
    return proto


def branches() -> Iterator[Case]:
    for names, join in itertools.product(
        ("named", "unnamed"), ("outputs", "a sum", "a sum in the other order", "a Concat")
    ):
        yield from exchanged(names, join)


CLASSES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "attributes": attributes,
    "types of operands": lambda: types_of_operands(constants=False),
    "types of constant operands": lambda: types_of_operands(constants=True),
    "casts": casts,
    "constants": constants,
    "quantizers": quantizers,
    "functions": functions,
    "foreign operators": foreign,
    "inputs and outputs": inputs_and_outputs,
    "bodies": bodies,
    "exchanged branches": branches,
}
