"""A CNN with BatchNormalization and ReLU beside PyTorch: the same losses, step by step."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from amp_rewrite.train.step.step import training_step
from amp_rewrite.train.step.trainer import Trainer
from amp_rewrite.train.update.optimizers import SGD
from support.paths import ROOT
from support.train.nets import F32, PLACE

EXAMPLES = ROOT / "examples" / "training"
STEPS, RATE, MOMENTUM = 100, 0.01, 0.9


def batches() -> list[dict[str, Any]]:
    """Images that have a bright patch somewhere, whose place is the class."""
    rng, found = np.random.default_rng(0), []
    for _ in range(STEPS):
        label = rng.integers(0, 5, 32)
        image = np.array(rng.normal(size=(32, 1, 12, 12)) * 0.3, F32)
        for row, at in enumerate(label):
            image[row, 0, 3:8, 2 * at : 2 * at + 3] += 1
        found.append({"image": image, "label": label})
    return found


@pytest.mark.torch
def test_losses_of_a_cnn_with_relu_are_those_of_torch_for_100_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "from_torch", raising=False)
    from from_torch import trainable

    nn = torch.nn
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(144, 5)),
    )
    data = batches()
    model = trainable(net, {"image": torch.from_numpy(data[0]["image"])}, "logits")
    rule = SGD(RATE, momentum=MOMENTUM)
    step = training_step(
        model, loss="cross_entropy(logits, label)", optimizer=rule, policy="float32", training_mode=True
    )
    ours = Trainer(step, **PLACE).fit(data).losses

    net.train()
    optimizer, theirs = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM), []
    for batch in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.from_numpy(batch["image"])), torch.from_numpy(batch["label"]))
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())

    assert theirs[-1] < 0.2 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
