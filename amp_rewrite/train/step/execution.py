"""Execution: the model of a step as a provider runs it, its evaluation, its predictions, its bad gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names
from amp_rewrite.rewrite.builder import declared
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import BufferedRunner, DoubleBuffer, Side
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions, cuda_opens
from amp_rewrite.train.door import stated, whole_number
from amp_rewrite.train.keras.variables import ArrayLike
from amp_rewrite.train.step.assembly import with_outputs, with_state
from amp_rewrite.train.step.batches import BatchMeans, Rows, Scores, batch_model, read_by
from amp_rewrite.train.step.step import TrainingStep


class HoldsSession:
    """Base of objects with an open session; they have no copies."""

    def __reduce__(self) -> NoReturn:
        """Say how to go on in place of a copy."""
        raise TrainingError(
            f"a {type(self).__name__} holds an open session, which cannot be copied; save() writes its state, and"
            " load() of a new one reads it"
        )


@dataclass(frozen=True, slots=True)
class Execution:
    """The model of a step in the arithmetic of its provider. `emulated`: in float32 ops with rounding."""

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
    """The models for the evaluation of a step, opened on the state in a buffer. `model`: the step as it runs."""

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


@dataclass(frozen=True, eq=False)
class Predictions(ArrayLike):
    """Outputs of a model, read as the array of one of them; `predictions["NAME"]` is another.

    Attributes:
        compute: gives the arrays by name.
        names: the outputs.
        output: the output that is read.
        source: what a loss object needs.
    """

    compute: Callable[[], Mapping[str, Array]]
    names: tuple[str, ...]
    output: str
    source: object = None

    def __getitem__(self, key: Any) -> Any:
        """Return the predictions of another output, or a part of the array."""
        if not isinstance(key, str):
            return self.numpy()[key]
        if key not in self.names:
            raise TrainingError(f"the model has no output {key!r}; it has {', '.join(self.names)}")
        return replace(self, output=key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.numpy(), name)  # argmax, mean, reshape …

    def numpy(self) -> Array:
        return self.compute()[self.output]

    def __repr__(self) -> str:
        return repr(self.numpy())


def inputs_of(source: Model, inputs: Sequence[str], batch: Mapping[str, Array]) -> Batch:
    """Return the inputs of a model from a batch, perhaps with targets. FeedError if one does not fit."""
    if not isinstance(batch, Mapping):
        raise TrainingError(f"the batch is {stated(batch)}; pass a mapping from names of inputs to arrays")
    missing = sorted(set(inputs) - batch.keys())
    if missing:
        raise TrainingError(f"the batch lacks the inputs {missing}; pass arrays for all inputs of the model")
    (read,) = Feed.of([batch], batch_model(source, inputs), allow_nonfinite=True)
    return read


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model opened to compute its outputs. `inputs`: those besides the weights."""

    source: Model
    runner: Runner
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, source: Model, weights: Collection[str], options: SessionOptions) -> Predictor:
        runner = Runner.open(with_state(source, weights), options)
        return cls(source, runner, tuple(port.name for port in runner.inputs if port.name not in weights))

    def __call__(self, batch: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[str, Array]:
        read = inputs_of(self.source, self.inputs, batch)
        outputs = [v.name for v in self.source.proto.graph.output]
        ports = {port.name for port in self.runner.inputs}
        held = {name: array for name, array in weights.items() if name in ports}
        results = self.runner.run({**held, **read}, outputs)
        return {name: np.asarray(results[name]) for name in outputs}

    def rows(self, data: object, batch_size: int | None, weights: Mapping[str, Array]) -> Predictions:
        """Return the outputs for all rows of data, joined along the first axis. Labels are left out."""
        given = data[: len(self.inputs)] if isinstance(data, tuple) else data
        rows = Rows.of(given, self.inputs, batch_size, False)
        feed = Feed.of(
            given if rows is None else lambda: rows.batches(0),
            batch_model(self.source, self.inputs),
            allow_nonfinite=True,
            allow_change=True,
        )
        parts = [self(batch, weights) for batch in feed]
        names = tuple(v.name for v in self.source.proto.graph.output)
        found = {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in names}
        return Predictions(lambda: found, names, names[0])


def first_bad_gradient(step: TrainingStep, model: Model, options: SessionOptions, feeds: Mapping[str, Array]) -> str:
    """Return the first nonfinite gradient on the way back from the loss, in words; "" without one.

    `model`: that of the step as it runs.
    """
    shapes = {s.input: s.initial.shape for s in step.state}
    outputs = [declared(value, DType.FLOAT, shapes[name]) for name, value in step.gradients.items()]
    runner = Runner.open(with_outputs(model, outputs, ()), options)
    ports = {port.name for port in runner.inputs}
    found = runner.run({name: array for name, array in feeds.items() if name in ports}, [*step.gradients.values()])
    for name, value in reversed([*step.gradients.items()]):
        array = np.asarray(found[value])
        if not np.isfinite(array).all():
            return f"{name!r} (shape {list(array.shape)}) with {'NaN' if np.isnan(array).any() else 'infinity'}"
    return ""
