"""Training on a real GPU: `make gpu` runs these. Elsewhere they are skipped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.runtime.runner import CPU, cuda_opens
from amp_rewrite.train import Trainer, training_step
from amp_rewrite.train.replicas import SingleReplica
from support.train.nets import CROSS_ENTROPY, batches, mlp, same
from support.train.processes import started
from support.train.replica import STEPS, Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_opens(), reason="no CUDA provider opens here"),
]
DATA = list(batches(100))


@pytest.mark.parametrize(("policy", "near"), [("float32", 1e-4), ("mixed_float16", 1e-2), ("mixed_bfloat16", 5e-2)])
def test_losses_on_the_gpu_are_those_of_the_cpu(policy: str, near: float) -> None:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam,lr=0.01", policy=policy)
    there, here = Trainer(step), Trainer(step, providers=(CPU,))
    assert there.where.startswith("CUDAExecutionProvider")

    np.testing.assert_allclose(there.fit(DATA).losses, here.fit(DATA).losses, atol=near)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"policy": "float32", "loss_scale": 8}])
def test_a_run_that_is_resumed_on_the_gpu_ends_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    step = training_step(mlp(), **{"loss": CROSS_ENTROPY, "optimizer": "adam,lr=0.01", **options})
    straight, first, second = (Trainer(step) for _ in range(3))
    straight.fit(DATA)
    first.fit(DATA[:40])
    first.save(tmp_path / "a.npz")
    second.load(tmp_path / "a.npz")
    second.fit(DATA[40:])

    assert same(straight.state, second.state)


@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 2)])
def test_replicas_on_the_gpu_train_as_one_process(backend: str, world: int, tmp_path: Path) -> None:
    ended = started(tmp_path, "--backend", backend, world=world)
    assert [code for code, _ in ended] == [0] * world, ended
    states = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world)]
    alone = Loop()
    for batch in batches(STEPS):
        alone.step(SingleReplica(), batch)

    assert all(same(states[0], state) for state in states)
    for name, value in alone.state.items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-3, atol=1e-4)
