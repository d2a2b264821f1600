"""The float32 twin of a mixed model: rounded values, unrounded values, and agreement with half-precision kernels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

import amp_rewrite
from amp_rewrite import Model, View
from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.emulate import emulate
from suites.models.test_fixtures import LOW
from support.objections import graphs, of_checker, of_names, run, session

both_types = pytest.mark.parametrize("low", LOW, ids=lambda t: t.spelling)


def parsed(graph: str, functions: str = "", opset: int = 22, domains: str = "") -> ModelProto:
    header = f'<ir_version: 10, opset_import: ["": {opset}{domains}]>'
    return onnx.parser.parse_model(f"{header} {graph} {functions}")


def twin(model: object, **options: Any) -> ModelProto:
    """Emulate a model; the twin must be valid and have unique names."""
    proto = emulate(model, **options).to_proto()
    assert of_checker(proto) + of_names(proto) == []
    return proto


def kinds(model: ModelProto) -> list[str]:
    """Return the op types in order, bodies after their op, Casts with their target type."""
    return [
        node.op_type + "".join(f"→{DType(a.i).spelling}" for a in node.attribute if a.name == "to")
        for graph in graphs(model.graph)
        for node in graph.node
    ]


def low_values(model: ModelProto) -> list[str]:
    """Return the names of low values read or computed by an op other than a Cast."""
    view = View.of(Model.load(model))
    names = []
    for op in view.ops:
        if op.kind != "Cast":
            values = [v for v in (*op.inputs, *op.outputs) if v is not None]
            names += [view.value_name(v) for v in values if (t := view.dtype(v)) is not None and t.low]
    return names


def agrees(text: str, feeds: Mapping[str, object], low: DType, functions: str = "", **options: int) -> ModelProto:
    """Return the twin of a model text with LOW as its low type; its results equal the reference's at every level."""
    model = parsed(text.replace("LOW", low.onnx_name), functions.replace("LOW", low.onnx_name), **options)
    result = twin(model, io="float32")
    with np.errstate(all="ignore"):
        low_feeds = {k: v.astype(low.numpy) if getattr(v, "dtype", 0) == np.float32 else v for k, v in feeds.items()}
        expected = ReferenceEvaluator(model).run(None, low_feeds)
    wide = {k: v.astype(np.float32) if k in feeds and feeds[k].dtype == np.float32 else v for k, v in low_feeds.items()}  # type: ignore[attr-defined]
    for level in ("BASIC", "ALL"):
        for actual, right in zip(run(result, wide, level), expected, strict=True):
            for a, b in zip(actual, right, strict=True) if isinstance(right, list) else [(actual, right)]:
                if b.dtype == low.numpy:
                    b = b.astype(np.float32)
                np.testing.assert_array_equal(a, b)
    assert low_values(result) == []
    return result


X = np.random.default_rng(11).standard_normal((3, 4)).astype(np.float32)

# -- rounding ------------------------------------------------------------------------------------------


@both_types
def test_a_computing_op_gets_two_casts_and_a_data_movement_op_none(low: DType) -> None:
    result = agrees(
        "g (LOW[3, 4] x) => (LOW[4, 3] y) { t = Transpose (x) \n e = Mul (t, t) \n y = Relu (e) }", {"x": X}, low
    )
    cast = f"Cast→{low.spelling}"
    assert kinds(result) == [cast, "Cast→float32", "Transpose", "Mul", cast, "Cast→float32", "Relu"]


@both_types
def test_float32_inputs_are_rounded_first(low: DType) -> None:
    model = parsed(f"g ({low.onnx_name}[1] x) => ({low.onnx_name}[1] y) {{ y = Neg (x) }}")
    (y,) = run(twin(model, io="float32"), {"x": np.float32([1.0 + 2.0**-12])})
    np.testing.assert_array_equal(y, np.float32([-1.0]))


@both_types
@pytest.mark.parametrize("rounding", [True, False])
def test_weights_are_rounded(low: DType, rounding: bool, tmp_path: Path) -> None:
    """This includes float32 weights in a file with a pending cast."""
    model = parsed("g (float[1, 96] x) => (float[1, 96] y) { y = MatMul (x, w) }")
    weight = np.random.default_rng(3).standard_normal((96, 96)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    converted = amp_rewrite.convert(tmp_path / "m.onnx", to=low.spelling)
    converted.save(tmp_path / "low.onnx")
    for source in (converted.result, tmp_path / "low.onnx"):
        emulate(source, rounding=rounding).save(tmp_path / "twin.onnx", overwrite=True)
        (tensor,) = onnx.load(tmp_path / "twin.onnx").graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), weight.astype(low.numpy).astype(np.float32))


# -- edges ---------------------------------------------------------------------------------------------


EDGES = "g (float16[2] h, bfloat16[2] b) => (float16[2] y, bfloat16[2] z) { y = Add (h, h) \n z = Add (b, b) }"


@pytest.mark.parametrize(
    ("io", "expected"),
    [
        ("numpy", ["h float16", "b float32", "y float16", "z float32"]),
        ("same", ["h float16", "b bfloat16", "y float16", "z bfloat16"]),
        ("float32", ["h float32", "b float32", "y float32", "z float32"]),
    ],
)
def test_inputs_and_outputs_have_the_requested_types(io: str, expected: list[str]) -> None:
    result = twin(parsed(EDGES), io=io)
    values = (*result.graph.input, *result.graph.output)
    assert [f"{v.name} {DType(v.type.tensor_type.elem_type).spelling}" for v in values] == expected
    session(result)


def test_an_unknown_io_option_is_refused() -> None:
    message = "unknown io 'low' for emulate; use one of numpy, same, float32"
    with pytest.raises(amp_rewrite.PolicyError, match=message):
        emulate(parsed(EDGES), io="low")


def test_float16_edges_carry_the_inner_values() -> None:
    """Cases: a result with readers, an input and a weight as outputs, an input read in a body."""
    model = parsed("""g (float16[2] x, bool c) => (float16[2] y, float16[2] z, float16[2] x2, float16[2] w)
      <float16[2] w = {15872, 16640}> {
        y = Mul (x, x)
        z = If (c) <
          then_branch = t () => (float16[2] a) { a = Add (y, x) },
          else_branch = e () => (float16[2] b) { b = Mul (x, w) }
        >
        x2 = Identity (x)
    }""")
    result = twin(model)
    x = np.float16([300.0, 0.1])
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        with np.errstate(over="ignore"):
            expected = ReferenceEvaluator(model).run(None, feeds)
        for actual, right in zip(run(result, feeds), expected, strict=True):
            np.testing.assert_array_equal(actual, right)
            assert actual.dtype == np.float16  # type: ignore[attr-defined]


def test_the_default_of_an_input_stays_a_default() -> None:
    model = parsed(
        "g (float16[2] x, float16[2] w) => (float16[2] y) <float16[2] w = {16384, 16896}> { y = Mul (x, w) }"
    )
    for io, kind in (("numpy", np.float16), ("float32", np.float32)):
        result = twin(model, io=io)
        x = np.array([1, 2], kind)
        np.testing.assert_array_equal(run(result, {"x": x})[0], np.array([2, 6], kind))
        np.testing.assert_array_equal(run(result, {"x": x, "w": x})[0], np.array([1, 4], kind))


def test_the_models_casts_round_or_disappear() -> None:
    model = parsed("""g (float[2] x) => (float[2] y, int64[2] n, float[2] z) {
        a = Cast <to = 10> (x)  b = Cast <to = 16> (a)  y = Cast <to = 1> (b)  n = Cast <to = 7> (a)
        l = CastLike (x, a)  z = CastLike (l, x)
    }""")
    result = twin(model)
    assert kinds(result) == [
        *("Cast→float16", "Cast→float32", "Cast→bfloat16", "Cast→float32", "Identity", "Cast→int64"),
        *("Cast→float16", "Cast→float32", "Identity"),
    ]
    x = np.float32([0.1, 3.999])
    y, n, z = run(result, {"x": x})
    half = x.astype(np.float16)
    np.testing.assert_array_equal(y, half.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(n, half.astype(np.int64))
    np.testing.assert_array_equal(z, half.astype(np.float32))


# -- bodies, functions, containers ---------------------------------------------------------------------


NESTED: dict[str, tuple[str, dict[str, np.ndarray], str, int]] = {
    "branches": (
        """g (LOW[3, 4] x, bool c) => (LOW[3, 4] y) {
            k = Mul (x, x)
            y = If (c) <
              then_branch = t () => (LOW[3, 4] a) { a = Add (k, x) },
              else_branch = e () => (LOW[3, 4] b) { b = Sub (k, x) }
            >
        }""",
        {"c": np.array(True)},
        "",
        4,
    ),
    "each iteration of a loop": (
        """g (LOW[3, 4] x, int64 n, bool c) => (LOW[3, 4] y) {
            y = Loop (n, c, x) <body = b (int64 i, bool go, LOW[3, 4] s) => (bool go2, LOW[3, 4] s2) {
                go2 = Identity (go)
                p = Mul (s, x)
                s2 = Add (p, x)
            }>
        }""",
        {"n": np.array(5), "c": np.array(True)},
        "",
        3,
    ),
    "local functions": (
        "g (LOW[3, 4] x) => (LOW[3, 4] y) { y = here.f (x) }",
        {},
        '<opset_import: ["": 22], domain: "here"> f (x) => (y) { s = Mul (x, x) \n y = Add (s, x) }',
        3,
    ),
    "weights with a low scale": (
        "g (LOW[3, 4] x, int8[4] q, LOW s) => (LOW[3, 4] y) { w = DequantizeLinear (q, s) \n y = Mul (x, w) }",
        {"q": np.arange(-2, 2, dtype=np.int8), "s": np.array(0.0123, np.float32)},
        "",
        4,
    ),
}
"""By name: the model, its feeds, its functions, and the number of rounded values."""


@both_types
@pytest.mark.parametrize("name", NESTED)
def test_ops_with_bodies_are_emulated(name: str, low: DType) -> None:
    text, feeds, functions, rounded = NESTED[name]
    domains = ', "here": 1' if functions else ""
    result = agrees(text, {"x": X, **feeds}, low, functions, domains=domains)  # type: ignore[arg-type]
    assert kinds(result).count(f"Cast→{low.spelling}") == rounded


def test_sequences_hold_rounded_values() -> None:
    """No schema has bfloat16 sequences before opset 23."""
    agrees(
        """g (float16[3, 4] x, int64 i) => (float16[6, 4] y, float16[3, 4] z, int64 n) {
            a = Mul (x, x)  s = SequenceConstruct (x, a)  t = SequenceInsert (s, a, i)  u = SequenceErase (t, i)
            y = ConcatFromSequence <axis = 0> (u)  z = SequenceAt (t, i)  e = SequenceEmpty <dtype = 10> ()
            f = SequenceInsert (e, z)  n = SequenceLength (f)
        }""",
        {"x": X, "i": np.array(1)},
        DType.FLOAT16,
    )


def test_optionals_hold_float32() -> None:
    body = "o = Optional (x)  y = OptionalGetElement (o)  h = OptionalHasElement (o)"
    y, has = run(twin(parsed(f"g (float16[2] x) => (float16[2] y, bool h) {{ {body} }}")), {"x": np.float16([1, 2])})
    np.testing.assert_array_equal(y, np.float16([1, 2]))
    assert has


# -- attributes ----------------------------------------------------------------------------------------


def attribute_of(model: ModelProto, name: str) -> AttributeProto:
    (result,) = (a for graph in graphs(model.graph) for node in graph.node for a in node.attribute if a.name == name)
    return result


@both_types
def test_attributes_that_name_a_type_follow(low: DType) -> None:
    drawing = f"r = RandomNormalLike <dtype = {low.code}, seed = 3.0> (x)"
    random = parsed(f"g (float[2] x) => (float[2] y) {{ {drawing} \n y = Cast <to = 1> (r) }}", opset=21)
    assert attribute_of(twin(random), "dtype").i == TensorProto.FLOAT
    (drawn,) = run(twin(random), {"x": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(drawn, drawn.astype(low.numpy).astype(np.float32))  # type: ignore[attr-defined]
    tenth = np.array(0.1).astype(low.numpy).view(np.uint16)
    filling = f"r = ConstantOfShape <value = {low.onnx_name}[1] {{{tenth}}}> (s)"
    shape = parsed(f"g (int64[1] s) => (float[N] y) {{ {filling} \n y = Cast <to = 1> (r) }}")
    (filled,) = run(twin(shape), {"s": np.array([2])})
    np.testing.assert_array_equal(filled, np.full(2, 0.1).astype(low.numpy).astype(np.float32))


def test_statistics_in_the_low_type_become_float32() -> None:
    model = parsed("""g (float16[3, 4] x, float16[4] w) => (float16[3, 4] y, float16[3, 1] m) {
        y, m = LayerNormalization <stash_type = 10> (x, w)
    }""")
    result = twin(model, io="float32")
    assert attribute_of(result, "stash_type").i == TensorProto.FLOAT
    y, m = run(result, {"x": X, "w": np.ones(4, np.float32)})
    for array in (y, m):
        np.testing.assert_array_equal(array, array.astype(np.float16).astype(np.float32))  # type: ignore[attr-defined]


def sparse(low: DType) -> onnx.SparseTensorProto:
    values = helper.make_tensor("w", low.code, [2], np.array([0.1, 3.0]))
    indices = helper.make_tensor("w_at", TensorProto.INT64, [2], [0, 3])
    return helper.make_sparse_tensor(values, indices, [4])


@both_types
def test_sparse_weights_are_rounded(low: DType) -> None:
    model = parsed(f"g ({low.onnx_name}[4] x) => ({low.onnx_name}[4] y) {{ y = Add (x, w) }}")
    model.graph.sparse_initializer.append(sparse(low))
    constant = parsed(f"g ({low.onnx_name}[4] x) => ({low.onnx_name}[4] y) {{ w = Constant () \n y = Add (x, w) }}")
    constant.graph.node[0].attribute.append(helper.make_attribute("sparse_value", sparse(low)))
    tenth = np.array(0.1).astype(low.numpy).astype(np.float32)
    for result in (emulate(model, io="float32").proto, twin(constant, io="float32")):
        (y,) = run(result, {"x": np.zeros(4, np.float32)})
        np.testing.assert_array_equal(y, np.float32([tenth, 0, 0, 3]))


# -- ops that stay low ----------------------------------------------------------------------------------


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 26, reason="this onnx has no BitCast")
def test_bits_are_read_from_the_low_type() -> None:
    model = parsed("g (float16[2] x) => (uint16[2] y) { a = Add (x, x) \n y = BitCast <to = 4> (a) }", opset=26)
    x = np.float16([1.5, -2])
    np.testing.assert_array_equal(run(twin(model), {"x": x})[0], (x + x).view(np.uint16))


FAR = "g (float16[2] x) => (float16[2] y) <float16[2] b> { a = Add (x, x) \n b = far.F (a) \n y = Add (b, b) }"
GEMMA = """g (float[1, 2, 4] e, float16[1, 2, 2, 4] q) => (float16[1, 2, 2, 4] y) {
    a = Add (q, q)  y, z = com.microsoft.GemmaRotaryEmbedding (e, a, a, a, a) }"""


@pytest.mark.parametrize(
    ("text", "op_type", "types"),
    [
        (FAR, "F", [DType.FLOAT16, None]),
        (FAR, "Add", [DType.FLOAT] * 6),
        (GEMMA, "GemmaRotaryEmbedding", [DType.FLOAT, *[DType.FLOAT16] * 6]),
    ],
)
def test_an_op_of_an_unknown_domain_or_without_float32_in_its_schema_keeps_its_types(
    text: str, op_type: str, types: list[DType | None]
) -> None:
    view = View.of(emulate(parsed(text, domains=', "far": 1, "com.microsoft": 1')))
    ops = (op for op in view.ops if op.op_type == op_type)
    assert [view.dtype(v) for op in ops for v in op.ports] == types


def test_text_has_the_digits_of_the_low_type() -> None:
    model = parsed("g (float[1] x) => (string[1] y) { h = Cast <to = 10> (x) \n y = Cast <to = 8> (h) }")
    result = twin(model)
    assert kinds(result) == ["Cast→float16", "Cast→float32", "Cast→float16", "Cast→string"]


def test_fused_ops_round_their_outputs_and_a_sum_before_its_norm() -> None:
    gelu = "f = com.microsoft.FastGelu (x, w)"
    norm = "y, m, v, sum = com.microsoft.SkipLayerNormalization <epsilon = 1e-5> (f, x, w)"
    inputs, outputs = "LOW[2, 3, 4] x, LOW[4] w", "LOW[2, 3, 4] y, LOW[2, 3, 4] sum"

    def build(text: str, low: str) -> ModelProto:
        return parsed(text.replace("LOW", low), domains=', "com.microsoft": 1')

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16).astype(np.float32)

    rng = np.random.default_rng(2)
    feeds = {"x": rounded(rng.standard_normal((2, 3, 4))), "w": rounded(rng.standard_normal(4))}
    result = run(twin(build(f"g ({inputs}) => ({outputs}) {{ {gelu}  {norm} }}", "float16"), io="float32"), feeds)
    (f,) = run(build(f"g ({inputs}) => (LOW[2, 3, 4] f) {{ {gelu} }}", "float"), feeds)
    halves = rounded(rounded(f) + feeds["x"]) / 2
    norm_of_sum = build(f"g ({inputs}, LOW[2, 3, 4] f) => ({outputs}) {{ {norm} }}", "float")
    for actual, right in zip(result, run(norm_of_sum, {"f": halves, "x": halves, "w": feeds["w"]}), strict=True):
        np.testing.assert_array_equal(actual, rounded(right))


def test_a_model_of_only_other_domains_imports_the_opset_of_its_casts() -> None:
    model = parsed(
        "g (float16[2] x) => (float16[2] y) { y = com.microsoft.QuickGelu (x) }", domains=', "com.microsoft": 1'
    )
    del model.opset_import[0]
    result = twin(model)
    assert {o.domain: o.version for o in result.opset_import} == {"com.microsoft": 1, "": 13}
    session(result)


def widened(model: object, io: str = "float32") -> ModelProto:
    """Return the widened twin, which must be valid and have unique names."""
    return twin(model, io=io, rounding=False)


@both_types
def test_casts_between_float32_and_low_types_become_identities(low: DType) -> None:
    model = parsed(f"""g (float[2] x, {low.onnx_name}[2] h) => (float[2] y, int64[2] n, float[2] z, float[2] d) {{
        a = Cast <to = {low.code}> (x)  y = Cast <to = 1> (a)  n = Cast <to = 7> (a)
        l = CastLike (x, h)  z = CastLike (l, x)
        i = Cast <to = {low.code}> (n)  e = Cast <to = 11> (i)  k = Cast <to = {low.code}> (e)  d = Cast <to = 1> (k)
    }}""")
    result = widened(model)
    assert kinds(result) == [
        *("Identity", "Identity", "Cast→int64", "Identity", "Identity"),
        *("Cast→float32", "Cast→float64", "Cast→float32", "Identity"),
    ]
    x = np.float32([0.1, 4097.9])
    y, n, z, d = run(result, {"x": x, "h": x})
    for array in (y, z):
        np.testing.assert_array_equal(array, x)
    np.testing.assert_array_equal(n, x.astype(np.int64))
    np.testing.assert_array_equal(d, np.trunc(x))


def test_ops_after_a_kept_output_are_not_rounded() -> None:
    model = parsed("""g (float16[2] x) => (float16[2] y, float[2] z, float16[2] w) <float16[2] w = {15872, 16640}> {
        y = Mul (x, x)  d = Div (y, x)  z = Cast <to = 1> (d)
    }""")
    x = np.float16([300, 2])
    with np.errstate(over="ignore"):
        y, z, w = run(widened(model, "numpy"), {"x": x})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(z, np.float32([300, 2]))
    np.testing.assert_array_equal(w, np.float16([1.5, 2.5]))
