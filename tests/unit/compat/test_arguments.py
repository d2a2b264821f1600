"""Words of other converters: each that one of them knows is answered by the word for it here."""

from __future__ import annotations

import warnings

import pytest

from amp_rewrite.compat.arguments import node_pattern, op_patterns, refuses_unknown, without_effect

# Arguments of onnxconverter-common, onnxruntime's converters, onnxmltools and ModelOpt AutoCast.
FOREIGN = {
    "nodes_to_exclude": "keep=",
    "op_types_to_exclude": "keep=",
    "exclude_nodes": "keep=",
    "blocked_nodes": "keep=",
    "disabled_node_name_regex": "keep=",
    "nodes_to_include": "lower=",
    "op_types_to_include": "lower=",
    "op_allow_list": "lower=",
    "node_allow_list": "lower=",
    "low_precision_type": "to=",
    "dtype": "to=",
    "precision": "to=",
    "use_bfloat16": "to=",
    "io_types": "io=",
    "keep_inputs": "io=",
    "keep_outputs": "io=",
    "use_gpu_io": "io=",
    "target_opset": "opset=",
    "opset_version": "opset=",
    "data_max": "headroom=",
    "calibration_data": "data=",
    "feed_dict": "data=",
    "input_feed": "data=",
    "custom_rule": "lists=",
    "level": "level=",
}


@refuses_unknown
def converter(model: object, min_positive_val: float = 1e-7, op_block_list: object = None) -> object:
    return model


@pytest.mark.parametrize("word", FOREIGN)
def test_a_word_of_another_converter_is_answered_by_ours(word: str) -> None:
    with pytest.raises(TypeError) as caught:
        converter("model", **{word: 1})
    assert str(caught.value) == (
        f"converter() got an unexpected keyword argument {word!r}; amp_rewrite.convert takes {FOREIGN[word]} for it"
    )


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("min_positive_value", "min_positive_val"),
        ("nothing_of_the_kind", "it takes model, min_positive_val, op_block_list"),
    ],
)
def test_a_word_that_no_converter_knows_gets_the_nearest_or_all(word: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        converter("model", **{word: 1})


def test_known_words_pass() -> None:
    assert converter("model", min_positive_val=0, op_block_list=["Softmax"]) == "model"


@pytest.mark.parametrize(("value", "warned"), [(None, False), (False, False), (0, True), (True, True), ("x", True)])
def test_only_what_was_given_is_said_to_have_no_effect(value: object, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without_effect({"name": value}, {"name": "nothing reads it"})
    assert [str(w.message) for w in caught] == [f"name={value!r} has no effect: nothing reads it"] * warned


@pytest.mark.parametrize(
    ("name", "pattern"), [("a/b_1.c", "a/b_1.c"), ("a b", r"re:\Aa\ b\Z"), ("a[0]", r"re:\Aa\[0\]\Z"), ("", r"re:\A\Z")]
)
def test_a_node_is_selected_by_exactly_its_name(name: str, pattern: str) -> None:
    assert node_pattern(name) == pattern


def test_an_op_type_is_selected_in_every_domain() -> None:
    assert op_patterns("Conv") == ("op=Conv", "op=*::Conv")
    assert op_patterns("A*,B") == (r"op=A[*]\,B", r"op=*::A[*]\,B")
