"""Train a CNN with BatchNormalization and a tiny GPT from scratch, and compare each loss with PyTorch's.

    pip install . torch onnxscript
    python examples/training/against_torch.py

Both sides start from the same weights and see the same batches in the same order. In float32, each loss agrees with
PyTorch's to 1e-4 for 100 steps. In float16 and bfloat16 (emulated on a CPU), the curves agree up to rounding.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import onnx
import torch
from from_torch import trainable
from tasks import CONTEXT, MODELS, TASKS, Task, letters, losses
from torch import Tensor, nn
from torch.nn import functional as F

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
TOLERANCE = 1e-4


class DigitsCNN(nn.Module):
    """Two convolutions with BatchNormalization, from images (n, 784) to logits (n, 10).

    It uses GELU instead of ReLU for the comparison: after a normalization, the empty border of all images has a single
    value. When training moves that value through 0, rounding decides the sign of thousands of pixels, and from then on
    two libraries diverge, however exact they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.top = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.top_norm = nn.BatchNorm2d(16)
        self.classifier = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = F.gelu(self.stem_norm(self.stem(image.view(-1, 1, 28, 28))))
        x = F.gelu(self.top_norm(self.top(F.max_pool2d(x, 2))))
        return self.classifier(x.mean((2, 3)))


class Block(nn.Module):
    """Masked self-attention and a two-layer network, each with a LayerNorm before it and a residual connection."""

    def __init__(self, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.register_buffer("future", torch.ones(context, context).triu(1).bool(), persistent=False)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        # -1e4, not -inf: it fits in float16, and fully masked rows do not become NaN
        weights = scores.masked_fill(self.future, -1e4).softmax(dim=3)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyGPT(nn.Module):
    """A decoder from letters (n, context) to next-letter logits (n, letters, context), with a tied embedding."""

    def __init__(self, letters: int, dim: int = 32, heads: int = 2, depth: int = 2, context: int = 32) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, dim)
        self.position = nn.Parameter(torch.randn(context, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, context) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.letter.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letter(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) @ self.letter.weight.T).transpose(1, 2)


def module_of(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return DigitsCNN() if task.name == "cnn" else TinyGPT(int(letters().max()) + 1, context=CONTEXT)


def exported(task: Task, module: nn.Module) -> onnx.ModelProto:
    (batch,) = task.first(1)
    return trainable(module, {task.source: torch.from_numpy(batch[task.source])}, "logits")


def pytorch_losses(task: Task, module: nn.Module, steps: int) -> list[float]:
    """Train the module in place with PyTorch in float32, and return the loss of each step."""
    module.train()
    optimizer: torch.optim.Optimizer
    if task.name == "cnn":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.001, eps=1e-8)
    history = []
    for batch in task.first(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(torch.from_numpy(batch[task.source])), torch.from_numpy(batch["label"]))
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def compare(task: Task, model: onnx.ModelProto, reference: np.ndarray) -> None:
    """Print each policy's largest difference from PyTorch's losses; raise SystemExit if float32 differs too much."""
    print(f"{task.name}: PyTorch float32, loss {reference[0]:.4f} → {reference[-10:].mean():.4f}")
    for policy in POLICIES:
        history, trainer = losses(task, model, policy, len(reference))
        error = float(np.abs(np.array(history) - reference).max())
        summary = f"loss {history[0]:.4f} → {np.mean(history[-10:]):.4f}, differs from PyTorch by at most {error:.1e}"
        print(f"  {policy:<15} {summary}; {trainer.where}", flush=True)
        if policy == "float32" and not error <= TOLERANCE:
            raise SystemExit(f"{task.name}: float32 losses differ from PyTorch's by more than {TOLERANCE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="run only 10 steps, as a smoke test")
    parser.add_argument("--export", action="store_true", help="regenerate models/: the models and PyTorch's losses")
    args = parser.parse_args()
    steps = 10 if args.quick else args.steps
    references = {}
    for task in TASKS.values():
        module = module_of(task)
        model = exported(task, module)
        references[task.name] = pytorch_losses(task, module, steps)
        if args.export:
            MODELS.mkdir(exist_ok=True)
            (MODELS / f"{task.name}.onnx").write_bytes(model.SerializeToString(deterministic=True))
        else:
            compare(task, model, np.array(references[task.name]))
    if args.export:
        (MODELS / "losses.json").write_text(json.dumps(references) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
