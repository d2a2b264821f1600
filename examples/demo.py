"""Converts two trained digit classifiers to float16, runs both versions, prints the accuracy of each.

    make demo

The models and the 360 held-out digits lie in `examples/models`; `train_digits.py` made them.
With an NVIDIA GPU the models run there, in real float16. Elsewhere they run on onnxruntime's CPU provider, and the
float16 model as its emulation (`amp_rewrite.emulate`): as it is it would not do, because that provider computes most
float16 ops in float32 without rounding, and so hides what is asked about.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

import amp_rewrite

MODELS = Path(__file__).parent / "models"
NETWORKS = {
    "digits_cnn": "a convolutional network",
    "digits_vit": "a vision transformer",
}
# Two of the 360 digits.
ALLOWED_LOSS = 0.006


@dataclass(frozen=True, slots=True)
class Outcome:
    """Class probabilities (n, 10), and where they were computed: "CUDA" or "CPU"."""

    probabilities: np.ndarray
    where: str

    def accuracy(self, labels: np.ndarray) -> float:
        return float((self.probabilities.argmax(axis=1) == labels).mean())


def cuda_driver() -> bool:
    """Whether this machine has one; asking onnxruntime instead prints errors where it has none."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform == "linux" else "nvcuda.dll")
    except OSError:
        return False
    return True


def run(model: onnx.ModelProto, images: np.ndarray) -> Outcome:
    """The model's answer to `images`, from the GPU if onnxruntime can really open it, else from the CPU."""
    import onnxruntime

    feeds = {model.graph.input[0].name: images}
    if cuda_driver():
        onnxruntime.preload_dlls()
        # TF32 would round the float32 version as well, and so flatter the comparison.
        providers = [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
        if session.get_providers()[0] == "CUDAExecutionProvider":
            return Outcome(session.run(None, feeds)[0], "CUDA")
    emulation = amp_rewrite.emulate(model).to_proto()  # of a float32 model: itself
    session = onnxruntime.InferenceSession(emulation.SerializeToString(), providers=["CPUExecutionProvider"])
    return Outcome(session.run(None, feeds)[0], "CPU")


def comparison(rows: list[tuple[str, str, str]]) -> str:
    wide = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{wide}}  {before:>14}  {after:>14}" for name, before, after in rows)


def demonstrate(name: str, images: np.ndarray, labels: np.ndarray) -> Outcome:
    """Prints everything about one network; what its float16 version answered."""
    path = MODELS / f"{name}.onnx"
    print(f"== {name}.onnx: {NETWORKS[name]}\n")
    original = onnx.load(path)
    converted = amp_rewrite.convert(path, to="float16")
    print(converted.report.text())

    before, after = run(original, images), run(converted.model, images)
    totals = converted.report.totals
    casts = totals.casts_to_low + totals.casts_to_float32
    lowered = totals.compute_lowered / max(totals.compute_ops, 1)
    changed = int((before.probabilities.argmax(axis=1) != after.probabilities.argmax(axis=1)).sum())
    difference = float(np.abs(before.probabilities - after.probabilities).max())
    rows = [
        ("", "before", "after"),
        ("file, bytes", f"{path.stat().st_size:,}", f"{converted.model.ByteSize():,}"),
        ("compute ops in float16", f"{0:.0%}", f"{lowered:.0%}"),
        ("casts", f"{totals.casts_existing}", f"{totals.casts_existing + casts}"),
        ("accuracy", f"{before.accuracy(labels):.2%}", f"{after.accuracy(labels):.2%}"),
        ("answers that differ", "", f"{changed} of {len(labels)}"),
        ("largest change of a probability", "", f"{difference:.1e}"),
        ("computed by", before.where, after.where),
    ]
    print(comparison(rows) + "\n")
    if after.accuracy(labels) < before.accuracy(labels) - ALLOWED_LOSS:
        raise SystemExit(f"{name}: float16 lost more than {ALLOWED_LOSS:.1%} of accuracy")
    return after


def main() -> None:
    with np.load(MODELS / "digits_test.npz") as held_out:
        images, labels = held_out["x"], held_out["y"]
    places = {demonstrate(name, images, labels).where for name in NETWORKS}
    if places == {"CUDA"}:
        print("float16 was real: both versions ran on the GPU, in onnxruntime's CUDA provider.")
    else:
        print("onnxruntime opened no GPU: float16 was emulated on the CPU (float32 inside each op, results rounded).")


if __name__ == "__main__":
    main()
