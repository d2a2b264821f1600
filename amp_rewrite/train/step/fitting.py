"""The loop of `fit`: epochs over batches, validation after each epoch, callbacks, and the history."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, TypedDict

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.casting import Array
from amp_rewrite.train.arguments import AttributeHints, checked_arguments, whole_number
from amp_rewrite.train.loss_scale import MINIMUM, DynamicLossScale
from amp_rewrite.train.step.batches import BatchMeans, Rows, with_targets
from amp_rewrite.train.update.optimizer import rate_from_config

Log = Mapping[str, float]
"""Numbers of an epoch by name; see `History`."""


@checked_arguments()
@dataclass(eq=False)
class EarlyStopping:
    """Stop training when a number has not improved for `patience` consecutive epochs, as in Keras.

    `fit` calls `begin`, then `epoch_end` after each epoch, and `end` at the end, even after an error.

    Args:
        monitor: name of the number, such as "val_loss" or "accuracy".
        patience: number of epochs without improvement after which `fit` stops; 0 stops after the first, like 1.
        restore_best_weights: True restores the state of the best epoch at the end.
        mode: "min", "max", or "auto": min for a loss, max for an accuracy.
        min_delta: smallest change that counts as an improvement.

    Raises:
        TrainingError: the mode is unknown, or "auto" cannot be resolved from the name.
    """

    monitor: str = "val_loss"
    patience: int = 0
    restore_best_weights: bool = False
    mode: str = "auto"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "min", "max"):
            raise TrainingError(f"mode must be 'auto', 'min' or 'max', not {self.mode!r}")
        whole_number("patience", self.patience, 0)
        falling, rising = "loss" in self.monitor, "acc" in self.monitor
        if self.mode == "auto" and falling == rising:
            raise TrainingError(
                f"EarlyStopping cannot tell from the name whether {self.monitor!r} should fall or rise; pass mode='min'"
                " or mode='max'"
            )
        self.sign = 1.0 if self.mode == "min" or (self.mode == "auto" and falling) else -1.0

    def begin(self) -> None:
        """Reset when `fit` starts."""
        self.best, self._waited = math.inf, 0
        self._state: dict[str, Array] | None = None

    def epoch_end(self, trainer: Any, log: Log) -> bool:
        """Compare the numbers of an epoch with the best ones. Return True to stop."""
        if self.monitor not in log:
            hint = "pass validation_data or validation_split" if self.monitor.startswith("val_") else "use one of them"
            raise TrainingError(f"EarlyStopping monitors {self.monitor!r}, but an epoch has {', '.join(log)}; {hint}")
        value = self.sign * log[self.monitor]
        if math.isfinite(value) and value < self.best - abs(self.min_delta):
            self.best, self._waited = value, 0
            self._state = trainer.state if self.restore_best_weights else None
            return False
        self._waited += 1
        return self._waited >= max(self.patience, 1)

    def end(self, trainer: Any) -> None:
        """Restore the best state if `restore_best_weights` is True."""
        if self._state is not None:
            trainer.set_state(self._state)


Callback = EarlyStopping | Callable[[int, Log], object]
"""A callback of `fit`: `EarlyStopping`, or a function of the index of an epoch (from 0) and its numbers."""


Progress = Callable[[int, int], None]
Rate = float | Callable[[int], float]
"""A learning rate, or a function from the number of applied steps to the rate of the next step."""


class FitOptions(TypedDict, total=False):
    """Options of `fit`.

    Attributes:
        shuffle: shuffle the rows of arrays in each epoch; by default True.
        seed: seed of the order, combined with the index of the epoch; by default, each call draws a new one.
        validation_data: data to evaluate after each epoch, such as (x, y).
        validation_split: fraction of the rows of arrays, taken from the end, to evaluate on instead of training on.
        callbacks: `EarlyStopping`, or functions of the index of an epoch (from 0) and its numbers; training stops if
            one returns True.
        first_epoch: index of the first epoch, to resume a run.
        steps_per_epoch: runs per epoch; the next epoch continues where the last one ended, and the data start over
            when they end.
        verbose: accepted as in Keras, and ignored; see `progress`.
    """

    shuffle: bool | None
    seed: int | None
    validation_data: object
    validation_split: float
    callbacks: Sequence[Callback] | Callback
    first_epoch: int
    steps_per_epoch: int | None
    verbose: object


@dataclass(frozen=True)
class History(AttributeHints):
    """Result of a call of `fit`.

    The numbers of an epoch are the means of the loss and the metrics, weighted as in `Scores`; the same means with the
    prefix "val_" for validation data; and learning_rate, skipped (steps), seconds, and loss_scale if there is one.

    Attributes:
        losses: the loss of each run.
        skipped: number of steps that were not applied because a gradient was nonfinite.
        nonfinite: number of steps with nonfinite gradients, including those applied without a dynamic loss scale.
        epochs: the numbers of each epoch by name.
    """

    losses: tuple[float, ...]
    skipped: int
    nonfinite: int
    epochs: tuple[Mapping[str, float], ...] = field(default=(), compare=False)

    @property
    def history(self) -> dict[str, list[float]]:
        """The numbers of all epochs by name, as in Keras."""
        names = dict.fromkeys(name for epoch in self.epochs for name in epoch)
        return {name: [epoch[name] for epoch in self.epochs if name in epoch] for name in names}


@dataclass
class Monitor:
    """Counts of nonfinite steps in a call of `fit`, and the warning about them.

    `start`: the step count before the call. `before`: counts of skipped and nonfinite steps before the last run.
    `applied`: a description of the first nonfinite gradient that was applied. `batch`: the batch of the last run.
    `skipped`: True if the last run was skipped.
    """

    trainer: Any
    start: int
    before: tuple[int, int]
    applied: str = ""
    batch: Batch | None = None
    skipped: bool = False

    def record(self, batch: Batch) -> None:
        """Record the state of the trainer after a run."""
        trainer, (skipped, nonfinite) = self.trainer, self.before
        self.batch, self.skipped, self.before = batch, trainer.skipped > skipped, (trainer.skipped, trainer.nonfinite)
        if trainer.nonfinite > nonfinite and not self.skipped and not self.applied:
            self.applied = trainer.diagnosis(batch, before=True) or "not reproducible"

    def warn(self, skipped: int) -> None:
        """Warn if weights are NaN, or if steps were skipped until the end; a single skipped step is normal."""
        trainer, scale = self.trainer, self.trainer.step.loss_scale
        if self.batch is None:
            return
        nan = "look for NaN in the data, weights and loss (0 / 0, log 0) with policy='float32'"
        remedy, at_minimum = f"Train for more steps, until the scale fits, or {nan}", False
        if isinstance(scale, DynamicLossScale) and trainer.loss_scale <= np.float32(scale.minimum):
            remedy, at_minimum = f"Scale the loss or its targets down, or {nan}", True
            if scale.minimum == MINIMUM:
                remedy = f"Allow a scale below 1 with loss_scale=DynamicLossScale(minimum=2**-14), or {nan}"
        if self.applied and any(np.isnan(array).any() for array in trainer.get_weights().values()):
            text = (
                f"weights are NaN, because nonfinite gradients were applied; the first is {self.applied}. Use a dynamic"
                " loss scale, which skips such steps, or a smaller learning rate, and look for NaN in the data"
            )
        elif skipped > 1 and (trainer.steps == self.start or (self.skipped and at_minimum)):
            first = trainer.diagnosis(self.batch, before=False) or "in an earlier batch"
            what = "all steps" if trainer.steps == self.start else f"{skipped} steps, including the last one,"
            text = (
                f"{what} were skipped, because gradients were not finite; the first is {first}, and the loss scale"
                f" is {trainer.loss_scale:g}. {remedy}"
            )
        else:
            return
        warnings.warn(text, UserWarning, stacklevel=4)


@dataclass
class Fitting:
    """One call of `fit`. `rows`: the data if they are arrays; otherwise `feed` yields the batches."""

    trainer: Any
    rows: Rows | None
    feed: Any
    validation: object
    callbacks: Sequence[Callback]
    steps: int | None = None
    losses: list[float] = field(default_factory=list)
    epochs: list[Mapping[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Any, data: object, batch_size: int | None, options: FitOptions) -> Fitting:
        """Prepare data and options. TrainingError for options that contradict the data."""
        if data is None:
            raise TrainingError("fit needs data; pass them first, as in fit(x, y) or fit({'image': x, 'label': y})")
        names, shuffle = trainer.step.batch, options.get("shuffle")
        if shuffle not in (None, True, False):
            raise TrainingError(f"shuffle must be True or False, not {shuffle!r}")
        rows = Rows.of(data, names, batch_size, shuffle, options.get("seed"), trainer.step.target)
        validation, share = options.get("validation_data"), options.get("validation_split") or 0.0
        if isinstance(validation, (tuple, list)) and len(validation) == 2 and len(names) != 2:
            validation = with_targets(validation[0], validation[1], names)
        if share and (validation is not None or rows is None):
            what = "validation_data is set; omit one" if rows is not None else "these are batches; use validation_data"
            raise TrainingError(f"validation_split takes rows from arrays, but {what}")
        if share and rows is not None:
            rows, held_out = rows.split(share)
            validation = held_out.arrays
        if validation is not None and Rows.of(validation, names, None, False, target=trainer.step.target) is None:
            validation = trainer.feed(validation)  # a generator yields its batches only once
        feed = trainer.feed(data if rows is None else lambda: rows.batches(0))
        option = options.get("callbacks", ())
        callbacks: Any = option if isinstance(option, (list, tuple)) else (option,)
        for callback in callbacks:
            if isinstance(callback, type) or not (isinstance(callback, EarlyStopping) or callable(callback)):
                raise TrainingError(
                    f"{callback!r} is not a callback; pass EarlyStopping(…), or a function of an epoch's index and its"
                    " numbers"
                )
        steps = options.get("steps_per_epoch")
        steps = None if steps is None else whole_number("steps_per_epoch", steps, 1)
        return cls(trainer, rows, feed, validation, callbacks, steps)

    def run(self, epochs: range, learning_rate: Rate | None, progress: Progress | None) -> History:
        trainer = self.trainer
        rate: Rate | None = rate_from_config(learning_rate)
        before = (trainer.skipped, trainer.nonfinite)
        monitor = Monitor(trainer, trainer.steps, before)
        per_epoch = self.steps or (self.rows.count if self.rows is not None else len(self.feed) if progress else 0)
        total, stream = len(epochs) * per_epoch, self._stream(epochs.start)
        with ExitStack() as stack:
            for callback in (c for c in self.callbacks if isinstance(c, EarlyStopping)):
                callback.begin()
                stack.callback(callback.end, trainer)
            for epoch in epochs:
                batches = self._batches(epoch) if self.steps is None else islice(stream, self.steps)
                log = self._epoch(batches, rate, monitor, lambda done: progress and progress(done, total))
                self.epochs.append(log)
                results = [
                    callback.epoch_end(trainer, log) if isinstance(callback, EarlyStopping) else callback(epoch, log)
                    for callback in self.callbacks
                ]
                if any(result is True for result in results):
                    break
        skipped, nonfinite = trainer.skipped - before[0], trainer.nonfinite - before[1]
        monitor.warn(skipped)
        return History(tuple(self.losses), skipped, nonfinite, tuple(self.epochs))

    def _batches(self, epoch: int) -> Any:
        rows = self.rows
        return self.feed if rows is None else self.trainer.feed(lambda: rows.batches(epoch))

    def _stream(self, first: int) -> Iterator[Any]:
        passed, skipped = divmod(first * (self.steps or 0), self.rows.count) if self.rows is not None else (0, 0)
        for number in count(passed):
            yield from islice(self._batches(number), skipped if number == passed else 0, None)

    def _epoch(
        self, batches: Iterable[Any], learning_rate: Rate | None, monitor: Monitor, done: Callable[[int], object]
    ) -> dict[str, float]:
        trainer, step, skipped = self.trainer, self.trainer.step, self.trainer.skipped
        sums, start = BatchMeans(step.loss, step.metrics, step.target), time.perf_counter()
        for number, batch in enumerate(batches):
            results = trainer.take(batch, number, learning_rate)
            monitor.record(batch)
            sums.add(batch, results)
            self.losses.append(results[step.loss].item())
            done(len(self.losses))
        log = sums.scores(step.metrics).numbers
        seconds = time.perf_counter() - start
        if self.validation is not None:
            log |= {f"val_{name}": value for name, value in trainer.evaluate(self.validation).numbers.items()}
        scale = {} if trainer.loss_scale is None else {"loss_scale": trainer.loss_scale}
        counts = {"learning_rate": trainer.last_rate, "skipped": float(trainer.skipped - skipped)}
        return {**log, **counts, **scale, "seconds": seconds}
