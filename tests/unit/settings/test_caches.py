"""Key-value caches: which names are theirs, and the types that they get."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from amp_rewrite import convert
from amp_rewrite.errors import PatternError


def net(inputs: list[str], outputs: list[str], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a model with inputs that are each an output, plus their sum."""
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in zip(inputs, outputs, strict=True)]
    nodes.append(helper.make_node("Sum", inputs, ["sum"]))
    given = [helper.make_tensor_value_info(name, kind, [2]) for name in inputs]
    made = [helper.make_tensor_value_info(name, kind, [2]) for name in (*outputs, "sum")]
    graph = helper.make_graph(nodes, "g", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def low(model: onnx.ModelProto, io: str | list[str]) -> set[str]:
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
def test_names_of_exporters_are_those_of_caches(past: str, present: str) -> None:
    assert low(net([past, "x"], [present, "y"]), io="caches") == {past, present}


@pytest.mark.parametrize(
    "name", ["past_values", "past_time_features", "presentation", "past_key_values_length", "input"]
)
def test_other_names_are_not_those_of_caches(name: str) -> None:
    model = net([name, "past_key_values.0.key"], ["y", "present.0.key"])
    assert low(model, io="caches") == {"past_key_values.0.key", "present.0.key"}
    with pytest.raises(PatternError, match=r"io 'caches': no float32 input or output is named as a key-value cache"):
        convert(net([name], ["y"]), io="caches")


def test_caches_that_have_the_type_already_are_no_error() -> None:
    model = net(["past_key_values.0.key"], ["present.0.key"], TensorProto.FLOAT16)
    assert "past_key_values.0.key" in low(model, io="caches")
