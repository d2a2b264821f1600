"""Shipped models by onnxconverter-common and onnxruntime.transformers, and by `amp_rewrite.compat` in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import onnx
import pytest

from amp_rewrite import compat
from support.paths import TESTS

pytest.importorskip("onnxconverter_common", reason="needs onnxconverter-common; make integrations sets it up")
pytest.importorskip("onnxruntime.transformers", reason="needs onnxruntime; make integrations sets it up")

MODELS = ("bert_ts13", "cnn_dynamo18", "gpt2_ts17", "lstm_ts13", "unet_ts15")
PEERS = {
    "onnxconverter_common.float16": ("convert_float_to_float16", "convert_float_to_float16_model_path"),
    "onnxconverter_common.auto_mixed_precision": ("auto_convert_mixed_precision",),
    "onnxruntime.transformers.float16": ("convert_float_to_float16",),
}


def theirs(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def io_types(model: onnx.ModelProto) -> list[tuple[str, int]]:
    weights = {tensor.name for tensor in model.graph.initializer}
    values = [v for v in (*model.graph.input, *model.graph.output) if v.name not in weights]
    return [(value.name, value.type.tensor_type.elem_type) for value in values]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PEERS.items() for name in names])
def test_the_installed_release_has_no_argument_that_is_unknown_here(module: str, name: str) -> None:
    ours = inspect.signature(getattr(compat, name)).parameters
    needed = inspect.signature(theirs(module, name)).parameters
    assert needed.keys() <= ours.keys()
    places = [n for n, p in ours.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(needed)[: len(places)] == places


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("module", ["onnxconverter_common.float16", "onnxruntime.transformers.float16"])
def test_inputs_and_outputs_get_the_types_that_they_get_there(module: str, model: str, keep: bool) -> None:
    source = TESTS / "models" / f"{model}.onnx"
    peer = theirs(module, "convert_float_to_float16")(onnx.load(source), keep_io_types=keep)
    assert io_types(compat.convert_float_to_float16(onnx.load(source), keep_io_types=keep)) == io_types(peer)
