"""Configurations that `amp-rewrite triton` prints, read with the protobuf messages of Triton's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format

import amp_rewrite
from amp_rewrite.integrations.triton import triton_config
from support.paths import ROOT, TESTS

pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]; make integrations sets it up")

MODELS = sorted([*(TESTS / "models").glob("*.onnx"), *(ROOT / "examples" / "models").glob("*.onnx")])


def parsed(text: str) -> Any:
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(text, model_config_pb2.ModelConfig())


def numpy_type(code: int) -> Any:
    from tritonclient.grpc import model_config_pb2
    from tritonclient.utils import triton_to_np_dtype

    return triton_to_np_dtype(model_config_pb2.DataType.Name(code).removeprefix("TYPE_"))


@pytest.mark.parametrize("io", ["keep", "low"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_triton_reads_the_types_and_ranks_of_the_converted_model(path: Path, io: str) -> None:
    half = amp_rewrite.convert(path, io=io)
    config = parsed(triton_config(half, name=path.stem))
    proto = half.result.proto
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in weights]
    assert config.name == path.stem
    for stated, values in ((config.input, inputs), (config.output, proto.graph.output)):
        assert [port.name for port in stated] == [value.name for value in values]
        for port, value in zip(stated, values, strict=True):
            tensor = value.type.tensor_type
            assert np.dtype(numpy_type(port.data_type)) == onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            rank = 0 if port.HasField("reshape") else len(port.dims)
            assert rank + (config.max_batch_size > 0) == len(tensor.shape.dim)


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash", "line\nbreak", "größe"])
def test_names_of_any_characters_come_back(name: str) -> None:
    assert parsed(triton_config(MODELS[0], name=name)).name == name
