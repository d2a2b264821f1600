"""`Session`, for models converted on loading, and a cache of converted models. Fallbacks issue warnings."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, overload

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ConversionError, ModelError, PolicyError, spelled
from amp_rewrite.evidence.ranges import Ranges
from amp_rewrite.files.disk import read_regular, write_whole
from amp_rewrite.files.fingerprint import digest
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.findings import unfit_here
from amp_rewrite.reports.report import MAX_CHARACTERS, Report
from amp_rewrite.runtime.buffers import Binding
from amp_rewrite.runtime.gpu import hardware, why_not_fast
from amp_rewrite.runtime.installation import has_provider, require
from amp_rewrite.runtime.installation import onnxruntime as installed_onnxruntime
from amp_rewrite.runtime.providers import cuda_options
from amp_rewrite.runtime.runner import (
    CPU,
    CUDA,
    MAX_THREADS,
    TENSORRT,
    CudaGraphs,
    Runner,
    SessionOptions,
    Value,
    cuda_works,
    library_load_error,
)
from amp_rewrite.settings.choices import BY_PROVIDER, Target, low_type
from amp_rewrite.settings.option import check_keyword_names, checked
from amp_rewrite.settings.request import KEYWORDS, Request
from amp_rewrite.train import policy as policies
from amp_rewrite.train.policy import Policy
from amp_rewrite.version import VERSION

Provider = str | tuple[str, Mapping[str, object]]

IGNORE_PERFORMANCE = "AMP_REWRITE_IGNORE_PERFORMANCE"
_ON_GPU = (CUDA, TENSORRT)
_OFF = ("", "0", "false", "no", "off")
_NOT_OPTIONS = ("model", "to", "folder", "data")  # arguments of convert that Session sets itself or cannot cache


class Session:
    """A model loaded by onnxruntime, in the precision of a policy. docs/how-to/session.md explains all settings.

    A mixed policy converts the model, or loads the result from the cache. If a low type would not be faster, because
    there is no GPU or its compute capability is below 7.0 (for bfloat16, 8.0), the model is not converted, and a
    warning says so. `report`: the type of each op, with the reason; None for a model that was not converted.
    `get_providers()` returns the active providers; `notes` contains all warnings.

    Args:
        model: anything that `convert` accepts.
        policy: "mixed_float16", "mixed_bfloat16" or a `Policy`; None: the global policy (`set_policy`), or float32.
        providers: onnxruntime providers, by name or with options; by default CUDA if available, then the CPU.
        cuda_graph: capture the work for each shape on CUDA as a graph, and replay it.
        threads: threads per op on the CPU; 0 for one per core.
        ignore_performance: True to convert even if that is slower; None: if AMP_REWRITE_IGNORE_PERFORMANCE is set.
        cache: a `Cache` or a folder; True for the user's default cache; None for no cache.
        folder: the folder of a ModelProto's external data.
        **options: options of `convert`; see docs/reference/options.md.

    Raises:
        AmpRewriteError: `convert` raises it.
        ModelError: onnxruntime cannot load the model.

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
        legal = [name for name in signature(convert).parameters if name not in _NOT_OPTIONS]
        check_keyword_names("Session", options, legal)
        if not 0 <= threads <= MAX_THREADS:
            raise PolicyError(f"threads is {threads!r}; use 1 to {MAX_THREADS} threads per op, or 0 for one per core")
        require("Session")
        source = Model.load(model, folder=folder)
        self._name = source.path.name if source.path else "the model"
        provider_options = _provider_options(providers)
        first = next(iter(provider_options))
        if (unfit := unfit_here(source, installed_onnxruntime().__version__, first)) is not None:
            raise ModelError(f"{self._name}: {unfit}")
        if cuda_graph and CUDA in provider_options:
            provider_options[CUDA] = {_GRAPH: "1", **provider_options[CUDA]}
        device_id = provider_options[first].get("device_id", "0")
        if not device_id.isdecimal():
            raise PolicyError(f"device_id {device_id!r} is not the number of a GPU; GPUs are numbered from 0")
        self._device = int(device_id)
        session_options = SessionOptions(
            providers=tuple(provider_options), provider_options=provider_options, channels_last=True, threads=threads
        )
        if ignore_performance is None:
            ignore_performance = os.environ.get(IGNORE_PERFORMANCE, "0").lower() not in _OFF
        chosen = policies.policy_of_sessions() if policy is None else Policy.of(policy)
        to = None if chosen.lowers is None else low_type(chosen)
        slow = "" if to is None or ignore_performance else _obstacle(first, to, self._device)
        prepared = _Prepared(source, unconverted=slow)
        if to is not None and not slow:
            keywords = {"target": BY_PROVIDER.get(first, Target.ONNX), **options, "to": to}
            prepared = _converted(source, keywords, chosen_cache(cache))
        if prepared.report is not None:
            try:
                self._runner, fallback = _open(prepared.model, session_options)
            except ModelError as cause:
                prepared = _Prepared(source, unconverted=f"the converted model does not load ({cause})")
        if prepared.report is None:
            self._runner, fallback = _open(source, session_options)
        self._report_json = prepared.report
        captures = _captures_graphs({self.provider: self._runner.provider_options})
        self._graphs = CudaGraphs(self._runner, self._device) if captures else None
        graph_requested = cuda_graph or _captures_graphs(provider_options)
        self.notes = tuple(self._notes(prepared, first, fallback, providers is not None, graph_requested))
        for note in self.notes:
            warnings.warn(note, UserWarning, stacklevel=3)
        if self._report_json is None:
            policies.state.plain_sessions += 1

    def _notes(self, prepared: _Prepared, first: str, fallback: str, explicit: bool, graph: bool) -> Iterator[str]:
        """Yield notes on differences from the request. `explicit`: the caller named the providers."""
        if prepared.unconverted:
            yield f"{self._name} was not converted and runs unchanged on {self.provider}: {prepared.unconverted}"
        if prepared.uncached and self.converted:
            yield f"{self._name} will be converted again each time: {prepared.uncached}"
        if self.provider != first and (explicit or hardware().gpus):
            reason = fallback or _failure_to_open(first)
            if reason not in prepared.unconverted:
                yield f"{self._name} runs on {self.provider}: {reason}"
        if graph and self._graphs is None:
            reason = fallback if self.provider == CUDA else f"it runs on {self.provider}"
            yield f"{self._name} runs without a CUDA graph: {reason}"
        exact = self.provider == CUDA and self._runner.provider_options.get("use_tf32") == "0"
        if exact and self.converted and (cost := cuda_options(prepared.model).cost):
            yield f"{self._name}: {cost}"

    def __repr__(self) -> str:
        report = self.report
        state = f"converted to {report.model.to}" if report is not None else "as it is"
        return f"<{type(self).__name__} {self._name} {state}, on {self.provider}>"

    @property
    def provider(self) -> str:
        """The first active provider; it runs every op it has a kernel for."""
        return self._runner.provider

    @property
    def converted(self) -> bool:
        """True if the model was converted to another precision."""
        return self._report_json is not None

    @cached_property
    def report(self) -> Report | None:
        """The report of the conversion; None if the model was not converted."""
        return None if self._report_json is None else Report.from_json(self._report_json.encode(), self._name)

    @overload
    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Value]) -> list[Value]: ...
    @overload
    def run(self, output_names: Mapping[str, Value]) -> dict[str, Value]: ...
    def run(
        self,
        output_names: Sequence[str] | Mapping[str, Value] | None,
        input_feed: Mapping[str, Value] | None = None,
    ) -> list[Value] | dict[str, Value]:
        """Run the model; return a list for `run(None, feeds)`, as in onnxruntime, and a dict by name for `run(feeds)`.

        Values are arrays, with bfloat16 from ml_dtypes.

        Args:
            output_names: names of outputs, None for all outputs, or the inputs by name.
            input_feed: inputs by name.

        Raises:
            ModelError: the inputs do not match the model.
        """
        run = self._runner.run if self._graphs is None else self._graphs.run
        if isinstance(output_names, Mapping):
            return run(output_names)
        return list(run({} if input_feed is None else input_feed, output_names).values())

    def bind(self, feeds: Mapping[str, object], outputs: Sequence[str] | Mapping[str, object] | None = None) -> Binding:
        """Return inputs and outputs bound to the device, for repeated runs without copies; see `Runner.bind`.

        Args:
            feeds: inputs by name.
            outputs: names of outputs, or tensors to write to by name; None for all.
        """
        return self._runner.bind(feeds, outputs, device=self._device, fixed=self._graphs is not None)

    def get_providers(self) -> list[str]:
        """Return the active providers in order of priority."""
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


def _obstacle(first: str, to: DType, device: int) -> str:
    """Return why a low type is not faster on the first provider; "" if it is, or if this is unknown."""
    reason = ""
    if first == CPU:
        reason = f"on a CPU, {to.spelling} is slower, not faster"
    elif first in _ON_GPU:
        reason = why_not_fast(hardware(), to, device) or ("" if cuda_works() else _failure_to_open(first))
    return f"{reason}; to convert it anyway, pass ignore_performance=True" if reason else ""


def _failure_to_open(first: str) -> str:
    if first not in _ON_GPU:
        return f"{first} does not load on this machine"
    if unavailable_reason := hardware().unavailable_reason:
        return unavailable_reason
    fact = library_load_error() or "onnxruntime does not say why"
    return f"{first} does not load: {fact}; `amp-rewrite doctor` shows what is missing"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A model to open, with its report if it is converted. `unconverted`, `uncached`: why it is not, or ""."""

    model: Model
    report: str | None = None
    unconverted: str = ""
    uncached: str = ""


def _converted(source: Model, options: Mapping[str, Any], cache: Cache | None) -> _Prepared:
    key = "" if cache is None else cache.key(source, _settings(options))
    if cache is not None and (entry := cache.load(key)) is not None:
        return _Prepared(entry.model, entry.report)
    try:
        converted = convert(source, **options)
    except ConversionError as cause:  # a bug in this package; the source model is valid
        return _Prepared(source, unconverted=str(cause))
    if converted.plan.empty:
        return _Prepared(source, unconverted="nothing in it can be lowered")
    report = converted.report.to_json()
    if cache is None:
        return _Prepared(converted.result, report)
    try:
        cache.store(key, converted.result, report)
    except ModelError as cause:
        return _Prepared(converted.result, report, uncached=str(cause))
    entry = cache.load(key)
    return _Prepared(converted.result if entry is None else entry.model, report)


def _settings(options: Mapping[str, Any]) -> str:
    """Return all settings of a conversion as text, including those from environment variables."""
    request = Request.of(**{name: value for name, value in options.items() if name in KEYWORDS})
    more = {name: value for name, value in options.items() if name not in KEYWORDS}
    if (ranges := more.pop("ranges", None)) is not None:
        more["ranges"] = (ranges if isinstance(ranges, Ranges) else Ranges.load(ranges)).to_json()
    return repr((VERSION, request, request.op_lists.fingerprint, sorted(more.items())))


def _open(model: Model, session_options: SessionOptions) -> tuple[Runner, str]:
    """Open a model, if necessary without CUDA graphs or TensorRT; return it and the reason for doing so, or ""."""
    try:
        return Runner.open(model, session_options), ""
    except ModelError as cause:
        first, *others = session_options.providers
        if _captures_graphs(session_options.provider_options):
            cuda = {**session_options.provider_options[CUDA], _GRAPH: "0"}
            fallback = replace(session_options, provider_options={**session_options.provider_options, CUDA: cuda})
        elif first == TENSORRT and others:
            fallback = replace(session_options, providers=others)
        else:
            raise
        return Runner.open(model, fallback), str(cause)


_GRAPH = "enable_cuda_graph"


def _captures_graphs(options: Mapping[str, Mapping[str, str]]) -> bool:
    return options.get(CUDA, {}).get(_GRAPH) == "1"


def _provider_options(providers: Sequence[Provider] | None) -> dict[str, dict[str, str]]:
    """Return the options of each provider, in order; PolicyError for anything but names and pairs."""
    default = (CUDA, CPU) if has_provider(CUDA) else (CPU,)
    try:
        pairs = ((p, {}) if isinstance(p, str) else p for p in (default if providers is None else providers))
        result = {name: {key: str(value) for key, value in options.items()} for name, options in pairs}
    except (AttributeError, TypeError, ValueError):
        result = {}
    if not result:
        raise PolicyError(
            f"{spelled('providers', providers)} must list names, as in [{CPU!r}], or names with options, as in"
            f" [({CPU!r}, {{}})]"
        )
    return result


def chosen_cache(cache: Cache | str | Path | bool | None) -> Cache | None:
    if cache is True:
        return Cache.usual(os.environ)
    return Cache(Path(cache)) if isinstance(cache, (str, Path)) else cache or None


# -- cache -------------------------------------------------------------------------------------------


DEFAULT_LIMIT = 20 << 30
"""The default size limit of a cache in bytes."""

_LAYOUT = 1  # version of the folders and keys
_MODEL, _REPORT = "model.onnx", "report.json"
_IN_USE = 600.0  # seconds since the last use of an entry, during which another process may still be opening it


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A converted model with its weights in the files of the cache, and its report as JSON."""

    model: Model
    report: str


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of converted models; the least recently used entries are evicted first.

    Any number of processes of one user may use it at once. Entries are added atomically. A folder that other users can
    write to is not used. Entries used in the last ten minutes are kept, even if the cache exceeds its limit.

    Args:
        folder: the folder of the cache, created when needed.
        limit: the maximum size in bytes.
    """

    folder: Path
    limit: int = DEFAULT_LIMIT

    @classmethod
    def usual(cls, environ: Mapping[str, str]) -> Cache | None:
        """Return the user's default cache, in XDG_CACHE_HOME or ~/.cache; None for a user without a home folder."""
        configured = Path(environ.get("XDG_CACHE_HOME", ""))
        # XDG Base Directory Specification 0.8: ignore a path that is not absolute.
        try:
            folder = configured if configured.is_absolute() else Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(folder / "amp-rewrite")

    @staticmethod
    def key(model: Model, settings: str) -> str:
        """Return the key of a conversion: 64 hexadecimal digits for the model and the settings.

        It depends on every byte of the model, but not on how the model was loaded. Weights are streamed, O(bytes).
        """
        return hashlib.sha256(f"{settings}{digest(model)}".encode()).hexdigest()

    def load(self, key: str) -> CacheEntry | None:
        """Return the entry for a key; None if it is missing or damaged. A damaged entry is removed."""
        entry = self._home / key
        if not _private(self._home):
            return None
        try:
            loaded = CacheEntry(Model.load(entry / _MODEL), read_regular(entry / _REPORT, MAX_CHARACTERS).decode())
        except (ModelError, OSError, UnicodeDecodeError):
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(entry)
        return loaded

    def store(self, key: str, model: Model, report: str) -> None:
        """Store a model and its report, unless the entry exists.

        Raises:
            ModelError: the entry cannot be written.
        """
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _private(self._home):
                raise ModelError(
                    f"{self._home} belongs to another user or is writable by others, so their files could run"
                    " here; name another folder, or remove this one"
                )
            with tempfile.TemporaryDirectory(dir=self._home, ignore_cleanup_errors=True) as scratch:
                entry = Path(scratch) / key
                entry.mkdir()
                model.save(entry / _MODEL)
                write_whole(entry / _REPORT, report.encode())
                with suppress(OSError):  # another process stored the same entry first
                    entry.rename(self._home / key)
        except OSError as cause:
            where = cause.filename or self.folder
            raise ModelError(f"{where}: {cause.strerror or cause}; name a writable folder") from cause
        with suppress(OSError):  # another process may also be evicting entries
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used entries, including leftovers of killed processes, until the limit is met."""
        files = {entry: [file for file in entry.rglob("*") if file.is_file()] for entry in self._home.iterdir()}
        sizes = {entry: sum(file.stat().st_size for file in inside) for entry, inside in files.items()}
        used = {entry: entry.stat().st_mtime for entry in sizes}
        total = sum(sizes.values())
        for entry in sorted(sizes, key=lambda entry: (used[entry], entry.name)):
            if total <= self.limit or time.time() - used[entry] < _IN_USE:
                return
            shutil.rmtree(entry, ignore_errors=True)
            total -= sizes[entry]

    @property
    def _home(self) -> Path:
        return self.folder / f"v{_LAYOUT}"


def _private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    ours = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    return ours and folder.is_dir()
