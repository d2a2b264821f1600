"""Checkpoints that do not go on: within a step of other micro-batches, with numbers that no step leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_rewrite.errors import TrainingError
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step import training_step
from amp_rewrite.train.trainer import Trainer
from train.nets import CROSS_ENTROPY, batches, mlp

DATA = list(batches(4))


def trainer(**options: Any) -> Trainer:
    step = training_step(mlp(), loss=CROSS_ENTROPY, optimizer="adam,lr=0.01", **options)
    return Trainer(step, providers=("CPUExecutionProvider",), threads=1)


def refused(made: Trainer, path: Path) -> str:
    """What loading says; the state must be as it was."""
    before = dict(made.state)
    with pytest.raises(TrainingError) as error:
        made.load(path)
    assert (made.state, made.skipped, made.nonfinite) == (before, 0, 0)
    return str(error.value)


@pytest.mark.parametrize(("count", "here"), [(2, "2 runs make a step"), (1, "each run is a step")])
def test_gradients_of_a_step_that_was_begun_are_not_dropped(count: int, here: str, tmp_path: Path) -> None:
    begun = trainer(micro_batches=4)
    begun.fit(DATA[:3])
    begun.save(tmp_path / "a.npz")

    assert refused(trainer(micro_batches=count), tmp_path / "a.npz") == (
        f"{tmp_path / 'a.npz'} was saved within a step, after 3 of its micro-batches, and here {here}; make the step"
        " with as many micro-batches as the one that was saved"
    )


def test_after_a_whole_step_the_micro_batches_may_be_others(tmp_path: Path) -> None:
    whole = trainer(micro_batches=4)
    whole.fit(DATA)
    whole.save(tmp_path / "a.npz")
    made = trainer(micro_batches=2)
    made.load(tmp_path / "a.npz")
    made.fit(DATA)

    assert (whole.steps, made.steps) == (1, 3)


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("loss_scale", np.array(np.nan, np.float32), "'loss_scale' is nan, and must be a number of 1 or more"),
        ("loss_scale", np.array(0.25, np.float32), "'loss_scale' is 0.25, and must be a number of 1 or more"),
        ("loss_scale", np.array("much"), "'loss_scale' is much, and must be a number of 1 or more"),
        ("good_steps", np.array(-5), "'good_steps' is -5, and must be a number of 0 or more"),
        ("step", np.array(-5), "'step' is -5, and must be a number of 0 or more"),
        ("count/skipped", np.zeros(2, int), "'count/skipped' is [0 0], and must be a number of 0 or more"),
        ("count/nonfinite", np.array(np.nan), "'count/nonfinite' is nan, and must be a number of 0 or more"),
        ("micro_batch", np.array(-1), "'micro_batch' is -1, and must be a number of 0 or more"),
    ],
)
def test_numbers_that_no_step_leaves_behind_are_refused(name: str, value: Array, fact: str, tmp_path: Path) -> None:
    made = trainer()
    made.save(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{**np.load(tmp_path / "a.npz"), name: value})  # type: ignore[arg-type]

    assert refused(made, tmp_path / "b.npz") == f"{tmp_path / 'b.npz'} is damaged: {fact}; load an older one"


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("amp_rewrite/version", np.array("x"), "is a checkpoint of version x; this package reads version 1"),
        (
            "amp_rewrite/model",
            np.array("x"),
            "is a checkpoint of another model: its ops or its weights' shapes differ",
        ),
    ],
)
def test_a_head_of_another_type_is_refused(name: str, value: Array, fact: str, tmp_path: Path) -> None:
    made = trainer()
    made.save(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{**np.load(tmp_path / "a.npz"), name: value})  # type: ignore[arg-type]

    assert refused(made, tmp_path / "b.npz") == f"{tmp_path / 'b.npz'} {fact}"
