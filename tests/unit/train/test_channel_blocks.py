"""Convolutions of a step in blocks of channels: which ones, and that their numbers stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.step import execution
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update import channel_blocks
from amp_rewrite.train.update.channel_blocks import channel_block, in_channel_blocks
from support.train.nets import PLACE, parsed

BLOCK = channel_block()
needs_layout = pytest.mark.skipif(not BLOCK, reason="this CPU's kernels have no such layout")
TAKEN = {
    "plain": "Conv(x, w)",
    "bias": "Conv<pads=[1,1,1,1]>(x, w, b)",
    "strides and uneven padding": "Conv<strides=[2,1], pads=[0,1,2,0]>(x, w)",
    "dilation": "Conv<dilations=[2,1], pads=[1,1,1,1]>(x, w, b)",
    "transposed": "ConvTranspose(x, w)",
    "transposed, padding": "ConvTranspose<pads=[1,0,2,1]>(x, w, b)",
    "transposed, dilation": "ConvTranspose<dilations=[1,2], pads=[0,2,1,1]>(x, w)",
}
LEFT = {
    "groups": "Conv<group=2>(x, half)",
    "padding by dims": 'Conv<auto_pad="SAME_UPPER">(x, w)',
    "pointwise": "Conv(x, point)",
    "few channels": "Conv(x, few)",
    "constant weight": "Conv(x, c)",
    "transposed, strides": "ConvTranspose<strides=[2,2]>(x, w)",
    "transposed, padding beyond the window": "ConvTranspose<pads=[3,0,0,0]>(x, w)",
    "transposed, output padding": "ConvTranspose<strides=[1,1], dilations=[2,2], output_padding=[1,1]>(x, w)",
    "transposed, output shape": "ConvTranspose<output_shape=[8,7]>(x, w)",
}


def convolution(text: str, block: int) -> Model:
    n = 2 * block
    weights = f"float[{n},{n},3,2] w, float[{n},{n},1,1] point, float[{n},{block},3,3] half, float[3,{n},3,3] few"
    inputs = f"float[2,{n},6,5] x, float[{n}] b, {weights}"
    model = parsed(f"g ({inputs}) => (float[2,m,h,v] y) {{ y = {text} }}")
    constant = np.ones((n, n, 3, 3), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(constant, "c"))
    return Model(model)


def blocked(model: Model) -> bool:
    return any(node.domain for node in model.proto.graph.node)


@needs_layout
@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_blocks_of_channels_change_the_last_bits_alone(text: str) -> None:
    plain = convolution(text, BLOCK)
    model = in_channel_blocks(plain)
    random = np.random.default_rng(0)
    feeds = {
        p.name: random.standard_normal([int(d) for d in p.shape or ()]).astype(np.float32)
        for p in Runner.open(plain).inputs
    }
    y, other = (Runner.open(m).run(feeds)["y"] for m in (plain, model))

    assert blocked(model) and y.shape == other.shape
    np.testing.assert_allclose(y, other, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_other_convolutions_stay(text: str) -> None:
    model = convolution(text, 8)
    assert in_channel_blocks(model, 8) is model


def test_half_convolutions_stay() -> None:
    types = "float16[2,16,6,5] x, float16[16,16,3,2] w"
    model = Model(parsed(f"g ({types}) => (float16[2,16,4,4] y) {{ y = Conv(x, w) }}"))
    assert in_channel_blocks(model, 8) is model


def test_without_such_kernels_nothing_changes() -> None:
    model = convolution("Conv(x, w)", 8)
    assert blocked(in_channel_blocks(model, 8)) and in_channel_blocks(model, 0) is model


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
def test_the_size_of_a_block_is_asked_where_kernels_are_known(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(channel_blocks.platform, "machine", lambda: machine)
    monkeypatch.setattr(channel_blocks, "_computes_in", lambda size: bool(asked.append(size)) or size == 8)
    assert channel_block.__wrapped__() == (0 if machine == "aarch64" else 8)
    assert asked == ([] if machine == "aarch64" else [16, 8])


def test_kernels_that_refuse_the_layout_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> Runner:
        raise ModelError("no such operator")

    monkeypatch.setattr(channel_blocks.Runner, "open", refused)
    assert not channel_blocks._computes_in(8)


@needs_layout
def test_a_block_of_another_size_computes_other_numbers() -> None:
    assert channel_blocks._computes_in(BLOCK) and not channel_blocks._computes_in(24 - BLOCK)


@needs_layout
def test_steps_train_in_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 2 * BLOCK
    random = np.random.default_rng(0)
    graph = f"""net (float[B,{n},6,6] x) => (float[B,{n}] y) {{
        h = Conv<pads=[1,1,1,1]>(x, w) r = Relu(h) i = Conv<strides=[2,2]>(r, v)
        p = GlobalAveragePool(i) y = Flatten(p) }}"""
    model = parsed(graph)
    for name in ("w", "v"):
        weight = random.standard_normal((n, n, 3, 3)).astype(np.float32) / 16
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    step = training_step(model, loss="mean_squared_error(y, t)", optimizer="sgd,lr=0.1", policy="float32")
    data = [{"x": random.standard_normal((4, n, 6, 6)).astype(np.float32), "t": np.ones((4, n), np.float32)}] * 5
    fast = Trainer(step, **PLACE)
    monkeypatch.setattr(execution, "in_channel_blocks", lambda model: model)
    plain = Trainer(step, **PLACE)

    assert blocked(fast._model) and not blocked(plain._model)
    losses = plain.fit(data).losses
    np.testing.assert_allclose(fast.fit(data).losses, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
