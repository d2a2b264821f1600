"""Candidates of a benchmark: models opened on their provider, with the same batch in the types of their inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from amp_rewrite.deploy.bench.batches import Batch
from amp_rewrite.deploy.bench.child import Outcome, apart
from amp_rewrite.errors import FeedError, ModelError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.verify import low_types, name_of
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.runtime.runner import CPU, CUDA, Runner, SessionOptions

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
    tf32: bool = False
    threads: int = 0

    @property
    def options(self) -> dict[str, str]:
        """Return the options of its provider."""
        return {"use_tf32": str(int(self.tf32))} if self.provider == CUDA else {}

    def opened(self) -> Runner:
        """Open the model on its provider. Raise ModelError, naming it, if it does not open there."""
        providers = tuple(dict.fromkeys((self.provider, CPU)))
        options = {self.provider: self.options}
        try:
            runner = Runner.open(
                self.model, SessionOptions(providers=providers, provider_options=options, threads=self.threads)
            )
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from error
        if runner.provider != self.provider:
            raise ModelError(
                f"{self.name} was to run on {self.provider}, and only {runner.provider} opens here; ask for that, or"
                f" install what {self.provider} needs"
            )
        return runner

    def weighed(self, batch: Batch) -> Outcome:
        """Measure its memory for a batch, in a process of its own."""
        options = {**self.options, **_WEIGHED.get(self.provider, {})}
        return apart(self.file, batch, self.provider, options=options, threads=self.threads)

    def profiled(self) -> Outcome:
        """Measure the time of each op, in a process of its own."""
        return apart(self.file, self.batch, self.provider, options=self.options, threads=self.threads, profile=True)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions that all models of a benchmark share. `folder`: for models that are not files."""

    provider: str
    threads: int
    allow_nonfinite: bool
    folder: Path


def candidates(models: Sequence[object], names: Sequence[str], data: object, conditions: Conditions) -> list[Candidate]:
    """Return the models, and the first one again with TF32 where that may make a difference.

    FeedError and ModelError name the model.
    """
    provider = conditions.provider
    found: list[Candidate] = []
    fed: Feed | None = None
    for number, (given, name) in enumerate(zip(models, told_apart(models, names), strict=True)):
        model = Model.load(given)
        fed = fed or Feed.of(data, model, allow_nonfinite=conditions.allow_nonfinite)
        batch = _fitting(next(iter(fed)), model, name)
        file = _file(given, model, conditions.folder / f"{number}.onnx")
        types = low_types(model)
        found.append(Candidate(number, name, model, file, batch, provider, types, threads=conditions.threads))
        if number == 0 and provider == CUDA and not types:
            found.append(replace(found[0], name=f"{name} with TF32", tf32=True))
    return found


def told_apart(models: Sequence[object], names: Sequence[str]) -> list[str]:
    """Return distinct names of the models: the given ones, else file names, else paths; numbered if still equal."""
    found = list(names) or [name_of(given, f"model {number}") for number, given in enumerate(models)]
    if len(set(found)) < len(found):
        pairs = zip(models, found, strict=True)
        found = [str(given) if isinstance(given, (str, os.PathLike)) else name for given, name in pairs]
    return [f"{name} ({found[:i].count(name) + 1})" if name in found[:i] else name for i, name in enumerate(found)]


def _fitting(batch: Batch, model: Model, name: str) -> Batch:
    """Return the inputs of a model from a batch, in its types. Raise FeedError, naming the model, for a misfit."""
    ports = {port.name for port in input_ports(model)}
    mine = {key: array for key, array in batch.items() if key in ports}
    try:
        return next(iter(Feed.of(mine, model, allow_nonfinite=True)))
    except FeedError as error:
        raise FeedError(f"{name}: {error}") from error


def _file(given: object, model: Model, spare: Path) -> Path:
    """Return the model's own file, or write one."""
    if isinstance(given, (str, os.PathLike)):
        return Path(given)
    model.save(spare)
    return spare
