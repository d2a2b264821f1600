"""Models opened by onnxruntime, with numpy arrays by name as inputs and outputs, and one-line errors."""

from __future__ import annotations

import ctypes
import io
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from amp_rewrite.errors import ModelError, PolicyError, one_line
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_nodes
from amp_rewrite.runtime import buffers
from amp_rewrite.runtime.buffers import ML_DTYPES, Array, Binding, BufferedRunner, DoubleBuffer, from_array, to_array
from amp_rewrite.runtime.faults import CPU as CPU
from amp_rewrite.runtime.faults import CUDA as CUDA
from amp_rewrite.runtime.faults import WEBGPU as WEBGPU
from amp_rewrite.runtime.faults import faults_to_avoid
from amp_rewrite.runtime.installation import check_providers, devices, model_errors
from amp_rewrite.runtime.installation import onnxruntime as installed_onnxruntime
from amp_rewrite.runtime.ports import Port, check_names, input_ports, model_input, output_ports, submodel, written_to
from amp_rewrite.runtime.providers import CHANNELS_LAST, cuda_options

if TYPE_CHECKING:
    import onnxruntime

Value = Array | list[Any] | dict[Any, Any] | None
"""A value of an input or output: an array, a list for a sequence, a dict for a map, or None for an empty optional."""

TENSORRT = "TensorrtExecutionProvider"

MAX_THREADS = 1024
"""Maximum number of threads per op; onnxruntime takes minutes to start more."""

# For some graphs of thousands of nodes, planning memory reuse takes longer than all other work to open the model.
_MAX_PLANNED_NODES = 4000
# FATAL, because errors are raised as exceptions anyway.
QUIET, _DEFAULT_SEVERITY = 4, 2
_BATCH, _SIZE = 1, 64
"""Sizes of free dimensions in a trial run: on the first axis, and on all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options for opening a model.

    `providers`: in order of preference. `outputs`: compute only these outputs, in this order. `optimized`: False
    runs every node unchanged. `planned`: False skips planning the reuse of memory, which takes most of the time to
    open a graph of 1000 nodes. `pooled`: False allocates memory for each value separately; otherwise, a second run
    allocates memory for all values at once, in addition to the memory of the first run. `lean`: for a single run,
    leave weights in their files without copies, and free memory at once. `spinning`: False lets waiting threads sleep,
    which suits graphs of many small ops. `threads`: the number per op; 0 for one per core. `provider_options`: options
    by provider; they override `cuda_options`. `channels_last`: on CUDA, try channels last for convolutional models.
    """

    providers: Sequence[str] = (CPU,)
    outputs: Sequence[str] | None = None
    optimized: bool = True
    planned: bool = True
    pooled: bool = True
    lean: bool = False
    spinning: bool = True
    threads: int = 0
    provider_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    channels_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """An open model. `provider`: the active provider; `provider_options`: its options. `inner`: its session."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    provider: str
    provider_options: Mapping[str, str]
    inner: onnxruntime.InferenceSession = field(repr=False)
    _written_to: frozenset[str] = field(repr=False)

    @classmethod
    def open(cls, model: Model, options: SessionOptions | None = None) -> Runner:
        """Open a model with these options, by default on the CPU.

        onnxruntime maps weights in files without copying them. A model with large weights in memory or with pending
        casts is written to a temporary folder while it is opened.

        PolicyError for a provider that the installed onnxruntime does not have; ModelError if none of the providers
        loads, or if onnxruntime rejects the model.
        """
        options = options or SessionOptions()
        providers = options.providers
        check_providers(providers)
        chosen = model if options.outputs is None else submodel(model, options.outputs)
        nodes = list(all_nodes(chosen.proto.graph.node))
        bodies = (nodes, *(all_nodes(function.node) for function in chosen.proto.functions))
        kinds = frozenset(node.op_type for body in bodies if options.optimized for node in body)
        faults = faults_to_avoid(chosen, kinds, installed_onnxruntime().__version__, providers)
        skip = [name for fault in faults for name in fault.skip]
        workarounds = {name: value for fault in faults for name, value in fault.options.items()}
        defaults: dict[str, Mapping[str, str]] = {providers[0]: workarounds}
        layout = False
        if CUDA in providers:
            best, requested = cuda_options(chosen), options.provider_options.get(CUDA, {}).keys()
            layout = options.channels_last and best.channels_last and not requested & {"use_tf32", *CHANNELS_LAST}
            defaults[CUDA] = {**best.without_layout, **(CHANNELS_LAST if layout else {}), **defaults.get(CUDA, {})}
        by_provider = {name: {**defaults.get(name, {}), **options.provider_options.get(name, {})} for name in providers}
        settings = _settings(options, len(nodes))
        with model_input(chosen) as (source, entries):
            for key, value in entries.items():
                settings.add_session_config_entry(key, value)
            runner = cls._of(chosen, by_provider, _opened(source, settings, by_provider, skip))
            if layout and runner.provider == CUDA and not runner._runs_on_zeros():
                by_provider[CUDA] = {k: v for k, v in by_provider[CUDA].items() if k not in CHANNELS_LAST}
                runner = cls._of(chosen, by_provider, _opened(source, settings, by_provider, skip))
        return runner

    @classmethod
    def _of(cls, model: Model, providers: Mapping[str, Mapping[str, str]], session: Any) -> Runner:
        first = session.get_providers()[0]
        if first not in providers:
            raise ModelError(
                f"{' and '.join(providers)} cannot be loaded on this machine, but {first} can; add {first} to the"
                " providers, or install the missing libraries"
            )
        written = written_to(model.proto.graph)
        return cls(input_ports(model), output_ports(model), first, providers[first], session, written)

    def _runs_on_zeros(self) -> bool:
        feeds: dict[str, Array] = {}
        sizes: dict[str, int] = {}
        for port in self.inputs:
            if port.dtype is None or port.shape is None:
                return False
            dims = [
                dim if isinstance(dim, int) else sizes.setdefault(dim or f"{axis > 0}", _SIZE if axis else _BATCH)
                for axis, dim in enumerate(port.shape)
            ]
            feeds[port.name] = np.zeros(dims, port.dtype.numpy)
        try:
            self.run(feeds)
        except ModelError:
            return False
        return True

    def _without_graph(self) -> Any:
        """Return run options to bypass the session's CUDA graphs; None if it does not capture any."""
        return _graph_number(-1) if self.provider_options.get("enable_cuda_graph") == "1" else None

    def run(self, batch: Mapping[str, Value], outputs: Sequence[str] | None = None) -> dict[str, Value]:
        """Run the model, and return the results by name: `outputs`, or all in the model's order.

        `batch` is not changed. Tensors are arrays, sequences are lists, maps are dictionaries, and empty optionals are
        None. bfloat16 arrays have the dtype from ml_dtypes. ModelError for unknown or missing names, and if onnxruntime
        raises an error.
        """
        ports = {port.name: port for port in self.outputs}
        names = list(ports) if outputs is None else list(outputs)
        check_names("output", names, tuple(ports))
        self._check_fed(batch)
        copies = {name: value.copy() for name in self._written_to if isinstance(value := batch.get(name), np.ndarray)}
        fed = {**batch, **copies}
        by_value = any(port.dtype in ML_DTYPES for port in (*self.inputs, *(ports[name] for name in names)))
        if not names:
            return {}
        with model_errors("run"):
            if by_value:  # OrtValues support bfloat16, onnxruntime's numpy interface does not
                values = {name: from_array(value) for name, value in fed.items()}
                results = map(to_array, self.inner.run_with_ort_values(names, values, self._without_graph()))
            else:
                results = self.inner.run(names, fed, self._without_graph())
            return dict(zip(names, results, strict=True))

    def bind(
        self,
        feeds: Mapping[str, object],
        outputs: Sequence[str] | Mapping[str, object] | None = None,
        *,
        device: int = 0,
        fixed: bool = False,
    ) -> Binding:
        """Bind inputs and outputs to the device, for repeated runs without copies.

        `feeds`: numpy arrays (with bfloat16 from ml_dtypes), OrtValues, or DLPack tensors, for example from torch;
        tensors already on the device are not copied. `outputs`: names, or tensors to write to by name; by default, all
        outputs. `device`: the number of the GPU. `fixed`: outputs keep their addresses, as a CUDA graph requires.
        ModelError for wrong names, types and devices.
        """
        in_ports, out_ports = ({port.name: port for port in side} for side in (self.inputs, self.outputs))
        chosen = list(out_ports) if outputs is None else outputs
        check_names("output", chosen, tuple(out_ports))
        self._check_fed(feeds)
        place = self._place(device)
        values: dict[str, Any] = {}
        given: dict[str, Any] = {}
        with model_errors("run"):
            bound = self.inner.io_binding()
            for name, tensor in feeds.items():
                values[name] = buffers.value_on(tensor, *place)
                buffers.check_type(in_ports[name], values[name], "input")
                bound.bind_ortvalue_input(name, values[name])
            for name in chosen:
                if isinstance(chosen, Mapping):
                    given[name] = buffers.output_value(out_ports[name], chosen[name], place[0])
                elif fixed:
                    given[name] = buffers.allocate_output(out_ports[name], *place)
                else:
                    bound.bind_output(name, *place)
                    continue
                bound.bind_ortvalue_output(name, given[name])
        options = _graph_number(next(_NUMBERS)) if fixed else None
        return Binding(tuple(chosen), values, given, self.inner, bound, options)

    def on_device(self, array: Value, device: int = 0) -> Any:
        """Return a copy of an array on the model's device, as an OrtValue."""
        return from_array(array, *self._place(device))

    def _check_fed(self, feeds: Mapping[str, object]) -> None:
        if not isinstance(feeds, Mapping):
            raise ModelError(f"inputs must be a mapping, not {type(feeds).__name__}; pass {{name: array}}")
        check_names("input", feeds, tuple(port.name for port in self.inputs))
        missing = [p.name for p in self.inputs if p.required and p.name not in feeds and "optional" not in p.container]
        if missing:
            raise ModelError(f"input {missing[0]!r} is missing; pass an array for each of {missing}")

    def double_buffer(self, initial: Mapping[str, Array]) -> DoubleBuffer:
        """Allocate two sets of state for `buffered` on this model's device, with the initial values on side 0."""
        place = self._place()
        # onnxruntime's memory is aligned for vector instructions, so sums are the same in every run
        first, second = ({name: buffers.memory_for(array, place) for name, array in initial.items()} for _ in "01")
        buffer = DoubleBuffer(place, (first, second))
        buffer.put(0, initial)
        return buffer

    def buffered(self, state: DoubleBuffer, successors: Mapping[str, str], returned: Sequence[str]) -> BufferedRunner:
        """Bind the model to state in a buffer on the same device: each run reads one set and writes the other.

        `successors`: the output with the next value of each state input. `returned`: outputs to return as arrays.
        ModelError for unknown outputs.
        """
        check_names("output", [*returned, *successors.values()], tuple(port.name for port in self.outputs))
        with model_errors("run"):
            inputs = frozenset(port.name for port in self.inner.get_inputs())
            first, second = state.sides
            read = [name for name in first if name in inputs]
            shielded = {name: buffers.copy_to(first[name], *state.place) for name in read if name in self._written_to}
            bound = self.inner.io_binding(), self.inner.io_binding()
            for binding, current, following in zip(bound, (first, second), (second, first), strict=True):
                for name in read:
                    binding.bind_ortvalue_input(name, shielded.get(name, current[name]))
                for name in returned:  # first, so that they are the first results
                    binding.bind_output(name)
                for name, output in successors.items():
                    binding.bind_ortvalue_output(output, following[name])
        fed = inputs - first.keys()
        return BufferedRunner(state, fed, tuple(returned), self.provider, self.inner, bound, {}, shielded)

    def _place(self, device: int = 0) -> tuple[str, int]:
        return ("cuda", device) if self.provider in (CUDA, TENSORRT) else ("cpu", 0)


@dataclass(frozen=True, slots=True)
class CudaGraphs:
    """Recorded runs of a model on CUDA: one for each set of shapes, up to a limit. Other shapes run normally.

    The first run with new shapes is a normal one, to find the shapes of the results; then a run is recorded. Results
    are copied from the device before the next replay overwrites them. Threads take turns.
    """

    runner: Runner
    device: int
    bindings: dict[tuple[object, ...], Binding | None] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def run(self, feeds: Mapping[str, Value], outputs: Sequence[str] | None = None) -> dict[str, Value]:
        given = {name: value for name, value in feeds.items() if isinstance(value, np.ndarray)}
        if len(given) < len(feeds):
            return self.runner.run(feeds, outputs)
        shapes = ((name, array.shape, array.dtype.str) for name, array in sorted(given.items()))
        key = (*shapes, None if outputs is None else tuple(outputs))
        with self._turn:
            binding = self.bindings.get(key)
            if binding is not None:
                binding.feed(given)
                return dict(binding.arrays())
            results = self.runner.run(feeds, outputs)
            if key not in self.bindings and len(self.bindings) < MAX_GRAPHS:
                self.bindings[key] = self._record(given, results)
            return results

    def _record(self, feeds: Mapping[str, Array], results: Mapping[str, Value]) -> Binding | None:
        if not all(isinstance(value, np.ndarray) for value in results.values()):
            return None
        try:
            given = {name: self.runner.on_device(value, self.device) for name, value in results.items()}
            binding = self.runner.bind(feeds, given, device=self.device, fixed=True)
            binding.run()
        except ModelError:
            return None
        return binding


_NUMBERS = count(1)


def _graph_number(number: int) -> Any:
    """Return run options to record or replay the CUDA graph with this number; -1 for a run without a graph."""
    options = installed_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


MAX_GRAPHS = 8
"""Maximum number of recorded sets of shapes per session; each keeps memory for its inputs and results."""


def small_model(dtype: str = "float") -> ModelProto:
    """Return a model of one op, to test whether a provider opens it."""
    import onnx.parser

    text = '<ir_version: 8, opset_import: ["" : 13]> probe ({0}[1] x) => ({0}[1] y) {{ y = Neg(x) }}'
    return onnx.parser.parse_model(text.format(dtype))


@cache
def cuda_works() -> bool:
    """True if a model can be opened on CUDA here; a build with CUDA does not guarantee this."""
    try:
        return Runner.open(Model(small_model()), SessionOptions(providers=(CUDA, CPU))).provider == CUDA
    except (ModelError, PolicyError):
        return False


@cache
def webgpu_works() -> bool:
    """True if a WebGPU device here runs a float16 model with onnxruntime's plugin."""
    try:
        runner = Runner.open(Model(small_model("float16")), SessionOptions(providers=(WEBGPU, CPU)))
        runner.run({"x": np.zeros(1, np.float16)})
    except (ModelError, PolicyError):
        return False
    return any(part.ep_name == WEBGPU for part in runner.inner.get_provider_graph_assignment_info())


def _settings(options: SessionOptions, nodes: int) -> Any:
    ort = installed_onnxruntime()
    settings = ort.SessionOptions()
    settings.log_severity_level = QUIET
    settings.intra_op_num_threads = options.threads
    settings.enable_mem_reuse = options.planned and nodes <= _MAX_PLANNED_NODES
    settings.enable_mem_pattern = options.pooled
    level = ort.GraphOptimizationLevel
    settings.graph_optimization_level = level.ORT_ENABLE_ALL if options.optimized else level.ORT_DISABLE_ALL
    if options.lean:
        settings.enable_cpu_mem_arena = False
        settings.add_session_config_entry("session.disable_prepacking", "1")
    if not options.spinning:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if options.providers[0] == WEBGPU:
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")  # for `webgpu_works`
    return settings


def _opened(
    source: bytes | str, settings: Any, by_provider: Mapping[str, Mapping[str, str]], skip: list[str]
) -> onnxruntime.InferenceSession:
    ort = installed_onnxruntime()
    first = next(iter(by_provider))
    plugin_devices = devices(ort, first)[:1]
    ort.set_default_logger_severity(QUIET)  # a provider that fails to load logs this outside of any session
    try:
        with model_errors("open"):
            if {CUDA, TENSORRT}.intersection(by_provider):
                preload_once()
            if plugin_devices:
                settings.add_provider_for_devices(plugin_devices, by_provider[first])
            named = None if plugin_devices else list(by_provider.items())
            return ort.InferenceSession(source, settings, named, disabled_optimizers=skip or None, enable_fallback=0)
    finally:
        ort.set_default_logger_severity(_DEFAULT_SEVERITY)


@cache
def preload_once() -> None:
    """Load CUDA libraries installed by pip unless the loader finds others."""
    ort = installed_onnxruntime()
    release = str(getattr(ort, "cuda_version", None) or "").partition(".")[0]
    missing = [_load_error(name) is not None for name in (f"libcublasLt.so.{release}", _CUDNN)]
    if release and any(missing):
        with redirect_stdout(io.StringIO()):  # the call prints missing libraries
            ort.preload_dlls(cuda=missing[0], cudnn=missing[1])


_CUDNN = "libcudnn.so.9"


def library_load_error() -> str | None:
    """Return the loader's error for the CUDA provider or cuDNN; None if both load.

    The error names the missing library. Only on Linux, where the loader finds a loaded library by its name.
    """
    if not sys.platform.startswith("linux"):
        return None
    preload_once()
    provider = Path(installed_onnxruntime().__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    return _load_error(str(provider)) or _load_error(_CUDNN)


def _load_error(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as cause:
        return one_line(cause)
    return None
