"""One of several processes that train together; test_replicas.py starts them.

replica.py OUT [--dies AFTER] [--poison STEP] [--backend gloo]
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.casting import Array
from amp_rewrite.train import Adam, LossScaleOptimizer, ModelLoss, averaged, join_replicas, shard
from support.train.nets import CROSS_ENTROPY, batches, mlp

STEPS = 12


class Loop:
    """A model, its optimizer and a step on the rows of one replica."""

    def __init__(self) -> None:
        self.loss = ModelLoss.of(mlp(), CROSS_ENTROPY, policy="float32")
        self.optimizer = LossScaleOptimizer(Adam(0.01), "dynamic")

    def step(self, replicas: object, batch: dict[str, Array]) -> None:
        variables = self.loss.variables
        gradients = self.loss.on(batch).gradients(variables, self.optimizer.loss_scale())
        means = averaged(replicas, gradients, len(batch["x"]))  # type: ignore[arg-type]
        self.optimizer.apply_gradients(zip(self.optimizer.get_unscaled_gradients(means), variables, strict=True))

    @property
    def state(self) -> dict[str, Array]:
        return {variable.name: variable.numpy() for variable in self.loss.variables} | self.optimizer.checkpoint()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--poison", type=int, help="the step with an infinite input on the last replica")
    parser.add_argument("--dies", type=int, help="the number of steps after which the last replica exits")
    parser.add_argument("--backend", default="gloo")
    arguments = parser.parse_args()
    with join_replicas(arguments.backend, timeout=20) as replicas:
        last, loop = replicas.rank == replicas.world - 1, Loop()
        for number, batch in enumerate(shard(batches(STEPS), replicas)):
            if last and number == arguments.dies:
                os._exit(9)
            if last and number == arguments.poison:
                batch["x"][0, 0] = np.inf
            loop.step(replicas, batch)
        np.savez(arguments.out / f"{replicas.rank}.npz", **loop.state)


if __name__ == "__main__":
    try:
        main()
    except AmpRewriteError as error:
        raise SystemExit(str(error)) from None
