"""Memory and time of a training step with gradient checkpointing, beside the same step without.

    python benchmarks/run.py recompute [--layers 12] [--width 256] [--steps 3]

A transformer encoder, one process for each row, on one thread of the CPU. Memory is what the peak of the process grows
by after the session is open and its state is in place: activations, gradients and the workspace of a step. Time is the
processor time of a step. Rows of one policy end with the same parameters to the bit, or nothing is reported.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.shared import measure

ROWS, TOKENS = 32, 64
CLEAR_PEAK = "5"


@dataclass(frozen=True)
class Row:
    """One training. `regions`: 0 for one without checkpointing. `grown`: MB at the peak; `seconds` of a step."""

    policy: str
    regions: int
    grown: float
    seconds: float
    digest: str


def trained(policy: str, regions: int, layers: int, width: int, steps: int) -> Row:
    """Train in this process."""
    from amp_rewrite.train import SGD, Trainer, training_step
    from benchmarks.training.encoder import encoder

    step = training_step(
        encoder(layers, width, TOKENS),
        loss="cross_entropy(logits, label)",
        optimizer=SGD(0.1),
        policy=policy,
        recompute=regions or None,
    )
    trainer = Trainer(step, providers=["CPUExecutionProvider"], threads=1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, TOKENS, width)).astype(np.float32)
    batch = {"x": x, "label": rng.integers(0, 4, ROWS)}
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    before, start = _status("VmRSS"), time.process_time()
    trainer.fit([batch] * steps)
    seconds = (time.process_time() - start) / steps
    digest = hashlib.sha256(b"".join(trainer.state[name].tobytes() for name in sorted(trainer.state))).hexdigest()
    return Row(policy, regions, _status("VmHWM") - before, seconds, digest[:16])


def _status(name: str) -> float:
    """Return a number of this process in MB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    rows: list[Row] = []
    for policy in ("float32", "mixed_float16"):
        for regions in (0, 3, given.layers):
            rows.append(measure.apart(trained, policy, regions, given.layers, given.width, given.steps))
            print(rows[-1], flush=True)
    for policy in {row.policy for row in rows}:
        if len({row.digest for row in rows if row.policy == policy}) > 1:
            raise SystemExit(f"{policy}: the parameters differ with and without checkpointing")
    head = ("policy", "regions", "growth at the peak", "of that without", "processor time of a step", "of that without")
    plain = {row.policy: row for row in rows if not row.regions}
    cells = [
        (
            row.policy,
            row.regions or "none",
            f"{row.grown:.0f} MB",
            f"{row.grown / plain[row.policy].grown:.2f}",
            f"{row.seconds:.2f} s",
            f"{row.seconds / plain[row.policy].seconds:.2f}",
        )
        for row in rows
    ]
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy"))
    said = (
        f"Encoder of {given.layers} layers of width {given.width}, {ROWS} rows of {TOKENS} tokens, SGD, on the CPU"
        " provider; float16 is emulated there. All rows of a policy end with the same bits."
    )
    table = [said, "", *measure.markdown(head, cells)]
    measure.write(
        "recompute", {**about, "layers": given.layers, "width": given.width}, [asdict(r) for r in rows], table
    )


if __name__ == "__main__":
    main()
