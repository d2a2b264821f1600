"""Convert models that break in float16, by this package and by other converters, and print the errors of each.

    make demo [PEERS=PYTHON] [AUTOCAST=PYTHON]

The hard models are those of `tests/support/hard_models.py`: small models with the troubles of large ones, and data that
shows them. Below them stand three digit classifiers of `examples/models`, trained by `train_digits.py`, with their
accuracy on 360 held-out images.

With an NVIDIA GPU converted models run there. Elsewhere they run on the CPU as their emulation, which rounds each
result to the low type: onnxruntime's CPU provider computes most float16 ops in float32, and so hides what is asked.

Other converters run in the interpreters of `--peers` (onnxruntime and onnxconverter-common) and `--autocast`
(nvidia-modelopt[onnx], which pins older packages). A tool that is not installed there has a dash.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

import amp_rewrite
from amp_rewrite.reports.report_builder import inventory_view, report_of

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "examples" / "models"
PEER_TOOLS = ROOT / "benchmarks" / "peers" / "peer_tools.py"
TOLERANCE = 1e-2
"""Largest allowed error, as a share of the largest magnitude of the output."""

HARD = {
    "llama_outlier": "Llama, 70 000 in its residual stream",
    "t5_outlier": "T5, 90 000 in its residual stream",
    "vae_decoder": "VAE decoder, activations of 100 000",
    "large_logits": "classifier, logits of 90 000",
    "offset_norm": "instance norm of 3000 ± 0.5",
    "masked_rows": "attention with a fully masked row",
    "far_rotary": "rotary positions up to 8191",
}
DIGITS = {"digits_mlp": "MLP", "digits_cnn": "CNN", "digits_vit": "vision transformer"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool of `benchmarks/peers/peer_tools.py`: its title, the module that it needs, True if it is given the data."""

    title: str
    tool: str
    module: str
    data: bool


PEERS = (
    Peer("onnxruntime float16", "onnxruntime_float16", "onnxruntime", False),
    Peer("onnxconverter-common auto, with data", "onnxconverter_common_auto", "onnxconverter_common", True),
    Peer("ModelOpt AutoCast, with data", "modelopt_autocast", "modelopt", True),
)
OURS = ("amp-rewrite", "amp-rewrite, with data")


def installed(module: str, python: str) -> bool:
    """Return True if an interpreter finds a module."""
    look = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def judged(reference: Path, candidate: Path | onnx.ModelProto, data: Path) -> str:
    """Return the error of a converted model, and the share of its matrix products and convolutions in float16."""
    verdict = amp_rewrite.verify(reference, candidate, data, tolerance=TOLERANCE)
    totals = report_of(inventory_view(amp_rewrite.Model.load(candidate))).totals
    share = f"{totals.compute_lowered / totals.compute_ops:.0%}"
    differences = [row.difference for row in verdict.rows]
    if any(found.nonfinite[1] > found.nonfinite[0] for found in differences):
        return "NaN"
    return f"{'' if verdict.ok else 'wrong: '}{max(found.scaled or 0.0 for found in differences):.1g}, {share} low"


def hard_models(names: Iterable[str], python: str, autocast: str) -> Iterator[tuple[str, ...]]:
    """Yield the head, and a row per hard model: the error by each converter."""
    there = {peer: installed(peer.module, autocast if peer.module == "modelopt" else python) for peer in PEERS}
    yield "model", *(peer.title for peer in PEERS), *OURS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run([sys.executable, ROOT / "tests" / "support" / "hard_models.py", folder], check=True)
        for name in names:
            model, data = folder / f"{name}.onnx", folder / f"{name}.npz"
            cells = []
            for peer in PEERS:
                out = folder / f"{name}.{peer.tool}.onnx"
                interpreter = autocast if peer.module == "modelopt" else python
                words = [interpreter, PEER_TOOLS, peer.tool, model, out, *([data] if peer.data else [])]
                if there[peer]:
                    subprocess.run(words, check=False, capture_output=True)
                cells.append("–" if not there[peer] else judged(model, out, data) if out.exists() else "no model")
            plain, repaired = folder / "plain.onnx", folder / "repaired.onnx"
            amp_rewrite.convert(model, check=True).save(plain, overwrite=True)  # as the command does
            found = amp_rewrite.repair(model, data, tolerance=TOLERANCE)
            found.converted.save(repaired, overwrite=True)
            yield HARD[name], *cells, judged(model, plain, data), judged(model, repaired, data)


def cuda_driver() -> bool:
    """Return True if the machine has a CUDA driver; asking onnxruntime instead prints errors where it has none."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform == "linux" else "nvcuda.dll")
    except OSError:
        return False
    return True


def probabilities(model: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    """Return a model's answer to images, from the GPU if onnxruntime can open it, else from the emulation."""
    import onnxruntime

    feeds = {model.graph.input[0].name: images}
    if cuda_driver():
        onnxruntime.preload_dlls()
        # TF32 would round the float32 version as well, and so flatter the comparison.
        providers = [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
        if session.get_providers()[0] == "CUDAExecutionProvider":
            return session.run(None, feeds)[0]
    emulation = amp_rewrite.emulate(model).to_proto()  # of a float32 model: itself
    session = onnxruntime.InferenceSession(emulation.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def digits() -> Iterator[tuple[str, ...]]:
    """Yield the head, and a row per digit classifier: sizes, accuracy before and after, compute ops lowered, Casts."""
    with np.load(MODELS / "digits_test.npz") as held_out:
        images, labels = held_out["x"], held_out["y"]
    yield "model", "bytes", "accuracy", "in float16", "in bfloat16", "answers that differ", "low", "Casts"
    for name, title in DIGITS.items():
        path = MODELS / f"{name}.onnx"
        answers = [probabilities(onnx.load(path), images).argmax(axis=1)]
        half, brain = (amp_rewrite.convert(path, to=to) for to in ("float16", "bfloat16"))
        answers += [probabilities(converted.model, images).argmax(axis=1) for converted in (half, brain)]
        accuracy = [f"{(answer == labels).mean():.2%}" for answer in answers]
        differing = f"{(answers[0] != answers[1]).sum()} of {len(labels)}"
        totals = half.report.totals
        low = f"{totals.compute_lowered} of {totals.compute_ops}"
        size = f"{path.stat().st_size:,} → {half.model.ByteSize():,}"
        yield title, size, *accuracy, differing, low, str(totals.casts_to_low + totals.casts_to_float32)


def show(rows: Iterator[Sequence[str]], first: Iterable[str], least: int) -> None:
    """Print a Markdown table row by row, as it comes; `first` has what its first column holds, `least` is a width."""
    head = next(rows)
    wide = [max(map(len, (head[0], *first))), *(max(len(cell), least) for cell in head[1:])]
    for cells in chain((head, ["-" * width for width in wide]), rows):
        print(line(cells, wide), flush=True)


def line(cells: Iterable[str], wide: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, wide, strict=True))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*HARD, []], metavar="NAME", help="a hard model; all by default")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--autocast", default=sys.executable, metavar="PYTHON")
    given = parser.parse_args()
    show(hard_models(given.names or HARD, given.peers, given.autocast), HARD.values(), len("wrong: 0.8, 100% low"))
    print()
    show(digits(), DIGITS.values(), len("100.00%"))
    print()
    where = "on the GPU" if cuda_driver() else "by emulation on the CPU: float32 inside each op, its result rounded"
    print(f"Low precision ran {where}.")


if __name__ == "__main__":
    main()
