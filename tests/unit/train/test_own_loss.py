"""Means over batches of a loss of the model's own: those over all rows together, where its graph shows the divisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.step.step import TrainingStep, training_step
from amp_rewrite.train.step.step_file import load_step, save_step
from amp_rewrite.train.step.trainer import Trainer
from support.train.nets import F32, PLACE, parsed

RNG = np.random.default_rng(0)
WEIGHTS = [1, 2, 0.5, 3]
HEAD = """net (float[N,5,8] x, int64[N,5] t) => (float loss)
<float[4] weights = {1, 2, 0.5, 3}, float half = {0.5}, int64 zero = {0}, int64 ignored = {-100}, int64[1] begin = {0},
 int64[1] second = {1}, int64[1] last = {-1}, int64[1] end = {5}, float bound = {1}> {
  z = MatMul (x, w)
  y = Transpose <perm = [0, 2, 1]> (z)
"""
IGNORING = "SoftmaxCrossEntropyLoss <ignore_index = -100>"
MASK = "e = Equal (t, ignored) k = Not (e) m = Cast <to = 1> (k) s = Where (k, t, zero)"
LOSSES = {
    "ignored": f"loss = {IGNORING} (y, t)",
    "weights": f"loss = {IGNORING} (y, t, weights)",
    "log": "l = LogSoftmax <axis = 1> (y) loss = NegativeLogLikelihoodLoss <ignore_index = -100> (l, t, weights)",
    "shifted": f"a = Slice (y, begin, last, last) b = Slice (t, second, end, second) loss = {IGNORING} (a, b)",
    "written out": f"""{MASK}
        l = LogSoftmax <axis = -1> (z) u = Unsqueeze (s, last) g = GatherElements <axis = -1> (l, u)
        q = Squeeze (g, last) n = Neg (q) r = Mul (n, m) a = ReduceSum <keepdims = 0> (r)
        c = ReduceSum <keepdims = 0> (m) d = Clip (c, bound) loss = Div (a, d)""",
    "a sum": f"""{MASK}
        a = SoftmaxCrossEntropyLoss <ignore_index = -100, reduction = "sum"> (y, t)
        i = Cast <to = 7> (k) c = ReduceSum <keepdims = 0> (i) f = Cast <to = 1> (c) loss = Div (a, f)""",
    "with decay": f"""a = {IGNORING} (y, t) b = Mul (half, a)
        v = Mul (w, w) d = ReduceSum <keepdims = 0> (v) loss = Add (d, b)""",
}


def _step(loss: str, **options: Any) -> TrainingStep:
    model = parsed(f"{HEAD} {loss} }}")
    rng = np.random.default_rng(1)
    model.graph.initializer.append(from_array(rng.normal(size=(8, 4)).astype(F32), "w"))
    return training_step(
        model, loss="loss", parameters="w", **{"policy": "float32", "loss_scale": "dynamic", **options}
    )


def _data() -> list[dict[str, Any]]:
    """Batches with other shares of ignored classes, one with none that counts."""
    made = []
    for share in (0.1, 0.9, 1.0, 0.5):
        t = RNG.integers(0, 4, (6, 5))
        made.append({"x": RNG.normal(size=(6, 5, 8)).astype(F32), "t": np.where(RNG.random((6, 5)) < share, -100, t)})
    return made


@pytest.mark.parametrize("way", LOSSES)
def test_a_mean_over_data_is_the_loss_of_all_rows_together(way: str, tmp_path: Path) -> None:
    step, data = _step(LOSSES[way], optimizer="sgd,lr=0"), _data()
    joined = {name: np.concatenate([batch[name] for batch in data]) for name in data[0]}
    save_step(step, tmp_path / "step.onnx")
    assert step.weight and step.metrics == ()
    for made in (step, load_step(tmp_path / "step.onnx")):
        trainer = Trainer(made, **PLACE)
        whole = trainer.evaluate([joined]).loss
        assert trainer.evaluate(data).loss == pytest.approx(whole, rel=1e-6)
        assert trainer.fit(data).epochs[0]["loss"] == pytest.approx(whole, rel=1e-6)
        assert trainer.evaluate(data[2:3]).loss != trainer.evaluate(data[2:3]).loss


@pytest.mark.torch
@pytest.mark.parametrize("way", ["ignored", "weights", "log", "written out", "a sum"])
def test_that_mean_is_the_loss_of_pytorch(way: str) -> None:
    torch = pytest.importorskip("torch")
    trainer, data = Trainer(_step(LOSSES[way]), **PLACE), _data()
    x, t = (torch.from_numpy(np.concatenate([batch[name] for batch in data])) for name in ("x", "t"))
    logits = (x @ torch.from_numpy(trainer.state["w"])).movedim(-1, 1)
    weights = torch.tensor(WEIGHTS) if way in ("weights", "log") else None
    expected = torch.nn.functional.cross_entropy(logits, t, weight=weights).item()
    assert trainer.evaluate(data).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        f"a = {IGNORING} (y, t) v = ReduceMean <keepdims = 0> (y) loss = Add (a, v)",
        f"a = {IGNORING} (y, t) b = {IGNORING} (y, t, weights) loss = Add (a, b)",
        f"a = {IGNORING} (y, t) loss = Exp (a)",
        f"a = {IGNORING} (y, t) v = Mul (z, z) n = ReduceSum <keepdims = 0> (v) s = Sqrt (n) loss = Div (a, s)",
    ],
)
def test_a_loss_without_one_divisor_weighs_rows(loss: str) -> None:
    step, data = _step(loss), _data()[:2]
    trainer = Trainer(step, **PLACE)
    assert not step.weight and step.target is None
    each = [trainer.evaluate([batch]).loss for batch in data]
    assert trainer.evaluate(data).loss == pytest.approx(sum(each) / 2)


def test_classes_beside_the_ignored_one_are_checked() -> None:
    trainer, batch = Trainer(_step(LOSSES["ignored"]), **PLACE), _data()[0]
    batch["t"][1, 2] = 4
    with pytest.raises(TrainingError, match="input 't' of batch 0 has class 4, but the model has classes 0 to 3"):
        trainer.evaluate([batch])


def test_a_low_step_computes_the_divisor_in_float32() -> None:
    data = _data()
    low = Trainer(_step(LOSSES["weights"], policy="mixed_float16", optimizer="sgd,lr=0"), **PLACE)
    high = Trainer(_step(LOSSES["weights"]), **PLACE)
    assert low.fit(data).epochs[0]["loss"] == pytest.approx(high.evaluate(data).loss, rel=2e-3)
