"""Callbacks of `fit`: early stopping, and functions of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.train.door import door
from amp_rewrite.train.update.schedules import whole_number

Log = Mapping[str, float]
"""Numbers of an epoch: loss, metrics, the same with "val_" before them, learning_rate, skipped, loss_scale, seconds."""


class Trained(Protocol):
    """A `Trainer`, as callbacks need it."""

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name."""

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Continue from a state."""


@door()
@dataclass(eq=False)
class EarlyStopping:
    """Stop when a number has not improved for `patience` epochs in a row, as in Keras; for 0 after the first.

    `fit` calls `begin`, `epoch_end` after each epoch, and `end`, also after an error.

    Args:
        monitor: a number of an epoch.
        patience: epochs without improvement after which `fit` stops.
        restore_best_weights: end with the state of the best epoch.
        mode: "min", "max", or "auto": min for a loss, max for an accuracy.
        min_delta: least change that counts.
    """

    monitor: str = "val_loss"
    patience: int = 0
    restore_best_weights: bool = False
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "min", "max"):
            raise TrainingError(f"mode is {self.mode!r}; use auto, min or max")
        whole_number("patience", self.patience, 0)
        falling, rising = "loss" in self.monitor, "acc" in self.monitor
        if self.mode == "auto" and falling == rising:
            raise TrainingError(
                f"EarlyStopping cannot tell by the name if {self.monitor!r} should fall or rise; say mode='min' or"
                " mode='max'"
            )
        self.sign = 1.0 if self.mode == "min" or (self.mode == "auto" and falling) else -1.0

    def begin(self) -> None:
        """Prepare for a call of `fit`."""
        self.best, self._waited = math.inf, 0
        self._state: dict[str, Array] | None = None

    def epoch_end(self, trainer: Trained, log: Log) -> bool:
        """Look at the numbers of an epoch. Return True to stop."""
        if self.monitor not in log:
            hint = "; give validation_data or validation_split" if self.monitor.startswith("val_") else ""
            raise TrainingError(f"EarlyStopping monitors {self.monitor!r}, but an epoch has {', '.join(log)}{hint}")
        value = self.sign * log[self.monitor]
        if math.isfinite(value) and value < self.best - abs(self.min_delta):
            self.best, self._waited = value, 0
            self._state = trainer.state if self.restore_best_weights else None
            return False
        self._waited += 1
        return self._waited >= max(self.patience, 1)

    def end(self, trainer: Trained) -> None:
        """Finish a call of `fit`."""
        if self._state is not None:
            trainer.set_state(self._state)


Callback = EarlyStopping | Callable[[int, Log], object]
"""A callback of `fit`: an object above, or a function of the number of an epoch, from 0, and its numbers."""


def callbacks_of(given: Sequence[Callback] | Callback) -> tuple[Callback, ...]:
    """Return callbacks as a tuple. TrainingError for anything else."""
    listed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for callback in listed:
        if isinstance(callback, type) or not (isinstance(callback, EarlyStopping) or callable(callback)):
            raise TrainingError(
                f"not a callback: {callback!r}; pass EarlyStopping(…), or a function of the number"
                " of an epoch and its numbers"
            )
    return listed


def stops(callbacks: Sequence[Callback], trainer: Trained, epoch: int, log: Log) -> bool:
    """Show all callbacks the numbers of an epoch; True if one of them returns True."""
    found = [c.epoch_end(trainer, log) if isinstance(c, EarlyStopping) else c(epoch, log) for c in callbacks]
    return any(one is True for one in found)
