"""Convert models that break in float16, with this package and other converters, and print the errors.

    make demo [PEERS=PYTHON] [AUTOCAST=PYTHON]

The hard models of `tests/support/hard_models.py` are small models with the problems of large ones, and data that
reveals them. The second table shows the three digit classifiers in `examples/models`, trained by `train_digits.py`, and
their accuracy on 360 held-out images.

The converted models run on an NVIDIA GPU if there is one. Otherwise they are emulated on the CPU, with each result
rounded to the low type: onnxruntime's CPU provider computes most float16 ops in float32, which hides the errors.

Other converters run in the interpreters of `--peers` (onnxruntime and onnxconverter-common) and `--autocast`
(nvidia-modelopt[onnx], which pins older packages). A dash marks a tool that is not installed.
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
"""Largest allowed error, relative to the output's largest magnitude."""

HARD = {
    "llama_outlier": "Llama, 70,000 in its residual stream",
    "t5_outlier": "T5, 90,000 in its residual stream",
    "vae_decoder": "VAE decoder, activations of 100,000",
    "large_logits": "classifier, logits of 90,000",
    "offset_norm": "instance norm of 3000 ± 0.5",
    "masked_rows": "attention with a fully masked row",
    "far_rotary": "rotary positions up to 8191",
}
DIGITS = {"digits_mlp": "MLP", "digits_cnn": "CNN", "digits_vit": "vision transformer"}


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool of `benchmarks/peers/peer_tools.py`: its title, the module it needs, and whether it uses the data."""

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
    """Return True if the interpreter can find the module."""
    code = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def judged(reference: Path, candidate: Path | onnx.ModelProto, data: Path) -> str:
    """Return a converted model's error, and the share of its matrix products and convolutions in float16."""
    verdict = amp_rewrite.verify(reference, candidate, data, tolerance=TOLERANCE)
    totals = report_of(inventory_view(amp_rewrite.Model.load(candidate))).totals
    share = f"{totals.compute_lowered / totals.compute_ops:.0%}"
    differences = [row.difference for row in verdict.rows]
    if any(difference.nonfinite[1] > difference.nonfinite[0] for difference in differences):
        return "NaN"
    error = max(difference.scaled or 0.0 for difference in differences)
    return f"{'' if verdict.ok else 'wrong: '}{error:.1g}, {share} low"


def hard_models(names: Iterable[str], python: str, autocast: str) -> Iterator[tuple[str, ...]]:
    """Yield the header, then each hard model's row: the error of each converter."""
    available = {peer: installed(peer.module, autocast if peer.module == "modelopt" else python) for peer in PEERS}
    yield "model", *(peer.title for peer in PEERS), *OURS
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        subprocess.run([sys.executable, ROOT / "tests" / "support" / "hard_models.py", folder], check=True)
        for name in names:
            model, data = folder / f"{name}.onnx", folder / f"{name}.npz"
            cells = []
            for peer in PEERS:
                out = folder / f"{name}.{peer.tool}.onnx"
                interpreter = autocast if peer.module == "modelopt" else python
                command = [interpreter, PEER_TOOLS, peer.tool, model, out, *([data] if peer.data else [])]
                if available[peer]:
                    subprocess.run(command, check=False, capture_output=True)
                cells.append("–" if not available[peer] else judged(model, out, data) if out.exists() else "no model")
            plain, repaired = folder / "plain.onnx", folder / "repaired.onnx"
            amp_rewrite.convert(model, check=True).save(plain, overwrite=True)  # as the command line does
            result = amp_rewrite.repair(model, data, tolerance=TOLERANCE)
            result.converted.save(repaired, overwrite=True)
            yield HARD[name], *cells, judged(model, plain, data), judged(model, repaired, data)


def cuda_driver() -> bool:
    """Return True if the machine has a CUDA driver. Without one, onnxruntime would print errors when asked."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform == "linux" else "nvcuda.dll")
    except OSError:
        return False
    return True


def probabilities(model: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    """Return the model's predictions for the images, on the GPU if onnxruntime can use it, or emulated otherwise."""
    import onnxruntime

    feeds = {model.graph.input[0].name: images}
    if cuda_driver():
        onnxruntime.preload_dlls()
        # TF32 would also round the float32 version, which would flatter the comparison.
        providers = [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
        if session.get_providers()[0] == "CUDAExecutionProvider":
            return session.run(None, feeds)[0]
    emulation = amp_rewrite.emulate(model).to_proto()  # a float32 model stays as it is
    session = onnxruntime.InferenceSession(emulation.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def digits() -> Iterator[tuple[str, ...]]:
    """Yield the header, then each digit classifier's row: sizes, accuracies, compute ops lowered, Casts."""
    with np.load(MODELS / "digits_test.npz") as held_out:
        images, labels = held_out["x"], held_out["y"]
    yield "model", "bytes", "accuracy", "in float16", "in bfloat16", "predictions changed", "low", "Casts"
    for name, title in DIGITS.items():
        path = MODELS / f"{name}.onnx"
        predictions = [probabilities(onnx.load(path), images).argmax(axis=1)]
        half, brain = (amp_rewrite.convert(path, to=to) for to in ("float16", "bfloat16"))
        predictions += [probabilities(converted.model, images).argmax(axis=1) for converted in (half, brain)]
        accuracy = [f"{(prediction == labels).mean():.2%}" for prediction in predictions]
        changed = f"{(predictions[0] != predictions[1]).sum()} of {len(labels)}"
        totals = half.report.totals
        low = f"{totals.compute_lowered} of {totals.compute_ops}"
        size = f"{path.stat().st_size:,} → {half.model.ByteSize():,}"
        yield title, size, *accuracy, changed, low, str(totals.casts_to_low + totals.casts_to_float32)


def show(rows: Iterator[Sequence[str]], first: Iterable[str], least: int) -> None:
    """Print a Markdown table as its rows arrive. `first` is the first column; the others have a width of `least`."""
    header = next(rows)
    widths = [max(map(len, (header[0], *first))), *(max(len(cell), least) for cell in header[1:])]
    for cells in chain((header, ["-" * width for width in widths]), rows):
        print(line(cells, widths), flush=True)


def line(cells: Iterable[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*HARD, []], metavar="NAME", help="a hard model (default: all)")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--autocast", default=sys.executable, metavar="PYTHON")
    args = parser.parse_args()
    show(hard_models(args.names or HARD, args.peers, args.autocast), HARD.values(), len("wrong: 0.8, 100% low"))
    print()
    show(digits(), DIGITS.values(), len("100.00%"))
    print()
    where = "on the GPU" if cuda_driver() else "emulated on the CPU: float32 inside each op, with its result rounded"
    print(f"Low precision ran {where}.")


if __name__ == "__main__":
    main()
