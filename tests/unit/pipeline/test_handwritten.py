"""Small models with one trap each: lowered ops, the rewrite's output, and unchanged results."""

from functools import cache

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from support import cases, corpus, objections
from support.counting import lowered_ops

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16

LOWERED = {
    "batch_norm_training": ("first second", 4, 1),
    "capture_of_lowered": ("before", 2, 1),
    "captures": ("outer weighed with_float with_lowered", 5, 2),
    "cast_like": ("first like second sum", 2, 0),
    "casts_that_fold": ("first lower public raise second", 2, 0),
    "constant_floats": ("first moved scaled second", 2, 2),
    "constant_of_shape": ("first moved ones scaled second zeros", 2, 0),
    "custom_domain": ("first last reads_known", 4, 0),
    "double_island": ("first narrow second widen", 2, 0),
    "dropout_training": ("dropped first second", 2, 0),
    "eye_like": ("first second", 4, 0),
    "function_of_integers": ("", 0, 0),
    "half_island": ("second", 2, 0),
    "if_branches_apart": ("after before lowered", 4, 0),
    "if_in_loop": ("deep mine outer", 4, 1),
    "initializers_as_inputs_ir3": ("first second", 2, 2),
    "input_is_output": ("lowered", 2, 0),
    "layer_norm_mean": ("first norm second", 2, 3),
    "local_function": ("first inside__1 relu__1 second", 4, 1),
    "loop_all_allowed": ("after allow before clear", 6, 1),
    "loop_from_deny": ("allow", 2, 0),
    "names_of_ours": ("x_float16_2_cast x_float16_cast", 4, 0),
    "no_node_names": ("MatMul_0 MatMul_3 Relu_2", 4, 0),
    "optionals": ("first second", 4, 0),
    "output_also_read": ("first gray second", 3, 0),
    "overridable_initializer": ("first second", 3, 1),
    "qdq13": ("first second", 4, 1),
    "qdq19": ("first second", 4, 1),
    "qdq21": ("first second", 4, 1),
    "random_normal_like": ("first second", 4, 0),
    "resize10": ("first second wider", 2, 1),
    "resize11": ("first second wider", 2, 1),
    "resize13": ("first second wider", 2, 1),
    "resize19": ("first second wider", 2, 1),
    "rotary": ("project", 2, 1),
    "rounding_pair": ("first round2", 1, 0),
    "same_names_in_branches": ("after before inner inner last", 7, 0),
    "scan": ("sum weighed weighed_again", 3, 1),
    "sequence_input": ("second", 2, 0),
    "sequences": ("count first item longer pair second", 3, 0),
    "strings_and_integers": ("", 0, 0),
    "tied_weights": ("first second turned", 2, 1),
    "upsample9": ("first second", 4, 1),
    "value_info": ("first gray second third", 4, 1),
    "weight_is_output": ("lowered", 2, 1),
    "weight_read_by_both": ("lowered", 2, 1),
    "weight_shared_with_branch": ("after before inner", 4, 1),
}
"""By model: lowered ops, inserted Casts and baked constants with default options."""

RANDOM = {"dropout_training", "random_normal_like"}
FOREIGN = {"custom_domain"}
BOUND = 16 * DType.FLOAT16.eps
"""Relative to the largest output: a few roundings of half an eps each, without amplification."""

every_model = pytest.mark.parametrize("name", corpus.TEXT_MODELS)


@cache
def converted(name: str) -> Converted:
    """Convert a text model with default options. The result is shared: never change it."""
    return convert(corpus.text_model(name))


def agree(before: ModelProto, after: ModelProto, **fed: np.ndarray) -> None:
    feeds = {**cases.feeds(before), **fed}
    first, second = objections.run(before, feeds), objections.run(after, feeds)
    assert objections.of_outputs(first, second, bound=BOUND) == []


def tensor(model: ModelProto, name: str) -> TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def node(model: ModelProto, name: str) -> object:
    return next(n for g in objections.graphs(model.graph) for n in g.node if n.name == name)


def attribute(model: ModelProto, name: str, key: str) -> object:
    return helper.get_node_attr_value(node(model, name), key)


@every_model
def test_the_right_ops_are_lowered_with_the_fewest_casts(name: str) -> None:
    result = converted(name)
    ops, casts, bakes = LOWERED[name]
    assert " ".join(lowered_ops(result.view, result.coloring)) == ops
    assert (len(result.plan.casts), len(result.plan.bakes)) == (casts, bakes)


@pytest.mark.parametrize("name", [name for name in corpus.TEXT_MODELS if name not in FOREIGN])
def test_the_model_computes_the_same(name: str) -> None:
    """The CPU provider computes most half ops in float32, so this finds wrong wiring but not lost digits."""
    model = corpus.text_model(name)
    feeds = cases.feeds(model)
    after = objections.run(converted(name).model, feeds)
    if name not in RANDOM:
        assert objections.of_outputs(objections.run(model, feeds), after, bound=BOUND) == []


def test_a_weight_shared_with_a_float_op_keeps_its_float32_copy_and_name() -> None:
    result = converted("weight_read_by_both").model
    assert sorted((t.name, t.data_type) for t in result.graph.initializer) == [("w", FLOAT), ("w_float16", HALF)]
    assert list(node(result, "stays").input) == ["w"]


def test_a_captured_value_is_cast_once_outside_the_loop() -> None:
    result = converted("captures").model
    outside = [n.input[0] for n in result.graph.node if n.op_type == "Cast"]
    inside = [n.input[0] for n in attribute(result, "loop", "body").node if n.op_type == "Cast"]
    assert (sorted(outside), inside) == (["a", "e", "x"], ["s", "r"])


def test_an_overridable_initializer_is_cast_in_the_graph() -> None:
    result = converted("overridable_initializer").model
    assert tensor(result, "w").data_type == FLOAT
    assert tensor(result, "v").data_type == HALF
    agree(corpus.text_model("overridable_initializer"), result, w=np.full((8, 8), 0.5, np.float32))


def test_the_default_of_a_low_input_is_low() -> None:
    model = corpus.text_model("overridable_initializer")
    assert tensor(convert(model, io="low").model, "w").data_type == HALF


@pytest.mark.parametrize("source", ["half", "int"])
def test_a_cast_that_the_user_lowers_still_serves_a_float_reader(source: str) -> None:
    model = cases.build("f=Cast[to=float](n);a=MatMul(f,f);d=Exp(f)", ["a", "d"], types={"n": source})
    result = convert(model, lower=["f"]).model
    assert objections.of_casts(result) == []
    agree(model, result)


def test_only_a_local_function_with_floats_is_inlined() -> None:
    assert [f.subject for f in converted("local_function").report.findings if f.kind == "inlined"] == [
        "here::Block",
        "here::Plain",
    ]
    untouched = corpus.text_model("function_of_integers")
    assert converted("function_of_integers").model.SerializeToString() == untouched.SerializeToString()


def with_function_of_another_opset(body: str, call: str) -> ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20, "here" : 1]>'
        f"g (float[8,8] x) => (float[8,8] y) {{ a = MatMul (x, x)  y = {call} (a) }}"
        f'<domain: "here", opset_import: ["" : 18]> F (p) => (r) {{ {body} }}'
    )


@pytest.mark.parametrize(("call", "ops"), [("here.F", ["MatMul", "MatMul", "Relu"]), ("Neg", ["MatMul", "Neg"])])
def test_a_function_may_import_another_opset_with_the_same_ops(call: str, ops: list[str]) -> None:
    """IR.md, "Model Local Functions"."""
    model = with_function_of_another_opset("q = MatMul (p, p)  r = Relu (q)", call)
    onnx.checker.check_model(model, full_check=True)
    result = convert(model)
    assert [node.op_type for node in result.model.graph.node if node.op_type != "Cast"] == ops
    assert objections.of_checker(result.model) == objections.of_loading(result.model) == []
    assert [f.opset_import[0].version for f in model.functions] == [18]


def test_a_function_of_an_opset_with_different_ops_is_refused() -> None:
    """Cast has another version in opset 20. onnx's checker also refuses the model."""
    model = with_function_of_another_opset("r = Cast <to = 1> (p)", "here.F")
    with pytest.raises(onnx.checker.ValidationError, match="not compatible"):
        onnx.checker.check_model(model)
    with pytest.raises(ModelError, match=r"Model has functions with incompatible opset versions\.$"):
        convert(model)


def test_readers_of_a_value_of_unknown_type_are_reported_as_left_behind() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[8,8] x) => (float[8,8] d)'
        "{ [a] a = MatMul (x, x)  [b] b = my.Foo (a)  [c] c = MatMul (b, b)  [d] d = my.Bar (c) }"
    )
    report = convert(model).report
    row = next(row for row in report.rows if row.name == "c")
    assert (row.dtype, row.rule, row.because) == ("unknown", "unknown_type", "b")
    assert (report.totals.compute_ops, report.totals.compute_lowered) == (2, 1)


def test_a_castlike_becomes_a_cast_without_its_second_input() -> None:
    model = cases.build("a=MatMul(x,x);c=CastLike(n,a);b=MatMul(c,a)", ["b"], types={"n": "int"})
    result = convert(model)
    assert (node(result.model, "c").op_type, list(node(result.model, "c").input)) == ("Cast", ["n"])
    assert attribute(result.model, "c", "to") == HALF
    assert len(result.plan.casts) == 2
    untouched = cases.build("c=CastLike(n,x);d=Exp(c)", ["d"], types={"n": "int"})
    assert convert(untouched).model == untouched


def test_only_a_sequence_between_allow_ops_is_lowered() -> None:
    types = objections.inferred_types(converted("sequences").model)
    assert (types["s"], types["s2"], types["t"], types["kept"]) == ({HALF}, {HALF}, {FLOAT}, {FLOAT})


def test_metadata_beside_the_graph_is_kept() -> None:
    model = corpus.with_everything_beside_the_graph()
    after = convert(model).model
    assert [p for p in after.metadata_props if p.key != "amp_rewrite"] == list(model.metadata_props)
    assert [p.key for p in after.metadata_props] == ["licence", "amp_rewrite"]
    for field in ("training_info", "opset_import", "functions"):
        assert list(getattr(after, field)) == list(getattr(model, field)), field
    for field in ("producer_name", "producer_version", "doc_string", "domain", "model_version", "ir_version"):
        assert getattr(after, field) == getattr(model, field), field
    for field in ("quantization_annotation", "metadata_props"):
        assert list(getattr(after.graph, field)) == list(getattr(model.graph, field)), field
    assert after.graph.doc_string == model.graph.doc_string
    first = node(after, "first")
    assert (first.doc_string, first.metadata_props[0].value) == ("words about a node", "layer 1")


def test_a_type_inferred_from_a_reader_is_inferred_again_after_lowering() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[2,8] x) => (float[2,1] y)'
        "<float[8,1] w = {1, 1, 1, 1, 1, 1, 1, 1}> { t = my.Op (x)  y = MatMul (t, w) }"
    )
    once = convert(model)
    assert list(lowered_ops(once.view, once.coloring)) == ["MatMul_1"]
    assert objections.of_checker(once.model) == []
    assert convert(once.model).plan.empty
