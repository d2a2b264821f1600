"""Predictions: outputs of a model in float32, with weights that are inputs of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from amp_rewrite.errors import TrainingError
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.door import stated
from amp_rewrite.train.keras.variables import ArrayLike
from amp_rewrite.train.step.assembly import with_state
from amp_rewrite.train.step.batches import Rows, batch_model


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


def predictor(source: Model, weights: Mapping[str, Array], providers: Sequence[str]) -> Runner:
    """Return a runner of the model itself, with these weights as inputs."""
    model = with_state(source, weights)
    return Runner.open(model, SessionOptions(providers=tuple(providers)))


def inputs_of(source: Model, inputs: Sequence[str], batch: Mapping[str, Array]) -> Batch:
    """Return the inputs of a model from a batch, which may have targets besides. FeedError if one does not fit."""
    if not isinstance(batch, Mapping):
        raise TrainingError(f"the batch is {stated(batch)}; pass a mapping from names of inputs to arrays")
    missing = sorted(set(inputs) - batch.keys())
    if missing:
        raise TrainingError(f"the batch lacks the inputs {missing}; pass arrays for all inputs of the model")
    (read,) = Feed.of([batch], batch_model(source, inputs), allow_nonfinite=True)
    return read


def predicted(
    runner: Runner, source: Model, batch: Mapping[str, Array], weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the outputs of a model by name, from a `predictor`."""
    return _run(runner, source, inputs_of(source, _inputs(runner, weights), batch), weights)


def predicted_rows(
    runner: Runner, source: Model, data: object, batch_size: int | None, weights: Mapping[str, Array]
) -> Predictions:
    """Return the outputs of a model for all rows of data, joined along the first axis. Labels are left out."""
    inputs = _inputs(runner, weights)
    given = data[: len(inputs)] if isinstance(data, tuple) else data
    rows = Rows.of(given, inputs, batch_size, False)
    feed = Feed.of(
        given if rows is None else lambda: rows.batches(0),
        batch_model(source, inputs),
        allow_nonfinite=True,
        allow_change=True,
    )
    parts = [_run(runner, source, batch, weights) for batch in feed]
    names = tuple(v.name for v in source.proto.graph.output)
    found = {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in names}
    return Predictions(lambda: found, names, names[0])


def _inputs(runner: Runner, weights: Mapping[str, Array]) -> list[str]:
    return [port.name for port in runner.inputs if port.name not in weights]


def _run(runner: Runner, source: Model, batch: Mapping[str, Array], weights: Mapping[str, Array]) -> dict[str, Array]:
    ports = {port.name for port in runner.inputs}
    outputs = [v.name for v in source.proto.graph.output]
    held = {name: array for name, array in weights.items() if name in ports}
    results = runner.run({**held, **batch}, outputs)
    return {name: np.asarray(results[name]) for name in outputs}
