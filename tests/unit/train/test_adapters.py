"""Adapters: steps are those of LoRA in PyTorch, only factors are trained, and export merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto
from onnx.numpy_helper import from_array

from amp_rewrite.cli import program
from amp_rewrite.errors import TrainingError
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.step_file import load_step, save_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD, Adafactor
from amp_rewrite.train.update.schedules import CosineDecay
from benchmarks.training.encoder import encoder
from support.train.nets import F32, PLACE

LOSS = "cross_entropy(y, t)"
SHAPES = {"a.q_proj.weight": (8, 8), "a.k_proj.weight": (8, 6), "a.v_proj.weight": (6, 6), "head.weight": (6, 4)}


def net() -> ModelProto:
    """A product, one of a transposed weight, a Gemm of a square weight with its rows as outputs, and a head."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (float[N, 8] x) => (float[N, 4] y) {
          q = MatMul (x, "a.q_proj.weight")  qt = Tanh (q)
          w = Transpose <perm = [1, 0]> ("a.k_proj.weight")  k = MatMul (qt, w)  kt = Tanh (k)
          v = Gemm <transB = 1> (kt, "a.v_proj.weight")  vt = Tanh (v)
          y = MatMul (vt, "head.weight") }"""
    )
    rng = np.random.default_rng(0)
    for name, (inner, outer) in SHAPES.items():
        shape = (outer, inner) if name == "a.k_proj.weight" else (inner, outer)
        model.graph.initializer.append(from_array(rng.normal(size=shape).astype(F32) * F32(0.5), name))
    return model


def batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(16, 8)).astype(F32), "t": rng.integers(0, 4, 16)}


def step_of(adapters: str = "q_proj,k_proj,v_proj:r=2,alpha=4", **options: Any) -> Any:
    return training_step(net(), loss=LOSS, optimizer=SGD(0.5), policy="float32", adapters=adapters, **options)


@pytest.mark.torch
def test_steps_and_the_merged_model_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    trainer = Trainer(step_of(), **PLACE)
    start = trainer.get_weights()
    weights = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in net().graph.initializer}
    factors = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    assert set(factors) == {f"a.{p}_proj.lora_{f}" for p in "qkv" for f in "AB"}

    def adapted(x: Any, stem: str, w: Any) -> Any:
        return x @ w + 2.0 * ((x @ factors[f"{stem}.lora_A"]) @ factors[f"{stem}.lora_B"])

    def forward(x: Any) -> Any:
        q = torch.tanh(adapted(x, "a.q_proj", weights["a.q_proj.weight"]))
        k = torch.tanh(adapted(q, "a.k_proj", weights["a.k_proj.weight"].T))
        v = torch.tanh(adapted(k, "a.v_proj", weights["a.v_proj.weight"].T))
        return v @ weights["head.weight"]

    optimizer = torch.optim.SGD(factors.values(), lr=0.5)
    for number in range(30):
        given = batch(number)
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(given["x"])), torch.tensor(given["t"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.fit([given]).losses[0] == pytest.approx(loss.item(), abs=2e-6)
    exported = trainer.export()
    with torch.no_grad():
        expected = forward(torch.tensor(batch(99)["x"])).numpy()

    assert [(n.op_type, list(n.output)) for n in exported.proto.graph.node] == [
        (n.op_type, list(n.output)) for n in net().graph.node
    ]
    assert {t.name for t in exported.proto.graph.initializer} == SHAPES.keys()
    found = Runner.open(exported).run({"x": batch(99)["x"]})["y"]
    assert np.abs(np.asarray(found) - expected).max() < 1e-5
    assert np.abs(trainer.predict({"x": batch(99)["x"]})["y"] - expected).max() < 1e-5


def test_training_starts_from_the_model_as_it_is_and_others_can_be_trained_besides() -> None:
    trainer = Trainer(step_of("q_proj:r=2", parameters="head.*"), **PLACE)
    plain = Runner.open(Model.load(net())).run({"x": batch(1)["x"]})["y"]

    assert set(trainer.get_weights()) == {"a.q_proj.lora_A", "a.q_proj.lora_B", "head.weight"}
    assert np.array_equal(trainer.predict({"x": batch(1)["x"]})["y"], np.asarray(plain))


def test_a_file_a_checkpoint_and_an_evaluation_keep_the_adapters(tmp_path: Path) -> None:
    save_step(step_of(), tmp_path / "step.onnx")
    first, second = Trainer(step_of(), **PLACE), Trainer(load_step(tmp_path / "step.onnx", forward=net()), **PLACE)
    first.fit([batch(number) for number in range(3)])
    first.save(tmp_path / "a.npz")
    second.load(tmp_path / "a.npz")
    one, two = ({t.name: m.array(t) for t in m.proto.graph.initializer} for m in (first.export(), second.export()))

    assert all(np.array_equal(array, two[name]) for name, array in one.items()) and one.keys() == two.keys()
    assert first.evaluate([batch(9)], metrics=["accuracy(y, t)"]) == second.evaluate(
        [batch(9)], metrics=["accuracy(y, t)"]
    )


def test_an_encoder_in_mixed_precision_with_regions_learns_by_adapters_alone() -> None:
    step = training_step(
        encoder(2, 16, 8),
        loss="cross_entropy(logits, t)",
        optimizer="adam,lr=0.01",
        adapters="*q_proj,v_proj:r=4",
        recompute=2,
    )
    trainer, rng = Trainer(step, **PLACE), np.random.default_rng(0)
    given = {"x": rng.normal(size=(8, 8, 16)).astype(F32), "t": rng.integers(0, 4, 8)}
    losses = trainer.fit([given] * 12).losses

    assert len(step.parameters) == 8 and all("lora_" in name for name in step.parameters)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q_proj:r=0", "adapters 'q_proj:r=0' are not settings; write PATTERN,…:r=RANK"),
        ("q_proj:rank=2", "adapters 'q_proj:rank=2' are not settings"),
        ("q_proj:r=0,alpha=1", "adapters 'q_proj:r=0,alpha=1' are not settings"),
        ("q_proj:r=2,alpha=0", "adapters 'q_proj:r=2,alpha=0' are not settings"),
        ("q_proj:alpha=inf", "adapters 'q_proj:alpha=inf' are not settings"),
        ("q_proj:r=2,r=3", "adapters 'q_proj:r=2,r=3' are not settings"),
        (":r=2", "adapters ':r=2' are not settings"),
        ("o_proj:r=2", "no weight of two dimensions matches the adapter 'o_proj'; the model has a.q_proj.weight"),
    ],
)
def test_adapters_that_do_not_fit_say_so(text: str, message: str) -> None:
    with pytest.raises(TrainingError) as error:
        step_of(text)
    assert str(error.value).startswith(message)


def test_a_weight_that_is_read_otherwise_says_so() -> None:
    model = net()
    model.graph.node.append(onnx.helper.make_node("Gather", ["head.weight", "t"], ["row"], name="lookup"))
    model.graph.input.append(onnx.helper.make_tensor_value_info("t", onnx.TensorProto.INT64, ["N"]))
    with pytest.raises(
        TrainingError, match=r"^an adapter of 'head.weight' needs products x W, but node 'lookup' \(Gather\)"
    ):
        training_step(model, loss=LOSS, adapters="head:r=2")


def test_the_command_takes_adapters_regions_and_schedules(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "net.onnx")
    words = ["train-step", tmp_path / "net.onnx", "--loss", LOSS, "--adapters", "q_proj:r=2", "--recompute", 2]
    words += ["--optimizer", "adafactor,lr=cosine(0.01, 100)", "-o", tmp_path / "s.onnx"]
    done = CliRunner().invoke(program, [str(word) for word in words])
    step = load_step(tmp_path / "s.onnx", forward=net())

    assert done.exit_code == 0
    assert step.adapters == "q_proj:r=2" and step.optimizer == Adafactor(CosineDecay(0.01, 100))
    assert any(node.name.startswith("amp.recompute/") for node in step.model.proto.graph.node)
