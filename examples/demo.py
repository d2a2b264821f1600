"""Converts three trained digit classifiers to float16 and bfloat16, runs all versions, prints the accuracy of each.

    make demo

The models and the 360 held-out digits lie in `examples/models`; `train_digits.py` made them.
With an NVIDIA GPU the models run there, in real low precision. Elsewhere they run on onnxruntime's CPU provider, and
the converted models as their emulation (`amp_rewrite.emulate`): as they are they would not do, because that provider
computes most float16 ops in float32 without rounding, and so hides what is asked about.
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
    "digits_mlp": "three dense layers",
    "digits_cnn": "a convolutional network",
    "digits_vit": "a vision transformer",
}
TYPES = ("float16", "bfloat16")
# Less than one of the 360 digits.
ALLOWED_LOSS = 0.001
FACTS = (
    "",
    "file, bytes",
    "compute ops in it",
    "casts",
    "accuracy",
    "answers that differ",
    "largest change of a probability",
    "computed by",
)


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


def table(rows: list[tuple[str, ...]]) -> str:
    """The cells of each row under each other: the first flush left, the others flush right."""
    wide = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ((f"{row[0]:<{wide[0]}}", *map(str.rjust, row[1:], wide[1:])) for row in rows)
    return "\n".join("  " + "  ".join(line) for line in lines)


def demonstrate(name: str, images: np.ndarray, labels: np.ndarray) -> str:
    """Prints everything about one network; where its converted versions were computed."""
    path = MODELS / f"{name}.onnx"
    print(f"== {name}.onnx: {NETWORKS[name]}\n")
    before = run(onnx.load(path), images)
    correct = before.accuracy(labels)
    columns = [FACTS, ("float32", f"{path.stat().st_size:,}", "0%", "0", f"{correct:.2%}", "", "", before.where)]
    for to in TYPES:
        converted = amp_rewrite.convert(path, to=to)
        if to == "float16":
            print(converted.report.text())
        after = run(converted.model, images)
        columns.append((to, *facts(converted, before, after, labels)))
        if after.accuracy(labels) < correct - ALLOWED_LOSS:
            raise SystemExit(f"{name}: {to} lost more than {ALLOWED_LOSS:.1%} of accuracy")
    print(table(list(zip(*columns, strict=True))) + "\n")
    return columns[-1][-1]


def facts(converted: amp_rewrite.Converted, before: Outcome, after: Outcome, labels: np.ndarray) -> tuple[str, ...]:
    """What stands under `FACTS` for one conversion."""
    totals = converted.report.totals
    return (
        f"{converted.model.ByteSize():,}",
        f"{totals.compute_lowered / max(totals.compute_ops, 1):.0%}",
        f"{totals.casts_to_low + totals.casts_to_float32}",
        f"{after.accuracy(labels):.2%}",
        f"{(before.probabilities.argmax(axis=1) != after.probabilities.argmax(axis=1)).sum()} of {len(labels)}",
        f"{np.abs(before.probabilities - after.probabilities).max():.1e}",
        after.where,
    )


def main() -> None:
    with np.load(MODELS / "digits_test.npz") as held_out:
        images, labels = held_out["x"], held_out["y"]
    places = {demonstrate(name, images, labels) for name in NETWORKS}
    if places == {"CUDA"}:
        print("both were real: all versions ran on the GPU, in onnxruntime's CUDA provider.")
    else:
        print("onnxruntime opened no GPU: both were emulated on the CPU (float32 inside each op, results rounded).")


if __name__ == "__main__":
    main()
