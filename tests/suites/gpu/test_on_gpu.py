"""Tests on a real GPU (`make gpu`), skipped elsewhere."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array

import amp_rewrite
from amp_rewrite import Feed, Model, Session
from amp_rewrite.files.protos import clone
from amp_rewrite.runtime.gpu import hardware
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_works
from amp_rewrite.train import Trainer, training_step
from amp_rewrite.train.replicas import SingleReplica
from suites.models.test_fixtures import batch
from support.contrib_models import ERF, LAYER_NORM, RMS_NORM, TANH, model_of, random_feed
from support.paths import ROOT, TESTS
from support.train.nets import CROSS_ENTROPY, batches, mlp, same
from support.train.processes import started
from support.train.replica import STEPS, Loop
from unit.deploy.test_serving import CNN, IMAGES, MLP

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_works(), reason="no CUDA provider opens here")]
MODELS = ROOT / "examples" / "models"
# Two of the 360 digits, as in the demo.
LOST_ANSWERS = 2


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    with np.load(MODELS / "digits_test.npz") as held_out:
        return held_out["x"]


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["digits_cnn", "digits_vit"])
def test_the_gpu_agrees_with_its_emulation(name: str, to: str, digits: np.ndarray) -> None:
    converted = amp_rewrite.convert(MODELS / f"{name}.onnx", to=to)
    real = Runner.open(converted.result, SessionOptions(providers=(CUDA, CPU)))
    twin = Runner.open(amp_rewrite.emulate(converted.result))
    assert real.provider == CUDA
    answers = [np.asarray(next(iter(r.run({"image": digits}).values()))).argmax(axis=1) for r in (real, twin)]
    assert np.count_nonzero(answers[0] != answers[1]) <= LOST_ANSWERS


def test_a_benchmark_reports_both_float32_baselines_and_memory(digits: np.ndarray) -> None:
    source = MODELS / "digits_vit.onnx"
    half = amp_rewrite.convert(source).result
    found = amp_rewrite.bench([source, half], {"image": digits}, rounds=2)
    assert found.provider == CUDA
    assert [e.name for e in found.entries] == ["digits_vit.onnx", "digits_vit.onnx with TF32", "model 1"]
    assert found.baselines == ("digits_vit.onnx", "digits_vit.onnx with TF32")
    assert all(entry.memory for entry in found.entries), found.notes


def test_half_precision_weights_take_less_gpu_memory(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[n, 4096] x) => (float[n, 4096] y) { y = MatMul (x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(from_array(np.full((4096, 4096), 0.01, np.float32), "w"))
    full, half = Model.load(model), amp_rewrite.convert(model).result
    found = amp_rewrite.bench([full, half], {"x": np.ones((1, 4096), np.float32)}, rounds=1)
    before, after = found.entries[0].memory, found.entries[-1].memory
    assert before is not None and after is not None
    # The weights take 64 MiB and 32 MiB; the libraries' own memory differs by a few.
    assert before - after > 20 << 20


# -- kinds of models ----------------------------------------------------------------------------------------

NEAR = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
"""The L2 distance from float32 allowed for a few layers of rounding: eight units in the last place."""
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
    """Open a model on the GPU; return a function that casts its inputs and returns float32.

    `settings` are options of the CUDA provider.
    """
    source = Model.load(model)
    options = {CUDA: {"use_tf32": "0", **settings}}
    runner = Runner.open(source, SessionOptions(providers=(CUDA, CPU), provider_options=options))
    assert runner.provider == CUDA

    def run(feed: Mapping[str, Any]) -> list[Array]:
        fed = next(iter(Feed.of(dict(feed), source)))
        return [np.asarray(value).astype(np.float32) for value in runner.run(fed).values()]

    return run


def distance(wanted: list[Array], got: list[Array]) -> float:
    """Return the distance over all outputs, relative to the expected norm."""
    a, b = (np.concatenate([x.ravel().astype(np.float64) for x in side]) for side in (wanted, got))
    assert np.isfinite(b).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def batch_of(name: str) -> tuple[Arrays, list[Array]]:
    """Return the inputs of an exported model and PyTorch's outputs."""
    return batch(name, "input"), list(batch(name, "output").values())


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_an_exported_transformer_agrees_with_pytorch(name: str, way: str) -> None:
    source, (inputs, wanted) = TESTS / "models" / f"{name}.onnx", batch_of(name)
    converted = amp_rewrite.convert(source, **OPTIONS[way])
    near = NEAR[OPTIONS[way].get("to", "float16")]
    assert distance(wanted, opened(converted.result)(inputs)) < near


@pytest.mark.parametrize("body", [LAYER_NORM, RMS_NORM, ERF, TANH], ids=["layer norm", "rms norm", "erf", "tanh"])
def test_operators_of_onnxruntime_agree_with_the_ops_they_replace(body: str) -> None:
    plain = model_of("t = Add (x, z)  " + body)
    converted = amp_rewrite.convert(plain, fuse="contrib", lower=["op=*"])
    feed = random_feed(plain)
    wanted = opened(plain)(feed)
    assert distance(wanted, opened(converted.result)(feed)) < NEAR["float16"]


def convolution(opset: int) -> onnx.ModelProto:
    """Build a convolution of 8 to 16 channels and a Relu, with random weights."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[2,8,16,16] x) => (float[2,16,16,16] y)
        {{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Relu (c) }}"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(0, 0.1, (16, 8, 3, 3)).astype(np.float32)
    model.graph.initializer.append(from_array(weight, "w"))
    return model


def images() -> Arrays:
    return {"x": np.random.default_rng(1).standard_normal((2, 8, 16, 16)).astype(np.float32)}


@pytest.mark.parametrize(("opset", "low"), [(20, False), (22, True)])
def test_a_convolution_is_bfloat16_if_the_provider_has_a_kernel(opset: int, low: bool) -> None:
    model = convolution(opset)
    converted = amp_rewrite.convert(model, to="bfloat16")
    types = {tensor.data_type for tensor in converted.model.graph.initializer}
    assert types == {onnx.TensorProto.BFLOAT16 if low else onnx.TensorProto.FLOAT}
    assert distance(opened(model)(images()), opened(converted.result)(images())) < NEAR["bfloat16"]


@pytest.mark.parametrize("to", ["float32", "float16"])
def test_channels_last_agrees_with_channels_first(to: str) -> None:
    model = convolution(20)
    model = model if to == "float32" else amp_rewrite.convert(model).result
    first, last = opened(model), opened(model, prefer_nhwc="1")
    assert distance(first(images()), last(images())) < 2.0**-10


@pytest.mark.parametrize("name", ["vit_dynamo22", "whisper_step_dynamo20", "gpt2_dynamo18"])
def test_a_recorded_graph_of_a_converted_model_gives_the_same_results(name: str) -> None:
    inputs, _ = batch_of(name)
    converted = amp_rewrite.convert(TESTS / "models" / f"{name}.onnx")
    fixed = clone(converted.model)
    for value in fixed.graph.input:  # a graph is recorded for fixed shapes
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
            dim.dim_value = size
    fixed = onnx.shape_inference.infer_shapes(fixed)
    wanted = opened(Model.load(fixed))(inputs)
    binding = Session(fixed, policy="float32", providers=[CUDA, CPU], cuda_graph=True).bind(inputs)
    for _ in range(3):  # two plain runs and one that records the graph
        binding.run()
    assert distance(wanted, [np.float32(value) for value in binding.arrays().values()]) < 2.0**-10


def test_decoding_with_a_half_precision_cache_gives_the_float32_tokens() -> None:
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
        answers = {}
        for runner in (float32, half):
            logits, *presents = runner({"input_ids": tokens, **pasts[runner]})
            seen = inputs[names[0]].shape[2]
            pasts[runner] = {k: v[:, :, -seen:] for k, v in zip(names, presents, strict=True)}
            answers[runner] = logits
        assert distance([answers[float32]], [answers[half]]) < NEAR["float16"]
        tokens = answers[float32].argmax(-1).astype(tokens.dtype)


STATE = """<ir_version: 10, opset_import: ["": 20]> g (float16[2, 8] state, float[2, 8] x) => (float16[2, 8] next)
    { h = Cast <to = 10> (x)  s = Add (state, h)  next = Add (s, s) }"""


def test_a_state_is_fed_back_without_leaving_the_gpu() -> None:
    session = Session(onnx.parser.parse_model(STATE), providers=[CUDA, CPU])
    x, state = np.full((2, 8), 0.25, np.float32), np.full((2, 8), 0.5, np.float16)
    wanted, on_device = state, session.bind({"state": state, "x": x}).inputs["state"]
    for _ in range(5):
        binding = session.bind({"state": on_device, "x": x})
        assert binding.inputs["state"].data_ptr() == on_device.data_ptr()
        on_device = binding.run()["next"]
        assert on_device.device_name() == "cuda"
        wanted = 2 * (wanted + np.float16(0.25))
    np.testing.assert_array_equal(np.asarray(on_device.numpy()), wanted)


# -- sessions ----------------------------------------------------------------------------------------------

LOW = """<ir_version: 10, opset_import: ["": 20]> g (bfloat16[2] b, float16[2] h) => (bfloat16[2] c, float16[2] i)
    { c = Add (b, b)  i = Add (h, h) }"""


def test_a_converted_model_runs_on_the_gpu_and_agrees_with_float32() -> None:
    if hardware().gpus[0].capability < (7, 0):
        pytest.skip("float16 is not faster on this GPU")
    session = Session(CNN, policy="mixed_float16", cache=None)
    assert (session.notes, session.converted, session.get_providers()) == ((), True, [CUDA, CPU])
    expected = Session(CNN, providers=[CPU]).run({"image": IMAGES})["probability"]
    found = session.run({"image": IMAGES})["probability"]
    # Probabilities of a five-layer network in float16: an error of at most ten eps of 2**-10.
    np.testing.assert_allclose(found, expected, atol=10 * 2.0**-10, rtol=0)


def test_low_types_travel_to_the_gpu_and_back() -> None:
    b, h = np.array([1, 2.5], ml_dtypes.bfloat16), np.float16([3, 4])
    binding = Session(onnx.parser.parse_model(LOW)).bind({"b": b, "h": h})
    assert {value.device_name() for value in binding.inputs.values()} == {"cuda"}
    found = binding.arrays()
    np.testing.assert_array_equal(found["c"], b + b)
    np.testing.assert_array_equal(found["i"], h + h)
    binding.feed({"b": h.astype(ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(binding.arrays()["c"], np.array([6, 8], ml_dtypes.bfloat16))


def test_a_recorded_graph_reads_the_newly_fed_values() -> None:
    session = Session(onnx.parser.parse_model(MLP), policy="mixed_float16", cache=None, cuda_graph=True)
    eye = np.eye(2, 8, dtype=np.float32)
    binding = session.bind({"x": eye})
    for factor in (1, 2, 3):
        expected = np.float32([[1, 2], [3, 4]]) * factor
        binding.feed({"x": factor * eye})
        np.testing.assert_array_equal(binding.arrays()["y"], expected)
        np.testing.assert_array_equal(session.run({"x": factor * eye})["y"], expected)


@pytest.mark.torch
def test_a_tensor_of_torch_on_the_gpu_is_not_copied() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    x, y = torch.eye(2, 8, device="cuda"), torch.zeros(2, 2, device="cuda")
    binding = Session(onnx.parser.parse_model(MLP)).bind({"x": x}, {"y": y})
    assert binding.inputs["x"].data_ptr() == x.data_ptr()
    binding.run()
    assert y.tolist() == [[1, 2], [3, 4]]


# -- training ----------------------------------------------------------------------------------------------

DATA = list(batches(100))


@pytest.mark.parametrize(("policy", "near"), [("float32", 1e-4), ("mixed_float16", 1e-2), ("mixed_bfloat16", 5e-2)])
def test_losses_on_the_gpu_match_those_on_the_cpu(policy: str, near: float) -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam,lr=0.01", policy=policy)
    there, here = Trainer(step), Trainer(step, providers=(CPU,))
    assert there.where.startswith("CUDAExecutionProvider")

    np.testing.assert_allclose(there.fit(DATA).losses, here.fit(DATA).losses, atol=near)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"policy": "float32", "loss_scale": 8}])
def test_a_run_resumed_on_the_gpu_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    step = training_step(mlp(), **{"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", **options})
    straight, first, second = (Trainer(step) for _ in range(3))
    straight.fit(DATA)
    first.fit(DATA[:40])
    first.save(tmp_path / "a.npz")
    second.load(tmp_path / "a.npz")
    second.fit(DATA[40:])

    assert same(straight.state, second.state)


@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_replicas_on_the_gpu_train_as_one_process(backend: str, world: int, tmp_path: Path) -> None:
    results = started(tmp_path, "--backend", backend, world=world)
    assert [code for code, _ in results] == [0] * world, results
    states = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world)]
    alone = Loop()
    for rows in batches(STEPS):
        alone.step(SingleReplica(), rows)

    assert all(same(states[0], state) for state in states)
    for name, value in alone.state.items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-3, atol=1e-4)
