"""The command line in a sandbox: each run in a separate process with limited memory and time, without a terminal.

`Cage` starts a Python process that imports the package once and forks for every run, so that a run takes milliseconds
and a crash, a hang or excessive memory only affects that run.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MEMORY = 2 << 30  # bytes of address space
SECONDS, PATIENCE = 10, 180
"""Seconds of processor time, and seconds after which a run hangs, even on a busy machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run: its exit code, or minus the signal (SIGXCPU after the time limit), and its output."""

    code: int
    out: str
    err: str
    seconds: float
    """Processor time."""
    peak: int
    """Largest resident set, bytes."""

    @property
    def refused(self) -> bool:
        """Whether it ended with one clear line and exit code 2."""
        lines = self.err.splitlines()
        return self.code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) > 20


class Cage:
    """A context that runs command lines."""

    def __enter__(self) -> Cage:
        here = Path(__file__)
        path = os.pathsep.join([str(here.parents[3]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AMP_REWRITE_")}
        self._warden = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._warden.stdin and self._warden.stdout
        self._warden.stdin.close()
        self._warden.wait(30)
        self._warden.stdout.close()

    def run(self, *words: str | Path, folder: Path, seconds: float = SECONDS, memory: int = MEMORY) -> Outcome:
        """Run `amp-rewrite words…` in the folder."""
        assert self._warden.stdin and self._warden.stdout
        self._warden.stdin.write(json.dumps([list(map(str, words)), str(folder), seconds, memory]) + "\n")
        self._warden.stdin.flush()
        return Outcome(*json.loads(self._warden.stdout.readline()))


def _guard() -> None:
    """Read runs from stdin, fork for each, write outcomes to stdout, until stdin ends."""
    import onnx.parser

    import amp_rewrite.reports.diff  # noqa: F401
    from amp_rewrite.cli import program
    from amp_rewrite.pipeline.convert import convert

    warm = '<ir_version: 8, opset_import: ["" : 17]> g (float[2,2] x) => (float[2,2] y) { y = MatMul (x, x) }'
    convert(onnx.parser.parse_model(warm)).report.text()  # reads lists and tables once for all runs
    for line in sys.stdin:
        words, folder, seconds, memory = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                os.chdir(folder)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
                program.main(words)
            status, usage = _waited(child)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "backslashreplace"))
        print(
            json.dumps(
                [os.waitstatus_to_exitcode(status), *texts, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]
            ),
            flush=True,
        )


def _waited(child: int) -> tuple[int, resource.struct_rusage]:
    """Return the wait status and resource usage of a child; kill it if it hangs."""
    pause, deadline = 0.001, time.monotonic() + PATIENCE
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


if __name__ == "__main__":
    _guard()
