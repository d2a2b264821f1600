"""Execution: the model of a step as a provider runs it, and its executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Protocol

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.keras.metrics import Accuracy
from amp_rewrite.train.step.batches import BatchMeans, Scores, read_by
from amp_rewrite.train.step.step import TrainingStep


class Steps(Protocol):
    """Executor of steps: one model, or several that share the work. `buffer`: the state on the device."""

    @property
    def provider(self) -> str: ...

    @property
    def buffer(self) -> DoubleBuffer: ...

    def run(self, side: Side, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Read the state of one side and write the other; return loss, metrics and flags, valid until the next run."""


class HoldsSession:
    """Base of objects with an open session, of which there are no copies."""

    def __reduce__(self) -> NoReturn:
        """Say how to go on in place of a copy."""
        raise TrainingError(
            f"a {type(self).__name__} holds an open session, which cannot be copied; save() writes its state, and"
            " load() of a new one reads it"
        )


@dataclass(frozen=True, slots=True)
class Execution:
    """The model of a step in the arithmetic of its provider. `emulated`: in float32 ops that round."""

    model: Model
    options: SessionOptions
    emulated: bool

    @classmethod
    def of(
        cls,
        step: TrainingStep,
        providers: Sequence[str] | None,
        emulated: bool | None,
        threads: int,
        provider_options: Mapping[str, Mapping[str, str]],
    ) -> Execution:
        """Return the execution for arguments of a `Trainer`."""
        providers = (CUDA, CPU) if providers is None else tuple(providers)
        if providers[:2] == (CUDA, CPU) and not cuda_opens():
            providers = providers[1:]
        emulated = step.lowered and providers[0] == CPU if emulated is None else emulated
        model = emulate(step.model, io="same") if emulated else step.model
        # a memory pool would hold the memory of a step twice; planned reuse would give colder memory, and more of it
        options = SessionOptions(
            providers=providers, threads=threads, pooled=False, planned=False, provider_options=provider_options
        )
        return cls(model, options, emulated)


@dataclass(frozen=True)
class Evaluation:
    """The models that evaluate a step, opened on the state in a buffer. `model`: the step as it runs."""

    step: TrainingStep
    model: Model
    options: SessionOptions
    buffer: DoubleBuffer

    def scores(self, side: Side, batches: Iterable[Batch], metrics: Sequence[Accuracy]) -> Scores:
        """Return loss, the step's own metrics and the requested ones over batches, with the state of one side."""
        runner, loss, own, weight = self._evaluator
        rate = {self.step.learning_rate: np.zeros((), np.float32)}
        sums = BatchMeans(loss, own, self.step.target, weight)
        for batch in batches:
            results = runner.run(side, read_by(runner, {**batch, **rate}))
            sums.add(batch, results)
            if metrics:
                found = self.predictor.run(side, read_by(self.predictor, batch))
                for metric in metrics:
                    metric.take({**batch, **found})
        mean, *means = sums.means().values()
        named = dict(zip(self.step.metrics, means, strict=True))
        return Scores(mean, {**named, **{metric.name: metric.result() for metric in metrics}}, sums.rows)

    @cached_property
    def predictor(self) -> BufferedRunner:
        """The trained model, opened on the same state."""
        model = self.step.prediction()
        outputs = tuple(v.name for v in model.proto.graph.output)
        return Runner.open(model, self.options).buffered(self.buffer, {}, outputs)

    @cached_property
    def _evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...], str]:
        """The evaluation model, opened on the same state, with the names of loss and metrics."""
        model, loss, metrics, weight = self.step.evaluation()
        if model is self.step.model:
            model = self.model
        outputs = (loss, *metrics, *([weight] if weight else []))
        runner = Runner.open(model, replace(self.options, outputs_only=outputs))
        return runner.buffered(self.buffer, {}, outputs), loss, metrics, weight
