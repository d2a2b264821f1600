"""Key-value caches: which names are theirs, and the types that they get."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from amp_rewrite import convert
from amp_rewrite.errors import PatternError, PolicyError


def net(inputs: list[str], outputs: list[str], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a model with inputs that are each an output, plus their sum."""
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in zip(inputs, outputs, strict=True)]
    nodes.append(helper.make_node("Sum", inputs, ["sum"]))
    given = [helper.make_tensor_value_info(name, kind, [2]) for name in inputs]
    made = [helper.make_tensor_value_info(name, kind, [2]) for name in (*outputs, "sum")]
    graph = helper.make_graph(nodes, "g", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def low(model: onnx.ModelProto, **options: str) -> set[str]:
    proto = convert(model, **options).model  # type: ignore[arg-type]
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
    assert low(net([past, "x"], [present, "y"]), kv="float16") == {past, present}


@pytest.mark.parametrize(
    "name", ["past_values", "past_time_features", "presentation", "past_key_values_length", "input"]
)
def test_other_names_are_not_those_of_caches(name: str) -> None:
    model = net([name, "past_key_values.0.key"], ["y", "present.0.key"])
    assert low(model, kv="float16") == {"past_key_values.0.key", "present.0.key"}
    with pytest.raises(PatternError, match=r"kv='?float16'?: no float32 input or output is named as a key-value cache"):
        convert(net([name], ["y"]), kv="float16")


def test_a_rule_for_inputs_and_outputs_wins_over_that_of_caches() -> None:
    model = net(["past_key_values.0.key", "past_key_values.1.key"], ["present.0.key", "present.1.key"])
    assert low(model, kv="float16", io="*.1.key=float32") == {"past_key_values.0.key", "present.0.key"}


def test_caches_that_have_the_type_already_are_no_error() -> None:
    model = net(["past_key_values.0.key"], ["present.0.key"], TensorProto.FLOAT16)
    assert "past_key_values.0.key" in low(model, kv="float16")


@pytest.mark.parametrize(
    ("kv", "message"),
    [("bfloat16", "the model is lowered to float16; use float16 or float32 here"), ("half8", "half8")],
)
def test_another_type_than_the_low_one_is_refused(kv: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((PatternError, PolicyError), match=message):
        convert(net(["past_0"], ["present_0"]), kv=kv)  # type: ignore[arg-type]
