"""Train one model in several processes, each with its share of every batch.

    pip install . torch
    torchrun --nproc-per-node 2 examples/training/replicas.py
    python examples/training/replicas.py          # the same in one process

After each step, all processes have the same parameters, which equal those of one process with the whole batch up to
rounding. If a gradient is not finite in one process, all of them skip the step. If one process ends, the others stop
with an error instead of waiting forever. Restarted with the same file, they resume from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from digits import load
from guide import LOSS, network

from amp_rewrite.errors import TrainingError
from amp_rewrite.train import LossScaleOptimizer, ModelLoss, RMSprop, averaged, join_replicas, shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, metavar="NPZ", help="save after each epoch; resume from it")
    args = parser.parse_args()
    digits = load()
    # The same seeds everywhere give all replicas the same start and the same batches.
    loss = ModelLoss.of(network(128, seed=0), LOSS, policy="mixed_float16")
    optimizer = LossScaleOptimizer(RMSprop(0.0005), "dynamic")
    with join_replicas(timeout=60) as replicas:
        if args.checkpoint and args.checkpoint.exists():
            loss.load(args.checkpoint, optimizer)
        for epoch in range(args.epochs):
            losses = []
            for batch in shard(digits.batches(96, seed=epoch), replicas):
                batch_loss = loss.on(batch)
                gradients = batch_loss.gradients(loss.variables, optimizer.loss_scale())
                means = averaged(replicas, gradients, rows=max(map(len, batch.values())))
                optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(means), loss.variables, strict=True))
                losses.append(float(batch_loss))
            if args.checkpoint and replicas.rank == 0:
                loss.save(args.checkpoint, optimizer)
            if replicas.rank == 0:
                print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)
        (output,) = loss.predict({"image": digits.x_test}).values()
        accuracy = np.mean(output.argmax(1) == digits.y_test)
        print(f"replica {replicas.rank} of {replicas.world}: {100 * accuracy:.2f}% held out")


if __name__ == "__main__":
    try:
        main()
    except TrainingError as error:
        raise SystemExit(str(error)) from None
