"""Train the three digit classifiers of `make demo`, and export them to ONNX.

    pip install torch scikit-learn onnx onnxscript
    python examples/train_digits.py

The data are the 1797 handwritten digits of 8 x 8 pixels that ship with scikit-learn. A fifth of them is held out first
and used neither for training nor for model selection: the number of epochs is fixed. The script writes
`digits_mlp.onnx`, `digits_cnn.onnx`, `digits_vit.onnx` and the held-out split `digits_test.npz` (`x` float32 of shape
(n, 1, 8, 8) in [0, 1], `y` int64) to `examples/models`. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

# Hide the exporter's notes about packages that this script does not use.
logging.getLogger("torch.onnx").setLevel(logging.ERROR)

MODELS = Path(__file__).parent / "models"
SEED = 20
CLASSES = 10
# onnxruntime has no CUDA kernel for MaxPool from opset 22; below opset 20, Gelu is not one op.
OPSET = 20
REQUIRED_ACCURACY = 0.97


class DigitsMLP(nn.Module):
    """Three dense layers, from images (n, 1, 8, 8) to class probabilities (n, 10)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.second = nn.Linear(width, width)
        self.classifier = nn.Linear(width, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def logits(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.first(x.flatten(1))))
        return self.classifier(self.dropout(F.relu(self.second(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(dim=1)


class DigitsCNN(nn.Module):
    """Three convolutions, from images (n, 1, 8, 8) to class probabilities (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.stage(1, 32)
        self.middle = self.stage(32, 32)
        self.top = self.stage(32, 64)
        self.hidden = nn.Linear(64 * 2 * 2, 64)
        self.dropout = nn.Dropout(0.3)
        self.classifier = nn.Linear(64, CLASSES)

    @staticmethod
    def stage(channels: int, filters: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU())

    def logits(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.middle(self.stem(x)), 2)
        x = F.max_pool2d(self.top(x), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        return self.classifier(self.dropout(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(dim=1)


class Attention(nn.Module):
    """Multi-head self-attention over (n, tokens, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        weights = (q @ k.transpose(2, 3) * self.scale).softmax(dim=3)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block with normalization before the attention and before the two-layer GELU network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class DigitsViT(nn.Module):
    """A transformer over sixteen 2 x 2 patches, from images (n, 1, 8, 8) to class probabilities (n, 10)."""

    def __init__(self, dim: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(tokens.shape[0], -1, -1)
        tokens = torch.cat((first, tokens), dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.classifier(self.norm(tokens[:, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(dim=1)


# Name, network, epochs, largest learning rate.
RECIPES = (
    ("digits_mlp", DigitsMLP, 100, 4e-3),
    ("digits_cnn", DigitsCNN, 40, 4e-3),
    ("digits_vit", DigitsViT, 100, 2e-3),
)


def randomly_shifted(x: Tensor) -> Tensor:
    """Shift each image by up to one pixel in each direction, as a cheap augmentation."""
    padded = F.pad(x, (1, 1, 1, 1))
    dy, dx = torch.randint(0, 3, (2, len(x), 1, 1, 1))
    rows = torch.arange(8).view(1, 1, 8, 1) + dy
    columns = torch.arange(8).view(1, 1, 1, 8) + dx
    return padded[torch.arange(len(x)).view(-1, 1, 1, 1), 0, rows, columns]


def train(model: DigitsMLP | DigitsCNN | DigitsViT, x: Tensor, y: Tensor, *, epochs: int, rate: float) -> None:
    """Train the model in place with AdamW, one cycle of warm-up and cosine decay, and batches of 64."""
    batches = -(-len(x) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * batches)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model.logits(randomly_shifted(x[batch])), y[batch], label_smoothing=0.05).backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(dim=1) == y).double().mean().item()


def export(model: nn.Module, path: Path) -> None:
    """Write the model as ONNX, with a dynamic batch and inline weights, without the exporter's notes.

    The notes (`metadata_props`, doc strings) contain stack traces with paths of the exporting machine.
    """
    batch = torch.export.Dim("batch", min=1, max=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter itself
        program = torch.onnx.export(
            model,
            (torch.zeros(2, 1, 8, 8),),
            input_names=["image"],
            output_names=["probability"],
            dynamic_shapes=({0: batch},),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    without_notes(proto)
    onnx.checker.check_model(proto, full_check=True)
    path.write_bytes(proto.SerializeToString(deterministic=True))


def without_notes(proto: onnx.ModelProto) -> None:
    """Clear every doc string and `metadata_props` of the model, in place."""
    graph = proto.graph
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for holder in (proto, graph, *graph.node, *values):
        holder.ClearField("metadata_props")
        holder.ClearField("doc_string")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=MODELS, help="output folder")
    parser.add_argument("--epochs", type=int, default=None, help="override the number of epochs, for a quick run")
    parser.add_argument("--only", choices=[name for name, *_ in RECIPES], help="train only this network")
    args = parser.parse_args()
    folder: Path = args.output
    folder.mkdir(parents=True, exist_ok=True)

    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    x, x_test, y, y_test = train_test_split(
        x, labels.astype(np.int64), test_size=0.2, random_state=SEED, stratify=labels
    )
    np.savez_compressed(folder / "digits_test.npz", x=x_test, y=y_test)

    for name, architecture, epochs, rate in RECIPES:
        if args.only not in (None, name):
            continue
        torch.manual_seed(SEED)
        model = architecture()
        train(model, torch.tensor(x), torch.tensor(y), epochs=args.epochs or epochs, rate=rate)
        measured = accuracy(model, torch.tensor(x_test), torch.tensor(y_test))
        path = folder / f"{name}.onnx"
        export(model, path)
        print(f"{path}: {path.stat().st_size:,} bytes, {100 * measured:.2f}% of {len(y_test)} held-out digits")
        if args.epochs is None and measured <= REQUIRED_ACCURACY:
            raise SystemExit(f"{name} has an accuracy of {measured:.4f}; it must exceed {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
