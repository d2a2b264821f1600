"""The trainer: it runs a step over data, evaluates, writes checkpoints, and exports the trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.objective.prediction import Target
from amp_rewrite.train.step import checkpoint
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.update.loss_scale import Array

Progress = Callable[[int, int], None]
Rate = float | Callable[[int], float]
"""A learning rate, or a function from the number of applied steps to the rate of the next step."""


@dataclass(frozen=True)
class History:
    """Record of a call of `fit`.

    Attributes:
        losses: the loss of each run.
        metrics: the metrics of each run.
        skipped: steps not applied because a gradient was nonfinite.
        nonfinite: all steps with nonfinite gradients, including those applied under a fixed loss scale or none.
    """

    losses: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]]
    skipped: int
    nonfinite: int


@dataclass(frozen=True)
class Scores:
    """Means over data, weighted by the rows of each batch.

    Attributes:
        loss: the loss.
        metrics: metrics by name.
        rows: number of rows.
    """

    loss: float
    metrics: Mapping[str, float]
    rows: int


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
    """Executor of steps: one model, or several that share the work. `buffer`: the state on the device."""

    @property
    def provider(self) -> str: ...

    @property
    def buffer(self) -> DoubleBuffer: ...

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read the state of one side and write the other; return loss, metrics and flags, valid until the next run."""


class Trainer:
    """A training step with its state. Steps are deterministic on a CPU: a resumed run gives the same bits.

    The CPU provider computes most float16 ops in float32. So there a lowered step runs as its float32 twin with
    explicit rounding (`emulate`), and `emulated` is True. The state stays on the device, in two sets: a step reads one
    and writes the other. So a step that fails or is interrupted leaves the state of the step before it.

    Args:
        step: the step.
        providers: those of onnxruntime; by default CUDA if available, else the CPU.
        emulated: False runs the step itself on a CPU; None: as above.
        threads: for one op; 0: one per core.
        provider_options: options by provider; without any, CUDA computes float32 without TF32.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.train import Trainer, training_step
        >>> trainer = Trainer(training_step("model.onnx", loss="cross_entropy(probability, label)", policy="float32"))
        >>> batch = {"image": np.ones((4, 1, 8, 8), np.float32), "label": np.arange(4)}
        >>> history = trainer.fit([batch], epochs=3)
        >>> trainer.steps, history.losses[2] < history.losses[0]
        (3, True)
        >>> trainer.export().save("trained.onnx")
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
        require("Trainer")
        self.step = step
        providers = (CUDA, CPU) if providers is None else tuple(providers)
        if providers[:2] == (CUDA, CPU) and not cuda_opens():
            providers = providers[1:]
        self.emulated = step.lowered and providers[0] == CPU if emulated is None else emulated
        self._model = emulate(step.model) if self.emulated else step.model
        self._declared = _fed(step)
        # a memory pool would hold the memory of a step twice
        self._options = SessionOptions(
            providers=providers, threads=threads, pooled=False, provider_options=provider_options
        )
        self._stepper = self._open()
        self._now = _Position()

    def _open(self) -> Steps:
        step, runner = self.step, Runner.open(self._model, self._options)
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

    def fit(
        self, batches: object, epochs: int = 1, *, learning_rate: Rate | None = None, progress: Progress | None = None
    ) -> History:
        """Train on all batches, `epochs` times, and return losses, metrics and counts.

        Args:
            batches: as `Feed.of` takes them, named as in the step's `batch`; steps with NaN are skipped or reported.
            epochs: passes over the batches.
            learning_rate: a number ≥ 0, or a function of the step; None: the optimizer's.
            progress: called as `progress(done, total)` with runs; `amp_rewrite.progress_bar` draws it.

        Raises:
            TrainingError: a target is out of range, or a learning rate is not a number ≥ 0.
            FeedError: the data do not fit.
        """
        if not isinstance(epochs, int) or epochs < 0:
            raise TrainingError(f"epochs is {epochs!r}; use a whole number ≥ 0")
        feed = Feed.of(batches, self._declared, allow_nonfinite=True)
        total = epochs * len(feed) if progress is not None else 0
        losses: list[float] = []
        metrics: dict[str, list[float]] = {name: [] for name in self.step.metrics}
        skipped = nonfinite = 0
        for _ in range(epochs):
            for number, batch in enumerate(feed):
                before = self._now
                results = self._take(batch, number, learning_rate)
                losses.append(results[self.step.loss].item())
                for name, values in metrics.items():
                    values.append(results[name].item())
                skipped += self._now.skipped - before.skipped
                nonfinite += self._now.nonfinite - before.nonfinite
                if progress is not None:
                    progress(len(losses), total)
        return History(tuple(losses), {name: tuple(values) for name, values in metrics.items()}, skipped, nonfinite)

    def _take(self, batch: Batch, number: int, learning_rate: Rate | None) -> dict[str, Array]:
        """Run one step, or one micro-batch of a step; a nonfinite step is counted in its last run."""
        self._check(batch, number)
        now = self._now
        results = self._stepper.run(now.side, {**batch, self.step.learning_rate: self._rate(learning_rate)})
        applied = bool(results[self.step.applied])
        micro_batch = (now.micro_batch + 1) % self.step.micro_batches
        nonfinite = micro_batch == 0 and not results[self.step.finite]
        self._now = _Position(
            side=1 if now.side == 0 else 0,
            steps=now.steps + applied,
            micro_batch=micro_batch,
            skipped=now.skipped + (nonfinite and not applied),
            nonfinite=now.nonfinite + nonfinite,
        )
        return results

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

        Args:
            batches: as `fit` takes them.

        Raises:
            FeedError: the data do not fit.
            TrainingError: a target is out of range.
        """
        runner, loss, metrics = self._evaluator
        rate = {self.step.learning_rate: np.array(0, np.float32)}
        sums, rows = dict.fromkeys((loss, *metrics), 0.0), 0
        for number, batch in enumerate(Feed.of(batches, self._declared, allow_nonfinite=True)):
            self._check(batch, number)
            results = runner.run(self._now.side, read_by(runner, {**batch, **rate}))
            here = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
            rows += here
            for name in sums:
                sums[name] += results[name].item() * here
        means = [value / rows for value in sums.values()]
        return Scores(means[0], dict(zip(self.step.metrics, means[1:], strict=True)), rows)

    @cached_property
    def _evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """The evaluation model, opened on the same state, with the names of loss and metrics."""
        model, loss, metrics = self.step.evaluation()
        if model is self.step.model:
            model = self._model
        outputs = (loss, *metrics)
        runner = Runner.open(model, replace(self._options, outputs_only=outputs))
        return runner.buffered(self._stepper.buffer, {}, outputs), loss, metrics

    def _check(self, batch: Batch, number: int) -> None:
        """Raise FeedError if a named dimension has two sizes, TrainingError if a class is out of range.

        The backward pass assumes one size, and could be wrong.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for formal in self._declared.proto.graph.input:
            dims = formal.type.tensor_type.shape.dim
            for dim, size in zip(dims, batch[formal.name].shape, strict=False):
                before, where = sizes.setdefault(dim.dim_param, (size, formal.name)) if dim.dim_param else (size, "")
                if before != size:
                    raise FeedError(
                        f"batch {number} has size {before} for {dim.dim_param!r} in {where!r}, but {size} in"
                        f" {formal.name!r}; use inputs of one size, or export the model with two dimension names"
                    )
        for target in self.step.targets:
            self._check_classes(target, batch[target.name], number)

    def _check_classes(self, target: Target, classes: Array, number: int) -> None:
        """Raise TrainingError if a class is out of range."""
        if target.classes is None:
            return
        wrong = classes[((classes < 0) | (classes >= target.classes)) & (classes != target.ignored)]
        if wrong.size:
            raise TrainingError(
                f"input {target.name!r} of batch {number} has class {int(wrong.flat[0])}, but the model has classes 0"
                f" to {target.classes - 1}; correct the targets"
            )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: parameters, slots, step count, loss scale, good steps; see `checkpoint.save`.

        Args:
            path: the file, a .npz.
        """
        views = self._views()
        state = {v.name: views[v.input] for v in self.step.state}
        for name, count in (("count/skipped", self.skipped), ("count/nonfinite", self.nonfinite)):
            state[name] = np.array(count, np.int64)
        checkpoint.save(path, state, self.step.fingerprint)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint, saved with or without a loss scale; see `checkpoint.load` for the errors.

        Args:
            path: a file that `save` wrote.
        """
        step, side = self.step, self._now.side
        saved = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        other: Side = 1 if side == 0 else 0
        self._stepper.buffer.put(other, {v.input: saved[v.name] for v in step.state})
        counts = ("step", "micro_batch", "count/skipped", "count/nonfinite")
        self._now = _Position(other, *(int(saved.get(name, 0)) for name in counts))

    def export(self) -> Model:
        """Return the model with its trained parameters as float32 initializers, ready for `convert`."""
        return self.step.trained(self._views())


def read_by(runner: BufferedRunner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the feeds that a runner reads."""
    return {name: array for name, array in feeds.items() if name in runner.inputs}


def _fed(step: TrainingStep) -> Model:
    """Return the step with only its batch inputs, to check batches against."""
    declared = {v.name: v for v in step.model.proto.graph.input}
    proto = ModelProto(ir_version=step.model.proto.ir_version, opset_import=step.model.proto.opset_import)
    proto.graph.input.extend(declared[name] for name in step.batch)
    return Model(proto)
