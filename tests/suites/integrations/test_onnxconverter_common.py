"""`amp_rewrite.compat` as a replacement for onnxconverter-common and onnxruntime.transformers."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from amp_rewrite import compat
from suites.integrations.shipped import BERT, CNN, FULL, HALF, error_of, recorded
from support.paths import TESTS

pytest.importorskip("onnxconverter_common", reason="needs onnxconverter-common; make integrations sets it up")
ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime; make integrations sets it up")
pytest.importorskip("onnxruntime.transformers", reason="needs onnxruntime; make integrations sets it up")

MODELS = ("bert_ts13", "cnn_dynamo18", "gpt2_ts17", "lstm_ts13", "unet_ts15")
PEERS = {
    "onnxconverter_common.float16": ("convert_float_to_float16", "convert_float_to_float16_model_path"),
    "onnxconverter_common.auto_mixed_precision": ("auto_convert_mixed_precision",),
    "onnxconverter_common.auto_mixed_precision_model_path": ("auto_convert_mixed_precision_model_path",),
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
def test_every_argument_of_the_installed_release_is_known(module: str, name: str) -> None:
    ours = inspect.signature(getattr(compat, name)).parameters
    needed = inspect.signature(theirs(module, name)).parameters
    assert needed.keys() <= ours.keys()
    places = [n for n, p in ours.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert list(needed)[: len(places)] == places


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("module", ["onnxconverter_common.float16", "onnxruntime.transformers.float16"])
def test_inputs_and_outputs_get_the_same_types(module: str, model: str, keep: bool) -> None:
    source = TESTS / "models" / f"{model}.onnx"
    peer = theirs(module, "convert_float_to_float16")(onnx.load(source), keep_io_types=keep)
    assert io_types(compat.convert_float_to_float16(onnx.load(source), keep_io_types=keep)) == io_types(peer)


def matrices(model: onnx.ModelProto, op_type: str, name: str = "") -> set[int]:
    """Return the weight types of an operator's nodes, or of one node, after any Cast."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    cast = {node.output[0]: node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"}
    nodes = [node for node in model.graph.node if node.op_type == op_type and name in ("", node.name)]
    known = [cast.get(node.input[1], types.get(node.input[1])) for node in nodes]
    return {kind for kind in known if kind is not None}


@pytest.mark.parametrize("module", ["onnxconverter_common.float16", "onnxruntime.transformers.float16"])
def test_the_same_ops_and_nodes_are_blocked(module: str) -> None:
    source = onnx.load(CNN)
    first = next(node.name for node in source.graph.node if node.op_type == "Conv")
    peer = theirs(module, "convert_float_to_float16")
    for convert in (peer, compat.convert_float_to_float16):
        blocked = convert(onnx.load(CNN), op_block_list=["Conv"], keep_io_types=True)
        assert matrices(blocked, "Conv") == {FULL}
        one = convert(onnx.load(CNN), node_block_list=[first], keep_io_types=True)
        assert matrices(one, "Conv", first) == {FULL}
        assert matrices(one, "Conv") == {FULL, HALF}


def test_a_half_precision_model_is_refused_on_request_alike() -> None:
    peer = theirs("onnxconverter_common.float16", "convert_float_to_float16")
    half = compat.convert_float_to_float16(onnx.load(BERT))
    for convert in (peer, compat.convert_float_to_float16):
        with pytest.raises(ValueError):
            convert(half, check_fp16_ready=True)


def test_the_conversion_of_a_file_is_as_accurate() -> None:
    peer = theirs("onnxconverter_common.float16", "convert_float_to_float16_model_path")
    models = [convert(str(CNN), keep_io_types=True) for convert in (peer, compat.convert_float_to_float16_model_path)]
    there, here = (error_of(model, CNN) for model in models)
    assert 0 < here < 1.5 * there


def test_a_search_meets_the_same_bound(tmp_path: Path) -> None:
    bound = {"rtol": 0.01, "atol": 0.005}
    batch, wanted = recorded("input", CNN), recorded("output", CNN)
    auto = theirs("onnxconverter_common.auto_mixed_precision", "auto_convert_mixed_precision")
    path = theirs("onnxconverter_common.auto_mixed_precision_model_path", "auto_convert_mixed_precision_model_path")
    models = [
        convert(onnx.load(CNN), batch, **bound, keep_io_types=True)
        for convert in (auto, compat.auto_convert_mixed_precision)
    ]
    for number, convert in enumerate((path, compat.auto_convert_mixed_precision_model_path)):
        out = tmp_path / f"out{number}" / "half.onnx"
        convert(str(CNN), batch, str(out), ["CPUExecutionProvider"], location="w.data", **bound)
        assert {file.name for file in out.parent.iterdir()} == {"half.onnx", "w.data"}
        models.append(onnx.load(out))
    for model in models:
        assert HALF in matrices(model, "Conv")
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for expected, found in zip(wanted.values(), session.run(None, batch), strict=True):
            np.testing.assert_allclose(found, expected, **bound)
