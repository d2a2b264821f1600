"""Why the losses of two trainings part: a CNN with BatchNormalization, here and in PyTorch, run in ways that differ
only by rounding.

    python benchmarks/relu_kinks.py [--steps 100]

Needs torch and onnxscript. The network is that of examples/training/against_torch.py, with ReLU or GELU; all runs begin
with the same weights and see the same batches. Each row is a pair of runs: the largest difference of any step's loss,
and the first step at which it is above 1e-4. The rows of PyTorch beside itself say how far apart two right trainings
are: with another number of threads, with another library of convolutions, with the rows of each batch in another
order, in another precision.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "training"))

from against_torch import DigitsCNN
from from_torch import trainable
from tasks import images

from amp_rewrite.train import SGD, Trainer, training_step

SEEN = 1e-4
MOMENTUM = 0.9
Batch = dict[str, np.ndarray]
Losses = np.ndarray
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"ReLU": F.relu, "GELU": F.gelu}
RUNS = (("ReLU", 0.05), ("ReLU", 0.02), ("ReLU", 0.01), ("GELU", 0.05))


class CNN(DigitsCNN):
    """The example's network with an activation of one's choice."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.stem_norm(self.stem(image.view(-1, 1, 28, 28))))
        x = self.activation(self.top_norm(self.top(F.max_pool2d(x, 2))))
        logits: torch.Tensor = self.classifier(x.mean((2, 3)))
        return logits


def made(activation: str) -> CNN:
    torch.manual_seed(0)
    return CNN(activation)


def theirs(
    activation: str,
    rate: float,
    batches: list[Batch],
    *,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
    onednn: bool = True,
    mixed: bool = False,
) -> Losses:
    """PyTorch's losses. `mixed`: the rows of each batch in another order."""
    torch.set_num_threads(threads)
    net = made(activation).to(dtype).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM)
    found = []
    with torch.backends.mkldnn.flags(enabled=onednn):
        for batch in batches:
            rows = np.random.default_rng(0).permutation(len(batch["label"])) if mixed else slice(None)
            optimizer.zero_grad()
            image, label = torch.from_numpy(batch["image"][rows]).to(dtype), torch.from_numpy(batch["label"][rows])
            loss = F.cross_entropy(net(image), label)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return np.array(found)


def ours(activation: str, rate: float, batches: list[Batch]) -> Losses:
    model = trainable(made(activation), {"image": torch.from_numpy(batches[0]["image"])}, "logits")
    step = training_step(
        model,
        loss="cross_entropy(logits, label)",
        optimizer=SGD(rate, momentum=MOMENTUM),
        policy="float32",
        training_mode=True,
    )
    return np.array(Trainer(step, providers=("CPUExecutionProvider",), threads=1).fit(batches).losses)


def compared(activation: str, rate: float, batches: list[Batch]) -> dict[str, Any]:
    """The largest differences of pairs of runs, and where they are seen first."""

    def there(**options: Any) -> Losses:
        return theirs(activation, rate, batches, **options)

    base, exact, here = there(), there(dtype=torch.float64), ours(activation, rate, batches)
    pairs = {
        "PyTorch on one thread, on two": (base, there(threads=2)),
        "PyTorch with oneDNN, without": (base, there(onednn=False)),
        "PyTorch, rows in another order": (base, there(mixed=True)),
        "PyTorch in float32, in float64": (base, exact),
        "PyTorch in float64, rows in another order": (exact, there(dtype=torch.float64, mixed=True)),
        "here in float32, PyTorch in float32": (here, base),
        "here in float32, PyTorch in float64": (here, exact),
    }
    apart = {name: np.abs(a - b) for name, (a, b) in pairs.items()}
    first = {name: int(np.argmax(d > SEEN)) + 1 if d.max() > SEEN else 0 for name, d in apart.items()}
    return {
        "activation": activation,
        "rate": rate,
        "loss": [float(here[0]), float(here[-10:].mean())],
        "apart": {name: [float(d.max()), first[name]] for name, d in apart.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    batches = list(itertools.islice(images(), parser.parse_args().steps))
    rows = []
    for activation, rate in RUNS:
        rows.append(compared(activation, rate, batches))
        print(rows[-1], flush=True)
    head = ["pair of runs", *(f"{row['activation']}, rate {row['rate']}: loss {_fell(row)}" for row in rows)]
    table = [[name, *(_cell(*row["apart"][name]) for row in rows)] for name in rows[0]["apart"]]
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy", "torch"))
    lines = [f"{len(batches)} steps; the largest difference of a loss, and the first step above {SEEN:g}.", ""]
    measure.write("relu_kinks", about, rows, [*lines, *measure.markdown(head, table)])


def _fell(row: dict[str, Any]) -> str:
    first, last = row["loss"]
    return f"{first:.2f} → {last:.2f}"


def _cell(largest: float, first: int) -> str:
    return f"{largest:.1e}" + (f", from step {first}" if first else "")


if __name__ == "__main__":
    main()
