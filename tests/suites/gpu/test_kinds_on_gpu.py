"""Kinds of models on a real GPU: what a conversion makes of each runs there, and gives its numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import amp_rewrite
from amp_rewrite import Feed, Model, Session
from amp_rewrite.files.protos import clone
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from suites.models.test_fixtures import batch
from support.contrib_models import ERF, LAYER_NORM, RMS_NORM, TANH, model_of, random_feed
from support.paths import TESTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_opens(), reason="no CUDA provider opens here"),
]
PROVIDERS = (CUDA, CPU)
NEAR = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Distance (L2) from float32 that a few layers of rounding stay below: eight units in the last place."""
TRANSFORMERS = (
    "bert_dynamo20",
    "gpt2_dynamo18",
    "llama_dynamo21",
    "t5_dynamo18",
    "vit_dynamo22",
    "whisper_step_dynamo20",
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "basic": {},
    "contrib": {"fuse": "contrib"},
    "opset": {"opset": "auto"},
    "bfloat16": {"to": "bfloat16"},
    "low inputs": {"io": "low"},
}
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Run = Callable[[Mapping[str, Any]], list[Array]]


def opened(model: Any, **settings: str) -> Run:
    """Open a model on the GPU; return what runs it, on floats in the types that it declares, and gives float32.

    `settings` are options of the CUDA provider.
    """
    source = Model.load(model)
    options = {CUDA: {"use_tf32": "0", **settings}} if PROVIDERS[0] == CUDA else {}
    runner = Runner.open(source, SessionOptions(providers=PROVIDERS, provider_options=options))
    assert runner.provider == PROVIDERS[0]

    def run(feed: Mapping[str, Any]) -> list[Array]:
        fed = next(iter(Feed.of(dict(feed), source)))
        return [np.asarray(value).astype(np.float32) for value in runner.run(fed).values()]

    return run


def distance(wanted: list[Array], got: list[Array]) -> float:
    """Return the distance over all outputs, relative to what is wanted."""
    a, b = (np.concatenate([x.ravel().astype(np.float64) for x in side]) for side in (wanted, got))
    assert np.isfinite(b).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def batch_of(name: str) -> tuple[Arrays, list[Array]]:
    """Return the inputs of an exported model, and what PyTorch made of them."""
    return batch(name, "input"), list(batch(name, "output").values())


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_exported_transformer_gives_the_numbers_of_pytorch(name: str, way: str) -> None:
    source, (inputs, wanted) = TESTS / "models" / f"{name}.onnx", batch_of(name)
    converted = amp_rewrite.convert(source, **OPTIONS[way])
    near = NEAR[OPTIONS[way].get("to", "float16")]
    assert distance(wanted, opened(converted.result)(inputs)) < near


@pytest.mark.parametrize("body", [LAYER_NORM, RMS_NORM, ERF, TANH], ids=["layer norm", "rms norm", "erf", "tanh"])
def test_operators_of_onnxruntime_give_the_numbers_of_what_they_replace(body: str) -> None:
    plain = model_of("t = Add (x, z)  " + body)
    converted = amp_rewrite.convert(plain, fuse="contrib", lower=["op=*"])
    feed = random_feed(plain)
    wanted = opened(plain)(feed)
    assert distance(wanted, opened(converted.result)(feed)) < NEAR["float16"]


def convolution(opset: int, low: str = "float") -> onnx.ModelProto:
    """A convolution of 8 to 16 channels and a Relu, with drawn weights."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]> g ({low}[2,8,16,16] x) => ({low}[2,16,16,16] y)
        {{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Relu (c) }}"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(0, 0.1, (16, 8, 3, 3)).astype(np.float32)
    model.graph.initializer.append(from_array(weight, "w"))
    return model


def images() -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((2, 8, 16, 16)).astype(np.float32)}


@pytest.mark.parametrize(("opset", "low"), [(20, False), (22, True)])
def test_a_convolution_is_bfloat16_where_the_provider_has_a_kernel(opset: int, low: bool) -> None:
    model = convolution(opset)
    converted = amp_rewrite.convert(model, to="bfloat16")
    types = {tensor.data_type for tensor in converted.model.graph.initializer}
    assert types == {onnx.TensorProto.BFLOAT16 if low else onnx.TensorProto.FLOAT}
    assert distance(opened(model)(images()), opened(converted.result)(images())) < NEAR["bfloat16"]


@pytest.mark.parametrize("to", ["float32", "float16"])
def test_channels_last_gives_the_numbers_of_channels_first(to: str) -> None:
    model = convolution(20)
    model = model if to == "float32" else amp_rewrite.convert(model).result
    first, last = opened(model), opened(model, **({"prefer_nhwc": "1"} if PROVIDERS[0] == CUDA else {}))
    assert distance(first(images()), last(images())) < 2.0**-10


@pytest.mark.parametrize("name", ["vit_dynamo22", "whisper_step_dynamo20", "gpt2_dynamo18"])
def test_a_recorded_graph_of_a_converted_model_gives_the_same_numbers(name: str) -> None:
    inputs, _ = batch_of(name)
    converted = amp_rewrite.convert(TESTS / "models" / f"{name}.onnx")
    fixed = clone(converted.model)
    for value in fixed.graph.input:  # a graph is recorded for fixed shapes
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
            dim.dim_value = size
    fixed = onnx.shape_inference.infer_shapes(fixed)
    wanted = opened(Model.load(fixed))(inputs)
    settings = {"providers": list(PROVIDERS), "cuda_graph": PROVIDERS[0] == CUDA}
    binding = Session(fixed, policy="float32", **settings).bind(inputs)
    for _ in range(3):  # two plain runs, one that records, and what it replays
        binding.run()
    assert distance(wanted, [np.float32(value) for value in binding.arrays().values()]) < 2.0**-10


def test_decoding_with_a_cache_of_half_precision_says_what_float32_says() -> None:
    source, (inputs, _) = TESTS / "models" / "gpt2_dynamo18.onnx", batch_of("gpt2_dynamo18")
    names = [name for name in inputs if name.startswith("past")]
    float32 = opened(source)
    converted = amp_rewrite.convert(source, io=["past_*=float16", "present_*=float16"])
    declared = {
        v.name: v.type.tensor_type.elem_type for v in (*converted.model.graph.input, *converted.model.graph.output)
    }
    caches = {t for name, t in declared.items() if name.startswith(("past", "present"))}
    assert caches == {onnx.TensorProto.FLOAT16}
    half = opened(converted.result)
    pasts = {runner: {name: inputs[name] for name in names} for runner in (float32, half)}
    tokens = inputs["input_ids"]
    for _ in range(6):
        said = {}
        for runner in (float32, half):
            logits, *presents = runner({"input_ids": tokens, **pasts[runner]})
            seen = inputs[names[0]].shape[2]
            pasts[runner] = {k: v[:, :, -seen:] for k, v in zip(names, presents, strict=True)}
            said[runner] = logits
        assert distance([said[float32]], [said[half]]) < NEAR["float16"]
        tokens = said[float32].argmax(-1).astype(tokens.dtype)


STATE = """<ir_version: 10, opset_import: ["": 20]> g (float16[2, 8] state, float[2, 8] x) => (float16[2, 8] next)
    { h = Cast <to = 10> (x)  s = Add (state, h)  next = Add (s, s) }"""


def test_a_state_goes_from_run_to_run_without_leaving_the_gpu() -> None:
    session = Session(onnx.parser.parse_model(STATE), providers=list(PROVIDERS))
    x, state = np.full((2, 8), 0.25, np.float32), np.full((2, 8), 0.5, np.float16)
    wanted, on_device = state, session.bind({"state": state, "x": x}).inputs["state"]
    for _ in range(5):
        binding = session.bind({"state": on_device, "x": x})
        assert binding.inputs["state"].data_ptr() == on_device.data_ptr()
        on_device = binding.run()["next"]
        assert on_device.device_name() == ("cuda" if PROVIDERS[0] == CUDA else "cpu")
        wanted = 2 * (wanted + np.float16(0.25))
    np.testing.assert_array_equal(np.asarray(on_device.numpy()), wanted)
