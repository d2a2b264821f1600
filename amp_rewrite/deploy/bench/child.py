"""Measure one model in a process of its own: its memory, or the time of each op.

Memory counts from a clean start, and a model that exceeds the memory ends its own process, not the benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amp_rewrite.deploy.bench.device import GpuMemory, resident
from amp_rewrite.deploy.bench.profile import OpTime, read_profile
from amp_rewrite.errors import AmpRewriteError, one_line
from amp_rewrite.evidence.conditions import session_on
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.files.model import Model
from amp_rewrite.runtime.runner import CUDA, Runner, has_provider
from amp_rewrite.runtime.subprocess import command

_SKIPPED, _RUNS = 3, 10  # runs of a profile
# Kernels run asynchronously; with blocking launches the time of an op includes its kernel.
_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A model file, a batch in a .npz file, how to open the model, and whether to time its ops."""

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
    reason if there is neither.
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
        words = command("from amp_rewrite.deploy.bench.child import main; main(sys.argv[1])", str(folder / "job.json"))
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
    """Do a job; a model that does not run gives an outcome with a fault."""
    try:
        return _profiled(job, folder) if job.profile else _weighed(job)
    except (AmpRewriteError, OSError) as error:
        return JobResult(fault=one_line(error))


def _weighed(job: BenchJob) -> JobResult:
    gpu = GpuMemory() if job.provider == CUDA else None
    batch = _batch(job)
    has_provider(job.provider)  # loads the runtime's library, which does not belong to the model
    before = gpu.used() if gpu else resident()
    runner = _opened(job)  # held until the end, because a session frees its arena on the GPU with itself
    _run(runner, batch, 2)  # the second run shows whether memory is used again
    after = gpu.used() if gpu else resident(peak=True)
    return (
        JobResult(max(after - before, 0)) if after else JobResult(fault="this system does not tell how much is in use")
    )


def _profiled(job: BenchJob, folder: Path) -> JobResult:
    runner = _opened(job, profile=str(folder / "profile"))
    _run(runner, _batch(job), _SKIPPED + _RUNS)
    return JobResult(ops=read_profile(runner.end_profile(), skip=_SKIPPED))


def _opened(job: BenchJob, profile: str | None = None) -> Runner:
    return Runner.open(Model.load(job.model), session_on(job.provider, job.threads, job.options, profile))


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
