"""Gradient checkpointing: the same bits, less memory alive, and what onnxruntime's optimizer leaves in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.step_file import load_step, save_step
from amp_rewrite.train.step.trainer import Trainer
from benchmarks.training.encoder import encoder
from support.train.nets import CROSS_ENTROPY, PLACE, batches, mlp, parsed

LOSS = "cross_entropy(logits, label)"


def encoder_step(recompute: int | None, policy: str = "float32", layers: int = 4, **options: Any) -> TrainingStep:
    return training_step(encoder(layers, 16, 8), loss=LOSS, policy=policy, recompute=recompute, **options)


def data(rows: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 8, 16)).astype(np.float32), "label": rng.integers(0, 4, rows)}


def compare(plain: TrainingStep, again: TrainingStep, batch: Mapping[str, Any], steps: int = 3) -> None:
    one, two = (Trainer(step, **PLACE) for step in (plain, again))
    histories = [trainer.fit([batch] * steps) for trainer in (one, two)]
    assert np.array_equal(histories[0].losses, histories[1].losses, equal_nan=True)
    assert histories[0].skipped == histories[1].skipped
    assert one.state.keys() == two.state.keys()
    assert all(array.tobytes() == two.state[name].tobytes() for name, array in one.state.items())


@pytest.mark.parametrize(("regions", "policy"), [(2, "float32"), (4, "float32"), (4, "mixed_float16")])
def test_an_encoder_learns_the_same_bits(regions: int, policy: str) -> None:
    compare(encoder_step(None, policy), encoder_step(regions, policy), data())


def test_a_nonfinite_batch_is_skipped_alike() -> None:
    batch = data()
    batch["x"][0, 0, 0] = np.inf
    compare(*(encoder_step(regions, "mixed_float16", 2) for regions in (None, 2)), batch, 1)


def test_other_models_and_settings_learn_the_same_bits() -> None:
    batch = next(batches(1))
    for options in ({"micro_batches": 2}, {"optimizer": "adam,clipnorm=1"}, {"loss_scale": 8.0}):
        steps = [training_step(mlp(), loss=CROSS_ENTROPY, recompute=regions, **options) for regions in (None, 2)]
        compare(steps[0], steps[1], batch)
    text = (
        "net (float[N, 1, 6, 6] x) => (float[N, 4] y)"
        " <float[4, 1, 3, 3] w, float[4] s, float[4] z, float[4] m, float[4] v>"
        " { c = Conv <pads = [1, 1, 1, 1]> (x, w)  n = BatchNormalization (c, s, z, m, v)  r = Relu (n)"
        " d = Dropout (r)  p = GlobalAveragePool (d)  y = Flatten (p) }"
    )
    model, rng = parsed(text), np.random.default_rng(0)
    fills = {"w": rng.normal(size=(4, 1, 3, 3)), "s": np.ones(4), "z": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    del model.graph.initializer[:]
    for name, array in fills.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    image = {"x": rng.normal(size=(5, 1, 6, 6)).astype(np.float32), "t": rng.integers(0, 4, 5)}
    steps = [training_step(model, loss=CROSS_ENTROPY, recompute=regions, training_mode=True) for regions in (None, 2)]
    compare(steps[0], steps[1], image)


def _filled(model: onnx.ModelProto, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = rng.uniform(0.1, 0.9, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


IMAGES = """net (float[N,1,8,8] x) => (float[N,4] y) {
  h = Conv (x, w1) n = BatchNormalization (h, s, z, m, v) g = Gelu (n) k = Conv (g, w2) r = Relu (k)
  p = GlobalAveragePool (r) f = Flatten (p) y = Gemm (f, w3) }"""
SEQUENCES = """net (float[N,7,6] x) => (float[N,4] y) { u = Transpose <perm = [1, 0, 2]> (x)
  q, last, c = LSTM <hidden_size = 5> (u, w, r) i = Constant <value_ints = [0]> () f = Squeeze (last, i)
  y = MatMul (f, o) }"""


@pytest.mark.parametrize("regions", [2, 3, 5])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_regions_without_gradients_and_bool_values_wait_for_nothing_of_their_own(regions: int, policy: str) -> None:
    rng = np.random.default_rng(1)
    images = _filled(parsed(IMAGES), w1=(4, 1, 3, 3), s=(4,), z=(4,), m=(4,), v=(4,), w2=(8, 4, 3, 3), w3=(8, 4))
    sequences = _filled(parsed(SEQUENCES), w=(1, 20, 6), r=(1, 20, 5), o=(5, 4))
    for model, shape in ((images, (6, 1, 8, 8)), (sequences, (6, 7, 6))):
        batch = {"x": rng.normal(size=shape).astype(np.float32), "t": rng.integers(0, 4, 6)}
        options: dict[str, Any] = {"loss": CROSS_ENTROPY, "policy": policy}
        compare(training_step(model, **options), training_step(model, recompute=regions, **options), batch)


def test_onnxruntime_leaves_the_recomputed_regions_in_place(tmp_path: Path) -> None:
    counts = []
    for regions in (None, 4):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 3
        step = encoder_step(regions)
        onnxruntime.InferenceSession(step.model.proto.SerializeToString(), options, ["CPUExecutionProvider"])
        counts.append(Counter(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node))

    assert counts[0]["Softmax"] == 4 and counts[1]["Softmax"] == 4 + 3  # of 4 regions, all but the last once more
    assert counts[1]["LayerNormalization"] >= counts[0]["LayerNormalization"] + 6 and counts[1]["Where"] >= 3


def test_a_file_holds_the_recomputation(tmp_path: Path) -> None:
    save_step(encoder_step(4), tmp_path / "step.onnx")
    again = load_step(tmp_path / "step.onnx", forward=encoder(4, 16, 8))
    compare(encoder_step(None), again, data())


@pytest.mark.parametrize("regions", [0, 1, 2.5, True, "4", 100_000])
def test_a_number_of_regions_that_is_none_says_so(regions: Any) -> None:
    with pytest.raises(TrainingError, match=r"^recompute is .*; use "):
        training_step(mlp(), loss=CROSS_ENTROPY, recompute=regions)
