"""One row of the GPU suite, in a process of its own: `gpu_rows JOB.json` writes the row beside the job.

Kinds: `latency` (a model and a way of making it half, beside float32 without and with TF32), `emulation` (what the
provider computes in half against its emulation on the CPU), `training` (a whole training step), `fit` (the largest
batch within some memory).
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

from benchmarks.gpu import gpu_models

Row = dict[str, Any]
# The guide's optimizer. A step is timed from one and the same state, so its learning rate does not matter.
OPTIMIZER, LOSS = "rmsprop", "cross_entropy(logits, label)"


def latency(job: Mapping[str, Any], folder: Path) -> Row:
    """Speed, memory and error of one model made half in one way. The first way also measures memory and ops."""
    import amp_rewrite
    from amp_rewrite import Feed, Model

    source = gpu_models.made(job["model"], Path(job["cache"]), tiny=job["tiny"])
    half = gpu_models.WAYS[job["way"]](job["model"], source, folder, job)
    feed = Feed.of(source.with_suffix(".npz"), Model.load(source), allow_nonfinite=True)
    full = job["way"] == next(iter(gpu_models.WAYS))
    found = amp_rewrite.bench(
        [source, half],
        feed,
        names=["float32", job["way"]],
        provider=job["provider"],
        rounds=job["rounds"],
        warm=job["warm"],
        memory=full,
        profile=full,
        allow_nonfinite=True,
    )
    batch = next(iter(feed))
    wanted, got = (_outputs(path, batch, job["provider"]) for path in (source, half))
    items = int(next(iter(batch.values())).shape[0])
    return {"batch": items, "bench": json.loads(found.to_json()), "error": error(wanted, got), "low": low_share(half)}


def low_share(file: Path) -> list[int]:
    """How many MatMul, Gemm and Conv ops read a low type, and how many there are."""
    from amp_rewrite import Model, View

    view = View.of(Model.load(file))
    compute = [op for op in view.ops if op.kind in ("MatMul", "Conv", "Gemm")]
    low = 0
    for op in compute:
        dtype = view.dtype(op.inputs[0]) if op.inputs[0] is not None else None
        low += dtype is not None and dtype.low
    return [low, len(compute)]


def _outputs(file: Path, batch: Mapping[str, Any], provider: str) -> list[Any]:
    """What a model gives for a batch, in float64, float32 without TF32; each input in the type that it has there."""
    from amp_rewrite import Feed, Model
    from amp_rewrite.runtime.runner import CPU, Runner, SessionOptions

    model = Model.load(file)
    runner = Runner.open(model, SessionOptions(providers=tuple(dict.fromkeys((provider, CPU)))))
    if runner.provider != provider:
        raise LookupError(f"{provider} does not open here")
    fed = next(iter(Feed.of(dict(batch), model, allow_nonfinite=True)))
    found = runner.run(fed).values()
    return [value.astype(np.float64) for value in found if isinstance(value, np.ndarray) and value.dtype.kind != "O"]


def error(wanted: list[Any], got: list[Any]) -> dict[str, Any]:
    """Over all outputs: the distance relative to the reference (L2), and the largest relative to the largest."""
    a, b = (np.concatenate([array.ravel() for array in side]) for side in (wanted, got))
    if a.shape != b.shape:
        return {"l2": None, "largest": None, "nonfinite": None}
    finite = np.isfinite(a) & np.isfinite(b)
    nonfinite = int(np.count_nonzero(np.isfinite(a) & ~np.isfinite(b)))
    a, b = a[finite], b[finite]
    norm, largest = float(np.linalg.norm(a)), float(np.abs(a).max(initial=0))
    apart = np.abs(a - b)
    return {
        "l2": float(np.linalg.norm(apart)) / norm if norm else None,
        "largest": float(apart.max(initial=0)) / largest if largest else None,
        "nonfinite": nonfinite,
    }


def emulation(job: Mapping[str, Any], folder: Path) -> Row:
    """The error of a low type on the provider, that of its emulation on the CPU, and their ratio; and the distance
    of the two from each other."""
    import amp_rewrite
    from amp_rewrite.runtime.runner import CPU

    given = job["file"]
    source = Path(given) if given else gpu_models.made(job["model"], Path(job["cache"]), tiny=job["tiny"])
    batch = gpu_models.batch_of(source.with_suffix(".npz"))
    converted = folder / "half.onnx"
    amp_rewrite.convert(source, to=job["to"]).save(converted)
    amp_rewrite.emulate(converted).save(folder / "twin.onnx")
    wanted = _outputs(source, batch, job["provider"])
    real, twin = _outputs(converted, batch, job["provider"]), _outputs(folder / "twin.onnx", batch, CPU)
    on_device, emulated = error(wanted, real), error(wanted, twin)
    ratio = on_device["l2"] / emulated["l2"] if on_device["l2"] is not None and emulated["l2"] else None
    return {"on_device": on_device, "emulated": emulated, "apart": error(twin, real), "ratio": ratio}


def training(job: Mapping[str, Any], folder: Path) -> Row:
    """A training step of the dense network, in float32 and in mixed precision, from one and the same state."""
    import amp_rewrite
    from amp_rewrite.train.step.step_file import save_step

    source = gpu_models.made("dense", Path(job["cache"]), tiny=job["tiny"])
    with np.load(source.with_suffix(".npz")) as stored:
        batch = {"image": stored["image"]}
    batch["label"] = np.random.default_rng(gpu_models.SEED).integers(0, 10, len(batch["image"]))
    files = {}
    for policy in ("float32", job["policy"]):
        step = amp_rewrite.training_step(source, loss=LOSS, optimizer=OPTIMIZER, policy=policy)
        files[policy] = folder / f"{policy}.onnx"
        save_step(step, files[policy])
        batch[step.learning_rate] = np.float32(step.optimizer.learning_rate)
    found = amp_rewrite.bench(
        list(files.values()),
        batch,
        names=list(files),
        provider=job["provider"],
        rounds=job["rounds"],
        warm=job["warm"],
        memory=True,
        profile=False,
    )
    return {"batch": len(batch["image"]), "bench": json.loads(found.to_json())}


def fit(job: Mapping[str, Any], folder: Path) -> Row:
    """The largest batch within some memory, in float32 and in float16, and the throughput on the way there."""
    import amp_rewrite

    source = gpu_models.made(job["model"], Path(job["cache"]), tiny=job["tiny"])
    half = gpu_models.WAYS["amp-rewrite float16"](job["model"], source, folder, job)
    found = amp_rewrite.bench(
        [source, half],
        source.with_suffix(".npz"),
        names=["float32", "amp-rewrite float16"],
        provider=job["provider"],
        rounds=job["rounds"],
        warm=job["warm"],
        sizes=job["sizes"],
        limit=job["limit"],
        memory=False,
        profile=False,
    )
    return {"bench": json.loads(found.to_json())}


def export(job: Mapping[str, Any], folder: Path) -> Row:
    """Make the float32 file that the other rows of a model want."""
    file = gpu_models.made(job["model"], Path(job["cache"]), tiny=job["tiny"])
    beside = file.with_name(file.name + ".data")
    return {"bytes": file.stat().st_size + (beside.stat().st_size if beside.exists() else 0)}


KINDS: Mapping[str, Callable[[Mapping[str, Any], Path], Row]] = {
    "export": export,
    "latency": latency,
    "emulation": emulation,
    "training": training,
    "fit": fit,
}


def main(path: Path) -> None:
    """Do the job; its row, or why there is none, goes into the file beside it."""
    from amp_rewrite import AmpRewriteError

    job = json.loads(path.read_text("utf-8"))
    # whoever stops this process knows the folder by its own number
    with tempfile.TemporaryDirectory(prefix=f"amp-rewrite-{os.getppid()}-", dir=job["cache"]) as name:
        try:
            row = KINDS[job["kind"]](job, Path(name))
        except (AmpRewriteError, LookupError, ImportError) as fault:
            row = {"fault": " ".join(str(fault).split())[:400]}
    scratch = path.with_suffix(".row.part")  # a process that is killed leaves no half row
    scratch.write_text(json.dumps(row), encoding="utf-8")
    scratch.replace(path.with_suffix(".row.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
