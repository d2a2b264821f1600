"""Measure one row in a separate process: `gpu_rows JOB.json` writes the row next to the job.

Besides the kinds of `gpu_latency`, `gpu_kernels`, `gpu_ops`, `gpu_beside` and `gpu_trials`, it has `emulation` (half
precision on the provider, compared with its emulation on the CPU) and `training` (a whole training step).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import gpu_beside, gpu_kernels, gpu_latency, gpu_models, gpu_trials
from benchmarks.gpu.gpu_turns import error

Row = dict[str, Any]
# The guide's optimizer. Each step starts from the same state, so the learning rate does not matter.
OPTIMIZER, LOSS = "rmsprop", "cross_entropy(logits, label)"
DENSE = {False: gpu_models.Dense(8192, 784, 4096), True: gpu_models.Dense(16, 16, 32)}
ROWS = 256


def small(name: str, folder: Path, *, tiny: bool) -> Path:
    """Write a model that is shipped or needs no framework, with its batch; return its path."""
    if name != "dense":
        return gpu_models.digits(name, 8 if tiny else ROWS, folder)
    path = folder / "dense.onnx"
    DENSE[tiny].write(path)
    np.savez(path.with_suffix(".npz"), **DENSE[tiny].inputs)
    return path


def _outputs(file: Path, batch: Mapping[str, Any], provider: str) -> list[Any]:
    """Return a model's outputs for a batch as float64, computed without TF32, with inputs cast to its types."""
    from amp_rewrite import Feed, Model
    from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions

    model = Model.load(file)
    runner = Runner.open(model, SessionOptions(providers=tuple(dict.fromkeys((provider, CPU)))))
    if runner.provider != provider:
        raise LookupError(f"{provider} does not work here")
    feeds = next(iter(Feed.of(dict(batch), model, allow_nonfinite=True)))
    found = runner.run(feeds).values()
    return [value.astype(np.float64) for value in found if isinstance(value, np.ndarray) and value.dtype.kind != "O"]


def ops(job: Mapping[str, Any], folder: Path) -> Row:
    """Compare single ops with their emulation."""
    from benchmarks.gpu import gpu_ops  # late: its cases are in the tests, which not every row needs

    return gpu_ops.ops(job)


def emulation(job: Mapping[str, Any], folder: Path) -> Row:
    """Return the errors of a low type on the provider and emulated on the CPU, their ratio, and their distance."""
    import amp_rewrite
    from amp_rewrite.runtime.runner import CPU

    source = Path(job["file"]) if job["file"] else small(job["model"], folder, tiny=job["tiny"])
    batch = gpu_models.batch_of(source.with_suffix(".npz"))
    converted = folder / "half.onnx"
    amp_rewrite.convert(source, to=job["to"]).save(converted)
    amp_rewrite.emulate(converted).save(folder / "twin.onnx")
    expected = _outputs(source, batch, job["provider"])
    real, twin = _outputs(converted, batch, job["provider"]), _outputs(folder / "twin.onnx", batch, CPU)
    on_device, emulated = error(expected, real), error(expected, twin)
    ratio = on_device["l2"] / emulated["l2"] if on_device["l2"] is not None and emulated["l2"] else None
    return {"on_device": on_device, "emulated": emulated, "apart": error(twin, real), "ratio": ratio}


def training(job: Mapping[str, Any], folder: Path) -> Row:
    """Time a training step of the dense network in float32 and in mixed precision, from the same state."""
    import amp_rewrite
    from amp_rewrite.train.step.step import save_step

    source = small("dense", folder, tiny=job["tiny"])
    with np.load(source.with_suffix(".npz")) as stored:
        batch = {"image": stored["image"]}
    batch["label"] = np.random.default_rng(gpu_models.SEED).integers(0, 10, len(batch["image"]))
    files = {}
    for policy in ("float32", job["policy"]):
        step = amp_rewrite.train.training_step(source, loss=LOSS, optimizer=OPTIMIZER, policy=policy)
        files[policy] = folder / f"{policy}.onnx"
        save_step(step, files[policy])
        batch[step.learning_rate] = np.float32(step.optimizer.learning_rate)
    found = amp_rewrite.bench(
        list(files.values()),
        batch,
        provider=job["provider"],
        rounds=job["rounds"],
    )
    return {"batch": len(batch["image"]), "bench": json.loads(found.to_json())}


KINDS: Mapping[str, Callable[[Mapping[str, Any], Path], Row]] = {
    "ceilings": lambda job, _: gpu_kernels.ceilings(job),
    "latency": lambda job, _: gpu_latency.latency(job),
    "training": training,
    "variants": lambda job, _: gpu_latency.variants(job),
    "kernels": lambda job, _: gpu_kernels.kernels(job),
    "ops": ops,
    "emulation": emulation,
    "beside": lambda job, _: gpu_beside.beside(job),
    "trials": lambda job, _: gpu_trials.trial(job),
}


def main(path: Path) -> None:
    """Run the job, and write its row, or the reason for its failure, next to it."""
    from amp_rewrite import AmpRewriteError

    job = json.loads(path.read_text("utf-8"))
    # the process that may stop this one finds the folder by its own process ID
    with tempfile.TemporaryDirectory(prefix=f"amp-rewrite-{os.getppid()}-{path.stem}-", dir=job["scratch"]) as name:
        try:
            row = KINDS[job["kind"]](job, Path(name))
        except (AmpRewriteError, LookupError, ImportError) as fault:
            row = {"fault": " ".join(str(fault).split())[:400]}
    scratch = path.with_suffix(".row.part")  # a killed process leaves no incomplete row
    scratch.write_text(json.dumps(row), encoding="utf-8")
    scratch.replace(path.with_suffix(".row.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
