"""Models of the GPU measurement: architectures, the dense network of TensorFlow's guide, and small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.parser
from onnx.numpy_helper import from_array

from benchmarks.gpu import skeleton
from benchmarks.shared import measure

EXAMPLES = measure.ROOT / "examples" / "models"
EXPORTED = measure.ROOT / "tests" / "models"
SEED = 7
Array = np.ndarray[Any, Any]
Sources = Mapping[str, Mapping[str, Any]]
"""The arguments of `skeleton.drawn` for each weight."""


class Source(Protocol):
    """A float32 model: its weights' distributions, one batch, and its file."""

    drawn: Sources
    inputs: Mapping[str, Array]

    def write(self, path: Path) -> None:
        """Write the model in float32."""
        ...

    def write_half(self, path: Path) -> None:
        """Write the model as its framework halves it; raise LookupError without a framework."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense network of TensorFlow's mixed-precision guide: two layers of `hidden` with Relu, then 10 classes."""

    rows: int
    features: int
    hidden: int

    @property
    def drawn(self) -> Sources:
        """Return the weights, with the spread of Glorot's uniform initialization."""
        sizes = ((self.features, self.hidden), (self.hidden, self.hidden), (self.hidden, 10))
        spread = {f"w{i}": (size, (2 / sum(size)) ** 0.5) for i, size in enumerate(sizes, 1)}
        return {key: {"shape": list(size), "mean": 0.0, "std": std} for key, (size, std) in spread.items()}

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Return a batch of images."""
        return {"image": np.random.default_rng(SEED).random((self.rows, self.features), np.float32)}

    def write(self, path: Path) -> None:
        """Write the model in float32, with a dynamic batch."""
        signature = f"dense (float[batch,{self.features}] image) => (float[batch,10] logits)"
        model = onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 20]> {signature} {{
              h1 = MatMul (image, w1)  a1 = Add (h1, b1)  dense_1 = Relu (a1)
              h2 = MatMul (dense_1, w2)  a2 = Add (h2, b2)  dense_2 = Relu (a2)
              h3 = MatMul (dense_2, w3)  logits = Add (h3, b3)
            }}"""
        )
        for number, (key, how) in enumerate(self.drawn.items(), 1):
            model.graph.initializer.append(from_array(skeleton.drawn(key, **how), key))
            model.graph.initializer.append(from_array(np.zeros(how["shape"][1], np.float32), f"b{number}"))
        onnx.save(model, path)

    def write_half(self, path: Path) -> None:
        """Raise LookupError, since the network has no framework."""
        raise LookupError("the model is written as ONNX, without a framework to halve it")


def of_torch(name: str) -> Callable[[Sources | None], Source]:
    """Return a function to build a model of `gpu_builds`, which needs torch and transformers."""

    def source(sources: Sources | None) -> Source:
        from benchmarks.gpu import gpu_builds

        return gpu_builds.Module.of(name, sources)

    return source


REAL: Mapping[str, Callable[[Sources | None], Source]] = {
    **{name: of_torch(name) for name in ("bert_base", "resnet50", "llama", "unet", "bert_large", "vit_base")},
    **{name: of_torch(name) for name in ("gpt2", "gpt2_step", "whisper")},
    "dense": lambda _: Dense(8192, 784, 4096),
    **{f"{name}_one": of_torch(f"{name}_one") for name in ("bert_base", "resnet50", "llama", "vit_base", "gpt2")},
}
"""Models in the order of making and measuring, the most important first; `_one` is a batch of one."""

TINY: Mapping[str, Callable[[Sources | None], Source]] = {
    "dense_tiny": lambda _: Dense(8, 32, 64),
    **{name: of_torch(name) for name in ("mlp_tiny", "bert_tiny", "gpt2_step_tiny")},
}
"""Small models for a dry run."""


def source(name: str, sources: Sources | None = None) -> Source:
    """Return a model of either table, with the weights of its skeleton's sources, if any."""
    return {**REAL, **TINY}[name](sources)


def place(name: str) -> int:
    """Return a model's place in the order of measurement; small ones come last."""
    names = [*REAL, *TINY]
    return names.index(name) if name in names else len(names)


def batch_of(file: Path) -> dict[str, Array]:
    """Return the inputs in a file of arrays, which may also hold outputs, as `input/NAME` and `output/NAME`."""
    with np.load(file) as stored:
        return {n.removeprefix("input/"): stored[n] for n in stored.files if not n.startswith("output/")}


def digits(name: str, rows: int, folder: Path) -> Path:
    """Copy a shipped digit classifier and write a batch of held-out digits for it; return the copy's path."""
    with np.load(EXAMPLES / "digits_test.npz") as held_out:
        images = np.resize(held_out["x"], (rows, *held_out["x"].shape[1:]))
    target = folder / f"{name}.onnx"
    target.write_bytes((EXAMPLES / f"{name}.onnx").read_bytes())
    np.savez(target.with_suffix(".npz"), image=images)
    return target
