"""Predicted errors against measured ones: every op of many models, lowered alone.

    python benchmarks/run.py prediction [FOLDER] [--only NAME ...]    # --only: keep the other rows

The models are those of tests/models and, with FOLDER, those that `benchmarks/run.py export FOLDER NAME ...` wrote
there. For each op that may become float16, the error of the outputs when that op alone is float16 is predicted by the
backward pass, and measured by emulation in a run of its own. RMS: the root of the mean squared error of an output in
units of its size, over outputs and batches. Max: the largest error of an element in units of the output's largest
value. Ops whose error no gradient tells are measured by the prediction itself, and not judged. Low precision is
emulated, so nothing here depends on the machine but the seconds. Models with fewer than ten judged ops are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.instrument.switchable import switchable_model
from amp_rewrite.evidence.metric import MEASURES, MetricBound
from amp_rewrite.evidence.prediction.prediction import PredictedModel, predict
from amp_rewrite.evidence.prediction.single_op_runs import SingleOpRuns
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.settings.request import Request
from benchmarks.shared import measure
from suites.models.test_fixtures import FIXTURES, batch, source

BATCHES, FEWEST, WITHIN = 4, 10, 1.5
NOISE = 1e-9
"""Relative errors below this are those of float32 itself."""
SCALED = MetricBound(MEASURES["scaled"], 1.0)
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One model: judged ops, those measured instead, rank correlations, shares of ops within a factor of 1.5."""

    model: str
    ops: int
    measured: int
    rank_rms: float
    rank_max: float
    within_rms: float
    within_max: float
    ratio: float
    seconds_predicted: float
    seconds_measured: float


def varied(fed: Mapping[str, Array], number: int) -> Mapping[str, Array]:
    """The stored batch first, then others of its kind: floats with noise, integers of many values in other order."""
    rng = np.random.default_rng(number)
    return {name: _varied(array, rng) for name, array in fed.items()} if number else fed


def _varied(array: Array, rng: np.random.Generator) -> Array:
    if array.dtype.kind == "f":
        return (array + 0.3 * array.std() * rng.standard_normal(array.shape)).astype(array.dtype)
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array
    if array.dtype.kind not in "iu" or len(np.unique(array)) < 5 or (np.diff(rows, axis=-1) == 1).all():
        return array
    return rng.permuted(array, axis=-1)


def judged(name: str, model: str | Path, fed: Mapping[str, Array]) -> Row | None:
    """Every op of a model that may become float16, predicted and measured."""
    draft = Draft.of(model, Request.of())
    may = frozenset(draft.paint().paints)
    first = next(iter(Feed.of(fed, draft.source, allow_nonfinite=True)))
    twin = switchable_model(draft.view, may, DType.FLOAT16, saturate=draft.hazards.saturate)
    if twin is None:
        return None
    alone = SingleOpRuns(twin)
    batches = [(b, alone.reference(b)) for b in (varied(first, number) for number in range(BATCHES))]
    start = time.perf_counter()
    found = predict(PredictedModel(draft.view, may, DType.FLOAT16, draft.hazards.saturate), batches, alone)
    middle = time.perf_counter()
    rows = []
    for op in sorted({op for op, _ in may} - found.reasons.keys()):
        runs = [alone(op, b) for b, _ in batches]
        energies = np.concatenate([each.energies(run) for each, run in zip(found.outputs, runs, strict=True)])
        predicted = found.alone(op)
        rms, expected = found.error(energies), found.error(predicted)
        if np.isfinite(energies).all() and np.isfinite(predicted).all() and max(rms, expected) > NOISE:
            largest = max(_largest(each.values, run) for each, run in zip(found.outputs, runs, strict=True))
            rows.append((expected, rms, found.score(predicted, SCALED), largest))
    end = time.perf_counter()
    if len(rows) < FEWEST:
        return None
    predicted_rms, rms, predicted_max, largest = np.maximum(np.array(rows), NOISE / 100).T
    return Row(
        name, len(rows), len(found.reasons), _rank(predicted_rms, rms), _rank(predicted_max, largest),
        _within(predicted_rms, rms), _within(predicted_max, largest), float(np.median(predicted_rms / rms)),
        middle - start, end - middle,
    )  # fmt: skip


def _largest(values: Mapping[str, Array], results: Mapping[str, Array]) -> float:
    errors = ((y.astype(np.float64), results[name]) for name, y in values.items())
    return max(float(np.nanmax(np.abs(z - y)) / (np.abs(y[np.isfinite(y)]).max(initial=0.0) or 1.0)) for y, z in errors)


def _rank(a: Array, b: Array) -> float:
    """Spearman's correlation of ranks."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def _within(predicted: Array, real: Array) -> float:
    ratio = predicted / real
    return float(np.mean((ratio < WITHIN) & (ratio > 1 / WITHIN)))


def models(folder: Path | None) -> Sequence[tuple[str, Path, Callable[[], Mapping[str, Array]]]]:
    """The models by name, each with what gives its batch."""
    found: list[tuple[str, Path, Callable[[], Mapping[str, Array]]]] = []
    found += [(name, source(name), lambda name=name: batch(name, "input")) for name in FIXTURES]  # type: ignore[misc]
    for path in sorted(folder.glob("*.dynamo.onnx")) if folder is not None else ():
        found.append((path.name.removesuffix(".onnx"), path, lambda path=path: _exported(path)))  # type: ignore[misc]
    return found


def _exported(path: Path) -> Mapping[str, Array]:
    with np.load(path.with_name(path.name.split(".")[0] + ".npz")) as stored:
        prefix = "built/in/"
        return {k.removeprefix(prefix): stored[k] for k in stored.files if k.startswith(prefix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=())
    given = parser.parse_args()
    stored = measure.RESULTS / "prediction.json"
    before = json.loads(stored.read_text("utf-8"))["rows"] if given.only and stored.exists() else []
    rows = {row["model"]: Row(**row) for row in before}
    for name, path, fed in models(given.folder):
        row = judged(name, path, fed()) if not given.only or name in given.only else None
        if row is not None:
            rows[name] = row
            print(row, file=sys.stderr, flush=True)
    found = sorted(rows.values(), key=lambda row: row.model)
    measure.write("prediction", measure.machine(), found, _table(found))


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("model", "ops", "measured instead", "rank RMS", "rank max", "within 1.5 RMS", "within 1.5 max",
            "predicted / measured", "s predicted", "s measured")  # fmt: skip
    cells = [
        (r.model, r.ops, r.measured, f"{r.rank_rms:.3f}", f"{r.rank_max:.3f}", f"{r.within_rms:.0%}",
         f"{r.within_max:.0%}", f"{r.ratio:.2f}", f"{r.seconds_predicted:.1f}", f"{r.seconds_measured:.1f}")
        for r in rows
    ]  # fmt: skip
    ops = sum(r.ops for r in rows)
    rms, largest = ([getattr(r, name) for r in rows] for name in ("rank_rms", "rank_max"))
    shares = [sum(getattr(r, name) * r.ops for r in rows) / ops for name in ("within_rms", "within_max")]
    said = (
        f"{len(rows)} models, {ops} ops. Rank correlation, RMS: median {statistics.median(rms):.3f}, least"
        f" {min(rms):.3f}; max: median {statistics.median(largest):.3f}, least {min(largest):.3f}. Within a factor of"
        f" 1.5: {shares[0]:.1%} of the ops (RMS), {shares[1]:.1%} (max)."
    )
    return [*measure.markdown(head, cells), "", said]


if __name__ == "__main__":
    main()
