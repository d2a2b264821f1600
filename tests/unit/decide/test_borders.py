"""Rules on the border between the types: which low ops they take back to float32, and their near twins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import amp_rewrite
from support import cases

NARROW = {"x": (8, 4), "w": (4, 4), "v": (4, 8)}


def types(model: ModelProto, **options: Any) -> dict[str, tuple[str | None, str | None]]:
    """Type and rule of each op, by name."""
    return {row.name: (row.dtype, row.rule) for row in amp_rewrite.convert(model, **options).report.rows}


def painted(
    text: str, outputs: str = "y", constants: Mapping[str, object] | None = None, **options: Any
) -> dict[str, str]:
    """The rule of each op that a rule of the border takes back to float32, by name."""
    shapes = options.pop("shapes", None)
    model = cases.build(text, outputs.split(), shapes=shapes, constants=constants, types=options.pop("inputs", None))
    rules = ("no_gain",)
    return {name: rule for name, (_, rule) in types(model, **options).items() if rule in rules}


# -- tiny products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_a_part_whose_products_sum_a_few_terms_is_float32_without_casts(to: str) -> None:
    model = cases.build("a=MatMul(x,w);r=Relu(a);y=MatMul(r,w)", ["y"], shapes=NARROW)
    converted = amp_rewrite.convert(model, to=to)
    assert {row.rule for row in converted.report.rows} == {"no_gain"}
    assert converted.plan.empty


@pytest.mark.parametrize(
    "product",
    ["Gemm <transB = 1> (x, w)", 'Einsum <equation = "ij,kj->ik"> (x, w)', 'Einsum <equation = "ij,jk"> (x, v)'],
)
def test_other_products_of_a_few_terms_count_as_well(product: str) -> None:
    head = '<ir_version: 8, opset_import: ["": 18]> g (float[8,4] x, float[6,4] w, float[4,6] v) => (float[8,6] y)'
    model = onnx.parser.parse_model(f"{head} {{ [product] y = {product} }}")
    assert types(model) == {"product": ("float32", "no_gain")}


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("a=MatMul(x,w);y=MatMul(a,v)", {"x": (8, 8), "w": (8, 4), "v": (4, 8)}),  # beside a larger one
        ("a=MatMul(x,k);p=Softmax(a);y=MatMul(p,v)", {"x": (2, 4), "k": (4, 4), "v": (4, 4)}),  # attention
        ("y=Conv(x,w)", {"x": (1, 1, 8, 8), "w": (4, 1, 3, 3)}),  # one channel, nine terms
    ],
)
def test_products_beside_larger_ones_and_attention_are_no_such_part(text: str, shapes: dict[str, Any]) -> None:
    assert painted(text, shapes=shapes) == {}


def test_a_product_of_unknown_length_counts_as_large() -> None:
    model = cases.build("y=MatMul(x,w)", ["y"])
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_n"
    assert types(model)["y"] == ("float16", "allow_root")


def test_a_product_with_a_scalar_constant_has_no_known_length() -> None:
    """ONNX forbids it; a broken model is converted or refused, never a fault of the converter."""
    model = cases.build("a=MatMul(x,c);y=MatMul(a,w)", ["y"], constants={"c": np.ones((4, 4), "f4")}, shapes=NARROW)
    (constant,) = model.graph.initializer
    constant.CopyFrom(numpy_helper.from_array(np.float32(2), "c"))
    assert set(types(model)) == {"a", "y"}


def test_what_the_user_lowers_stays_low_in_a_tiny_part() -> None:
    assert painted("y=MatMul(x,w)", shapes=NARROW, lower=["op=MatMul"]) == {}


def test_a_sequence_in_a_tiny_part_keeps_one_type() -> None:
    text = "a=MatMul(x,w);s=SequenceConstruct(a,a);i=SequenceAt(s,at);y=MatMul(i,w)"
    model = cases.build(text, ["y"], shapes={**NARROW, "at": ()}, types={"at": "int"})
    assert {dtype for dtype, _ in types(model).values()} == {"float16"}


@pytest.mark.parametrize("options", [{"safety": "none"}, {"level": "lower-all"}])
def test_without_safety_rules_and_where_all_is_lowered_no_border_is_held(options: dict[str, str]) -> None:
    assert painted("y=MatMul(x,w)", shapes=NARROW, **options) == {}


# -- raw values ----------------------------------------------------------------------------------------

SPLIT = "p,q=Split[axis=1](x,sizes);y=MatMul(p,w);"
WIDE = {"x": (8, 16), "w": (8, 8)}
SIZES = {"sizes": np.array([8, 8])}


@pytest.mark.parametrize("reader", ["z=Exp(q)", "z=Identity(q)"])
def test_a_raw_value_that_is_read_in_float32_is_not_rounded(reader: str) -> None:
    rules = painted(SPLIT + reader, "y z", SIZES, shapes=WIDE)
    assert rules["p"] == "no_gain"


def test_a_raw_value_that_low_ops_alone_read_is_low() -> None:
    assert painted(SPLIT + "z=MatMul(q,w)", "y z", SIZES, shapes=WIDE) == {}


def test_a_value_that_a_product_made_is_not_raw() -> None:
    text = "a=MatMul(x,w);p,q=Split[axis=1](a,sizes);y=MatMul(p,v);z=Exp(q)"
    shapes = {"x": (8, 8), "w": (8, 16), "v": (8, 8)}
    assert "no_gain" not in painted(text, "y z", SIZES, shapes=shapes).values()


def test_a_value_that_comes_from_a_product_through_float32_ops_is_not_raw() -> None:
    """A skip connection: what a product gives is rounded already."""
    text = "a=MatMul(x,w);e=Exp(a);b=MatMul(e,w);c=Concat[axis=1](e,b);y=MatMul(c,v);z=Exp(c)"
    assert "no_gain" not in painted(text, "y z", shapes={"v": (16, 8)}).values()


def test_a_cache_that_leaves_in_float32_is_joined_in_float32() -> None:
    text = "k=MatMul(x,w);present=Concat[axis=0](past,k);t=Transpose[perm=1 0](present);y=MatMul(x,t)"
    assert painted(text, "y present")["present"] == "no_gain"
    assert painted(text, "y present", io=["past=float16", "present=float16"]) == {}


# -- behind the last product ---------------------------------------------------------------------------

SUMS = "a=MatMul(x,w);b=MatMul(x,v);s=Add(a,b);"


def test_one_sum_that_spares_a_cast_is_low_and_a_second_one_is_not() -> None:
    assert painted(SUMS + "y=Relu(s)") == {}
    assert painted(SUMS + "c=MatMul(x,u);y=Add(s,c)") == {"y": "no_gain"}


def test_a_copy_of_a_low_and_a_float32_value_is_float32() -> None:
    sums = SUMS + "c=MatMul(x,u);t=Add(s,c);"
    for copy in ("y=Concat[axis=0](s,t)", "y=Concat[axis=0](a,b,c,t)"):
        found = types(cases.build(sums + copy, ["y"]))
        assert (found["t"], found["y"][0]) == (("float32", "no_gain"), "float32")


@pytest.mark.parametrize("branch", ["n=Mul(b,g)", "n=LayerNormalization(b,g)"])
def test_a_branch_that_is_scaled_or_normalized_before_its_sum_is_low(branch: str) -> None:
    scale = {"g": np.ones(8, np.float32)}
    assert painted(f"a=MatMul(x,w);b=MatMul(a,v);{branch};y=Add(a,n)", constants=scale) == {}
    assert painted(f"a=MatMul(x,w);b=MatMul(a,v);{branch};y=Exp(n)", constants=scale, to="bfloat16") == {"n": "no_gain"}


def test_a_product_in_a_body_counts() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (float[8,8] x, float[8,8] w, bool c) => (float[8,8] y) {
        a = MatMul (x, w)  b = MatMul (a, w)  d = MatMul (b, w)  s = Add (a, b)  t = Add (s, d)
        y = If (c) <then_branch = t () => (float[8,8] p) { p = MatMul (t, w) },
                    else_branch = e () => (float[8,8] q) { q = Identity (x) }>
    }"""
    converted = types(onnx.parser.parse_model(text))
    assert "no_gain" not in {rule for _, rule in converted.values()}


@pytest.mark.parametrize(
    ("mean", "to", "low"), [(48.0, "float16", True), (48000.0, "float16", False), (48.0, "bfloat16", False)]
)
def test_a_constant_beyond_the_whole_numbers_is_added_in_float32(mean: float, to: str, low: bool) -> None:
    text = "a=MatMul(x,w);b=MatMul(x,v);h=Add(a,m);l=Add(b,m);y=Sub(h,l)"
    found = types(cases.build(text, ["y"], constants={"m": np.full(8, mean)}), to=to)
    assert [found[name][0] == to for name in "hly"] == [low] * 3


def test_what_leads_to_an_output_or_op_that_the_user_lowers_stays_low() -> None:
    text = SUMS + "c=MatMul(x,u);t=Add(s,c);y=Tanh(t)"
    assert painted(text) != {}
    assert painted(text, lower=["y"]) == {}
    assert "no_gain" not in painted(SUMS + "c=MatMul(x,u);y=Add(s,c)", io=["y=float16"]).values()


def test_a_quantizer_at_the_end_needs_no_cast_in_front() -> None:
    text = "a=MatMul(x,w);q=QuantizeLinear(a,scale,zero);y=DequantizeLinear(q,scale,zero)"
    model = cases.build(text, ["y"], constants={"scale": 0.5, "zero": np.array(0, np.int8)}, opset=21)
    assert types(model, quantized="rescale")["q"][1] != "no_gain"


def test_the_type_of_a_shape_at_the_end_is_that_of_its_input() -> None:
    found = types(cases.build("a=MatMul(x,w);y=Relu(a);s=Shape(a)", ["y", "s"]))
    assert found["s"] == ("float16", "shape_follows")
