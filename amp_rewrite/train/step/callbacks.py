"""Callbacks of `fit`: early stopping, the best checkpoint, logs, TensorBoard, and learning rates."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array

Log = Mapping[str, float]
"""Numbers of an epoch: loss, metrics, the same with "val_" before them, learning_rate, seconds, seconds_per_row."""


class Trained(Protocol):
    """A `Trainer`, as callbacks need it."""

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name."""

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Continue from a state."""

    def save(self, path: str | Path) -> None:
        """Write a checkpoint."""


class Callback:
    """Base of callbacks.

    `fit` calls `begin`, `rate` for each step, `epoch_end` after each epoch, and `end`, also after an error.
    """

    def begin(self, trainer: Trained) -> None:
        """Prepare for a call of `fit`."""

    def rate(self, epoch: int, rate: float) -> float:
        """Return the learning rate of the next step, by default the one that it would have.

        Args:
            epoch: the number of the epoch, from 0.
            rate: the rate that it would have: of `fit`, else of the optimizer, changed by earlier callbacks.
        """
        return rate

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> bool | None:
        """Look at the numbers of an epoch, counted from 0. Return True to stop."""

    def end(self, trainer: Trained) -> None:
        """Finish a call of `fit`."""


_FALLING = ("loss", "error", "perplexity", "entropy", "divergence", "huber", "contrastive", "cosine", "mae", "mse")
_RISING = ("acc", "auc", "f1", "top_k", "precision", "recall", "score", "similarity")
"""Parts of names of numbers that are better if they are less, and if they are more."""


class _Monitor(Callback):
    """Base of callbacks that compare a number with its best value so far; subclasses have these fields.

    Args:
        monitor: a number of an epoch.
        mode: "min", "max", or "auto": min for losses and errors, max for accuracy, AUC, F1 and the like.
        min_delta: least change that counts.
    """

    monitor: str
    mode: str
    min_delta: float

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "min", "max"):
            raise TrainingError(f"mode is {self.mode!r}; use auto, min or max")
        falling, rising = (any(word in self.monitor for word in words) for words in (_FALLING, _RISING))
        if self.mode == "auto" and falling == rising:
            raise TrainingError(
                f"{type(self).__name__} cannot tell by the name if {self.monitor!r} should fall or rise; say mode='min'"
                " or mode='max'"
            )
        self.sign = 1.0 if self.mode == "min" or (self.mode == "auto" and falling) else -1.0
        self.best = math.inf

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
class EarlyStopping(_Monitor):
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
class BestCheckpoint(_Monitor):
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


@dataclass(eq=False)
class LearningRateScheduler(Callback):
    """Set the learning rate of each epoch, as Keras's callback of this name does.

    In the first epoch the rate before is that of `fit`, else of the optimizer.

    Args:
        schedule: the rate of an epoch, a function of its number and, with a second argument, of the rate before.
    """

    schedule: Callable[..., float]

    def begin(self, trainer: Trained) -> None:
        self._epoch, self._rate = -1, math.nan

    def rate(self, epoch: int, rate: float) -> float:
        if epoch != self._epoch:
            before = rate if math.isnan(self._rate) else self._rate
            try:
                signature(self.schedule).bind(epoch, before)
            except TypeError:
                self._epoch, self._rate = epoch, self.schedule(epoch)
            else:
                self._epoch, self._rate = epoch, self.schedule(epoch, before)
        return self._rate


@dataclass(eq=False)
class ReduceLROnPlateau(_Monitor):
    """Multiply the learning rate by a factor when a number has not improved for some epochs, as PyTorch does.

    The factor acts on the rate of `fit` or of the optimizer, also on a schedule. It starts at 1 in each call of `fit`;
    a checkpoint does not hold it.

    Args:
        factor: above 0 and below 1.
        patience: epochs without improvement after which the next one reduces the rate.
        cooldown: epochs after a reduction that are not counted.
        min_lr: least rate.

    Raises:
        TrainingError: the factor is out of range.
    """

    monitor: str = "val_loss"
    factor: float = 0.1
    patience: int = 10
    _: KW_ONLY
    cooldown: int = 0
    min_lr: float = 0.0
    mode: str = "auto"
    min_delta: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.factor < 1:
            raise TrainingError(f"factor of ReduceLROnPlateau is {self.factor!r}; use a number above 0 and below 1")

    def begin(self, trainer: Trained) -> None:
        self.best, self._waited, self._cooling, self._product = math.inf, 0, 0, 1.0

    def rate(self, epoch: int, rate: float) -> float:
        return rate if self._product == 1 else max(rate * self._product, min(rate, self.min_lr))

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> None:
        self._waited = 0 if self.improved(log) else self._waited + 1
        if self._cooling:
            self._cooling, self._waited = self._cooling - 1, 0
        if self._waited > self.patience:
            self._waited, self._cooling, self._product = 0, self.cooldown, self._product * self.factor


@dataclass(eq=False)
class CSVLog(Callback):
    """Write the numbers of each epoch as a line of a CSV file, which is replaced when `fit` begins.

    Args:
        path: the file.
    """

    path: str | Path

    def begin(self, trainer: Trained) -> None:
        self._names = ["epoch"]

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> None:
        first = self._names == ["epoch"]
        if first:
            self._names += list(log)
        try:
            with Path(self.path).open("w" if first else "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if first:
                    writer.writerow(self._names)
                writer.writerow([epoch, *(log.get(name, "") for name in self._names[1:])])
        except OSError as cause:
            raise _unwritten(self.path, cause) from cause


@dataclass(eq=False)
class JSONLog(Callback):
    """Append the numbers of each epoch as a line of JSON to a file.

    Args:
        path: the file.
    """

    path: str | Path

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> None:
        try:
            with Path(self.path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"epoch": epoch, **log}) + "\n")
        except OSError as cause:
            raise _unwritten(self.path, cause) from cause


@dataclass(eq=False)
class TensorBoard(Callback):
    """Write the numbers of each epoch for TensorBoard, with tensorboardX or PyTorch's writer.

    Args:
        folder: the folder of the events.

    Raises:
        TrainingError: neither writer is installed.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        self._open = _summary_writer()

    def begin(self, trainer: Trained) -> None:
        self._writer = self._open(str(self.folder))

    def epoch_end(self, trainer: Trained, epoch: int, log: Log) -> None:
        for name, value in log.items():
            self._writer.add_scalar(name, value, epoch)

    def end(self, trainer: Trained) -> None:
        self._writer.close()


def _summary_writer() -> Callable[[str], Any]:
    """Return the class of a writer. TrainingError without one."""
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        try:
            writer: Callable[[str], Any] = import_module(module).SummaryWriter
        except ImportError:
            continue
        return writer
    raise TrainingError("TensorBoard needs a writer of events, but none is installed; pip install tensorboardX")


def _unwritten(path: str | Path, cause: OSError) -> TrainingError:
    return TrainingError(f"cannot write the log {path}: {cause.strerror or cause}")
