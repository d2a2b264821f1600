"""Small models, training data, and a minimal loop around a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto
from onnx.numpy_helper import from_array

from amp_rewrite.files.casting import Array
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.gpu import Gpu, Hardware
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train import policy as policies
from amp_rewrite.train.step.model_loss import ModelLoss
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.trainer import Trainer

F32 = np.float32
CROSS_ENTROPY = "cross_entropy(y, t)"
PLACE: dict[str, Any] = {"providers": ("CPUExecutionProvider",), "threads": 1}
SHAPES = {"w1": (8, 16), "b1": (16,), "w2": (16, 4), "b2": (4,)}


def mlp(seed: int = 0, opset: int = 20) -> ModelProto:
    """Two layers from x [N, 8] to y [N, 4]."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": {opset}]> net (float[N,8] x) => (float[N,4] y) {{
          [first] h = MatMul (x, w1)
          [bias] hb = Add (h, b1)
          [act] a = Relu (hb)
          [second] z = MatMul (a, w2)
          [out] y = Add (z, b2)
        }}"""
    )
    rng = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        model.graph.initializer.append(from_array(np.array(rng.normal(size=shape) * 0.3, np.float32), name))
    return model


def square(value: float = 1.0) -> ModelLoss:
    """v * v."""
    model = parsed(f"square () => (float loss) <float v = {{{value}}}> {{ loss = Mul (v, v) }}")
    return ModelLoss.of(model, "loss", parameters=["v"])


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a policy or a rewrite, but with a fast GPU."""
    monkeypatch.setattr(policies, "state", policies.ProcessSettings())
    monkeypatch.setattr(policies, "query_hardware", lambda: Hardware((Gpu("H200", (9, 0)),)))


def batches(count: int, rows: int = 16, seed: int = 1) -> Iterator[dict[str, Array]]:
    """Yield random rows `x` [rows, 8] and classes `t` [rows]: the largest of four random projections."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(8, 4))
    for _ in range(count):
        x = np.array(rng.normal(size=(rows, 8)), np.float32)
        yield {"x": x, "t": (x @ truth).argmax(1)}


def step(**options: Any) -> TrainingStep:
    """Build a step of `mlp`, by default in float16 with Adam."""
    return training_step(mlp(), **{"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", **options})


def trainer(**options: Any) -> Trainer:
    """Build a trainer of that step on one thread of the CPU."""
    return Trainer(step(**options), **PLACE)


class Run:
    """A loop that runs a step on the CPU; a lowered step is emulated."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.runner = Runner.open(emulate(step.model) if step.lowered else step.model, SessionOptions(threads=1))
        self.state = step.initial_state()
        self.results: dict[str, Any] = {}

    def __call__(self, batch: dict[str, Array], rate: float = 0.1) -> Run:
        self.results = self.runner.run({**batch, **self.state, "learning_rate": np.array(rate, F32)})
        self.state = self.step.next_state(self.results)
        return self

    def all(self, count: int, rate: float = 0.1, **more: int) -> Run:
        for batch in batches(count, **more):
            self(batch, rate)
        return self


def same(a: dict[str, Array], b: dict[str, Array], *but: str) -> bool:
    """Whether two states have the same names and bits, except those named in `but`."""
    names = (a.keys() | b.keys()) - set(but)
    return all(n in a and n in b and np.array_equal(a[n], b[n], equal_nan=True) for n in names)


def parsed(graph: str, opset: int = 20) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {graph}')
