"""Patterns over a small transformer-like graph and over a Loop; rules for inputs, outputs and caches."""

import onnx
import pytest
from onnx import TensorProto, helper

from amp_rewrite import convert
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PatternError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.settings.io_rules import io_types, parse_io
from amp_rewrite.settings.selectors import overrides, parse_pattern, select

BLOCK = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[2,4] x, float[2,2] past_key, float[2,2] mask, int64[2] ids) => (float[2,4] y, float[2,2] present_key) {
  ["/encoder/layer.0/attention/q"] q = MatMul (x, x)
  ["/encoder/layer.0/attention/scale"] s = Div (q, past_key)
  ["/encoder/layer.0/attention/mask"] m = Add (s, mask)
  ["/encoder/layer.0/attention/Softmax"] p = Softmax (m)
  ["/encoder/layer.0/attention/out"] o = MatMul (p, past_key)
  ["/encoder/layer.1/mlp/dense"] d = com.microsoft.FusedMatMul (o, x)
  ["/decoder/Conv"] c = Conv (d, past_key)
  ["/decoder/act"] a = Relu (c)
  ["/decoder/shape"] shape = Shape (a)
  ["/decoder/view"] y = Reshape (a, shape)
  present_key = Exp (past_key)
}
"""
LOOP = """
<ir_version: 10, opset_import: ["" : 21]>
g (int64 n, bool go, float[2] x) => (float[2] y) {
  [steps] y = Loop (n, go, x) <body = b (int64 i, bool c, float[2] s) => (bool k, float[2] t) {
    k = Identity (c)
    [act] t = Tanh (s)
  }>
}
"""


def view_of(text: str) -> View:
    return View.of(Model.load(onnx.parser.parse_model(text)))


@pytest.fixture(scope="module")
def block() -> View:
    return view_of(BLOCK)


def names(view: View, pattern: str) -> list[str]:
    return [view.ops[op].name.rpartition("/")[2] for op in select(view, pattern)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/decoder/*", ["Conv", "act", "shape", "view"]),
        ("name=*/q", ["q"]),
        ("re:(?i)SOFTMAX", ["Softmax"]),
        ("re:^/encoder/layer.{1,2}0/attention/[qo]", ["q", "out"]),
        ("op=MatMul", ["q", "out"]),
        ("op=ai.onnx::MatMul", ["q", "out"]),
        ("op=com.microsoft::*", ["dense"]),
        ("op=*MatMul", ["q", "out", "dense"]),
        ("scope=encoder/layer.1", ["dense"]),
        ("scope=/encoder/*", ["q", "scale", "mask", "Softmax", "out", "dense"]),
        ("scope=encoder.layer.0.attention, op=MatMul", ["q", "out"]),
        ("scope=*/attention/[qo]*", ["q", "out"]),
        ("feeds=Softmax", ["q", "scale", "mask"]),
        ("feeds=ai.onnx::Softmax", ["q", "scale", "mask"]),
        ("fed_by=ai.onnx::Conv", ["act"]),
        ("op=MatMul,feeds=Softmax", ["q"]),
        ("fed_by=Conv", ["act"]),
        ("fed_by=Softmax", ["out"]),
        ("fed_by=MatMul", ["scale", "mask", "Softmax", "dense"]),
        ("input=past_*", ["scale", "out", "Conv", "Exp_10"]),
        ("output=[oc]", ["out", "Conv"]),
        ("input=past_*,op=Exp", ["Exp_10"]),
    ],
)
def test_a_pattern_selects_ops_that_satisfy_all_its_terms(block: View, pattern: str, expected: list[str]) -> None:
    assert names(block, pattern) == expected


def test_a_value_read_only_for_its_shape_feeds_nothing() -> None:
    view = view_of("""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float[2,2] x, float[4] w) => (float[2,2] y) {
      [size] s = Shape (x)
      [data] d = Exp (w)
      [moved] r = Reshape (d, s)
      y = Softmax (r)
    }
    """)

    assert names(view, "feeds=Softmax") == ["data", "moved"]


def test_module_scopes_that_torch_records_are_scopes() -> None:
    model = onnx.parser.parse_model(LOOP)
    node = model.graph.node[0]
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'vit', 'vit.layers.3', 'linear_7']")
    node.attribute[0].g.node[1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="QQ")
    view = View.of(Model.load(model.SerializeToString().replace(b"\x02QQ", b"\x02\xffQ")))  # not UTF-8

    assert names(view, "scope=vit/layers/*") == ["steps"]
    assert names(view, "scope=vit") == ["steps"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "kind=Conv",
            "pattern 'kind=Conv': unknown key 'kind'; use one of name, op, scope, feeds, fed_by, input, output",
        ),
        ("fed=Conv", "pattern 'fed=Conv': unknown key 'fed'; did you mean 'feeds'?"),
        ("op=", "pattern 'op=': a term is empty; write KEY=VALUE or a glob for the node name"),
        ("", "pattern '': a term is empty; write KEY=VALUE or a glob for the node name"),
        (
            "re:a(",
            "pattern 're:a(': invalid regular expression: missing ), unterminated subpattern at position 1; correct it",
        ),
    ],
)
def test_a_malformed_pattern_is_named_with_a_remedy(pattern: str, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        parse_pattern(pattern)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("op=Matmul", "no op matches op=Matmul; did you mean 'MatMul'?"),
        ("op=FusedMatMul", "no op matches op=FusedMatMul; did you mean 'com.microsoft::FusedMatMul'?"),
        ("Softmax", "no op matches name=Softmax; did you mean 'op=Softmax'?"),
        ("/decoder/Cnv", "no op matches name=/decoder/Cnv; did you mean '/decoder/Conv'?"),
        ("scope=encodr/layer.1/mlp/*", "no op matches scope=encodr/layer.1/mlp/*; did you mean 'encoder/layer/1/mlp'?"),
        ("op=Conv,feeds=Sofmax", "no op matches feeds=Sofmax; did you mean 'Softmax'?"),
        ("fed_by=Softmx", "no op matches fed_by=Softmx; did you mean 'Softmax'?"),
        ("input=past_keys", "no op matches input=past_keys; did you mean 'past_key'?"),
        (r"re:\d{5}", r"no op matches name=\d{5}; 'amp-rewrite report -v' prints the names"),
        (
            "op=Conv,feeds=Softmax",
            "no op matches all its terms (op=Conv: 1, feeds=Softmax: 3); commas mean AND, so write several patterns",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(block: View, pattern: str, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        select(block, pattern)

    assert str(caught.value) == f"pattern '{pattern}' matches nothing: {message}"


def test_overrides_remember_the_first_matching_pattern(block: View) -> None:
    kept, lowered = overrides(block, ["op=Softmax", "scope=decoder"], ["op=MatMul", "*/q"])

    assert {block.ops[op].name.rpartition("/")[2]: pattern for op, pattern in (kept | lowered).items()} == {
        "Softmax": "op=Softmax",
        "Conv": "scope=decoder",
        "act": "scope=decoder",
        "shape": "scope=decoder",
        "view": "scope=decoder",
        "q": "op=MatMul",
        "out": "op=MatMul",
    }


def test_an_op_that_is_kept_and_lowered_is_a_contradiction(block: View) -> None:
    with pytest.raises(PatternError) as caught:
        overrides(block, ["/decoder/*"], ["op=Conv"])

    assert str(caught.value) == (
        "node '/decoder/Conv' matches both keep '/decoder/*' and lower 'op=Conv'; narrow one of them"
    )


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, {}),
        ("keep", {}),
        ("low", {"x": "float16", "past_key": "float16", "mask": "float16", "y": "float16", "present_key": "float16"}),
        (["in:low"], {"x": "float16", "past_key": "float16", "mask": "float16"}),
        (["*_key=float16"], {"past_key": "float16", "present_key": "float16"}),
        (["out:*_key=float16"], {"present_key": "float16"}),
        (["low", "in:*=float32", "out:y=f32"], {"present_key": "float16"}),
        (["low", "keep"], {}),
    ],
)
def test_the_last_matching_io_rule_wins(block: View, rules: str | list[str] | None, expected: dict[str, str]) -> None:
    found = io_types(block, parse_io(rules), DType.FLOAT16)

    assert {block.value_name(v): t.spelling for v, t in found.items()} == expected


FORMS = "write keep, low, caches or GLOB=TYPE, optionally preceded by in: or out:"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("ids=float16", "io 'ids=float16': no float32 input or output is named 'ids'; the names are x, past_key, mask, "
         "y, present_key"),
        ("in:present_*=float16",
         "io 'in:present_*=float16': no float32 input is named 'present_*'; the names are x, past_key, mask"),
        ("out:past_*=float16",
         "io 'out:past_*=float16': no float32 output is named 'past_*'; the names are y, present_key"),
        ("mesk=float16", "io 'mesk=float16': no float32 input or output is named 'mesk'; did you mean 'mask'?"),
        ("x=bfloat16", "io 'x=bfloat16': the model is lowered to float16; use float16 or float32 here"),
        ("x=flaot16", "io 'x=flaot16': unknown element type 'flaot16'; did you mean 'float16'?"),
        ("x=banana", "io 'x=banana': unknown element type 'banana'; use one of float16 (f16, fp16, half), "
         "bfloat16 (bf16), float32 (f32, float)"),
        ("lo", "io 'lo' is not a rule; did you mean 'low'?"),
        ("=float16", f"io '=float16' is not a rule; {FORMS}"),
        ("in: =float16", f"io 'in: =float16' is not a rule; {FORMS}"),
        ("past_*", f"io 'past_*' is not a rule; {FORMS}"),
    ],
)  # fmt: skip
def test_a_senseless_io_rule_is_an_error_with_a_remedy(block: View, rule: str, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        io_types(block, parse_io([rule]), DType.FLOAT16)

    assert str(caught.value) == message


def net(inputs: list[str], outputs: list[str], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a model whose outputs are its inputs and their sum."""
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in zip(inputs, outputs, strict=True)]
    nodes.append(helper.make_node("Sum", inputs, ["sum"]))
    ports = [helper.make_tensor_value_info(name, kind, [2]) for name in inputs]
    results = [helper.make_tensor_value_info(name, kind, [2]) for name in (*outputs, "sum")]
    graph = helper.make_graph(nodes, "g", ports, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def lowered_names(model: onnx.ModelProto, io: str | list[str]) -> set[str]:
    proto = convert(model, io=io).model
    values = (*proto.graph.input, *proto.graph.output)
    return {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT16}


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),  # optimum, onnxruntime-genai, transformers.js
        ("past_key_values.11.decoder.value", "present.11.decoder.value"),
        ("past_key_values.0.encoder.key", "present.0.encoder.key"),
        ("past_0", "present_0"),
        ("past_0_key", "present_0_key"),
        ("past_key_self_0", "present_key_self_0"),
        ("past_value_cross_3", "present_value_cross_3"),
        ("past_key_0", "present_key_0"),
        ("past_conv.2", "present_conv.2"),
        ("past_key_values_0_key", "present_key_values_0_key"),
    ],
)
def test_cache_names_of_exporters_are_recognized(past: str, present: str) -> None:
    assert lowered_names(net([past, "x"], [present, "y"]), io="caches") == {past, present}


@pytest.mark.parametrize(
    "name", ["past_values", "past_time_features", "presentation", "past_key_values_length", "input"]
)
def test_other_names_are_not_taken_for_caches(name: str) -> None:
    model = net([name, "past_key_values.0.key"], ["y", "present.0.key"])
    assert lowered_names(model, io="caches") == {"past_key_values.0.key", "present.0.key"}
    with pytest.raises(PatternError, match=r"io 'caches': no float32 input or output is named like a key-value cache"):
        convert(net([name], ["y"]), io="caches")


def test_caches_already_in_the_type_are_accepted() -> None:
    model = net(["past_key_values.0.key"], ["present.0.key"], TensorProto.FLOAT16)
    assert "past_key_values.0.key" in lowered_names(model, io="caches")
