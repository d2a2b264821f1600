"""One model measured in a process of its own: its memory, or the time of each op.

Memory counts from a clean start, and a model that exceeds the memory ends its own process, not the benchmark."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.errors import AmpRewriteError, ModelError, one_line
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.opening import session_on
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.gpu import DRIVER, Loader, hardware
from amp_rewrite.runtime.plugins import has_provider, offered_device
from amp_rewrite.runtime.probes import command
from amp_rewrite.runtime.runner import CUDA, Runner

_STATUS = Path("/proc/self/status")
_CPUS = Path("/proc/cpuinfo")


def device_name(provider: str) -> str:
    """Return the GPU and its driver, or the processor and the cores of this process."""
    if offered := offered_device(provider):
        return f"{offered} ({provider})"
    machine = hardware() if provider == CUDA else None
    if machine is not None and machine.gpus:
        driver = "" if machine.cuda is None else f", driver of CUDA {machine.cuda[0]}.{machine.cuda[1]}"
        return f"{machine.gpus[0]}{driver}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = _line_of(_CPUS, "model name").strip(" \t:") or platform.processor() or platform.machine()
    return f"{processor}, {cores} cores"


def _line_of(file: Path, start: str) -> str:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")


class GpuMemory:
    """Memory of the first GPU, of all processes together: differences need a GPU without other load."""

    def __init__(self, load: Loader = ctypes.CDLL) -> None:
        self._library = load(DRIVER)
        self._context = ctypes.c_void_p()
        gpu = ctypes.c_int()
        self._ask("cuInit", 0)
        self._ask("cuDeviceGet", ctypes.byref(gpu), 0)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), gpu)

    def used(self) -> int:
        """Return the bytes in use now: of a runtime without frees, the peak. Raise OSError if the driver refuses."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._ask("cuCtxPushCurrent_v2", self._context)
        self._ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self._ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return total.value - free.value

    def _ask(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as missing:
            raise OSError(f"the NVIDIA driver here has no {name}; update it") from missing
        if code:
            raise OSError(f"the NVIDIA driver refused {name} with error {code}")


def resident(*, peak: bool = False) -> int:
    """Return the resident bytes of this process now, or their peak; 0 if unknown.

    `ru_maxrss` would not do as a peak, since a process inherits it from its parent.
    """
    line = _line_of(_STATUS, "VmHWM:" if peak else "VmRSS:")
    return int(line.split()[0]) << 10 if line else 0


_SUFFIX = "_kernel_time"
# onnxruntime's names of element types that differ from ours.
_TYPES = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True)
class OpTime:
    """One op of a model as it ran: seconds in the median run, provider, and the type of its first output."""

    name: str
    op: str
    provider: str
    dtype: str
    seconds: float

    @property
    def place(self) -> str:
        """Return the short name of its provider: "CUDA", "CPU"."""
        return self.provider.removesuffix("ExecutionProvider")


@dataclass(frozen=True, slots=True)
class OpChange:
    """An op before and after; None on a side without it."""

    before: OpTime | None
    after: OpTime | None

    @property
    def side(self) -> OpTime:
        """The op after the change, or before it if it is gone."""
        op = self.after or self.before
        assert op is not None
        return op

    @property
    def seconds(self) -> float:
        """Return the additional seconds in a run."""
        return (self.after.seconds if self.after else 0.0) - (self.before.seconds if self.before else 0.0)


def read_profile(file: Path, *, skip: int = 0) -> tuple[OpTime, ...]:
    """Read ops in the order of their first run, without the first `skip` runs. Raise ModelError for another file."""
    try:
        events = json.loads(file.read_text(encoding="utf-8"))
        runs = sorted(e["ts"] for e in events if e["name"] == "model_run")
        nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_SUFFIX)]
        ops = _ops(nodes, runs, skip)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        why = one_line(cause)
        raise ModelError(f"{file.name} is not a profile of onnxruntime: {why}; profile the model again") from cause
    if len(runs) <= skip:
        raise ModelError(f"{file.name} holds {len(runs)} runs, and {skip} do not count; run the model more often")
    return ops


def _ops(events: Sequence[Mapping[str, Any]], runs: Sequence[int], skip: int) -> tuple[OpTime, ...]:
    taken: dict[tuple[str, str, str, str], NDArray[Any]] = defaultdict(lambda: np.zeros(len(runs)))
    for event in events:
        args = event["args"]
        name = event["name"].removesuffix(_SUFFIX)
        run = bisect_right(runs, event["ts"]) - 1
        if run >= 0:
            dtype = next(iter(next(iter(args.get("output_type_shape", ())), {})), "")  # "" if it is not a tensor
            key = (name, args["op_name"], args.get("provider", ""), _TYPES.get(dtype, dtype))
            taken[key][run] += event["dur"] * 1e-6
    counted = {key: seconds[skip:] for key, seconds in taken.items() if seconds[skip:].any()}
    return tuple(OpTime(*key, float(np.median(seconds))) for key, seconds in counted.items())


def changes(before: Sequence[OpTime], after: Sequence[OpTime]) -> tuple[OpChange, ...]:
    """Return the changes of ops paired by name and op type, unpaired ones included, the largest slowdown first."""
    left = {(op.name, op.op): op for op in before}
    pairs = [OpChange(left.pop((op.name, op.op), None), op) for op in after]
    pairs += [OpChange(op, None) for op in left.values()]
    return tuple(sorted(pairs, key=lambda change: -change.seconds))


_SKIPPED, _RUNS = 3, 10  # runs of a profile
# Kernels run asynchronously; with blocking launches the time of an op includes its kernel.
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
# Where memory is measured, the arena grows by the requested size, not by powers of two.
_WEIGHED: Mapping[str, Mapping[str, str]] = {CUDA: {"arena_extend_strategy": "kSameAsRequested"}}


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A model file, a batch in a .npz file, the way to open the model, and `profile`, to measure its ops, too."""

    model: str
    batch: str
    provider: str
    options: Mapping[str, str] = field(default_factory=dict)
    profile: bool = False
    threads: int = 0


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job.

    `memory`: bytes in use beyond those before the model was opened, None if unknown; `ops`: a profile; `fault`: the
    reason if something is missing.
    """

    memory: int | None = None
    ops: tuple[OpTime, ...] = ()
    fault: str = ""


def apart(model: Path, batch: Batch, provider: str, **more: Any) -> JobResult:
    """Run a job in a process of its own and return its outcome. Raise OSError if no process can be started."""
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        arrays: dict[str, Any] = {f"0/{name}": array for name, array in batch.items()}  # "file" is a name, too
        np.savez(folder / "batch.npz", **arrays)
        job = BenchJob(os.fspath(model.resolve()), str(folder / "batch.npz"), provider, **more)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        words = command("from amp_rewrite.deploy.measurement import main; main(sys.argv[1])", str(folder / "job.json"))
        environment = os.environ | (_BLOCKING if job.profile else {})
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", check=False)
        result = folder / "outcome.json"
        if not result.exists():
            return JobResult(fault=_ending(ended.returncode, ended.stderr))
        fields = json.loads(result.read_text("utf-8"))
        return JobResult(**fields | {"ops": tuple(OpTime(**op) for op in fields["ops"])})


def _ending(code: int, stderr: str) -> str:
    last = (stderr.strip().splitlines() or [""])[-1]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"its process ended with {how}{f': {last[:200]}' if last else ''}"


def outcome_of(job: BenchJob, folder: Path) -> JobResult:
    """Do a job; a failure is an outcome with a fault."""
    try:
        memory = _weighed(job)
        ops = _profiled(job, folder) if job.profile else ()
    except (AmpRewriteError, OSError) as error:
        return JobResult(fault=one_line(error))
    return JobResult(memory, ops, "this system does not tell how much is in use" if memory is None else "")


def _weighed(job: BenchJob) -> int | None:
    gpu = GpuMemory() if job.provider == CUDA else None
    batch = _batch(job)
    has_provider(job.provider)  # loads the runtime's library, which does not belong to the model
    before = gpu.used() if gpu else resident()
    # held until the end, because a session frees its arena on the GPU with itself
    runner = _opened(job, _WEIGHED.get(job.provider, {}))
    _run(runner, batch, 2)  # the second run shows whether memory is used again
    after = gpu.used() if gpu else resident(peak=True)
    return max(after - before, 0) if after else None


def _profiled(job: BenchJob, folder: Path) -> tuple[OpTime, ...]:
    runner = _opened(job, profile=str(folder / "profile"))
    _run(runner, _batch(job), _SKIPPED + _RUNS)
    return read_profile(runner.end_profile(), skip=_SKIPPED)


def _opened(job: BenchJob, more: Mapping[str, str] = {}, profile: str | None = None) -> Runner:
    options = {**job.options, **more}
    return Runner.open(Model.load(job.model), session_on(job.provider, job.threads, options, profile))


def _run(runner: Runner, batch: Batch, times: int) -> None:
    binding = runner.bind(batch)
    for _ in range(times):
        binding.run()


def _batch(job: BenchJob) -> Batch:
    return next(iter(Feed.of(job.batch, Model.load(job.model), allow_nonfinite=True)))


def main(file: str) -> None:
    """Do the job in a file, and write its outcome beside it."""
    path = Path(file)
    outcome = outcome_of(BenchJob(**json.loads(path.read_text("utf-8"))), path.parent)
    (path.parent / "outcome.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
