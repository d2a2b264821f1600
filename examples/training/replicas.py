"""One model trained by several processes, each with its share of every batch.

    pip install . torch
    torchrun --nproc-per-node 2 examples/training/replicas.py
    python examples/training/replicas.py          # the same, alone

All processes have the same parameters after each step: those of one process with the whole batch, to rounding. If a
gradient is not finite on one of them, all of them skip the step. If one of them ends, so do the others, with an error
instead of waiting for ever; started again with the same folder, they go on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import load
from guide import LOSS, network

from amp_rewrite.errors import TrainingError
from amp_rewrite.train import DataParallelTrainer, RMSprop, join_replicas, shard, training_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, metavar="NPZ", help="written after each epoch; gone on from")
    given = parser.parse_args()
    digits = load()
    # seeds are the same everywhere, so that all replicas begin alike and cut the same batches
    step = training_step(network(128, seed=0), loss=LOSS, optimizer=RMSprop(0.0005), policy="mixed_float16")
    with join_replicas(timeout=60) as replicas:
        trainer = DataParallelTrainer(step, replicas)
        if given.checkpoint and given.checkpoint.exists():
            trainer.load(given.checkpoint)
        for epoch in range(given.epochs):
            history = trainer.fit(list(shard(digits.batches(96, seed=epoch), replicas)))
            if given.checkpoint:
                trainer.save(given.checkpoint)
            if replicas.rank == 0:
                print(f"epoch {epoch}: loss {sum(history.losses) / len(history.losses):.4f}", flush=True)
        accuracy = trainer.evaluate(digits.test).metrics["accuracy"]
        print(f"replica {replicas.rank} of {replicas.world}: {100 * accuracy:.2f} % held out, {trainer.where}")


if __name__ == "__main__":
    try:
        main()
    except TrainingError as error:
        raise SystemExit(str(error)) from None
