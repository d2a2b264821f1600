"""Evaluation: loss and metrics over batches, from the state that a trainer holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.keras.metrics import Accuracy
from amp_rewrite.train.step.batch_check import read_by
from amp_rewrite.train.step.batch_means import BatchMeans
from amp_rewrite.train.step.fitting import Scores
from amp_rewrite.train.step.step import TrainingStep


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
        """The evaluation model, opened on the same state, with the names of loss, metrics and weight."""
        model, loss, metrics, weight = self.step.evaluation()
        if model is self.step.model:
            model = self.model
        outputs = (loss, *metrics, *([weight] if weight else []))
        runner = Runner.open(model, replace(self.options, outputs_only=outputs))
        return runner.buffered(self.buffer, {}, outputs), loss, metrics, weight
