"""`amp-rewrite triton`: types of the converted model, dimensions, and the decision for a batch."""

from __future__ import annotations

import re
from pathlib import Path

import onnx.parser
import pytest
from click.testing import CliRunner

import amp_rewrite
from amp_rewrite.cli import program
from amp_rewrite.errors import ModelError, PolicyError
from amp_rewrite.integrations.triton import triton_config
from support.paths import TESTS

MODELS = TESTS / "models"


def of(ports: str) -> str:
    """The configuration of a model with these inputs and outputs, without computations; "float s" is a scalar."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {ports} {{ }}')
    for value in (*model.graph.input, *model.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return triton_config(model, name="m")


def dims(config: str) -> list[str]:
    return re.findall(r"dims: \[ (.*) \]", config)


def test_the_types_are_those_of_the_converted_model_and_the_batch_is_left_out() -> None:
    half = amp_rewrite.convert(MODELS / "unet_ts15.onnx", io="low")
    assert (
        triton_config(half, name="unet")
        == """name: "unet"
backend: "onnxruntime"
max_batch_size: 4
input [
  {
    name: "sample"
    data_type: TYPE_FP16
    dims: [ 4, 16, 16 ]
  },
  {
    name: "timestep"
    data_type: TYPE_INT64
    dims: [ 1 ]
    reshape: { shape: [ ] }
  }
]
output [
  {
    name: "noise"
    data_type: TYPE_FP16
    dims: [ 4, 16, 16 ]
  }
]
"""
    )


@pytest.mark.parametrize(
    ("ports", "size", "expected"),
    [
        ("(float[n,3] x, int64[n,s] i) => (float[n,s] y)", 4, ["3", "-1", "-1"]),
        ("(float[n,3] x) => (float[other,3] y)", 4, ["3", "3"]),  # exporters name dimensions of outputs anew
        ("(float[n,3] x, float[s,3] c) => (float[n,3] y)", 0, ["-1, 3", "-1, 3", "-1, 3"]),
        ("(float[n,n] x) => (float[n] y)", 0, ["-1, -1", "-1"]),
        ("(float[n,3] x) => (float[3] y)", 0, ["-1, 3", "3"]),
        ("(float[2,3] x) => (float[2,3] y)", 0, ["2, 3", "2, 3"]),
        ("(float[?,3] x, float[?,3] c) => (float[?,3] y)", 0, ["-1, 3", "-1, 3", "-1, 3"]),
        ("(float[n,3] x, float s) => (float[n,3] y)", 0, ["-1, 3", "1", "-1, 3"]),
    ],
)
def test_a_model_is_batched_where_one_dimension_comes_first_everywhere(ports: str, size: int, expected: list) -> None:
    config = of(ports)
    assert f"max_batch_size: {size}\n" in config
    assert dims(config) == expected


def test_the_batch_may_be_stated_and_is_refused_where_there_is_none() -> None:
    batched, fixed = MODELS / "bert_ts13.onnx", MODELS / "loop_ts16.onnx"
    assert dims(triton_config(batched, max_batch_size=32)) == ["-1", "-1", "-1, 32", "32"]
    assert dims(triton_config(batched, max_batch_size=0)) == ["-1, -1", "-1, -1", "-1, -1, 32", "-1, 32"]
    with pytest.raises(PolicyError, match="max_batch_size 8 needs a batch"):
        triton_config(fixed, max_batch_size=8)
    with pytest.raises(PolicyError, match="invalid max_batch_size -1"):
        triton_config(batched, max_batch_size=-1)


def test_a_weight_that_is_an_input_too_is_none_of_the_configuration() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 9]> g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}>'
        " { y = Add(x, w) }"
    )
    assert triton_config(model).count("name:") == 3


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ("(seq(float[2]) x) => (float[2] y)", "input 'x' is a seq, and Triton takes tensors alone"),
        ("(float[2] x) => (float8e5m2[2] y)", "output 'y' has type float8e5m2, which Triton lacks"),
    ],
)
def test_what_triton_lacks_is_an_error_that_names_it(ports: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        of(ports)


def test_an_output_without_a_shape_is_an_error() -> None:
    model = onnx.load(MODELS / "vit_ts17.onnx")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="output 'logits' has no shape, and Triton needs its rank"):
        triton_config(model)


def test_the_command_prints_or_writes_the_file_with_its_folders(tmp_path: Path) -> None:
    model = str(MODELS / "bert_ts13.onnx")
    shown = CliRunner().invoke(program, ["triton", model])
    assert shown.output == triton_config(model)
    assert 'name: "bert_ts13"\n' in shown.output
    assert 'default_model_filename: "bert_ts13.onnx"\n' in shown.output
    out = tmp_path / "repository" / "bert" / "config.pbtxt"
    done = CliRunner().invoke(program, ["triton", model, "--name", "bert", "--max-batch-size", "8", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text("utf-8") == triton_config(model, name="bert", max_batch_size=8)
    assert (
        CliRunner().invoke(program, ["triton", str(MODELS / "loop_ts16.onnx"), "--max-batch-size", "8"]).exit_code == 2
    )
