"""Shares of values that are proved to fit float16, at initialization and with weights as training leaves them.

    python benchmarks/run.py bound_shares CACHE [NAME ...]

Needs the models of `python benchmarks/run.py zoo CACHE`, whose weights are those of an initialization. *Trained* stands
for weights that are harder to bound: all matrices have numbers of σ 0.1, rows times a log-normal factor (σ 0.5), and
gains of norms are log-normal (σ 0.5). Images and spectra are given as [-4, 4]; token ids need nothing. Nothing runs.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import amp_rewrite
from amp_rewrite.evidence.bounds import Bounds
from amp_rewrite.files.model import Model
from benchmarks.shared import measure

MODELS = ("bert_base", "gpt2", "llama", "vit_base", "whisper_small_encoder")
GIVEN = {"pixel_values": (-4.0, 4.0), "input_features": (-4.0, 4.0)}
SIGMA, SPREAD = 0.1, 0.5
_MATRIX = 64
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


@dataclass(frozen=True, slots=True)
class Row:
    """One model with one kind of weights. `open`: products without a proof, by the kind of their op."""

    model: str
    weights: str
    values: int
    values_proved: int
    products: int
    products_proved: int
    largest: float
    open: dict[str, int]
    seconds: float


def trained(path: Path, seed: int = 0) -> Model:
    """A model with other weights: matrices with rows of different sizes, and gains."""
    rng = np.random.default_rng(seed)
    model = Model.load(path)
    gains = {node.input[1] for node in model.proto.graph.node if node.op_type in _NORMS}
    for tensor in model.proto.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        shape = tuple(tensor.dims)
        if tensor.name in gains or (len(shape) == 1 and shape[0] >= _MATRIX and (model.array(tensor) == 1).all()):
            new = np.exp(SPREAD * rng.standard_normal(shape, np.float32))
        elif len(shape) >= 2 and min(shape[0], math.prod(shape[1:])) >= _MATRIX:
            new = SIGMA * rng.standard_normal(shape, np.float32)
            new *= np.exp(SPREAD * rng.standard_normal((shape[0], *[1] * (len(shape) - 1)), np.float32))
        else:
            continue
        tensor.CopyFrom(numpy_helper.from_array(new.astype(np.float32), tensor.name))
    return model


def row(name: str, weights: str, model: Model) -> Row:
    """The shares of one model."""
    names = {port.name for port in model.proto.graph.input}
    start = time.process_time()
    found: Bounds = amp_rewrite.bounds(model, {key: ends for key, ends in GIVEN.items() if key in names})
    seconds = time.process_time() - start
    every, heavy = found.counts(), found.counts(heavy=True)
    products = [r for r in found.rows if r.heavy]
    unproved = Counter(r.kind for r in products if r.klass != "proved to fit")
    largest = max((r.absmax for r in products if r.absmax < math.inf), default=math.inf)
    fits = "proved to fit"
    counts = len(found.rows), every[fits], len(products), heavy[fits]
    return Row(name, weights, *counts, largest, dict(unproved), seconds)


def cells(r: Row) -> tuple[str, ...]:
    """One row of the table."""
    left = ", ".join(f"{n} {kind}" for kind, n in r.open.items())
    return (
        r.model,
        r.weights,
        f"{r.values_proved} of {r.values} ({r.values_proved / r.values:.0%})",
        f"{r.products_proved} of {r.products} ({r.products_proved / r.products:.0%})",
        f"{r.largest:.3g}",
        left or "–",
        f"{r.seconds:.1f}",
    )


HEAD = ("model", "weights", "values proved", "products proved", "largest bound of one", "open", "processor seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.names:
        path = given.cache / f"{name}.onnx"
        rows.append(row(name, "initialization", Model.load(path)))
        print("  ".join(cells(rows[-1])), flush=True)
        rows.append(row(name, "trained", trained(path)))
        print("  ".join(cells(rows[-1])), flush=True)
    measure.write("bound_shares", measure.machine(), rows, measure.markdown(HEAD, map(cells, rows)))


if __name__ == "__main__":
    main()
