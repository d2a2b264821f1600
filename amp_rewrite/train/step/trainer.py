"""Running a training step over data: epochs, evaluation, checkpoints, and the trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnx.helper
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, cuda_opens
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.step import TrainingStep

Progress = Callable[[int, int], None]
Rate = float | Callable[[int], float]
"""A learning rate, or one for each step, by the number of steps applied before it."""


@dataclass(frozen=True)
class History:
    """What a call of `fit` saw: per run its loss and metrics, and how many steps were not finite.

    `skipped`: steps that were not applied because a gradient was not finite; `nonfinite`: all steps with such
    gradients, those included that a fixed loss scale, or none, let through.
    """

    losses: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]]
    skipped: int
    nonfinite: int


@dataclass(frozen=True)
class Scores:
    """Means over data: each batch counts by its rows."""

    loss: float
    metrics: Mapping[str, float]
    rows: int


@dataclass(slots=True)
class _Seen:
    """A History in the making."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    skipped: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class _Standing:
    """Where training stands: which set of the buffer is the state, and what was counted on the way.

    One object, so that an interrupt finds all of it before a step or all of it after one.
    """

    side: Side = 0
    steps: int = 0
    micro_batch: int = 0
    skipped: int = 0
    nonfinite: int = 0


class Steps(Protocol):
    """What carries out a step: one model, or several that share the work."""

    @property
    def provider(self) -> str: ...

    @property
    def buffer(self) -> DoubleBuffer:
        """The state, on the device."""
        ...

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read the state of one side, write that of the other; loss, metrics and flags by name, until the next run."""
        ...


class Trainer:
    """A training step with its state. Steps are deterministic on a CPU: a run that is resumed gives the same bits.

    `providers`, `threads`, `provider_options`: as `Runner.open` takes them; by default CUDA where it opens, else the
    CPU, one thread for each core, and no TF32. The CPU provider computes most float16 ops in float32, so there a
    lowered step runs as its float32 twin that rounds (`emulate`), and `emulated` is True; `emulated=False` runs it as
    it is.

    The state stays where the step runs, in two sets: a step reads one and writes the other, so that a step that
    fails, or is interrupted, leaves the state of the step before it.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        providers: Sequence[str] | None = None,
        emulated: bool | None = None,
        threads: int = 0,
        provider_options: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.step = step
        chosen = _opening(providers)
        self.emulated = step.lowered and chosen[0] == CPU if emulated is None else emulated
        self._model = emulate(step.model) if self.emulated else step.model
        self._declared = _fed(step)
        self._judge: tuple[BufferedRunner, str, tuple[str, ...]] | None = None
        # pooled, the memory of a step would be taken twice, and stay so
        self._options: dict[str, Any] = {"providers": chosen, "threads": threads, "pooled": False}
        self._options["provider_options"] = provider_options
        self._stepper = self._opened()
        self._standing = _Standing()

    def _opened(self) -> Steps:
        step, runner = self.step, Runner.open(self._model, **self._options)
        buffer = runner.double_buffer({v.input: v.initial for v in step.state})
        told = (step.loss, *step.metrics, step.finite, step.applied)
        return runner.buffered(buffer, {v.input: v.output for v in step.state}, told)

    @property
    def where(self) -> str:
        """Where steps run and how honestly, for people."""
        low, provider = self.step.policy.lowers, self._stepper.provider
        if low is None or not self.step.lowered:
            return provider
        how = "emulated: float32 kernels, rounded" if self.emulated else "as the provider computes it"
        return f"{provider}, {low.spelling} {how}"

    @property
    def state(self) -> dict[str, Array]:
        """What the next step is fed besides batch and learning rate, by input name: copies of what is on the device."""
        return self._stepper.buffer.arrays(self._standing.side)

    @property
    def steps(self) -> int:
        """How many steps were applied."""
        return self._standing.steps

    @property
    def skipped(self) -> int:
        """How many steps were not, those before a checkpoint included."""
        return self._standing.skipped

    @property
    def nonfinite(self) -> int:
        """How many steps had a gradient that was not finite, applied or not, those before a checkpoint included."""
        return self._standing.nonfinite

    @property
    def loss_scale(self) -> float | None:
        """The loss scale that the next step uses."""
        if self.step.loss_scale is None:
            return None
        name = next((v.input for v in self.step.state if v.name == "loss_scale"), None)
        return float(self.step.loss_scale() if name is None else self._views()[name])

    def _views(self) -> dict[str, Array]:
        """The state, not copied where it is on the host; good until the next step."""
        buffer, side = self._stepper.buffer, self._standing.side
        return {v.input: buffer.view(side, v.input) for v in self.step.state}

    # -- training --------------------------------------------------------------------------------------

    def fit(
        self,
        batches: object,
        epochs: int = 1,
        *,
        learning_rate: Rate | None = None,
        progress: Progress | None = None,
    ) -> History:
        """Train on all batches, `epochs` times; what happened.

        `batches`: as `Feed.of` takes them, with the step's `batch` as names; NaN and infinity are let in, and make
        a step that is skipped or reported. `progress(done, total)` counts runs; `amp_rewrite.progress_bar` draws it.
        TrainingError for targets that name no class and learning rates that are
        no number of 0 or more; FeedError for data that does not fit.
        """
        if not isinstance(epochs, int) or epochs < 0:
            raise TrainingError(f"epochs is {epochs!r}; give a whole number of 0 or more")
        feed = self._feed(batches)
        total = epochs * len(feed) if progress is not None else 0
        seen = _Seen(metrics={name: [] for name in self.step.metrics})
        for _ in range(epochs):
            for number, batch in enumerate(feed):
                self._take(batch, number, learning_rate, seen)
                if progress is not None:
                    progress(len(seen.losses), total)
        metrics = {name: tuple(values) for name, values in seen.metrics.items()}
        return History(tuple(seen.losses), metrics, seen.skipped, seen.nonfinite)

    def _take(self, batch: Batch, number: int, learning_rate: Rate | None, seen: _Seen) -> None:
        self._check(batch, number)
        before = self._standing
        told = self._stepper.run(before.side, {**batch, self.step.learning_rate: self._rate(learning_rate)})
        self._standing = self._after(before, bool(told[self.step.finite]), bool(told[self.step.applied]))
        seen.losses.append(_number(told[self.step.loss]))
        for name, values in seen.metrics.items():
            values.append(_number(told[name]))
        seen.skipped += self._standing.skipped - before.skipped
        seen.nonfinite += self._standing.nonfinite - before.nonfinite

    def _after(self, before: _Standing, finite: bool, applied: bool) -> _Standing:
        """Where training stands after a run; what was not finite counts with the last run of its step."""
        micro_batch = (before.micro_batch + 1) % self.step.micro_batches
        nonfinite = micro_batch == 0 and not finite
        return _Standing(
            side=1 if before.side == 0 else 0,
            steps=before.steps + applied,
            micro_batch=micro_batch,
            skipped=before.skipped + (nonfinite and not applied),
            nonfinite=before.nonfinite + nonfinite,
        )

    def _rate(self, given: Rate | None) -> Array:
        """The learning rate of the next step. TrainingError for what would spoil the parameters."""
        rate = self.step.optimizer.learning_rate if given is None else given
        value = rate(self.steps) if callable(rate) else rate
        real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (real and 0 <= value <= DType.FLOAT.max):  # beyond, float32 has only infinity
            raise TrainingError(f"the learning rate of step {self.steps + 1} is {value!r}; give a number of 0 or more")
        return np.array(value, np.float32)

    def evaluate(self, batches: object) -> Scores:
        """Loss and metrics over data, with the state as it is; see `TrainingStep.evaluation` for training mode.

        FeedError and TrainingError as `fit`.
        """
        if self._judge is None:
            self._judge = self._opened_judge()
        runner, loss, metrics = self._judge
        rate = {self.step.learning_rate: np.array(0, np.float32)}
        sums, rows = dict.fromkeys((loss, *metrics), 0.0), 0
        for number, batch in enumerate(self._feed(batches)):
            self._check(batch, number)
            feeds = {name: array for name, array in {**batch, **rate}.items() if name in runner.inputs}
            told = runner.run(self._standing.side, feeds)
            here = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
            rows += here
            for name in sums:
                sums[name] += _number(told[name]) * here
        means = [value / rows for value in sums.values()]
        return Scores(means[0], dict(zip(self.step.metrics, means[1:], strict=True)), rows)

    def _opened_judge(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """What evaluates, on the state where it is, with the names of loss and metrics there."""
        model, loss, metrics = self.step.evaluation()
        if model is self.step.model:
            model = self._model
        told = (loss, *metrics)
        runner = Runner.open(model, outputs_only=told, **self._options)
        return runner.buffered(self._stepper.buffer, {}, told), loss, metrics

    def _feed(self, batches: object) -> Feed:
        return Feed.of(batches, self._declared, allow_nonfinite=True)

    def _check(self, batch: Batch, number: int) -> None:
        _check_sizes(self._declared, batch, number)
        target = self.step.target
        if target is None or target.classes is None:
            return
        classes = batch[target.name]
        wrong = classes[(classes < 0) | (classes >= target.classes)]
        if wrong.size:
            raise TrainingError(
                f"input {target.name!r} of batch {number} has class {int(wrong.flat[0])}, and the model knows 0 to"
                f" {target.classes - 1}; correct the targets"
            )

    # -- state -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: parameters, slots, step count, loss scale, good steps; see `checkpoint.save`."""
        counts = {"count/skipped": self.skipped, "count/nonfinite": self.nonfinite}
        views = self._views()
        state = {v.name: views[v.input] for v in self.step.state}
        state |= {name: np.array(count, np.int64) for name, count in counts.items()}
        checkpoint.save(path, state, self.step.fingerprint)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, saved with a loss scale or without; see `checkpoint.load` for the errors."""
        step, side = self.step, self._standing.side
        found = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        other: Side = 1 if side == 0 else 0
        self._stepper.buffer.put(other, {v.input: found[v.name] for v in step.state})
        counted = ("step", "micro_batch", "count/skipped", "count/nonfinite")
        self._standing = _Standing(other, *(int(found.get(name, 0)) for name in counted))

    def export(self) -> Model:
        """The model with what it has learned in its initializers, in float32: ready for `convert`."""
        return self.step.trained(self._views())


def _opening(providers: Sequence[str] | None) -> tuple[str, ...]:
    """The providers that are asked for, or the usual ones, without a CUDA that does not open before a CPU that does."""
    chosen = (CUDA, CPU) if providers is None else tuple(providers)
    return chosen[1:] if chosen[:2] == (CUDA, CPU) and not cuda_opens() else chosen


def _fed(step: TrainingStep) -> Model:
    """A model that takes what a step is fed and nothing else: what batches are checked against."""
    declared = {v.name: v for v in step.model.proto.graph.input}
    proto = ModelProto(ir_version=step.model.proto.ir_version)
    proto.opset_import.extend(step.model.proto.opset_import)
    proto.graph.name = "batch"
    proto.graph.input.extend(declared[name] for name in step.batch)
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info("none"))
    return Model(proto)


def _check_sizes(declared: Model, batch: Batch, number: int) -> None:
    """FeedError where a named dimension has two sizes: the backward pass is made for one, and could be wrong."""
    seen: dict[str, tuple[int, str]] = {}
    for formal in declared.proto.graph.input:
        dims = formal.type.tensor_type.shape.dim
        for dim, size in zip(dims, batch[formal.name].shape, strict=False):
            before, where = seen.setdefault(dim.dim_param, (size, formal.name)) if dim.dim_param else (size, "")
            if before != size:
                raise FeedError(
                    f"batch {number} has {before} as {dim.dim_param!r} in {where!r}, and {size} in {formal.name!r};"
                    " give inputs of one size, or export the model with two names"
                )


def _number(value: Any) -> float:
    return float(np.asarray(value).reshape(()))
