"""Data and optimizers for the CNN and the tiny GPT of `against_torch.py`, without PyTorch.

The folder `models` holds the untrained models, and PyTorch's losses in `losses.json`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from digits import load

from amp_rewrite.train import SGD, Adam, Optimizer, Trainer, training_step

MODELS = Path(__file__).parent / "models"
TEXT = Path(__file__).parents[2] / "LICENSE"  # 11,000 letters of English in this repository
CONTEXT = 32
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model's optimizer, and its endless and reproducible batches, with the targets as `label`."""

    name: str
    source: str
    batches: Callable[[], Iterator[Batch]]
    optimizer: Optimizer

    def first(self, steps: int) -> list[Batch]:
        return list(itertools.islice(self.batches(), steps))


def images() -> Iterator[Batch]:
    digits = load(shipped=True)
    for epoch in itertools.count():
        yield from (batch for batch in digits.batches(64, seed=epoch) if len(batch["label"]) == 64)


def letters() -> np.ndarray:
    """Return the text as integers from 0."""
    return np.unique(np.frombuffer(TEXT.read_bytes(), np.uint8), return_inverse=True)[1].astype(np.int64)


def windows() -> Iterator[Batch]:
    """Yield windows of the text, with each letter's successor as its label."""
    text, rng = letters(), np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT - 1, 16)
        window = text[starts[:, None] + np.arange(CONTEXT + 1)]
        yield {"tokens": window[:, :-1], "label": window[:, 1:]}


TASKS = {
    "cnn": Task("cnn", "image", images, SGD(0.05, momentum=0.9)),
    "gpt": Task("gpt", "tokens", windows, Adam(0.001, epsilon=1e-8)),
}


def losses(task: Task, model: onnx.ModelProto, policy: str, steps: int) -> tuple[list[float], Trainer]:
    """Train the model; return the loss of each step, and the trainer."""
    step = training_step(
        model, loss="cross_entropy(logits, label)", optimizer=task.optimizer, policy=policy, training_mode=True
    )
    trainer = Trainer(step)
    return list(trainer.fit(task.first(steps)).losses), trainer
