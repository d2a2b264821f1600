"""Execution: the model of a step as a provider runs it, and its evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.step.batches import BatchMeans, Scores, read_by
from amp_rewrite.train.step.step import TrainingStep
from amp_rewrite.train.update.schedules import whole_number


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
        providers = (CUDA, CPU) if providers is None else as_names(providers)
        threads = whole_number("threads", threads, 0)
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

    def scores(self, side: Side, batches: Iterable[Batch]) -> Scores:
        """Return loss and metrics over batches, with the state of one side."""
        runner, loss, own = self._evaluator
        rate = {self.step.learning_rate: np.zeros((), np.float32)}
        sums = BatchMeans(loss, own, self.step.target)
        for batch in batches:
            sums.add(batch, runner.run(side, read_by(runner, {**batch, **rate})))
        mean, *means = sums.means().values()
        return Scores(mean, dict(zip(self.step.metrics, means, strict=True)), sums.rows)

    @cached_property
    def _evaluator(self) -> tuple[BufferedRunner, str, tuple[str, ...]]:
        """The evaluation model, opened on the same state, with the names of loss and metrics."""
        model, loss, metrics = self.step.evaluation()
        if model is self.step.model:
            model = self.model
        outputs = (loss, *metrics)
        runner = Runner.open(model, replace(self.options, outputs_only=outputs))
        return runner.buffered(self.buffer, {}, outputs), loss, metrics
