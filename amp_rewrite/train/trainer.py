"""Running a training step over data: epochs, evaluation, checkpoints, and the trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx.helper
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.emulate import emulate
from amp_rewrite.errors import FeedError, TrainingError
from amp_rewrite.evidence.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.ort.runner import CPU, CUDA, Runner, cuda_opens
from amp_rewrite.train import checkpoint
from amp_rewrite.train.loss_scale import Array
from amp_rewrite.train.step import TrainingStep

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


class Runs(Protocol):
    """What carries out a step: a `Runner`, or several that share the work."""

    @property
    def provider(self) -> str: ...

    def run(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of the step's model from its inputs, by name."""
        ...


class Trainer:
    """A training step with its state. Steps are deterministic on a CPU: a run that is resumed gives the same bits.

    `providers`: as `Runner.open` takes them; by default CUDA where it opens, else the CPU. The CPU provider computes
    most float16 ops in float32, so there a lowered step runs as its float32 twin that rounds (`emulate`), and
    `emulated` is True; `emulated=False` runs it as it is.

    `state` is by input name; `skipped` and `nonfinite` count all steps so far, those before a checkpoint included.
    """

    def __init__(
        self,
        step: TrainingStep,
        *,
        providers: Sequence[str] | None = None,
        emulated: bool | None = None,
        threads: int = 0,
    ) -> None:
        self.step = step
        chosen = tuple(providers) if providers is not None else (CUDA, CPU) if cuda_opens() else (CPU,)
        self.emulated = step.lowered and chosen[0] == CPU if emulated is None else emulated
        self._model = emulate(step.model) if self.emulated else step.model
        self._declared = _fed(step)
        self._judge: tuple[Runner, str, tuple[str, ...]] | None = None
        self._options: dict[str, Any] = {"providers": chosen, "threads": threads}
        self._runner = self._opened()
        self.state = step.initial_state()
        self.skipped = 0
        self.nonfinite = 0

    def _opened(self) -> Runs:
        return Runner.open(self._model, **self._options)

    @property
    def where(self) -> str:
        """Where steps run and how honestly, for people."""
        low = self.step.policy.lowers
        if low is None or not self.step.lowered:
            return self._runner.provider
        how = "emulated: float32 kernels, rounded" if self.emulated else "as the provider computes it"
        return f"{self._runner.provider}, {low.spelling} {how}"

    @property
    def steps(self) -> int:
        """How many steps were applied."""
        return int(self._of("step"))

    @property
    def loss_scale(self) -> float | None:
        """The loss scale that the next step uses."""
        if self.step.loss_scale is None:
            return None
        names = [v.name for v in self.step.state]
        return float(self._of("loss_scale") if "loss_scale" in names else self.step.loss_scale())

    def _of(self, path: str) -> Array:
        return self.state[next(v.input for v in self.step.state if v.name == path)]

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
        a step that is skipped or reported. TrainingError for targets that name no class and learning rates that are
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
        rate = self._rate(learning_rate)
        last = self._completes()
        results = self._runner.run({**batch, **self.state, self.step.learning_rate: rate})
        self.state = self.step.next_state(results)
        seen.losses.append(_number(results[self.step.loss]))
        for name, values in seen.metrics.items():
            values.append(_number(results[name]))
        if last and not results[self.step.finite]:
            skipped = int(not results[self.step.applied])
            seen.nonfinite, seen.skipped = seen.nonfinite + 1, seen.skipped + skipped
            self.nonfinite, self.skipped = self.nonfinite + 1, self.skipped + skipped

    def _rate(self, given: Rate | None) -> Array:
        """The learning rate of the next step. TrainingError for what would spoil the parameters."""
        rate = self.step.optimizer.learning_rate if given is None else given
        value = rate(self.steps) if callable(rate) else rate
        real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (real and 0 <= value <= DType.FLOAT.max):  # beyond, float32 has only infinity
            raise TrainingError(f"the learning rate of step {self.steps + 1} is {value!r}; give a number of 0 or more")
        return np.array(value, np.float32)

    def _completes(self) -> bool:
        """Whether the next run is the last of its step."""
        return self.step.micro_batches == 1 or int(self._of("micro_batch")) + 1 == self.step.micro_batches

    def evaluate(self, batches: object) -> Scores:
        """Loss and metrics over data, with the state as it is; see `TrainingStep.evaluation` for training mode.

        FeedError and TrainingError as `fit`.
        """
        if self._judge is None:
            self._judge = self._opened_judge()
        runner, loss, metrics = self._judge
        known = {port.name for port in runner.inputs}
        fixed = {**self.state, self.step.learning_rate: np.array(0, np.float32)}
        fixed = {name: value for name, value in fixed.items() if name in known}
        sums, rows = dict.fromkeys((loss, *metrics), 0.0), 0
        for number, batch in enumerate(self._feed(batches)):
            self._check(batch, number)
            results = runner.run({**batch, **fixed})
            here = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
            rows += here
            for name in sums:
                sums[name] += _number(results[name]) * here
        means = [value / rows for value in sums.values()]
        return Scores(means[0], dict(zip(self.step.metrics, means[1:], strict=True)), rows)

    def _opened_judge(self) -> tuple[Runner, str, tuple[str, ...]]:
        """What evaluates, with the names of loss and metrics there."""
        model, loss, metrics = self.step.evaluation()
        if model is self.step.model:
            model = self._model
        return Runner.open(model, outputs_only=(loss, *metrics), **self._options), loss, metrics

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
        state = {v.name: self.state[v.input] for v in self.step.state}
        state |= {name: np.array(count, np.int64) for name, count in counts.items()}
        checkpoint.save(path, state, self.step.fingerprint)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, saved with a loss scale or without; see `checkpoint.load` for the errors."""
        step = self.step
        found = checkpoint.load(path, step.state, step.fingerprint, micro_batches=step.micro_batches)
        self.state = {v.input: found[v.name] for v in self.step.state}
        self.skipped = int(found.get("count/skipped", 0))
        self.nonfinite = int(found.get("count/nonfinite", 0))

    def export(self) -> Model:
        """The model with what it has learned in its initializers, in float32: ready for `convert`."""
        return self.step.trained(self.state)


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
