"""Measure the wall time, CPU time and peak memory of a command; describe the machine; write results.

Peak memory is the kernel's high-water mark for a process (`ru_maxrss`). A child inherits the mark of its parent, so
benchmarks build their models in children (`apart`) and stay small themselves.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one process: exit code, wall and CPU seconds, peak resident bytes, last lines of errors."""

    code: int
    wall: float
    cpu: float
    peak: int
    said: str = ""


def cost(
    command: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    stdout: Path | None = None,
    limit: float | None = None,
    memory: float | None = None,
) -> Cost:
    """Run a command and return its cost. Its output goes to `stdout`, and the tail of its errors to the result.

    `limit`, `memory`: kill it at this many seconds or resident bytes, with the reason in `said`. `memory` needs Linux.
    Python may cache bytecode, as for an installed tool.
    """
    env = {name: value for name, value in (env or os.environ).items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as errors, (stdout or Path(os.devnull)).open("wb") as out:
        start = time.perf_counter()
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=errors, env=env)
        ended, stopped = threading.Event(), list[str]()
        watch = threading.Thread(target=_watch, args=(process.pid, limit, memory, ended, stopped), daemon=True)
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        ended.set()
        watch.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip()[-400:]
    said = stopped[0] if stopped else said
    scale = 1 if sys.platform == "darwin" else 1024
    return Cost(process.returncode, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale, said)


def _watch(process: int, limit: float | None, memory: float | None, ended: threading.Event, stopped: list[str]) -> None:
    """Kill a process that exceeds a limit, and append the reason to `stopped`."""
    start, status = time.perf_counter(), Path(f"/proc/{process}/statm")
    while not ended.wait(limit if memory is None else 0.2):
        if limit is not None and time.perf_counter() - start >= limit:
            stopped.append(f"stopped after {limit:.0f} s")
        elif memory is not None and status.exists() and _resident(status) >= memory:
            stopped.append(f"stopped at {memory / 1e9:g} GB of memory")
        if stopped:
            with suppress(ProcessLookupError):  # it has already ended
                os.kill(process, signal.SIGKILL)
            return


def _resident(status: Path) -> int:
    """Return the current resident bytes of a process, from its `statm`."""
    return int(status.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def best(runs: Iterable[Cost]) -> Cost:
    """Return the run with the lowest wall time; on a shared machine, the others measure the neighbors."""
    return min(runs, key=lambda run: run.wall)


def apart(function: Callable[..., Any], *arguments: object) -> Any:
    """Run a function in a separate process and return its result, to keep its memory out of this process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def warm_up() -> None:
    """Cache this package's bytecode, as pip does for an installed package."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", ROOT / "amp_rewrite"], check=True)
    cost([*own_command(), ROOT / "examples" / "models" / "digits_vit.onnx", "--dry-run"])


def own_command() -> list[str | Path]:
    """Return the `amp-rewrite` command of this interpreter's environment."""
    return [Path(sys.executable).with_name("amp-rewrite")]


def script(name: str, python: str | Path = sys.executable) -> list[str | Path]:
    """Return the command for a benchmark or helper script, with the given Python."""
    return [python, ROOT / "benchmarks" / "run.py", name]


def memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine(packages: Iterable[str] = ("onnx", "numpy", "ml_dtypes", "protobuf")) -> dict[str, object]:
    """Return the machine, the date and the versions for a results file."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = (line for line in info.read_text("utf-8").splitlines() if line.startswith("model name"))
        model = next(names, ":").partition(":")[2].strip()
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def write(name: str, about: Mapping[str, object], rows: Sequence[Any], table: Sequence[str]) -> None:
    """Write the rows to results/NAME.json and the table to results/NAME.md."""
    RESULTS.mkdir(exist_ok=True)
    plain = [row if isinstance(row, dict) else asdict(row) for row in rows]
    text = json.dumps({"machine": about, "rows": plain}, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    versions = ", ".join(f"{package} {version}" for package, version in dict(about["versions"]).items())  # type: ignore[call-overload]
    where = f"{about['date']}, {about['cpu']}, {about['cores']} cores (shared, load {about['load']}), {about['system']}"
    lines = [f"{where}, Python {about['python']}, {versions}.", "", *table]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
