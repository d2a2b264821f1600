"""Constants of the cost model, fitted to measured rows; predicted times beside measured ones.

    python benchmarks/run.py gpu_fit GPU_JSON [--predicted FILE] [--write]

GPU_JSON is what `gpu` wrote; rows are joined by model and way. Prints the start of a kernel, the share of each peak and
of the bandwidth that the rows are explained by best, and a table; `--write` writes results/gpu-fitted.md, .json and
.svg. The fit is by least squares on logarithms, with a loss that outliers do not rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.gpu_predicted import H200, SHEET, Constants, Roof, seconds
from benchmarks.gpu.gpu_predicted import NAME as PREDICTED
from benchmarks.gpu.gpu_ways import WAYS
from benchmarks.gpu.gpu_work import Kernel, kernels
from benchmarks.shared import measure

NAME = "gpu-fitted"
FIELDS = tuple(asdict(SHEET))
STEPS = 200
WIDTH = 0.1
"""Distance in logarithms (10 %) beyond which a row counts as an outlier."""
PRIOR = 1e-3
"""Weight that draws constants which no row tells toward those of the data sheet."""
LEAST_GAIN = 1e-12
RIGHT = 0.3
"""Distance of a gain from the measured one up to which a prediction counts as right."""
SIDE, EDGE = 480, 60
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A model in one way: its kernels, and the seconds that it was measured to take."""

    model: str
    way: str
    work: tuple[Kernel, ...]
    measured: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, which of them the rows tell, and the median distance of a row (0.05: 5 %)."""

    constants: Constants
    told: tuple[str, ...]
    spread: float


def points(predictions: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Join predicted rows with the measured ones of the same model and way, made by the same code."""
    known = {(row["model"], row["way"], row["tree"]): row for row in predictions if "fault" not in row}
    found = []
    for job in rows:
        row = job["row"]
        if job["kind"] != "latency" or row is None or "fault" in row:
            continue
        for way, timing in row["time"].items():
            told = known.get((job["model"], way, job["made_by"]))
            if told is not None:
                found.append(Point(job["model"], way, tuple(kernels(told["work"])), timing["median"]))
    return found


def fitted(found: Sequence[Point], roof: Roof) -> Fit:
    """Fit the constants to measured rows, by damped Gauss-Newton steps on their logarithms.

    Residuals are logarithms of predicted over measured. The loss grows with their square up to WIDTH, and with their
    size beyond it. Constants that no row tells, such as a peak that nothing reaches, stay those of the data sheet.
    """
    at, sheet = np.log(astuple(SHEET)), np.log(astuple(SHEET))
    damping, value = 1.0, _loss(at, sheet, found, roof)
    for _ in range(STEPS):
        residual, slope = _residual(at, found, roof), _slope(at, found, roof)
        weight = 1 / np.sqrt(1 + (residual / WIDTH) ** 2)
        square = slope.T @ (weight[:, None] * slope) + PRIOR * np.eye(len(at))
        toward = slope.T @ (weight * residual) + PRIOR * (at - sheet)
        step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -toward)
        new = _loss(at + step, sheet, found, roof)
        if new < value:
            at, gain, value, damping = at + step, value - new, new, max(damping / 5, 1e-9)
            if gain < LEAST_GAIN:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    told = tuple(
        name for name, column in zip(FIELDS, _slope(at, found, roof).T, strict=True) if np.abs(column).max() > 0.02
    )
    spread = float(np.median(np.abs(_residual(at, found, roof))))
    return Fit(Constants(*map(float, np.exp(at))), told, spread)


def _residual(at: Array, found: Sequence[Point], roof: Roof) -> Array:
    constants = Constants(*np.exp(at))
    return np.array([np.log(seconds(p.work, p.way, roof, constants) / p.measured) for p in found])


def _slope(at: Array, found: Sequence[Point], roof: Roof) -> Array:
    """Return how the residuals change with each logarithm, by central differences."""
    columns = []
    for unit in np.eye(len(at)) * 1e-4:
        columns.append((_residual(at + unit, found, roof) - _residual(at - unit, found, roof)) / 2e-4)
    return np.stack(columns, axis=1)


def _loss(at: Array, sheet: Array, found: Sequence[Point], roof: Roof) -> float:
    residual = _residual(at, found, roof)
    robust = 2 * WIDTH**2 * (np.sqrt(1 + (residual / WIDTH) ** 2) - 1)
    return float(robust.sum() + PRIOR * ((at - sheet) ** 2).sum())


def right_gains(found: Sequence[Point], roof: Roof, constants: Constants) -> tuple[int, int]:
    """Return how many gains over TF32 are predicted within RIGHT of the measured ones, and of how many."""
    told = {(p.model, p.way): (seconds(p.work, p.way, roof, constants), p.measured) for p in found}
    off = [
        np.log(told[model, "tf32"][0] / predicted) - np.log(told[model, "tf32"][1] / measured)
        for (model, way), (predicted, measured) in told.items()
        if way != "tf32" and (model, "tf32") in told
    ]
    return int(np.count_nonzero(np.abs(off) <= np.log1p(RIGHT))), len(off)


# -- pages ---------------------------------------------------------------------------------------------


def lines(found: Sequence[Point], fit: Fit, roof: Roof) -> list[str]:
    """Return the page: the constants, and each row as predicted by the data sheet, as fitted, and as measured."""
    (sheet, count), (after, _) = (right_gains(found, roof, constants) for constants in (SHEET, fit.constants))
    units = {"start": 1e6}
    constants = [
        (name, f"{getattr(SHEET, name) * units.get(name, 1):.3g}", f"{value * units.get(name, 1):.3g}")
        if name in fit.told
        else (name, f"{getattr(SHEET, name) * units.get(name, 1):.3g}", "no row tells")
        for name, value in asdict(fit.constants).items()
    ]
    rows = []
    for point in found:
        by = [seconds(point.work, point.way, roof, constants) for constants in (SHEET, fit.constants)]
        times = (f"{1e3 * t:.3g}" for t in (*by, point.measured))
        rows.append((point.model, WAYS[point.way].name, *times, f"{point.measured / by[-1]:.2f}×"))
    return [
        f"Constants for {roof.gpu}, of {len(found)} rows: `start` in µs, the others as shares of the sheet's peaks.",
        f"Half of the rows are within {100 * fit.spread:.0f} % of the fit. Of {count} gains over TF32, {sheet} by the",
        f"data sheet and {after} as fitted are within {100 * RIGHT:.0f} % of the measured ones: none is printed.",
        "",
        *measure.markdown(("constant", "before", "fitted"), constants),
        "",
        *measure.markdown(("model", "way", "data sheet, ms", "fitted, ms", "measured, ms", "measured / fitted"), rows),
    ]


def plot(found: Sequence[Point], fit: Fit, roof: Roof) -> str:
    """Return an SVG: fitted times against measured ones, both on logarithmic axes."""
    pairs = [(seconds(p.work, p.way, roof, fit.constants), p.measured) for p in found]
    low = float(np.floor(np.log10(min(map(min, pairs)))))
    high = max(float(np.ceil(np.log10(max(map(max, pairs))))), low + 1)

    def across(value: float) -> float:
        return EDGE + (np.log10(value) - low) / (high - low) * (SIDE - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + 130} {SIDE}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="{SIDE + 130}" height="{SIDE}" fill="#fff"/>',
    ]
    for power in range(int(low), int(high) + 1):
        x = across(10.0**power)
        label = f"{10.0 ** (power + 3):g} ms"
        parts.append(f'<path d="M{x:.1f} {EDGE}V{SIDE - EDGE}M{EDGE} {SIDE - x:.1f}H{SIDE - EDGE}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{SIDE - EDGE + 16}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{EDGE - 6}" y="{SIDE - x + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<path d="M{EDGE} {SIDE - EDGE}L{SIDE - EDGE} {EDGE}" stroke="#888"/>')
    parts.append(f'<text x="{SIDE / 2}" y="{SIDE - 16}" text-anchor="middle">predicted, after the fit</text>')
    parts.append(
        f'<text x="16" y="{SIDE / 2}" text-anchor="middle" transform="rotate(-90 16 {SIDE / 2})">measured</text>'
    )
    models = list(dict.fromkeys(p.model for p in found))
    for point, (fit_time, measured) in zip(found, pairs, strict=True):
        color = COLORS[models.index(point.model) % len(COLORS)]
        at = f'cx="{across(fit_time):.1f}" cy="{SIDE - across(measured):.1f}"'
        parts.append(
            f'<circle {at} r="3.5" fill="{color}"><title>{point.model}, {WAYS[point.way].name}</title></circle>'
        )
    for number, model in enumerate(models):
        color, y = COLORS[number % len(COLORS)], EDGE + 16 * number
        parts.append(f'<circle cx="{SIDE - 40}" cy="{y - 4}" r="3.5" fill="{color}"/>')
        parts.append(f'<text x="{SIDE - 30}" y="{y}">{model}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, metavar="GPU_JSON")
    parser.add_argument("--predicted", type=Path, default=measure.RESULTS / f"{PREDICTED}.json")
    parser.add_argument("--write", action="store_true", help="write results/gpu-fitted.md, .json and .svg")
    given = parser.parse_args()
    before, after = (json.loads(path.read_text("utf-8")) for path in (given.predicted, given.measured))
    found = points(before["rows"], after["rows"])
    if len(found) < len(FIELDS):
        sys.exit(
            f"only {len(found)} measured rows are predicted, too few for {len(FIELDS)} constants: predict those models"
            " by the code that made them, or measure more"
        )
    fit = fitted(found, H200)
    page = lines(found, fit, H200)
    print("\n".join(page))
    if given.write:
        machine = after["machine"]
        rows = [{"model": p.model, "way": p.way, "measured": p.measured} for p in found]
        measure.write(
            NAME, {"load": None, **machine}, [*rows, {"fitted": asdict(fit.constants), "told": fit.told}], page
        )
        (measure.RESULTS / f"{NAME}.svg").write_text(plot(found, fit, H200), encoding="utf-8")


if __name__ == "__main__":
    main()
