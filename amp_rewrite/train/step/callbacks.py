"""Callbacks of `fit`: early stopping, the best checkpoint, and functions of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array

Log = Mapping[str, float]
"""Numbers of an epoch: loss, metrics, the same with "val_" before them, learning_rate, skipped, loss_scale, seconds."""


class Trained(Protocol):
    """A `Trainer`, as callbacks need it."""

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name."""

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Continue from a state."""

    def save(self, path: str | Path) -> None:
        """Write a checkpoint."""


class Monitor:
    """Base of early stopping and the best checkpoint: a number, compared with its best value so far.

    Subclasses have these fields. `fit` calls `begin`, `epoch_end` after each epoch, and `end`, also after an error.

    Args:
        monitor: a number of an epoch.
        mode: "min", "max", or "auto": min for a loss, max for an accuracy.
        min_delta: least change that counts.
    """

    monitor: str
    mode: str
    min_delta: float

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "min", "max"):
            raise TrainingError(f"mode is {self.mode!r}; use auto, min or max")
        falling, rising = "loss" in self.monitor, "acc" in self.monitor
        if self.mode == "auto" and falling == rising:
            raise TrainingError(
                f"{type(self).__name__} cannot tell by the name if {self.monitor!r} should fall or rise; say mode='min'"
                " or mode='max'"
            )
        self.sign = 1.0 if self.mode == "min" or (self.mode == "auto" and falling) else -1.0
        self.best = math.inf

    def begin(self, trainer: Trained) -> None:
        """Prepare for a call of `fit`."""

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> bool | None:
        """Look at the numbers of an epoch, counted from 0. Return True to stop."""

    def end(self, trainer: Trained) -> None:
        """Finish a call of `fit`."""

    def improved(self, log: Log) -> bool:
        """Compare an epoch with the best one, and remember it if it is better. TrainingError without the number."""
        if self.monitor not in log:
            hint = "; give validation_data or validation_split" if self.monitor.startswith("val_") else ""
            names, own = ", ".join(log), type(self).__name__
            raise TrainingError(f"{own} monitors {self.monitor!r}, but an epoch has {names}{hint}")
        value = self.sign * log[self.monitor]
        if math.isfinite(value) and value < self.best - abs(self.min_delta):
            self.best = value
            return True
        return False


@dataclass(eq=False)
class EarlyStopping(Monitor):
    """Stop when a number has not improved for `patience` epochs in a row, as in Keras; for 0 after the first.

    Args:
        patience: epochs without improvement after which `fit` stops.
        restore_best: end with the state of the best epoch.
    """

    monitor: str = "val_loss"
    patience: int = 0
    restore_best: bool = False
    mode: str = "auto"
    min_delta: float = 0.0

    def begin(self, trainer: Trained) -> None:
        self.best, self._waited = math.inf, 0
        self._state: dict[str, Array] | None = None

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> bool:
        if self.improved(log):
            self._waited = 0
            self._state = trainer.state if self.restore_best else None
            return False
        self._waited += 1
        return self._waited >= max(self.patience, 1)

    def end(self, trainer: Trained) -> None:
        if self._state is not None:
            trainer.set_state(self._state)


@dataclass(eq=False)
class BestCheckpoint(Monitor):
    """Write a checkpoint after each epoch that is the best so far.

    Args:
        path: the file, a .npz; {epoch} in it stands for the number of the epoch.
    """

    path: str | Path
    monitor: str = "val_loss"
    mode: str = "auto"
    min_delta: float = 0.0

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> None:
        if self.improved(log):
            trainer.save(str(self.path).replace("{epoch}", str(epoch)))


Callback = Monitor | Callable[[int, Log], object]
"""A callback of `fit`: an object above, or a function of the number of an epoch, from 0, and its numbers."""


def callbacks_of(given: Sequence[Callback] | Callback) -> tuple[Callback, ...]:
    """Return callbacks as a tuple. TrainingError for anything else."""
    listed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for callback in listed:
        if isinstance(callback, type) or not (isinstance(callback, Monitor) or callable(callback)):
            raise TrainingError(
                f"not a callback: {callback!r}; pass EarlyStopping(…), BestCheckpoint(…), or a function of the number"
                " of an epoch and its numbers"
            )
    return listed


def stops(callbacks: Sequence[Callback], trainer: Trained, epoch: int, log: Log) -> bool:
    """Show all callbacks the numbers of an epoch; True if one of them returns True."""
    found = [c.epoch_end(trainer, epoch, log) if isinstance(c, Monitor) else c(epoch, log) for c in callbacks]
    return any(one is True for one in found)
