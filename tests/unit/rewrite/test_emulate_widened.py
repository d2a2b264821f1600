"""The widened twin: a mixed model as if its low types were float32, the reference of one that is half already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

import amp_rewrite
from amp_rewrite import Model, View
from amp_rewrite.dtypes import DType
from amp_rewrite.rewrite.emulate import emulate
from suites.models.test_fixtures import FIXTURES, batch, source, tolerance
from support.objections import graphs, of_outputs, run
from unit.rewrite.test_emulate import (
    EDGES,
    X,
    attribute_of,
    both_types,
    element_types,
    has_low,
    kinds,
    parsed,
    sparse,
    twin,
)


def widened(model: object, io: str = "float32") -> ModelProto:
    """The widened twin, which must be a valid model of unique names."""
    return twin(model, io=io, rounding=False)


def as_float32(
    text: str, feeds: Mapping[str, object], low: DType, functions: str = "", **options: object
) -> ModelProto:
    """The widened twin of a model written with LOW for its low type; equal to the model written with float."""
    low_model = parsed(text.replace("LOW", low.onnx_name), functions.replace("LOW", low.onnx_name), **options)
    wide_model = parsed(text.replace("LOW", "float"), functions.replace("LOW", "float"), **options)
    found = widened(low_model)
    assert not has_low(found)
    assert [kind for kind in kinds(found) if kind.startswith("Cast→")] == []
    expected = ReferenceEvaluator(wide_model).run(None, dict(feeds))
    for level in ("BASIC", "ALL"):
        for mine, right in zip(run(found, feeds, level), expected, strict=True):
            np.testing.assert_array_equal(mine, right)
    return found


# -- nothing is rounded --------------------------------------------------------------------------------


@both_types
def test_what_would_overflow_or_lose_digits_does_not(low: DType) -> None:
    found = as_float32(
        "g (LOW[3, 4] x) => (LOW[3, 4] y) { e = Mul (x, x) \n y = Mul (e, e) }",
        {"x": np.float32([[1 + 2.0**-20, 300, 1e-5, 1e9]] * 3)},
        low,
    )
    assert kinds(found) == ["Mul", "Mul"]


@both_types
def test_casts_between_float32_and_low_types_become_identities(low: DType) -> None:
    model = parsed(f"""g (float[2] x, {low.onnx_name}[2] h) => (float[2] y, int64[2] n, float[2] z, float[2] d) {{
        a = Cast <to = {low.code}> (x)
        y = Cast <to = 1> (a)
        n = Cast <to = 7> (a)
        l = CastLike (x, h)
        z = CastLike (l, x)
        i = Cast <to = {low.code}> (n)
        e = Cast <to = 11> (i)
        k = Cast <to = {low.code}> (e)
        d = Cast <to = 1> (k)
    }}""")
    found = widened(model)
    assert kinds(found) == [
        *("Identity", "Identity", "Cast→int64", "Identity", "Identity"),
        *("Cast→float32", "Cast→float64", "Cast→float32", "Identity"),
    ]
    x = np.float32([0.1, 4097.9])
    y, n, z, d = run(found, {"x": x, "h": x})
    for array in (y, z):
        np.testing.assert_array_equal(array, x)
    np.testing.assert_array_equal(n, x.astype(np.int64))
    np.testing.assert_array_equal(d, np.trunc(x))


def test_casts_between_the_two_low_types_become_identities() -> None:
    model = parsed("g (float16[1] x) => (bfloat16[1] y) { y = Cast <to = 16> (x) }")
    assert kinds(widened(model)) == ["Identity"]


def test_casts_keep_their_names() -> None:
    model = parsed("""g (int64[1] n, float[1] x) => (float[1] y, float[1] z) {
        [one] a = Cast <to = 10> (n)
        [two] y = Cast <to = 1> (a)
        [three] b = Cast <to = 10> (x)
        [four] z = Cast <to = 1> (b)
    }""")
    assert [node.name for node in widened(model).graph.node] == ["one", "two", "three", "four"]


@both_types
def test_weights_are_those_that_the_model_holds(low: DType, tmp_path: Path) -> None:
    weight = np.random.default_rng(3).standard_normal((96, 96)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 96])],
        [helper.make_tensor_value_info("y", 1, [1, 96])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 22)]), tmp_path / "m.onnx")
    converted = amp_rewrite.convert(tmp_path / "m.onnx", to=low.spelling)
    converted.save(tmp_path / "low.onnx")
    for source_ in (converted.result, tmp_path / "low.onnx"):
        emulate(source_, rounding=False).save(tmp_path / "twin.onnx", overwrite=True)
        (held,) = onnx.load(tmp_path / "twin.onnx").graph.initializer
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(held), weight.astype(low.numpy).astype(np.float32))


def test_a_model_without_low_types_comes_back_as_it_was() -> None:
    model = parsed(
        "g (float[2] x, int64[2] n) => (float[2] y, double[2] z) { y = Cast <to = 1> (x) \n z = Cast <to = 11> (n) }"
    )
    assert emulate(model, rounding=False).proto.SerializeToString() == model.SerializeToString()


# -- edges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("io", "expected", "ops"),
    [
        ("float32", ["h float32", "b float32", "y float32", "z float32"], ["Add", "Add"]),
        (
            "numpy",
            ["h float16", "b float32", "y float16", "z float32"],
            ["Cast→float32", "Add", "Cast→float16", "Add"],
        ),
        (
            "same",
            ["h float16", "b bfloat16", "y float16", "z bfloat16"],
            ["Cast→float32", "Cast→float32", "Add", "Cast→float16", "Add", "Cast→bfloat16"],
        ),
    ],
)
def test_inputs_and_outputs_have_the_types_asked_for(io: str, expected: list[str], ops: list[str]) -> None:
    found = widened(parsed(EDGES), io)
    assert element_types(found) == expected
    assert kinds(found) == ops


def test_what_stands_behind_a_kept_output_is_not_rounded() -> None:
    model = parsed("""g (float16[2] x) => (float16[2] y, float[2] z, float16[2] w) <float16[2] w = {15872, 16640}> {
        y = Mul (x, x)
        d = Div (y, x)
        z = Cast <to = 1> (d)
    }""")
    x = np.float16([300, 2])
    with np.errstate(over="ignore"):
        y, z, w = run(widened(model, "numpy"), {"x": x})
    np.testing.assert_array_equal(y, np.float16([np.inf, 4]))
    np.testing.assert_array_equal(z, np.float32([300, 2]))
    np.testing.assert_array_equal(w, np.float16([1.5, 2.5]))


def test_a_default_of_an_input_stays_one() -> None:
    model = parsed(
        "g (float16[2] x, float16[2] w) => (float16[2] y) <float16[2] w = {16384, 16896}> { y = Mul (x, w) }"
    )
    x = np.float32([1, 1 + 2.0**-20])
    found = widened(model)
    np.testing.assert_array_equal(run(found, {"x": x})[0], x * np.float32([2, 3]))
    np.testing.assert_array_equal(run(found, {"x": x, "w": x})[0], x * x)


# -- bodies, functions, containers ---------------------------------------------------------------------


@both_types
def test_branches_are_widened(low: DType) -> None:
    as_float32(
        """g (LOW[3, 4] x, bool c) => (LOW[3, 4] y) {
            k = Mul (x, x)
            y = If (c) <
              then_branch = t () => (LOW[3, 4] a) { a = Add (k, x) },
              else_branch = e () => (LOW[3, 4] b) { b = Sub (k, x) }
            >
        }""",
        {"x": X * 300, "c": np.array(True)},
        low,
    )


@both_types
def test_loops_and_scans_are_widened(low: DType) -> None:
    as_float32(
        """g (LOW[3, 4] x, int64 n, bool c, LOW[4] s) => (LOW[3, 4] y, LOW[4] u, LOW[3, 4] all) {
            y = Loop (n, c, x) <body = b (int64 i, bool go, LOW[3, 4] s0) => (bool go2, LOW[3, 4] s2) {
                go2 = Identity (go)
                p = Mul (s0, x)
                s2 = Add (p, x)
            }>
            u, all = Scan <num_scan_inputs = 1, body = b2 (LOW[4] a, LOW[4] row) => (LOW[4] a2, LOW[4] o) {
                a2 = Add (a, row)
                o = Mul (a2, a2)
            }> (s, x)
        }""",
        {"x": X, "n": np.array(5), "c": np.array(True), "s": X[0]},
        low,
    )


@both_types
def test_local_functions_are_widened(low: DType) -> None:
    as_float32(
        "g (LOW[3, 4] x) => (LOW[3, 4] y) { y = here.f (x) }",
        {"x": X},
        low,
        functions='<opset_import: ["": 22], domain: "here"> f (x) => (y) { s = Mul (x, x) \n y = Add (s, x) }',
        domains=', "here": 1',
    )


def test_sequences_and_their_maps_are_widened() -> None:
    found = widened(
        parsed("""g (float16[3, 4] x, seq(float16[3, 4]) q) => (float16[6, 4] y, seq(float16[3, 4]) r) {
            s = SequenceConstruct (x, x)
            t = SequenceMap <body = b (float16[3, 4] a) => (float16[3, 4] o) { o = Mul (a, a) }> (s)
            y = ConcatFromSequence <axis = 0> (t)
            r = SequenceInsert (q, x)
        }""")
    )
    assert not has_low(found)
    y, r = run(found, {"x": X, "q": [X]})
    np.testing.assert_array_equal(y, np.concatenate([X * X, X * X]))
    np.testing.assert_array_equal(r, [X, X])


def test_optionals_are_widened() -> None:
    found = widened(
        parsed(
            "g (float16[2] x) => (float16[2] y) { o = Optional (x) \n g = OptionalGetElement (o) \n y = Mul (g, g) }"
        )
    )
    assert not has_low(found)
    x = np.float32([1 + 2.0**-20, 3e4])
    np.testing.assert_array_equal(run(found, {"x": x})[0], x * x)


# -- attributes ----------------------------------------------------------------------------------------


@both_types
def test_attributes_that_name_the_type_follow(low: DType) -> None:
    tenth = int(np.array(0.1).astype(low.numpy).view(np.uint16))
    model = parsed(
        f"""g (int64[1] s, float[2] x) => ({low.onnx_name}[N] y, {low.onnx_name}[2] r) {{
        y = ConstantOfShape <value = {low.onnx_name}[1] {{{tenth}}}> (s)
        r = RandomNormalLike <dtype = {low.code}, seed = 3.0> (x)
    }}""",
        opset=21,
    )
    found = widened(model)
    assert not has_low(found)
    assert attribute_of(found, "dtype").i == TensorProto.FLOAT
    y, r = run(found, {"s": np.array([2]), "x": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(y, np.full(2, 0.1).astype(low.numpy).astype(np.float32))
    assert np.any(r != r.astype(low.numpy).astype(np.float32))  # type: ignore[attr-defined]


@both_types
def test_sparse_weights_are_those_that_the_model_holds(low: DType) -> None:
    model = parsed(f"g ({low.onnx_name}[4] x) => ({low.onnx_name}[4] y) {{ y = Add (x, w) }}")
    model.graph.sparse_initializer.append(sparse(low))
    tenth = np.array(0.1).astype(low.numpy).astype(np.float32)
    (y,) = run(emulate(model, io="float32", rounding=False).proto, {"x": np.zeros(4, np.float32)})
    np.testing.assert_array_equal(y, np.float32([tenth, 0, 0, 3]))


# -- what stays low ------------------------------------------------------------------------------------


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 26, reason="this onnx has no BitCast")
def test_bits_are_still_those_of_the_low_type() -> None:
    model = parsed("g (float16[2] x) => (uint16[2] y) { a = Add (x, x) \n y = BitCast <to = 4> (a) }", opset=26)
    x = np.float32([1.5, -2])
    found = widened(model)
    assert kinds(found) == ["Add", "Cast→float16", "BitCast→uint16"]
    np.testing.assert_array_equal(run(found, {"x": x})[0], (x + x).astype(np.float16).view(np.uint16))


def test_an_op_of_an_unknown_domain_keeps_its_types() -> None:
    model = parsed("g (float16[2] x) => (float16[2] y) { a = Add (x, x) \n b = far.F (a) \n y = Add (b, b) }")
    model.opset_import.add(domain="far", version=1)
    model.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT16, [2]))
    found = emulate(model, io="float32", rounding=False)
    assert kinds(found.proto) == ["Add", "Cast→float16", "F", "Cast→float32", "Add"]
    (op,) = (op for op in View.of(found).ops if op.op_type == "F")
    assert [View.of(found).dtype(v) for v in op.inputs if v is not None] == [DType.FLOAT16]


def test_text_has_the_digits_of_float32() -> None:
    model = parsed("g (float[1] x) => (string[1] y) { h = Cast <to = 10> (x) \n y = Cast <to = 8> (h) }")
    assert kinds(widened(model)) == ["Identity", "Cast→string"]


# -- whole models --------------------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("name", FIXTURES)
def test_a_converted_model_widened_is_near_the_original(name: str, low: DType, tmp_path: Path) -> None:
    """Only its weights are rounded, so it keeps within the bound of one that rounds everywhere."""
    amp_rewrite.convert(source(name), to=low.spelling).save(tmp_path / "low.onnx")
    stored = batch(name, "input")
    expected = list(batch(name, "output").values())
    found = run(widened(tmp_path / "low.onnx"), stored)
    for mine, right in zip(found, expected, strict=True):
        if np.issubdtype(right.dtype, np.floating):
            assert np.abs(mine - right).max() <= tolerance(name, right, low)
    assert [
        node for graph in graphs(widened(tmp_path / "low.onnx").graph) for node in graph.node if _to_low(node)
    ] == []


def _to_low(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(DType(a.i).low for a in node.attribute if a.name == "to")


def test_the_twin_that_rounds_differs_from_the_one_that_does_not() -> None:
    """What makes the two worth telling apart."""
    model = parsed("g (float16[1] x) => (float16[1] y) { y = Mul (x, x) }")
    x = {"x": np.float32([1 + 2.0**-10])}
    exactly = np.float32([(1 + 2.0**-10) ** 2])
    assert of_outputs([exactly], run(widened(model), x), bound=0) == []
    assert of_outputs([exactly], run(twin(model, io="float32"), x), bound=2.0**-21) != []
    assert exactly.astype(ml_dtypes.bfloat16) != exactly


def test_the_argument_is_not_changed() -> None:
    model = amp_rewrite.convert(source("if_ts13")).model
    before = model.SerializeToString(deterministic=True)
    emulate(Model.load(model), rounding=False)
    assert model.SerializeToString(deterministic=True) == before
