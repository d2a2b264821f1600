"""Models for measuring training steps, as PyTorch modules with a batch and an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.shared import measure

EXAMPLES = measure.ROOT / "examples" / "training"
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model to train: its module, its batch, its optimizer on both sides, and the axis of its classes."""

    title: str
    source: str
    module: Callable[[], Any]
    batch: Callable[[np.random.Generator], Batch]
    ours: str
    theirs: Callable[[Any], Any]
    axis: int = 1


def mlp(width: int) -> Subject:
    def module() -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    return Subject(f"MLP 784-{width}-{width}-10, batch 128, RMSprop", "input", module, _images(128), *_rmsprop())


def _rmsprop() -> tuple[str, Callable[[Any], Any]]:
    import torch

    return "rmsprop,lr=0.001,epsilon=1e-8", lambda m: torch.optim.RMSprop(m.parameters(), 1e-3, alpha=0.9, eps=1e-8)


def _images(rows: int) -> Callable[[np.random.Generator], Batch]:
    def batch(rng: np.random.Generator) -> Batch:
        return {"input": rng.random((rows, 784), np.float32), "label": rng.integers(0, 10, rows)}

    return batch


def cnn() -> Subject:
    def module() -> Any:
        from torch import nn

        def stage(a: int, b: int, stride: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

        wide = (nn.Unflatten(1, (1, 28, 28)), stage(1, 32, 1), stage(32, 64, 2), stage(64, 64, 1), stage(64, 128, 2))
        return nn.Sequential(*wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    import torch

    rule = "sgd,lr=0.05,momentum=0.9"
    title = "CNN, 4 convolutions with BatchNormalization, batch 64, SGD"
    return Subject(title, "input", module, _images(64), rule, lambda m: torch.optim.SGD(m.parameters(), 0.05, 0.9))


def gpt() -> Subject:
    import torch

    def module() -> Any:
        from against_torch import TinyGPT

        return TinyGPT(96, dim=128, heads=4, depth=4, context=64)

    def batch(rng: np.random.Generator) -> Batch:
        letters = rng.integers(0, 96, (16, 65))
        return {"tokens": letters[:, :-1], "label": letters[:, 1:]}

    title = "GPT, 4 blocks of width 128, 16 × 64 tokens, Adam"
    rule = "adam,lr=0.001,epsilon=1e-8"
    return Subject(title, "tokens", module, batch, rule, lambda m: torch.optim.Adam(m.parameters(), 1e-3))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: mlp(1024),
    "wide": lambda: mlp(4096),
    "cnn": cnn,
    "gpt": gpt,
    "bert": lambda: _transformer("BERT"),
    "gpt2": lambda: _transformer("GPT-2"),
}


def _transformer(kind: str) -> Subject:
    """Return BERT with a classification head, or GPT-2, with 2 layers of width 256 and without dropout."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens).logits

    def module() -> Any:
        import transformers as hf

        width = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1024}
        if kind == "BERT":
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            sizes = {"intermediate_size": 1024, "max_position_embeddings": 64, "num_labels": 10}
            return Logits(hf.BertForSequenceClassification(hf.BertConfig(**width, **none, **sizes)))
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return Logits(hf.GPT2LMHeadModel(hf.GPT2Config(**width, **none, n_positions=64, use_cache=False)))

    def batch(rng: np.random.Generator) -> Batch:
        tokens = rng.integers(0, 1024, (8, 65))
        return {"tokens": tokens[:, :-1], "label": rng.integers(0, 10, 8) if kind == "BERT" else tokens[:, 1:]}

    title = f"{kind}, 2 layers of width 256, 8 × 64 tokens, Adam"
    rule = "adam,lr=0.001,epsilon=1e-8"
    axis = {} if kind == "BERT" else {"axis": -1}
    return Subject(title, "tokens", module, batch, rule, lambda m: torch.optim.Adam(m.parameters(), 1e-3), **axis)


def made(name: str) -> tuple[Subject, Any]:
    """Return a subject and its module, the same each time."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    return subject, subject.module()


def batches(subject: Subject) -> Iterator[Batch]:
    rng = np.random.default_rng(0)
    while True:
        yield {
            n: np.ascontiguousarray(a, np.int64 if a.dtype.kind == "i" else None) for n, a in subject.batch(rng).items()
        }
