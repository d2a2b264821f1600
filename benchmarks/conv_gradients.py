"""The gradient of a convolution by its weight, on one CPU thread: tap by tap, as one convolution, and in PyTorch.

    python benchmarks/conv_gradients.py      # needs torch

The forms of `amp_rewrite/train/vjp/window.py`, which takes products by tap from 8 channels on, up to 49 taps. They take
turns; a time is the median of processor times, and results have to agree to 1e-4.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from unittest.mock import patch

import measure
import numpy as np
import onnx.parser
from onnx import ModelProto

from amp_rewrite import gradients
from amp_rewrite.train.vjp import window
from amp_rewrite.train.vjp.subgraph import prune

ROUNDS, AGREE = 9, 1e-4


@dataclass(frozen=True, slots=True)
class Shape:
    """A square convolution: its kernel, stride, channels in and out, images and their side."""

    kernel: int
    stride: int
    channels: int
    filters: int
    images: int
    side: int

    def __str__(self) -> str:
        size = f"{self.images} × {self.channels} × {self.side} × {self.side} → {self.filters}"
        return f"{self.kernel} × {self.kernel}, stride {self.stride}: {size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    def model(self) -> ModelProto:
        places = (self.side + 2 * self.padding - self.kernel) // self.stride + 1
        sizes = f"pads = {[self.padding] * 4}, strides = {[self.stride] * 2}"
        return onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 20]> g (
              float[{self.images},{self.channels},{self.side},{self.side}] x,
              float[{self.filters},{self.channels},{self.kernel},{self.kernel}] w,
              float[{self.images},{self.filters},{places},{places}] c) => (float loss) {{
              y = Conv <{sizes}> (x, w)  p = Mul (y, c)  loss = ReduceSum <keepdims = 0> (p)
            }}"""
        )


SHAPES = (
    Shape(3, 1, 64, 64, 32, 28),
    Shape(3, 1, 128, 128, 16, 14),
    Shape(3, 1, 256, 256, 16, 7),
    Shape(3, 1, 16, 16, 32, 28),
    Shape(3, 1, 8, 16, 32, 28),
    Shape(3, 1, 3, 32, 32, 32),
    Shape(3, 1, 1, 32, 64, 28),
    Shape(3, 2, 32, 64, 64, 28),
    Shape(3, 2, 64, 128, 64, 14),
    Shape(1, 1, 64, 256, 16, 28),
    Shape(1, 1, 512, 512, 16, 7),
    Shape(1, 2, 64, 128, 16, 28),
    Shape(5, 1, 16, 32, 64, 14),
    Shape(7, 1, 64, 64, 8, 28),
    Shape(7, 2, 3, 64, 8, 112),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one gradient by form; which one is chosen."""

    shape: str
    by_tap: float
    convolved: float
    torch: float
    chosen: str

    def cells(self) -> list[str]:
        times = [f"{1e3 * t:.1f} ms" for t in (self.by_tap, self.convolved, self.torch)]
        return [self.shape, *times, f"{self.by_tap / self.convolved:.2f}", self.chosen]


def ours(shape: Shape, taps: int, feed: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    """The gradient alone, in products by tap up to so many taps."""
    import onnxruntime as ort

    with patch.multiple(window, _MANY_CHANNELS=1, _MANY_TAPS=taps):
        made = gradients(shape.model(), "loss", "w").to_proto()
    del made.graph.output[0]
    prune(made.graph)  # of the loss
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 3
    session = ort.InferenceSession(made.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return lambda: np.asarray(session.run(None, feed)[0])


def theirs(shape: Shape, feed: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    import torch

    torch.set_num_threads(1)
    x, w, c = (torch.from_numpy(feed[name]) for name in "xwc")
    words = {"stride": shape.stride, "padding": shape.padding}
    return lambda: torch.nn.grad.conv2d_weight(x, w.shape, c, **words).numpy()


def measured(shape: Shape) -> Row:
    rng = np.random.default_rng(0)
    model = shape.model()
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feed = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    forms = {"tap": ours(shape, 49, feed), "conv": ours(shape, 0, feed), "torch": theirs(shape, feed)}
    results = [form() for form in forms.values()]
    for result in results:
        if np.abs(result - results[-1]).max() > AGREE * np.abs(results[-1]).max():
            raise SystemExit(f"{shape}: the forms do not agree")
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, form in forms.items():
            start = time.process_time()
            form()
            times[name].append(time.process_time() - start)
    middle = [statistics.median(times[name]) for name in ("tap", "conv", "torch")]
    many = shape.channels >= window._MANY_CHANNELS or shape.kernel == 1
    return Row(str(shape), *middle, "by tap" if many else "one convolution")


HEAD = ("convolution", "by tap", "one convolution", "PyTorch", "by tap / one convolution", "chosen")


def main() -> None:
    rows = []
    for shape in SHAPES:
        rows.append(measured(shape))
        print(" | ".join(rows[-1].cells()), flush=True)
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy", "torch"))
    note = "Processor time on one thread of onnxruntime's CPU provider; nothing here was measured on a GPU."
    table = [note, "", *measure.markdown(HEAD, [row.cells() for row in rows])]
    measure.write("conv_gradients", about, [asdict(row) for row in rows], table)


if __name__ == "__main__":
    main()
