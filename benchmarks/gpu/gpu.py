"""Every measurement that needs a GPU, in one run.

    python benchmarks/run.py gpu --out DIR [--minutes 25] [--peers PYTHON] [--autocast PYTHON] [--models NAME …]
    python benchmarks/run.py gpu --out DIR --provider cpu --tiny     # the same road without a GPU, on small models

Each row runs in a process of its own and is written to DIR as soon as it is there, so that a run that is cut keeps
what it has. A second run with the same DIR goes on where the first one ended: what was measured in the same way, on the
same device and by the same versions is not repeated. DIR/gpu.json holds everything, DIR/gpu.md the tables. What goes
first matters most: float16 of all models, then the other ways.

- latency of float32, float32 with TF32, and of each way of making a model half, in turns: amp-rewrite to float16 and to
  bfloat16, `module.half()` exported by PyTorch, onnxruntime.transformers' float16 (`--peers`: an interpreter that has
  it; default: this one), NVIDIA's AutoCast (`--autocast`: an interpreter with nvidia-modelopt[onnx]); with the error,
  and for the first way peak memory and the ops that got slower;
- the dense network 784-4096-4096-10 of TensorFlow's guide of 2020 at a batch of 8192, inference and a training step:
  the guide states 12 → 4 µs for a sample on a Titan V;
- the largest batch within a gigabyte;
- what the provider computes in half against `amp_rewrite.emulate` on the CPU, for the digit classifiers and all
  exported models of the tests, worst ratio first.

The models of the zoo need torch, transformers and onnxscript; where they are missing, their rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_models, gpu_tables
from benchmarks.shared import measure

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
LIMITS = {"export": 300, "latency": 240, "emulation": 90, "training": 240, "fit": 300}
"""Seconds after which a row is given up."""
DEPENDS = ("device", "driver", "cuda", "versions")
"""What else a row depends on, beside its job; as `about` names it."""
PACKAGES = ("amp-rewrite", "onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "ml_dtypes", "torch", "transformers")
EXPORTS_NEED = ("torch", "transformers", "onnxscript")
FITTED = {"dense": (512, 2048, 8192), "digits_vit": (32, 256, 2048)}
FIT_LIMIT = 10**9

Job = dict[str, Any]


def jobs(given: argparse.Namespace) -> Iterator[Job]:
    """What is to be measured, what matters most first. Each has a name of its own."""
    shared = {
        "cache": str(given.cache),
        "provider": PROVIDERS[given.provider],
        "tiny": given.tiny,
        "rounds": given.rounds,
        "warm": given.warm,
        "peers": given.peers,
        "autocast": given.autocast,
    }
    models = given.models or list(gpu_models.MODELS)
    ways = list(gpu_models.WAYS)
    for model in models:
        yield {**shared, "name": f"export {model}", "kind": "export", "model": model}
        yield {**shared, **_latency(model, ways[0])}
    if "dense" in models:
        for policy in ("mixed_float16", "mixed_bfloat16"):
            yield {**shared, "name": f"training {policy}", "kind": "training", "policy": policy}
    for to in ("float16", "bfloat16"):
        yield from ({**shared, **job} for job in _emulations(to, models, given.tiny))
    for way in ways[1:]:
        if way == "modelopt AutoCast" and given.autocast is None:
            continue
        able = [m for m in models if way != "torch half" or gpu_models.has_module(m, tiny=given.tiny)]
        yield from ({**shared, **_latency(model, way)} for model in able)
    for model in (m for m in FITTED if m in models):
        sizes = [1, 2] if given.tiny else list(FITTED[model])
        limit = 1 if given.tiny else FIT_LIMIT
        yield {**shared, "name": f"fit {model}", "kind": "fit", "model": model, "sizes": sizes, "limit": limit}


def _latency(model: str, way: str) -> Job:
    return {"name": f"latency {model} {way}", "kind": "latency", "model": model, "way": way}


def _emulations(to: str, models: Sequence[str], tiny: bool) -> Iterator[Job]:
    """The digit classifiers on held-out digits, and the exported models of the tests on their own batches."""
    for model in (m for m in models if m.startswith("digits")):
        yield {"name": f"emulation {model} {to}", "kind": "emulation", "model": model, "file": None, "to": to}
    for file in sorted(gpu_models.EXPORTED.glob("*.onnx"))[: 1 if tiny else None]:
        name = f"emulation {file.stem} {to}"
        yield {"name": name, "kind": "emulation", "model": file.stem, "file": str(file), "to": to}


@dataclass(frozen=True, slots=True)
class Suite:
    """Rows, one file each below `out`, and what ran them."""

    out: Path
    about: dict[str, Any]
    deadline: float

    def run(self, todo: Sequence[Job]) -> None:
        """Every job whose row is not there yet, as long as there is time."""
        for number, job in enumerate(todo, 1):
            if self.row(job) is None and time.monotonic() < self.deadline:
                start = time.perf_counter()
                row = self._measured(job)
                told = row.get("fault") or "done"
                print(f"{number}/{len(todo)}  {job['name']}: {told}  {time.perf_counter() - start:.0f} s", flush=True)
            self.write(todo)

    def row(self, job: Job) -> dict[str, Any] | None:
        """What was measured, or why not; None: not yet, or of another machine, other versions or settings."""
        try:
            asked, row = (json.loads(self._file(job, suffix).read_text("utf-8")) for suffix in (".json", ".row.json"))
        except (OSError, ValueError):  # ValueError: its process was killed while it wrote
            return None
        return row if asked == self._asked(job) else None

    def _asked(self, job: Job) -> Job:
        """A job with all that its row depends on."""
        return json.loads(json.dumps({**job, "on": {key: self.about.get(key) for key in DEPENDS}}))

    def _file(self, job: Job, suffix: str) -> Path:
        return self.out / "rows" / (job["name"].replace(" ", "_").replace("/", "-") + suffix)

    def _measured(self, job: Job) -> dict[str, Any]:
        """The row of a process of its own, which may fail, die or take too long without any other row's loss."""
        file = self._file(job, ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file(job, ".row.json").unlink(missing_ok=True)
        file.write_text(json.dumps(self._asked(job)), encoding="utf-8")
        left = max(self.deadline - time.monotonic(), 1)
        limit = min(LIMITS[job["kind"]], left)
        command = [*map(str, measure.script("gpu_rows")), str(file)]
        code, said = ended(command, limit)
        for scratch in Path(job["cache"]).glob(f"amp-rewrite-{os.getpid()}-*"):  # of a process that was stopped
            shutil.rmtree(scratch, ignore_errors=True)
        if code is None and limit == left:
            return {"fault": "the time was up"}  # no row is left, so that the next run tries again
        fault = f"stopped after {limit:.0f} s" if code is None else f"its process ended with {code}: {said}"
        if code != 0:
            self._file(job, ".row.json").write_text(json.dumps({"fault": fault}), encoding="utf-8")
        return self.row(job) or {"fault": "it left no row"}

    def write(self, todo: Sequence[Job]) -> None:
        """gpu.json and gpu.md, of all that is there by now."""
        rows = [{**job, "row": self.row(job)} for job in todo]
        told = {"machine": self.about, "rows": rows}
        (self.out / "gpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        lines = gpu_tables.page(self.about, rows)
        (self.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ended(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """The exit code of a command and the last line of its errors; None for one that was stopped, and its children."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own children too: they may hold the device
            return None, ""
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)  # in a session of its own it has not heard of it
            raise
    return process.returncode, (errors.strip().splitlines() or ["without a word"])[-1][:300]


def about(provider: str, tiny: bool) -> dict[str, Any]:
    """GPU, driver, machine, versions and date."""
    from amp_rewrite.deploy.bench.device import device_name
    from amp_rewrite.runtime.gpu import hardware

    installed = []
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            installed.append(package)
    found = hardware()
    return {
        **measure.machine(installed),
        "device": device_name(PROVIDERS[provider]),
        "driver": found.driver,
        "cuda": None if found.cuda is None else ".".join(map(str, found.cuda)),
        "provider": PROVIDERS[provider],
        "tiny": tiny,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--provider", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models in place of the real ones, one round")
    parser.add_argument("--minutes", type=float, default=24.0, help="after which no row begins (default 24)")
    parser.add_argument("--models", nargs="+", choices=list(gpu_models.MODELS))
    parser.add_argument("--kinds", nargs="+", choices=list(LIMITS), default=list(LIMITS), help="only these rows")
    parser.add_argument("--rounds", type=int, help="default 10; tiny: 1")
    parser.add_argument("--warm", type=int, help="runs before any counts; default 10; tiny: 1")
    parser.add_argument("--cache", type=Path, help="where models are exported to (default: OUT/models)")
    parser.add_argument("--peers", default=sys.executable, help="Python with onnxruntime.transformers")
    parser.add_argument("--autocast", help="Python with nvidia-modelopt[onnx]")
    given = parser.parse_args()
    given.rounds, given.warm = given.rounds or (1 if given.tiny else 10), given.warm or (1 if given.tiny else 10)
    given.cache = (given.cache or given.out / "models").resolve()
    given.cache = given.cache / "tiny" if given.tiny else given.cache  # small models bear the names of the real ones
    given.cache.mkdir(parents=True, exist_ok=True)
    from amp_rewrite.runtime.runner import cuda_opens

    if given.provider == "cuda" and not cuda_opens():
        sys.exit(
            "no CUDA provider opens here, so nothing was measured; `amp-rewrite doctor` says what is missing, and"
            " --provider cpu --tiny goes the same road"
        )
    if given.autocast is None:
        print("AutoCast is left out: --autocast PYTHON names an interpreter with nvidia-modelopt[onnx]")
    if not given.tiny and any(find_spec(name) is None for name in EXPORTS_NEED):
        print(f"the large models cannot be made: they need {', '.join(EXPORTS_NEED)}; `make extras` brings them")
    suite = Suite(given.out, about(given.provider, given.tiny), time.monotonic() + 60 * given.minutes)
    try:
        suite.run([job for job in jobs(given) if job["kind"] in given.kinds])
    except KeyboardInterrupt:
        print(f"interrupted; what was measured by now stays in {given.out}, and the same command goes on", flush=True)
        sys.exit(130)  # as shells report death by SIGINT
    print(f"wrote {given.out / 'gpu.md'}")


if __name__ == "__main__":
    main()
