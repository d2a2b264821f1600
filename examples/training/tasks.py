"""What the CNN and the tiny GPT of `against_torch.py` are trained on, and by which rule. Needs no PyTorch.

Their untrained models lie in `models`, and there too what PyTorch's losses were: `losses.json`.
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
TEXT = Path(__file__).parents[2] / "LICENSE"  # 11 000 letters of English that come with the package
CONTEXT = 32
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """The batches of a model, the same each time and without end, with its targets as `label`; and the optimizer."""

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
    """The text as numbers from 0 on."""
    return np.unique(np.frombuffer(TEXT.read_bytes(), np.uint8), return_inverse=True)[1].astype(np.int64)


def windows() -> Iterator[Batch]:
    """Pieces of the text, and for each letter the next one."""
    text, rng = letters(), np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT - 1, 16)
        pieces = text[starts[:, None] + np.arange(CONTEXT + 1)]
        yield {"tokens": pieces[:, :-1], "label": pieces[:, 1:]}


TASKS = {
    "cnn": Task("cnn", "image", images, SGD(0.05, momentum=0.9)),
    "gpt": Task("gpt", "tokens", windows, Adam(0.001, epsilon=1e-8)),
}


def losses(task: Task, model: onnx.ModelProto, policy: str, steps: int) -> tuple[list[float], Trainer]:
    """The loss of each step, and what trained."""
    step = training_step(
        model, loss="cross_entropy(logits, label)", optimizer=task.optimizer, policy=policy, training_mode=True
    )
    trainer = Trainer(step)
    return list(trainer.fit(task.first(steps)).losses), trainer
