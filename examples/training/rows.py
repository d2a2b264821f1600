"""Train an LSTM or a GRU over the 28 rows of a digit's image, in three precisions.

    python examples/training/rows.py                # an LSTM of 64, 10 epochs
    python examples/training/rows.py --cell GRU

The model uses ONNX's LSTM or GRU. The training step replaces it with an equivalent Scan, and adds another Scan for the
backward pass. The final export has the LSTM or GRU again. On a CPU, float16 and bfloat16 are emulated.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import onnx
import onnx.parser
from digits import SIDE, Digits, load
from onnx.numpy_helper import from_array

from amp_rewrite.train import Adam, Trainer, training_step

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
GATES = {"LSTM": 4, "GRU": 3}


def network(cell: str, hidden: int, seed: int) -> onnx.ModelProto:
    """Build a network from image [batch, 784] to logits [batch, 10], with PyTorch's uniform weights of ±1/√hidden."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> rows (float[batch,784] image) => (float[batch,10] logits)
          <int64[3] grid = {{0, {SIDE}, {SIDE}}}, int64[1] first = {{0}}> {{
          rows = Reshape (image, grid)  steps = Transpose <perm = [1, 0, 2]> (rows)
          seen, last = {cell} <hidden_size = {hidden}> (steps, w, r, b)
          state = Squeeze (last, first)  logits = Gemm (state, w_out, b_out)
        }}"""
    )
    wide, rng = GATES[cell] * hidden, np.random.default_rng(seed)
    shapes = {"w": (1, wide, SIDE), "r": (1, wide, hidden), "b": (1, 2 * wide), "w_out": (hidden, 10), "b_out": (10,)}
    for name, shape in shapes.items():
        values = rng.uniform(-1, 1, shape) / np.sqrt(hidden)
        model.graph.initializer.append(from_array(values.astype(np.float32), name))
    return model


def trained(model: onnx.ModelProto, policy: str, digits: Digits, epochs: int) -> tuple[list[float], Trainer]:
    """Train the model; return the mean loss of each epoch, and the trainer."""
    step = training_step(model, loss="cross_entropy(logits, label)", optimizer=Adam(0.003), policy=policy)
    trainer = Trainer(step)
    losses = [statistics.fmean(trainer.fit(list(digits.batches(64, seed=epoch))).losses) for epoch in range(epochs)]
    return losses, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", choices=GATES, default="LSTM")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="use few digits, as a smoke test")
    args = parser.parse_args()
    digits = load(shipped=args.quick)
    print(f"{digits.origin}: {len(digits.x)} to train on, {len(digits.x_test)} held out")
    for policy in POLICIES:
        losses, trainer = trained(network(args.cell, args.hidden, 0), policy, digits, args.epochs)
        accuracy = trainer.evaluate(digits.test).metrics["accuracy"]
        curve = " ".join(f"{loss:.3f}" for loss in losses)
        print(f"{args.cell} {policy}: {curve}; {100 * accuracy:.2f}%, {trainer.skipped} steps skipped", flush=True)


if __name__ == "__main__":
    main()
