"""Run all GPU measurements, starting with those for the headline table.

    python benchmarks/run.py gpu --models FOLDER --out DIR [--minutes 24] [--kinds KIND …] [--only NAME …]
    python benchmarks/run.py gpu --models FOLDER --out DIR --provider cpu --tiny     # the same steps without a GPU

FOLDER contains the models written by `gpu_grow` from the skeletons of `gpu_make`. Each row runs in a separate process
and is written to DIR at once, so an interrupted run keeps its rows. Another run with the same DIR resumes: it does not
repeat rows of the same models, device and versions. DIR/gpu.json has all results, and DIR/gpu.md the tables.

ceilings   the GPU's best performance: large products in each type, and a copy
latency    all ways of a model, alternating in one process: times, paired ratios, errors, memory
training   a step of the dense network of TensorFlow's guide of 2020, in each policy
variants   CUDA graphs, NHWC, queued runs, and energy
kernels    the kernel names of each way
ops        single ops in half precision on the provider, compared with `amp_rewrite.emulate` on the CPU
emulation  the same for whole models
beside     PyTorch, eager and compiled, and this package, alternating
trials     alternatives of a rewrite or a setting, compared
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_models, gpu_tables, gpu_trials, skeleton_files
from benchmarks.shared import measure

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
LIMITS = {
    "ceilings": 60,
    "latency": 240,
    "training": 120,
    "variants": 240,
    "kernels": 200,
    "ops": 60,
    "emulation": 60,
    "beside": 240,
    "trials": 60,
}
"""Time limits of rows in seconds. Rows are measured in the order of their kinds."""
OF_MODELS = ("latency", "variants", "kernels", "beside")
UNTIMED = ("ops", "emulation")
"""Kinds of rows without times."""
PLACES = ("scratch", "models", "file")
"""Paths on the machine, omitted from results."""
DEPENDS = ("device", "driver", "cuda", "versions")
"""A row's other dependencies besides its job, as in `about`."""
PACKAGES = ("amp-rewrite", "onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "ml_dtypes", "torch", "transformers")
LIBRARIES = ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-runtime")
DIGITS = ("digits_cnn", "digits_vit")
PACKED = "AMP_REWRITE_GPU_PACKED"
"""Environment variable of `gpu_remote` for the missing parts of onnxruntime."""
MIN_SECONDS = 10.0
"""The minimum remaining time to start another row, in seconds."""

PLAN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kernels", ("gpt2",)),
    ("trials", tuple(gpu_trials.TRIALS)),
    ("beside", ("bert_base", "llama", "gpt2", "resnet50", "vit_base")),
    ("beside", ("bert_base_one", "llama_one", "gpt2_one", "resnet50_one", "vit_base_one")),
    ("beside", ("unet", "bert_large")),
    ("beside", ("whisper", "dense", "gpt2_step")),
)
"""The rows of `--plan` in order: kinds, and models or trials."""
PROFILED = ("amp",)
"""Ways to profile in the plan."""
Job = dict[str, Any]


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Yield all jobs, the most important first, each with a unique name."""
    shared = {"scratch": str(args.out / "scratch"), "provider": PROVIDERS[args.provider], "tiny": args.tiny}
    shared |= {"rounds": args.rounds, "warm": args.warm, "queued": args.queued}
    models = models_in(args.models)
    names = [name for name in models if not args.only or name in args.only]
    for kind in LIMITS:
        if kind in OF_MODELS:
            for name in names:
                yield {**shared, "name": f"{kind} {name}", "kind": kind, "model": name, **models[name]}
        elif kind == "trials":
            yield from (
                {**shared, "name": f"trials {trial}", "kind": kind, "trial": trial, "model": name, **models[name]}
                for trial, (name, *_) in gpu_trials.TRIALS.items()
                if name in names
            )
        else:
            yield from ({**shared, "kind": kind, **job} for job in _others(kind, args.tiny))


def planned(every: Sequence[Job]) -> list[Job]:
    """Return the jobs of the plan in order, with small models last."""
    found = [
        {**job, "ways": PROFILED} if kind == "kernels" else job
        for kind, names in PLAN
        for name in names
        for job in every
        if job["kind"] == kind and name in (job["model"], job.get("trial"))
    ]
    return [*found, *(job for job in every if job["kind"] == "beside" and job["model"] in gpu_models.TINY)]


def models_in(folder: Path) -> dict[str, Job]:
    """Return the grown models of a folder in the order of measurement, with their paths and versions."""
    found = {}
    for name in sorted((path.stem for path in folder.glob("*.json")), key=gpu_models.place):
        about = skeleton_files.about(folder, name)
        found[name] = {"models": str(folder), "made_by": about["tree"]}
        found[name] |= {"flops": about["flops"], "missing": about["missing"]}
    return found


def _others(kind: str, tiny: bool) -> Iterator[Job]:
    """Yield the rows of a kind without grown models."""
    if kind in ("ceilings", "ops"):
        yield {"name": kind}
    elif kind == "training":
        yield from ({"name": f"training {p}", "policy": p} for p in ("mixed_float16", "mixed_bfloat16"))
    else:
        for to in ("float16", "bfloat16"):
            yield from _emulations(to, tiny)


def _emulations(to: str, tiny: bool) -> Iterator[Job]:
    """Yield the digit classifiers on held-out digits, and the exported models of the tests on their own batches."""
    for model in () if tiny else DIGITS:
        yield {"name": f"emulation {model} {to}", "model": model, "file": None, "to": to}
    for file in sorted(gpu_models.EXPORTED.glob("*.onnx"))[: 1 if tiny else None]:
        yield {"name": f"emulation {file.stem} {to}", "model": file.stem, "file": str(file), "to": to}


@dataclass(frozen=True, slots=True)
class Suite:
    """The rows of a measurement, one file each below `out`, and the machine."""

    out: Path
    about: dict[str, Any]
    deadline: float

    def run(self, todo: Sequence[Job], every: Sequence[Job] | None = None, workers: int = 1) -> None:
        """Measure every job without a row, while time is left; `every` has the jobs of the page.

        With several workers, the untimed rows come first, in parallel.
        """
        places = [f"{number}/{len(todo)}" for number in range(1, len(todo) + 1)]
        placed = list(zip(places, todo, strict=True))
        untimed = [pair for pair in placed if pair[1]["kind"] in UNTIMED and workers > 1]
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda pair: self._report(*pair), untimed):
                self.write(every or todo)
        for place, job in placed:
            self._report(place, job)
            self.write(every or todo)

    def _report(self, place: str, job: Job) -> None:
        """Measure a job, unless it has a row or the time is up, and print the outcome."""
        if self.row(job) is None and self.deadline - time.monotonic() > MIN_SECONDS:
            start = time.perf_counter()
            outcome = self._measured(job).get("fault") or "done"
            print(f"{place}  {job['name']}: {outcome}  {time.perf_counter() - start:.0f} s", flush=True)

    def row(self, job: Job) -> dict[str, Any] | None:
        """Return a job's row or fault; None if it was not measured on this machine with these versions and settings."""
        try:
            key, row = (json.loads(self._file(job, suffix).read_text("utf-8")) for suffix in (".json", ".row.json"))
        except (OSError, ValueError):  # ValueError: its process was killed while writing
            return None
        return row if key == self._keyed(job) else None

    def _keyed(self, job: Job) -> Job:
        """Return a job with all dependencies of its row."""
        return json.loads(json.dumps({**job, "on": {key: self.about.get(key) for key in DEPENDS}}))

    def _file(self, job: Job, suffix: str) -> Path:
        return self.out / "rows" / (job["name"].replace(" ", "_").replace("/", "-") + suffix)

    def _measured(self, job: Job) -> dict[str, Any]:
        """Measure a job in a separate process, to protect other rows from crashes and hangs."""
        file = self._file(job, ".json")
        for folder in (file.parent, Path(job["scratch"])):
            folder.mkdir(parents=True, exist_ok=True)
        self._file(job, ".row.json").unlink(missing_ok=True)
        file.write_text(json.dumps(self._keyed(job)), encoding="utf-8")
        left = max(self.deadline - time.monotonic(), 1)
        limit = min(LIMITS[job["kind"]], left)
        command = [*map(str, measure.script("gpu_rows")), str(file)]
        code, said = ended(command, limit)
        left_over = f"amp-rewrite-{os.getpid()}-{file.stem}-*"  # of a process that was stopped
        for scratch in Path(job["scratch"]).glob(left_over):
            shutil.rmtree(scratch, ignore_errors=True)
        if code is None and limit == left:
            return {"fault": "the time was up"}  # without a row, so that the next run tries again
        fault = f"stopped after {limit:.0f} s" if code is None else f"the process exited with {code}: {said}"
        if code != 0:
            self._file(job, ".row.json").write_text(json.dumps({"fault": fault}), encoding="utf-8")
        return self.row(job) or {"fault": "the process wrote no row"}

    def write(self, todo: Sequence[Job]) -> None:
        """Write gpu.json and gpu.md from all rows so far."""
        rows = [{**{k: v for k, v in job.items() if k not in PLACES}, "row": self.row(job)} for job in todo]
        results = {"machine": self.about, "rows": rows}
        (self.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        lines = gpu_tables.page(self.about, rows)
        (self.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ended(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Return a command's exit code and the last line of its errors; None if it and its children were stopped."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also its children, which may hold the device
            return None, ""
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)  # in its own session, it did not get the signal
            raise
    return process.returncode, (errors.strip().splitlines() or ["without a message"])[-1][:300]


def about(provider: str, tiny: bool) -> dict[str, Any]:
    """Return GPU, driver, machine, versions and date; `packed` states the missing parts of onnxruntime, if any."""
    from amp_rewrite.deploy.benchmark import device_name
    from amp_rewrite.runtime.gpu import hardware
    from benchmarks.gpu.gpu_session import Card

    installed = []
    for package in (*PACKAGES, *LIBRARIES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            installed.append(package)
    found = hardware()
    return {
        **measure.machine(installed),
        "device": device_name(PROVIDERS[provider]),
        "driver": found.cuda,
        "cuda": None if found.cuda is None else ".".join(map(str, found.cuda)),
        "card": Card().about(),
        "provider": PROVIDERS[provider],
        "packed": os.environ.get(PACKED, ""),
        "tiny": tiny,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="the folder written by gpu_grow")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--provider", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one round, with small rows besides the models")
    parser.add_argument("--minutes", type=float, default=24.0, help="start no more rows after this time (default: 24)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--kinds", nargs="+", choices=list(LIMITS), default=list(LIMITS), help="only these rows")
    parser.add_argument("--plan", action="store_true", help="the most important rows for ten minutes, in order")
    parser.add_argument("--workers", type=int, default=1, help="parallel untimed rows (default: 1)")
    parser.add_argument("--rounds", type=int, help="rounds per row (default: 12; tiny: 1)")
    parser.add_argument("--warm", type=int, help="warm-up runs (default: 5; tiny: 1)")
    parser.add_argument("--queued", type=float, help="seconds of queued runs (default: 1; tiny: 0)")
    args = parser.parse_args()
    for key, usual, tiny in (("rounds", 12, 1), ("warm", 5, 1), ("queued", 1.0, 0.0)):
        if getattr(args, key) is None:
            setattr(args, key, tiny if args.tiny else usual)
    args.models, args.out = args.models.resolve(), args.out.resolve()
    from amp_rewrite.runtime.runner import cuda_works

    if args.provider == "cuda" and not cuda_works():
        sys.exit(
            "onnxruntime's CUDA provider does not work here, so nothing was measured; run `amp-rewrite doctor` for the"
            " reason, or use --provider cpu --tiny for a dry run"
        )
    if unknown := [name for name in args.only or () if name not in models_in(args.models)]:
        sys.exit(f"there is no model {unknown[0]!r} in {args.models}; choose from {', '.join(models_in(args.models))}")
    args.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(args.out, about(args.provider, args.tiny), time.monotonic() + 60 * args.minutes)
    try:
        every = list(jobs(args))
        todo = planned(every) if args.plan else [job for job in every if job["kind"] in args.kinds]
        suite.run(todo, todo if args.plan else every, args.workers)
    except KeyboardInterrupt:
        print(f"interrupted; {args.out} keeps the rows so far, and the same command resumes", flush=True)
        sys.exit(130)  # as shells report death by SIGINT
    print(f"wrote {args.out / 'gpu.md'}")


if __name__ == "__main__":
    main()
