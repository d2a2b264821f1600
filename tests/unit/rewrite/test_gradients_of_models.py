"""Gradients of networks as exporters write them: along a random direction they are the slope of the loss."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from amp_rewrite import View, gradients
from amp_rewrite.files.model import Model
from support.paths import TESTS
from support.train.vjp_case import Feed, evaluator, run_float32, widened, widened_feed

MODELS = TESTS / "models"
NAMES = (
    "bert_dynamo20",
    "cnn_dynamo18",
    "gpt2_ts17",
    "if_dynamo20",
    "if_ts13",
    "llama_dynamo21",
    "llama_ts16",
    "loop_dynamo21",
    "loop_ts16",
    "moe_dynamo21",
    "moe_ts17",
    "t5_dynamo18",
    "vit_dynamo22",
    "vit_ts17",
    "whisper_encoder_dynamo19",
    "whisper_step_dynamo20",
)
IN_FLOAT32 = ("llama_dynamo23", "bert_dynamo23", "unet_ts15", "cnn_ts13", "lstm_dynamo18")
"""With operators that the standard has no float64 of, that take long without a kernel, or that no judge has right."""

_STEP = 1e-5
_CLOSE = 1e-6
"""Of a float64 difference in steps of 1e-5 along a direction of length 1: h²/6 times third derivatives of 1e4."""
_CLOSE_FLOAT32 = 5e-3
"""Of float32: a step of 1e-3 makes 1e-4 of the slope out of 2⁻²⁴ of the loss, and passes some kinks of Relu."""


def with_loss(name: str) -> ModelProto:
    """The model with a weighted mean of its first output as one more output, "loss"."""
    model = onnx.load(str(MODELS / f"{name}.onnx"))
    first = model.graph.output[0].name
    shape = run_float32(model, feed_of(name, model), [first])[0].shape
    weights = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "loss_weights"))
    model.graph.node.append(helper.make_node("Mul", [first, "loss_weights"], ["weighted"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["weighted"], ["loss"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, ()))
    return model


def feed_of(name: str, model: ModelProto) -> Feed:
    constants = {t.name for t in model.graph.initializer}
    with np.load(MODELS / f"{name}.npz") as stored:
        return {v.name: stored[f"input/{v.name}"] for v in model.graph.input if v.name not in constants}


def parameters(model: ModelProto) -> dict[str, np.ndarray]:
    found = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        n: a for n, a in found.items() if a.dtype in (np.float32, np.float64) and a.ndim > 1 and n != "loss_weights"
    }


def promoted(model: ModelProto) -> ModelProto:
    """The parameters as inputs."""
    out = ModelProto()
    out.CopyFrom(model)
    names = parameters(model)
    for tensor in [t for t in out.graph.initializer if t.name in names]:
        if tensor.name not in {v.name for v in out.graph.input}:
            out.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        out.graph.initializer.remove(tensor)
    return out


@pytest.mark.parametrize("name", ["bert_dynamo20", "cnn_dynamo18", "if_ts13", "loop_ts16", "moe_ts17", "t5_dynamo18"])
def test_along_a_random_direction(name: str) -> None:
    model = widened(with_loss(name))
    feed, weights = widened_feed(feed_of(name, model)), parameters(model)
    made = gradients(model, "loss", list(weights)).to_proto()
    found = evaluator(made)(feed, [f"{n}_grad" for n in weights])
    rng = np.random.default_rng(3)
    ways = {n: rng.normal(size=w.shape) for n, w in weights.items()}
    length = np.sqrt(sum(float((d * d).sum()) for d in ways.values()))
    ways = {n: d / length for n, d in ways.items()}
    compute = evaluator(promoted(model))
    sides = [
        compute({**feed, **{n: w + step * ways[n] for n, w in weights.items()}}, ["loss"])[0].item()
        for step in (_STEP, -_STEP)
    ]
    slope = (sides[0] - sides[1]) / (2 * _STEP)
    mine = sum(float((g * ways[n]).sum()) for n, g in zip(weights, found, strict=True))
    size = np.sqrt(sum(float((g * g).sum()) for g in found))
    assert size > 0
    assert mine == pytest.approx(slope, rel=_CLOSE, abs=_CLOSE * size)


@pytest.mark.parametrize("name", (*NAMES, *IN_FLOAT32))
def test_along_the_gradient_itself_in_float32(name: str) -> None:
    model = with_loss(name)
    feed, weights = feed_of(name, model), parameters(model)
    made = gradients(model, "loss", list(weights)).to_proto()
    onnx.checker.check_model(made, full_check=True)
    View.of(Model(made))
    found = run_float32(made, feed, [f"{n}_grad" for n in weights])
    size = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in found))
    bare = promoted(model)
    sides = []
    for step in (1e-3, -1e-3):
        moved = {n: w + (step / size * g).astype(np.float32) for (n, w), g in zip(weights.items(), found, strict=True)}
        sides.append(run_float32(bare, {**feed, **moved}, ["loss"])[0].item())
    assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(size, rel=_CLOSE_FLOAT32)
