"""Candidates of a benchmark: models opened on their provider, with the same batch in the types of their inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from amp_rewrite.deploy.bench.child import JobResult, apart
from amp_rewrite.errors import FeedError
from amp_rewrite.evidence.conditions import Conditions, open_on, session_on
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.measured_models import low_types, name_of
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.runtime.runner import CUDA, Runner

# In a process that measures memory, the arena grows by the requested size, not by powers of two.
_WEIGHED: Mapping[str, Mapping[str, str]] = {CUDA: {"arena_extend_strategy": "kSameAsRequested"}}


@dataclass(frozen=True)
class Candidate:
    """A model in one mode, its file, and its batch. `number`: its position among the given models."""

    number: int
    name: str
    model: Model
    file: Path
    batch: Batch
    provider: str
    types: tuple[str, ...]
    threads: int
    tf32: bool = False

    @property
    def options(self) -> dict[str, str]:
        """Return the options of its provider."""
        return {"use_tf32": str(int(self.tf32))} if self.provider == CUDA else {}

    def opened(self) -> Runner:
        """Open the model on its provider. Raise ModelError, naming it, if it does not open there."""
        return open_on(self.model, self.name, session_on(self.provider, self.threads, self.options))

    def weighed(self, batch: Batch) -> JobResult:
        """Measure its memory for a batch, in a process of its own."""
        options = {**self.options, **_WEIGHED.get(self.provider, {})}
        return apart(self.file, batch, self.provider, options=options, threads=self.threads)

    def profiled(self) -> JobResult:
        """Measure the time of each op, in a process of its own."""
        return apart(self.file, self.batch, self.provider, options=self.options, threads=self.threads, profile=True)


def candidates(models: Sequence[object], data: object, conditions: Conditions, folder: Path) -> list[Candidate]:
    """Return the models, and the first one again with TF32 where that may make a difference.

    `folder`: for models that are not files. FeedError and ModelError name the model.
    """
    provider = conditions.chosen_provider
    sides: list[Candidate] = []
    feed: Feed | None = None
    for number, (source, name) in enumerate(zip(models, distinct_names(models, conditions.names or ()), strict=True)):
        model = Model.load(source)
        feed = feed or conditions.feed(data, model)
        batch = _fitting(next(iter(feed)), model, name)
        file = _file(source, model, folder / f"{number}.onnx")
        types = low_types(model)
        sides.append(Candidate(number, name, model, file, batch, provider, types, conditions.threads))
        if number == 0 and provider == CUDA and not types:
            sides.append(replace(sides[0], name=f"{name} with TF32", tf32=True))
    return sides


def distinct_names(models: Sequence[object], names: Sequence[str]) -> list[str]:
    """Return distinct names of the models: the given ones, else file names, else paths; numbered if still equal."""
    names = list(names) or [name_of(source, f"model {number}") for number, source in enumerate(models)]
    if len(set(names)) < len(names):
        pairs = zip(models, names, strict=True)
        names = [str(source) if isinstance(source, (str, os.PathLike)) else name for source, name in pairs]
    return [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]


def _fitting(batch: Batch, model: Model, name: str) -> Batch:
    """Return the inputs of a model from a batch, in its types. Raise FeedError, naming the model, for a misfit."""
    ports = {port.name for port in input_ports(model)}
    mine = {key: array for key, array in batch.items() if key in ports}
    try:
        return next(iter(Feed.of(mine, model, allow_nonfinite=True)))
    except FeedError as error:
        raise FeedError(f"{name}: {error}") from error


def _file(source: object, model: Model, spare: Path) -> Path:
    """Return the model's own file, or write one."""
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    model.save(spare)
    return spare
