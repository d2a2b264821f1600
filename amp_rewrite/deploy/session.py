"""`Session`: a model, converted on loading. Every fallback gives a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, overload

from amp_rewrite.deploy import process
from amp_rewrite.deploy.cache import Cache
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConfigError, ConversionError, ModelError, PolicyError
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.findings import unfit_here
from amp_rewrite.reports.report import Report
from amp_rewrite.runtime.binding import Binding
from amp_rewrite.runtime.gpu import Hardware, hardware, refusal
from amp_rewrite.runtime.installation import onnxruntime as installed_onnxruntime
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.plugins import has_provider
from amp_rewrite.runtime.providers import cuda_options
from amp_rewrite.runtime.runner import (
    CPU,
    CUDA,
    MOST_THREADS,
    TENSORRT,
    CudaGraphs,
    Given,
    Runner,
    SessionOptions,
    cuda_opens,
    unloaded_library,
)
from amp_rewrite.settings.choices import BY_PROVIDER, Target
from amp_rewrite.settings.option import checked
from amp_rewrite.settings.policy import Policy, low_type
from amp_rewrite.settings.request import Request
from amp_rewrite.version import VERSION

Provider = str | tuple[str, Mapping[str, object]]

IGNORE_PERFORMANCE = "AMP_REWRITE_IGNORE_PERFORMANCE"
_ON_GPU = (CUDA, TENSORRT)
_OWN = ("model", "to", "folder", "data")  # arguments of convert that a Session settles itself, or cannot cache
_WORDS = {"": False, "0": False, "false": False, "no": False, "off": False}
_WORDS |= {"1": True, "true": True, "yes": True, "on": True}


class Session:
    """A model opened by onnxruntime, in the precision of a policy. docs/how-to/session.md explains all settings.

    A mixed policy converts the model, or loads the result from the cache. The model is not converted, with a warning,
    if a low type would not be faster: without a GPU, or on one below compute capability 7.0 (bfloat16: 8.0).
    `report`: the type of each op, with the reason; None for a model that was not converted. `get_providers()` has the
    opened providers, `notes` all warnings.

    Args:
        model: as `convert` takes it.
        policy: "mixed_float16", "mixed_bfloat16" or a `Policy`; None: that of the process (`set_policy`), or float32.
        providers: those of onnxruntime, by name or with options; by default CUDA if available, then the CPU.
        cuda_graph: record the work of each shape on CUDA, and replay it.
        threads: per op on the CPU; 0 for one per core.
        ignore_performance: convert anyway; None: if AMP_REWRITE_IGNORE_PERFORMANCE is set.
        cache: a `Cache` or a folder; True: the user's own; None for no cache.
        folder: where the external data of a ModelProto lies.
        **options: those of `convert`, see docs/reference/options.md.

    Raises:
        AmpRewriteError: as `convert` raises it.
        ModelError: onnxruntime does not open the model.

    Example:
        >>> import amp_rewrite, numpy as np
        >>> session = amp_rewrite.Session("model.onnx", cache=None)
        >>> (probability,) = session.run(None, {"image": np.zeros((1, 1, 8, 8), np.float32)})
    """

    @checked
    def __init__(
        self,
        model: ModelSource,
        *,
        policy: str | Policy | None = None,
        providers: Sequence[Provider] | None = None,
        cuda_graph: bool = False,
        threads: int = 0,
        ignore_performance: bool | None = None,
        cache: Cache | str | Path | bool | None = True,
        folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        _check_options(options)
        if not 0 <= threads <= MOST_THREADS:
            raise PolicyError(f"threads is {threads!r}; give at most {MOST_THREADS} for one op, or 0 for one per core")
        require("Session")
        kept_in, unkept = chosen_cache(cache)
        source = Model.load(model, folder=folder)
        self._name = source.path.name if source.path else "the model"
        settings = _resolved(providers)
        first = next(iter(settings))
        if (unfit := unfit_here(source, installed_onnxruntime().__version__, first)) is not None:
            raise ModelError(f"{self._name}: {unfit}")
        if cuda_graph and CUDA in settings:
            settings[CUDA] = {"enable_cuda_graph": "1", **settings[CUDA]}
        chosen = process.policy_of_sessions() if policy is None else Policy.of(policy)
        to = None if chosen.lowers is None else low_type(chosen)
        ignored = stated_by(os.environ) if ignore_performance is None else ignore_performance
        opening = SessionOptions(
            providers=tuple(settings), provider_options=settings, channels_last=True, threads=threads
        )
        asked = _SessionRequest(opening, providers is not None, to, ignored)
        ready = _ready(source, asked, kept_in, options)
        if ready.report is not None:
            try:
                self._runner, unopened = _opened(ready.model, opening)
            except ModelError as refused:
                ready = _ModelToOpen(source, left=f"what was converted does not open ({refused})")
        if ready.report is None:
            self._runner, unopened = _opened(source, opening)
        self._report_json = ready.report
        self._device = asked.device
        recorded = settings.get(CUDA, {}).get("enable_cuda_graph") == "1"
        self._graphs = CudaGraphs(self._runner, self._device) if recorded and self.provider == CUDA else None
        ready = replace(ready, unkept=ready.unkept or unkept)
        self.notes = tuple(self._notes(asked, ready, unopened, recorded or cuda_graph))
        for note in self.notes:
            warnings.warn(note, UserWarning, stacklevel=3)
        if self._report_json is None:
            process.state.plain_sessions += 1

    def _notes(self, asked: _SessionRequest, ready: _ModelToOpen, unopened: str, recorded: bool) -> Iterator[str]:
        if ready.left:
            yield f"{self._name} is not converted and runs as it is, on {self.provider}: {ready.left}"
        if ready.unkept and self.converted:
            yield f"{self._name} is converted anew each time: {ready.unkept}"
        if self.provider != asked.first and asked.closed not in ready.left and (asked.named or asked.machine.gpus):
            yield f"{self._name} runs on {self.provider}: {unopened or asked.closed}"
        if recorded and self.provider != CUDA:
            yield f"{self._name} runs without a CUDA graph: it runs on {self.provider}"
        exact = self.provider == CUDA and self._runner.provider_options.get("use_tf32") == "0"
        if exact and self.converted and (cost := cuda_options(ready.model).cost):
            yield f"{self._name}: {cost}"

    def __repr__(self) -> str:
        report = self.report
        as_ = f"converted to {report.model.to}" if report is not None else "as it is"
        return f"<{type(self).__name__} {self._name} {as_}, on {self.provider}>"

    @property
    def provider(self) -> str:
        """The opened provider: it runs every op with a kernel of its own."""
        return self._runner.provider

    @property
    def converted(self) -> bool:
        """True if the model was converted to another precision."""
        return self._report_json is not None

    @cached_property
    def report(self) -> Report | None:
        """Report of the conversion; None without one."""
        return None if self._report_json is None else Report.from_json(self._report_json.encode(), self._name)

    @overload
    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Given]) -> list[Given]: ...
    @overload
    def run(self, output_names: Mapping[str, Given]) -> dict[str, Given]: ...
    def run(
        self, output_names: Sequence[str] | Mapping[str, Given] | None, input_feed: Mapping[str, Given] | None = None
    ) -> list[Given] | dict[str, Given]:
        """Run the model; return a list for `run(None, feeds)`, as in onnxruntime, and a dict by name for `run(feeds)`.

        Values are arrays, bfloat16 those of ml_dtypes.

        Args:
            output_names: names of outputs, or None for all; or the inputs.
            input_feed: inputs by name.

        Raises:
            ModelError: the inputs do not fit.
        """
        run = self._runner.run if self._graphs is None else self._graphs.run
        if isinstance(output_names, Mapping):
            return run(output_names)
        return list(run({} if input_feed is None else input_feed, output_names).values())

    def bind(self, feeds: Mapping[str, object], outputs: Sequence[str] | Mapping[str, object] | None = None) -> Binding:
        """Return inputs and outputs bound to the device, to run often without copies; see `Runner.bind`.

        Args:
            feeds: inputs by name.
            outputs: names of outputs, or memory by name; None: all.
        """
        return self._runner.bind(feeds, outputs, device=self._device, fixed=self._graphs is not None)

    def get_providers(self) -> list[str]:
        """Return the opened providers, in their order of priority for ops."""
        return list(self.inner.get_providers())

    def get_inputs(self) -> list[Any]:
        """Return onnxruntime's descriptions of the inputs: name, type, shape."""
        return list(self.inner.get_inputs())

    def get_outputs(self) -> list[Any]:
        """Return onnxruntime's descriptions of the outputs: name, type, shape."""
        return list(self.inner.get_outputs())

    @property
    def inner(self) -> Any:
        """onnxruntime's own session."""
        return self._runner.inner


@dataclass(frozen=True)
class _SessionRequest:
    """The request of a session, and its obstacles on this machine. `named`: the caller named the providers."""

    opening: SessionOptions
    named: bool
    to: DType | None
    ignored: bool

    @property
    def first(self) -> str:
        return self.opening.providers[0]

    @property
    def device(self) -> int:
        """Number of the first provider's GPU."""
        number = self.opening.provider_options[self.first].get("device_id", "0")
        if not number.isdecimal():
            raise PolicyError(f"device {number!r} is not a GPU's number; count from 0")
        return int(number)

    @cached_property
    def machine(self) -> Hardware:
        return hardware() if self.first in _ON_GPU else Hardware(absence="no GPU was asked for")

    @cached_property
    def refusal(self) -> str:
        """Obstacle to the policy's low type here; "" without one."""
        assert self.to is not None
        if self.ignored or self.first not in (*_ON_GPU, CPU):
            return ""  # a caller who names an unknown provider is trusted
        if self.first == CPU:
            return f"on a CPU {self.to.spelling} is slower, not faster{_IGNORE}"
        if slow := refusal(self.machine, self.to, self.device):
            return f"{slow}{_IGNORE}"
        return "" if cuda_opens() else f"{self.closed}{_IGNORE}"

    @cached_property
    def closed(self) -> str:
        """Obstacle to opening the first provider, as far as known."""
        if self.first not in _ON_GPU:
            return f"{self.first} does not open here"
        if self.machine.absence:
            return self.machine.absence
        fact = unloaded_library() or "onnxruntime does not say why"
        return f"{self.first} does not open, {fact}; `amp-rewrite doctor` tells what is missing"


_IGNORE = "; ignore_performance=True converts it anyway"


@dataclass(frozen=True, slots=True)
class _ModelToOpen:
    """A model to open: converted, with its report, or the source, with the reason. `unkept`: why it is not cached."""

    model: Model
    report: str | None = None
    left: str = ""
    unkept: str = ""


def _ready(source: Model, asked: _SessionRequest, cache: Cache | None, options: Mapping[str, Any]) -> _ModelToOpen:
    if asked.to is None:
        return _ModelToOpen(source)
    if asked.refusal:
        return _ModelToOpen(source, left=asked.refusal)
    options = {"target": BY_PROVIDER.get(asked.first, Target.ONNX), **options}
    key = "" if cache is None else _key(source, asked, options, cache)
    if cache is not None and (kept := cache.load(key)) is not None:
        return _ModelToOpen(kept.model, kept.report)
    try:
        converted = convert(source, to=asked.to, **options)
    except ConversionError as cause:  # a bug of this package; the source model is fine
        return _ModelToOpen(source, left=str(cause))
    if converted.plan.empty:
        return _ModelToOpen(source, left="nothing in it can be lowered")
    report = converted.report.to_json()
    if cache is None:
        return _ModelToOpen(converted.result, report)
    try:
        cache.store(key, converted.result, report)
    except ModelError as cause:
        return _ModelToOpen(converted.result, report, unkept=str(cause))
    kept = cache.load(key)
    return _ModelToOpen(converted.result if kept is None else kept.model, report)


def _key(source: Model, asked: _SessionRequest, options: Mapping[str, Any], cache: Cache) -> str:
    assert asked.to is not None
    named = {name: options[name] for name in ("lists", "level") if name in options}
    request = Request.of(to=asked.to, target=options["target"], **named)  # the environment counts, too
    kernels = request.target.kernels
    settings = (
        (VERSION, asked.to.spelling, request.level, request.op_lists.name, request.op_lists.fingerprint),
        None if kernels is None else kernels.runtime,
        sorted((name, _spelled(name, value)) for name, value in options.items() if name not in named),
    )
    return cache.key(source, repr(settings))


def _spelled(name: str, value: object) -> str:
    if isinstance(value, Ranges):
        return value.to_json()
    if name == "ranges" and isinstance(value, (str, Path)):
        with suppress(OSError, UnicodeDecodeError):  # convert raises the error
            return Path(value).read_text(encoding="utf-8")
    return repr(value)


def _opened(model: Model, opening: SessionOptions) -> tuple[Runner, str]:
    """Open the model; without TensorRT, and with a reason, if its libraries are missing."""
    try:
        return Runner.open(model, opening), ""
    except ModelError as cause:
        first, *others = opening.providers
        if first != TENSORRT or not others:
            raise
        return Runner.open(model, replace(opening, providers=others)), str(cause)


def _check_options(options: Mapping[str, object]) -> None:
    known = [name for name in signature(convert).parameters if name not in _OWN]
    for name in options:
        if name not in known:
            raise TypeError(f"Session() got an unexpected keyword argument {name!r}; convert takes {', '.join(known)}")


def _resolved(providers: Sequence[Provider] | None) -> dict[str, dict[str, str]]:
    if providers is not None and not providers:
        raise PolicyError("providers is empty; leave it out, or name at least CPUExecutionProvider")
    named = providers or ((CUDA, CPU) if has_provider(CUDA) else (CPU,))
    return dict(map(_pair, named))


def _pair(provider: Any) -> tuple[str, dict[str, str]]:
    pair = isinstance(provider, (tuple, list)) and len(provider) == 2
    name, options = provider if pair else (provider, {})
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise PolicyError(
            f"{provider!r} is not a provider; name one, as in {CPU!r}, or add options, as in ({CPU!r}, {{}})"
        )
    return name, {key: str(value) for key, value in options.items()}


def chosen_cache(cache: Cache | str | Path | bool | None) -> tuple[Cache | None, str]:
    """Return the cache for converted models, or the reason for having none. PolicyError for another value."""
    if isinstance(cache, (str, Path)) and str(cache):
        return Cache(Path(cache)), ""
    if isinstance(cache, (str, Path)):
        raise PolicyError(f"cache is {cache!r}; give a folder, a Cache, True for the user's own, or None")
    if cache is not True:
        return cache or None, ""
    try:
        return Cache.usual(os.environ), ""
    except ConfigError as cause:
        return None, str(cause)


def stated_by(environ: Mapping[str, str]) -> bool:
    """True if the environment requests conversion even without a speed gain. ConfigError for an unknown word."""
    word = environ.get(IGNORE_PERFORMANCE, "")
    if word.strip().lower() not in _WORDS:
        raise ConfigError(f"{IGNORE_PERFORMANCE} is {word!r}; set it to 1 or 0")
    return _WORDS[word.strip().lower()]
