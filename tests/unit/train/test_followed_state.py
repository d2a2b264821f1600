"""The state of a training that an optimizer object follows: read when it is asked for, once for each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from amp_rewrite.train.keras.optimizer import StatefulOptimizer
from amp_rewrite.train.update.optimizers import Adam


def test_slots_are_read_once_for_each_state_that_is_followed() -> None:
    reads: list[int] = []
    told: list[tuple[int, Any]] = []

    def slots() -> dict[str, dict[str, np.ndarray]]:
        reads.append(1)
        return {"w": {"m": np.full(2, float(len(reads)), np.float32)}}

    training = SimpleNamespace(
        optimizer_slots=slots, set_optimizer_state=lambda steps, state: told.append((steps, state["w"]["m"][0]))
    )
    optimizer = StatefulOptimizer(Adam(0.1))
    optimizer.follow(training, 3)
    assert (optimizer.iterations, reads) == (3, [])
    assert [optimizer.slots()["w"]["m"][0] for _ in range(3)] == [1.0] * 3
    optimizer.follow(training, 4)
    assert (optimizer.slots()["w"]["m"][0], reads) == (2.0, [1, 1])
    optimizer.iterations = 9
    optimizer.set_state(10, {"w": {"m": np.zeros(2, np.float32)}})
    assert told == [(9, 2.0), (10, 0.0)]
