"""`Session`: a model that is converted on loading. Every fallback gives a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from amp_rewrite.deploy.session import process
from amp_rewrite.deploy.session.arguments import (
    Provider,
    check_options,
    check_words,
    chosen_cache,
    provider_settings,
    resolved_providers,
    stated_by,
)
from amp_rewrite.deploy.session.cache import Cache, key_of
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError, ModelError, PolicyError
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.target_findings import unfit_here
from amp_rewrite.reports.report import Report
from amp_rewrite.runtime.gpu import Hardware, hardware, libraries, refusal
from amp_rewrite.runtime.installation import onnxruntime as installed_onnxruntime
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.ports import input_ports
from amp_rewrite.runtime.runner import CPU, CUDA, TENSORRT, Given, Runner, SessionOptions, cuda_opens, cuda_release
from amp_rewrite.settings.choices import BY_PROVIDER, Target
from amp_rewrite.settings.policy import Policy, low_type
from amp_rewrite.settings.request import Request
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.runtime.binding import Binding

_ON_GPU = (CUDA, TENSORRT)


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
        device: the GPU's number.
        tf32: compute float32 products in TF32, with the precision of float16.
        cuda_graph: record the work once and replay it; run through `bind`.
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

    def __init__(
        self,
        model: ModelSource,
        *,
        policy: str | Policy | None = None,
        providers: Sequence[Provider] | None = None,
        device: int = 0,
        tf32: bool = False,
        cuda_graph: bool = False,
        threads: int = 0,
        ignore_performance: bool | None = None,
        cache: Cache | str | Path | bool | None = True,
        folder: str | Path | None = None,
        **options: Any,
    ) -> None:
        check_options(options)
        switches = {"ignore_performance": ignore_performance, "tf32": tf32, "cuda_graph": cuda_graph}
        check_words(threads=threads, providers=providers, **switches)
        require("Session")
        kept_in, unkept = chosen_cache(cache)
        source = Model.load(model, folder=folder)
        self._name = source.path.name if source.path else "the model"
        settled = resolved_providers(providers)
        if (unfit := unfit_here(source, installed_onnxruntime().__version__, settled[0][0])) is not None:
            raise ModelError(f"{self._name}: {unfit}")
        chosen = process.policy_of_sessions() if policy is None else Policy.of(policy)
        to = None if chosen.lowers is None else low_type(chosen)
        ignored = stated_by(os.environ) if ignore_performance is None else ignore_performance
        free = any(not isinstance(dim, int) for port in input_ports(source) for dim in port.shape or (None,))
        settings = provider_settings(settled, device, tf32, cuda_graph, free)
        opening = SessionOptions(providers=tuple(settings), provider_options=settings, threads=threads)
        asked = _SessionRequest(opening, providers is not None, to, ignored)
        ready = _ready(source, asked, kept_in, options)
        self._runner, unopened, refused = _open(ready, source, opening)
        self._report_json = None if refused else ready.report
        self._device = asked.device
        self._cuda_graph = settings.get(CUDA, {}).get("enable_cuda_graph") == "1"
        if self._cuda_graph and self.provider != CUDA:
            raise ModelError(
                f"a CUDA graph needs {CUDA}, and {self._name} runs on {self.provider}: {asked.closed}; leave cuda_graph"
                " out"
            )
        self.notes = tuple(self._notes(asked, replace(ready, unkept=ready.unkept or unkept), refused, unopened))
        for note in self.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        if self._report_json is None:
            process.state.plain_sessions += 1

    def _notes(self, asked: _SessionRequest, ready: _ModelToOpen, refused: str, unopened: str) -> Iterator[str]:
        because = f"what was converted does not open ({refused})" if refused else ready.left
        if because:
            yield f"{self._name} is not converted and runs as it is, on {self.provider}: {because}"
        if ready.unkept and ready.report is not None:
            yield f"{self._name} is converted anew each time: {ready.unkept}"
        if self.provider != asked.first and asked.closed not in because and (asked.named or asked.machine.gpus):
            yield f"{self._name} runs on {self.provider}: {unopened or asked.closed}"

    def __repr__(self) -> str:
        report = self.report
        as_ = f"converted to {report.model.to}" if report is not None else "as it is"
        return f"<{type(self).__name__} {self._name} {as_}, on {self.provider}>"

    @property
    def provider(self) -> str:
        """The opened provider, which runs every op that it has a kernel for."""
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
        if self._cuda_graph:
            raise ModelError("a CUDA graph reads and writes fixed addresses; use bind(feeds) and its run()")
        if isinstance(output_names, Mapping):
            return self._runner.run(output_names)
        return list(self._runner.run({} if input_feed is None else input_feed, output_names).values())

    def bind(self, feeds: Mapping[str, object], outputs: Sequence[str] | Mapping[str, object] | None = None) -> Binding:
        """Return inputs and outputs bound to the device, to run often without copies; see `Runner.bind`.

        Args:
            feeds: inputs by name.
            outputs: names of outputs, or memory by name; None: all.
        """
        return self._runner.bind(feeds, outputs, device=self._device, fixed=self._cuda_graph)

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
    """The request of a session, and how this machine can serve it. `named`: the caller named the providers."""

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
        """Reason why the policy's low type is not used here; "" if it is."""
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
        """Reason why the first provider does not open, as far as known."""
        if self.first not in _ON_GPU:
            return f"{self.first} does not open here"
        if self.machine.absence:
            return self.machine.absence
        lost = [lib.name for lib in libraries(cuda_release() or 0) if lib.where is None and lib.needed]
        fact = f"{' and '.join(lost)} cannot be loaded" if lost else "onnxruntime does not say why"
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
    return _stored(cache, key, converted.result, converted.report.to_json())


def _stored(cache: Cache | None, key: str, model: Model, report: str) -> _ModelToOpen:
    """Store the converted model and return it, from the cache if possible."""
    if cache is None:
        return _ModelToOpen(model, report)
    try:
        cache.store(key, model, report)
    except ModelError as cause:
        return _ModelToOpen(model, report, unkept=str(cause))
    kept = cache.load(key)
    return _ModelToOpen(model if kept is None else kept.model, report)


def _key(source: Model, asked: _SessionRequest, options: Mapping[str, Any], cache: Cache) -> str:
    """Return the cache key of a conversion: everything that its result may depend on."""
    assert asked.to is not None
    named = {name: options[name] for name in ("lists", "level") if name in options}
    request = Request.of(to=asked.to, target=options["target"], **named)  # the environment counts, too
    kernels = request.target.kernels
    gpus = asked.machine.gpus
    return key_of(
        source,
        {
            "version": VERSION,
            "to": asked.to.spelling,
            "lists": [request.op_lists.name, request.op_lists.fingerprint],
            "level": request.level.value,
            "kernels": None if kernels is None else f"{kernels.runtime} {kernels.fingerprint}",
            "gpu": str(gpus[asked.device]) if asked.device < len(gpus) else None,
            "options": {name: _spelled(name, value) for name, value in options.items() if name not in named},
        },
        cache.digests,
    )


def _spelled(name: str, value: object) -> object:
    """Return an option of convert as JSON; for a file of ranges, its content."""
    if name == "ranges" and isinstance(value, (str, Path)):
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return str(value)  # convert raises the error
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Sequence):
        return [_spelled("", item) for item in value]
    return repr(value)


def _open(ready: _ModelToOpen, source: Model, opening: SessionOptions) -> tuple[Runner, str, str]:
    """Open the model; if the converted one does not open, the source. Return both reasons, for provider and model."""
    refused = ""
    if ready.report is not None:
        try:
            return (*_by_first(ready.model, opening), "")
        except ModelError as cause:
            refused = str(cause)
    return (*_by_first(source, opening), refused)


def _by_first(model: Model, opening: SessionOptions) -> tuple[Runner, str]:
    """Open the model; if TensorRT fails for missing libraries, use the other providers and return its error."""
    try:
        return Runner.open(model, opening), ""
    except ModelError as cause:
        first, *others = opening.providers
        if first != TENSORRT or not others:
            raise
        return _by_first(model, replace(opening, providers=others))[0], str(cause)
