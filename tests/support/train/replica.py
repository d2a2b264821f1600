"""One of several processes that train together: what tests/unit/train/test_parallel.py starts.

replica.py OUT [--dies AFTER] [--poison STEP] [--backend gloo] [--provider CPU…]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.runtime.runner import CPU
from amp_rewrite.train import DataParallelTrainer, join_replicas, shard, training_step
from support.train.nets import CROSS_ENTROPY, batches, mlp

STEPS = 12
OPTIONS = {"optimizer": "adam,lr=0.01", "policy": "float32", "loss_scale": "dynamic"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--poison", type=int, help="the step that gets an infinite number on the last replica")
    parser.add_argument("--dies", type=int, help="after how many steps the last replica ends without a word")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--provider", default=CPU)
    given = parser.parse_args()
    with join_replicas(given.backend, timeout=20) as replicas:
        last = replicas.rank == replicas.world - 1
        step = training_step(mlp(), loss=CROSS_ENTROPY, **OPTIONS)
        trainer = DataParallelTrainer(step, replicas, providers=(given.provider, CPU), threads=1)
        for number, batch in enumerate(shard(batches(STEPS), replicas)):
            if last and number == given.dies:
                os._exit(9)
            if last and number == given.poison:
                batch["x"][0, 0] = np.inf
            trainer.fit([batch])
            if number == 2:
                trainer.save(given.out / "checkpoint.npz")
        np.savez(given.out / f"{replicas.rank}.npz", skipped=trainer.skipped, **trainer.state)


if __name__ == "__main__":
    try:
        main()
    except AmpRewriteError as error:
        raise SystemExit(str(error)) from None
