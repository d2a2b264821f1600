"""Conditions of a measurement: the keywords that `verify`, `calibrate`, `locate` and `bench` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from amp_rewrite.errors import ModelError, spelled
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.check import misdeclared
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.ort_errors import NO_KERNEL
from amp_rewrite.runtime.runner import CPU, CUDA, TENSORRT, WEBGPU, Runner, SessionOptions, cuda_opens, webgpu_opens
from amp_rewrite.settings.choices import Target, target_of


@dataclass(frozen=True, slots=True)
class RunMode:
    """The way in which a model runs: the provider that must open, and low ops emulated or unchanged."""

    provider: str
    emulates: bool


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions under which models run on data.

    `provider`: the one that must open; None: CUDA where it opens, else the CPU. `threads` for one op; 0: one per core.
    `chunk`: values measured in one session; None: a default. `progress(done, total)` counts runs. `feedback` and
    `steps` are as `Feed.of` takes them.
    """

    allow_nonfinite: bool = False
    names: Sequence[str] | None = None
    emulate: bool | None = None
    provider: str | None = None
    threads: int = 0
    chunk: int | None = None
    progress: Callable[[int, int], None] | None = None
    feedback: Sequence[str] | str = ()
    steps: int | None = None

    @property
    def chosen_provider(self) -> str:
        """Return the provider that must open."""
        return (CUDA if cuda_opens() else CPU) if self.provider is None else self.provider

    @property
    def emulates(self) -> bool:
        """True if low-precision ops run as float32 ops that round.

        By default without CUDA, unless the caller names a provider that computes in low types itself.
        """
        if self.emulate is not None:
            return self.emulate
        return self.provider in (None, CPU, CUDA, TENSORRT) and not cuda_opens()

    def way(self, model: Model) -> RunMode:
        """Return the way in which a model runs: on WebGPU if it was converted for that and this machine has a device.

        Without the device it is emulated as on CUDA, which errs less than sums in float16.
        """
        if target_of(model) is not Target.WEBGPU or self.provider is not None:
            return RunMode(self.chosen_provider, self.emulates)
        if self.emulate is not True and webgpu_opens():
            return RunMode(WEBGPU, emulates=False)
        return RunMode(self.chosen_provider, self.emulate is not False)

    def feed(self, data: object, model: Model) -> Feed:
        """Return the data as batches for a model."""
        return Feed.of(data, model, allow_nonfinite=self.allow_nonfinite, feedback=self.feedback, steps=self.steps)

    def tell(self, done: int, total: int) -> None:
        """Report progress."""
        if self.progress:
            self.progress(done, total)


def session_on(
    provider: str, threads: int = 0, options: Mapping[str, str] | None = None, profile: str | None = None
) -> SessionOptions:
    """Return the options of a session on a provider, with options of that provider."""
    providers, own = tuple(dict.fromkeys((provider, CPU))), {provider: options} if options else {}
    return SessionOptions(
        providers=providers, provider_options=own, channels_last=True, threads=threads, profile=profile
    )


def check_as_is(model: Model, name: str, provider: str) -> None:
    """Raise ModelError, naming the model, if it is invalid, which its emulation might hide.

    It must open on the provider, and its outputs must have the types that they declare. A kernel may be missing, since
    the emulation stands for it.
    """
    wrong = misdeclared(View.of(inlined(model)))
    if wrong is not None:
        raise ModelError(f"{name}: {wrong}")
    try:
        open_on(
            model,
            name,
            replace(session_on(provider), channels_last=False, optimized=False, planned=False, spinning=False),
        )
    except ModelError as error:
        if NO_KERNEL not in str(error):
            raise


def open_on(model: Model, name: str, options: SessionOptions) -> Runner:
    """Open a model on the first provider. Raise ModelError, naming the model, if it does not open there."""
    provider = options.providers[0]
    try:
        runner = Runner.open(model, options)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    if runner.provider != provider:
        raise ModelError(
            f"{name}: {provider} does not open here; use {spelled('provider', runner.provider)}, or install what it"
            " needs"
        )
    return runner
