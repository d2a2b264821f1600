"""Execution: the model of a step as a provider runs it, and its executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.buffers import DoubleBuffer, Side
from amp_rewrite.runtime.runner import CPU, CUDA, SessionOptions, cuda_opens
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
