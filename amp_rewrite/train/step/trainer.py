"""The trainer: it runs a step over data, evaluates, writes checkpoints, and exports the trained model."""

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
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.update.loss_scale import Array

Progress = Callable[[int, int], None]
Rate = float | Callable[[int], float]
"""A learning rate, or a function from the number of applied steps to the rate of the next step."""


@dataclass(frozen=True)
class History:
    """Record of a call of `fit`: loss and metrics per run, and counts of nonfinite steps.

    `skipped`: steps not applied because a gradient was nonfinite. `nonfinite`: all steps with nonfinite gradients,
    including those applied under a fixed loss scale or none.
    """

    losses: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]]
    skipped: int
    nonfinite: int


@dataclass(frozen=True)
class Scores:
    """Means over data, weighted by the rows of each batch."""

    loss: float
    metrics: Mapping[str, float]
    rows: int


@dataclass(slots=True)
class _Record:
    """A History under construction."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    skipped: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class _Position:
    """Progress of training: the side of the buffer that holds the state, and the counts.

    One object, so that an interrupt leaves all of it as before a step or as after it.
    """

    side: Side = 0
    steps: int = 0
    micro_batch: int = 0
    skipped: int = 0
    nonfinite: int = 0


class Steps(Protocol):
    """Executor of steps: one model, or several that share the work."""

    @property
    def provider(self) -> str: ...

    @property
    def buffer(self) -> DoubleBuffer:
        """The state on the device."""
        ...

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read the state of one side and write the other; return loss, metrics and flags, valid until the next run."""
        ...


class Trainer:
    """A training step with its state. Steps are deterministic on a CPU: a resumed run gives the same bits.

    `providers`, `threads`, `provider_options`: as `Runner.open` takes them; by default CUDA if available, else the
    CPU, one thread per core, and no TF32. The CPU provider computes most float16 ops in float32. So there a lowered
    step runs as its float32 twin with explicit rounding (`emulate`), and `emulated` is True; `emulated=False` runs
    the step itself.

    The state stays on the device, in two sets: a step reads one and writes the other. So a step that fails or is
    interrupted leaves the state of the step before it.
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
        self._evaluator: tuple[BufferedRunner, str, tuple[str, ...]] | None = None
        # a memory pool would hold the memory of a step twice
        self._options: dict[str, Any] = {"providers": chosen, "threads": threads, "pooled": False}
        self._options["provider_options"] = provider_options
        self._stepper = self._open()
        self._now = _Position()

    def _open(self) -> Steps:
        step, runner = self.step, Runner.open(self._model, SessionOptions(**self._options))
        buffer = runner.double_buffer({v.input: v.initial for v in step.state})
        outputs = (step.loss, *step.metrics, step.finite, step.applied)
        return runner.buffered(buffer, {v.input: v.output for v in step.state}, outputs)

    @property
    def where(self) -> str:
        """Text for people: the provider of the steps, and how it computes low types."""
        low, provider = self.step.policy.lowers, self._stepper.provider
        if low is None or not self.step.lowered:
            return provider
        how = "emulated: float32 kernels, rounded" if self.emulated else "as the provider computes it"
        return f"{provider}, {low.spelling} {how}"

    @property
    def state(self) -> dict[str, Array]:
        """Copies of the state by input name: the feeds of the next step besides batch and learning rate."""
        return self._stepper.buffer.arrays(self._now.side)

    @property
    def steps(self) -> int:
        """Number of applied steps."""
        return self._now.steps

    @property
    def skipped(self) -> int:
        """Number of skipped steps, including those before a checkpoint."""
        return self._now.skipped

    @property
    def nonfinite(self) -> int:
        """Number of steps with a nonfinite gradient, applied or not, including those before a checkpoint."""
        return self._now.nonfinite

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the next step."""
        if self.step.loss_scale is None:
            return None
        name = next((v.input for v in self.step.state if v.name == "loss_scale"), None)
        return float(self.step.loss_scale() if name is None else self._views()[name])

    def _views(self) -> dict[str, Array]:
        """State by input name, without a copy on the host; valid until the next step."""
        buffer, side = self._stepper.buffer, self._now.side
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
        """Train on all batches, `epochs` times, and return losses, metrics and counts.

        `batches`: as `Feed.of` takes them, with the names in the step's `batch`; NaN and infinity are allowed and
        make a step that is skipped or reported. `progress(done, total)` counts runs; `amp_rewrite.progress_bar` draws
        it. TrainingError for targets out of range and learning rates that are not a number ≥ 0; FeedError for data
        that does not fit.
        """
        if not isinstance(epochs, int) or epochs < 0:
            raise TrainingError(f"epochs is {epochs!r}; use a whole number ≥ 0")
        feed = self._feed(batches)
        total = epochs * len(feed) if progress is not None else 0
        record = _Record(metrics={name: [] for name in self.step.metrics})
        for _ in range(epochs):
            for number, batch in enumerate(feed):
                self._take(batch, number, learning_rate, record)
                if progress is not None:
                    progress(len(record.losses), total)
        metrics = {name: tuple(values) for name, values in record.metrics.items()}
        return History(tuple(record.losses), metrics, record.skipped, record.nonfinite)

    def _take(self, batch: Batch, number: int, learning_rate: Rate | None, record: _Record) -> None:
        self._check(batch, number)
        before = self._now
        results = self._stepper.run(before.side, {**batch, self.step.learning_rate: self._rate(learning_rate)})
        self._now = self._after(before, bool(results[self.step.finite]), bool(results[self.step.applied]))
        record.losses.append(_number(results[self.step.loss]))
        for name, values in record.metrics.items():
            values.append(_number(results[name]))
        record.skipped += self._now.skipped - before.skipped
        record.nonfinite += self._now.nonfinite - before.nonfinite

    def _after(self, before: _Position, finite: bool, applied: bool) -> _Position:
        """Progress after a run; a nonfinite step is counted in its last run."""
        micro_batch = (before.micro_batch + 1) % self.step.micro_batches
        nonfinite = micro_batch == 0 and not finite
        return _Position(
            side=1 if before.side == 0 else 0,
            steps=before.steps + applied,
            micro_batch=micro_batch,
            skipped=before.skipped + (nonfinite and not applied),
            nonfinite=before.nonfinite + nonfinite,
        )

    def _rate(self, learning_rate: Rate | None) -> Array:
        """Return the learning rate of the next step. TrainingError unless it is a finite number ≥ 0."""
        rate = self.step.optimizer.learning_rate if learning_rate is None else learning_rate
        value = rate(self.steps) if callable(rate) else rate
        real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (real and 0 <= value <= DType.FLOAT.max):  # a larger one is infinity in float32
            raise TrainingError(f"the learning rate of step {self.steps + 1} is {value!r}; use a finite number ≥ 0")
        return np.array(value, np.float32)

    def evaluate(self, batches: object) -> Scores:
        """Return loss and metrics over data with the current state; see `TrainingStep.evaluation` for training mode.

        FeedError and TrainingError as in `fit`.
        """
        if self._evaluator is None:
            self._evaluator = self._open_evaluator()
        runner, loss, metrics = self._evaluator
        rate = {self.step.learning_rate: np.array(0, np.float32)}
        sums, rows = dict.fromkeys((loss, *metrics), 0.0), 0
        for number, batch in enumerate(self._feed(batches)):
            self._check(batch, number)
            feeds = {name: array for name, array in {**batch, **rate}.items() if name in runner.inputs}
            results = runner.run(self._now.side, feeds)
            here = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
            rows += here
            for name in sums:
                sums[name] += _number(results[name]) * here
        means = [value / rows for value in sums.values()]
        return Scores(means[0], dict(zip(self.step.metrics, means[1:], strict=True)), rows)

    def _open_evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """Open the evaluation model on the same state; return it with the names of loss and metrics."""
        model, loss, metrics = self.step.evaluation()
        if model is self.step.model:
            model = self._model
        outputs = (loss, *metrics)
        runner = Runner.open(model, SessionOptions(outputs_only=outputs, **self._options))
        return runner.buffered(self._stepper.buffer, {}, outputs), loss, metrics

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
                f"input {target.name!r} of batch {number} has class {int(wrong.flat[0])}, but the model has classes 0"
                f" to {target.classes - 1}; correct the targets"
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
        """Continue from a checkpoint, saved with or without a loss scale; see `checkpoint.load` for the errors."""
        step, side = self.step, self._now.side
        saved = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        other: Side = 1 if side == 0 else 0
        self._stepper.buffer.put(other, {v.input: saved[v.name] for v in step.state})
        counts = ("step", "micro_batch", "count/skipped", "count/nonfinite")
        self._now = _Position(other, *(int(saved.get(name, 0)) for name in counts))

    def export(self) -> Model:
        """Return the model with its trained parameters as float32 initializers, ready for `convert`."""
        return self.step.trained(self._views())


def _opening(providers: Sequence[str] | None) -> tuple[str, ...]:
    """Return the chosen or default providers; drop CUDA if unavailable and followed by the CPU."""
    chosen = (CUDA, CPU) if providers is None else tuple(providers)
    return chosen[1:] if chosen[:2] == (CUDA, CPU) and not cuda_opens() else chosen


def _fed(step: TrainingStep) -> Model:
    """Return a model with only the batch inputs of a step, to check batches against."""
    declared = {v.name: v for v in step.model.proto.graph.input}
    proto = ModelProto(ir_version=step.model.proto.ir_version)
    proto.opset_import.extend(step.model.proto.opset_import)
    proto.graph.name = "batch"
    proto.graph.input.extend(declared[name] for name in step.batch)
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info("none"))
    return Model(proto)


def _check_sizes(declared: Model, batch: Batch, number: int) -> None:
    """Raise FeedError if a named dimension has two sizes: the backward pass assumes one, and could be wrong."""
    sizes: dict[str, tuple[int, str]] = {}
    for formal in declared.proto.graph.input:
        dims = formal.type.tensor_type.shape.dim
        for dim, size in zip(dims, batch[formal.name].shape, strict=False):
            before, where = sizes.setdefault(dim.dim_param, (size, formal.name)) if dim.dim_param else (size, "")
            if before != size:
                raise FeedError(
                    f"batch {number} has size {before} for {dim.dim_param!r} in {where!r}, but {size} in"
                    f" {formal.name!r}; use inputs of one size, or export the model with two dimension names"
                )


def _number(value: Any) -> float:
    return float(np.asarray(value).reshape(()))
