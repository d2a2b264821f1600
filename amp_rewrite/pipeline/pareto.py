"""Pareto: the curve of predicted time against error, from all ops low to float32, its points verified."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from amp_rewrite.decide.coloring.coloring import Coloring
from amp_rewrite.decide.pin import Pin
from amp_rewrite.errors import ModelError, PolicyError, spelled
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.data.sources import Data
from amp_rewrite.evidence.instrument.switchable import SwitchableModel, switchable_model
from amp_rewrite.evidence.metric import MEASURES, MetricBound, scaled
from amp_rewrite.evidence.verdict import SCHEMA, json_of
from amp_rewrite.files.model import ModelSource
from amp_rewrite.ir.names import as_names
from amp_rewrite.ir.view import MAIN
from amp_rewrite.pipeline.convert import Converted, calibrated, finish, model_name, shifted_and_guarded
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.pipeline.foresight import MOST_BATCHES, Foresight, PredictedChoice
from amp_rewrite.reports.measurements import CurvePoint
from amp_rewrite.reports.render import count, table
from amp_rewrite.reports.result import Result
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.keywords import checked
from amp_rewrite.settings.options import KEYWORDS
from amp_rewrite.settings.request import Request
from amp_rewrite.settings.signatures import Options, takes

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

POINTS = 8
"""Default number of points that are verified."""
_EXPONENTS = np.arange(-8.0, 14.0)
"""Exponents of the prices, which are powers of 4."""
LOW, FLOAT32, BETWEEN = "converted", "float32", "between"
"""Kinds of points: what `convert` gives, float32, and all others."""


@dataclass(frozen=True, repr=False)
class Pareto(Result):
    """Points of time against error, the fastest first.

    No point is both slower and less exact than another one, save the one that `convert` gives.

    Attributes:
        model: name of the model.
        low: the low type.
        gpu: the GPU whose time is predicted.
        data: where the data come from.
        batches: batches that the points were verified on.
        points: the points, each verified by emulation.
        considered: different choices that the prices gave.
        notes: caveats.
    """

    model: str
    low: str
    gpu: str
    data: str
    batches: int
    points: tuple[CurvePoint, ...]
    considered: int
    notes: tuple[str, ...] = ()
    _made: tuple[Callable[[], Converted] | None, ...] = field(default=(), repr=False, compare=False)

    @property
    def brief(self) -> str:
        """The number of points, and the range of times and errors."""
        first, last = self.points[0], self.points[-1]
        times = f"{first.micros:.4g} to {last.micros:.4g} µs"
        return f"{count(len(self.points), 'point')} of {self.model}: {times} predicted on {self.gpu}"

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the points as dictionaries."""
        return map(asdict, self.points)

    def converted(self, number: int) -> Converted:
        """Return the conversion of a point, by its position in `points`.

        Raises:
            PolicyError: no such point exists, or it is float32.
        """
        made = self._made[number] if 0 <= number < len(self._made) else None
        if made is None:
            raise PolicyError(f"point {number} is float32 or does not exist; use one of the {len(self.points)} points")
        return made()

    def figures(self) -> Sequence[Figure]:
        """Return the curve."""
        from amp_rewrite.reports.page.curve import curve_figure  # late: few runs draw

        data = f"{self.data}, {count(self.batches, 'batch', 'batches')}"
        return (curve_figure(self.points, self.gpu, self.low, data),)

    def text(self) -> str:
        """Return the points as a table; it ends with a newline."""
        facts = (
            ("model", self.model),
            ("low type", self.low),
            ("time", f"predicted on {self.gpu}"),
            ("data", f"{self.data}: {count(self.batches, 'batch', 'batches')}"),
        )
        rows = (_cells(i, point) for i, point in enumerate(self.points))
        lines = [self.brief, *table(facts), "", *table(rows, head=_HEAD, right=">>>>>>> ")]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"

    def to_json(self) -> str:
        """Return JSON, one point per line; infinity is "inf". It ends with a newline."""
        head = {name: getattr(self, name) for name in ("model", "low", "gpu", "data", "batches", "considered", "notes")}
        return json_of({"schema": SCHEMA, **head}, points=self.records())


@takes(KEYWORDS)
@checked
def pareto(
    model: ModelSource,
    data: Data,
    *,
    points: int = POINTS,
    allow_nonfinite: bool = False,
    folder: str | Path | None = None,
    **options: Unpack[Options],
) -> Pareto:
    """Return the curve of predicted time against error of the outputs, each point verified by emulation.

    A price for squared error makes a minimum cut choose the low ops, jointly with their Casts. Many prices give the
    curve; its points are the corners of the lower convex hull, so choices between two of them may exist.

    Args:
        model: as `convert` takes it; of a half model the float32 twin counts.
        data: a Feed, or an argument of `Feed.of`.
        points: the largest number of points, beside float32 and what `convert` gives.
        allow_nonfinite: accept NaN and infinity in the data.
        folder: as `convert` takes it.
        **options: those of `convert`, see docs/reference/options.md. `placement` names the GPU.

    Returns:
        The points, the fastest first.

    Raises:
        PolicyError: `points` is below 1.
        ModelError: the errors of the model cannot be predicted.

    Example:
        >>> import amp_rewrite
        >>> curve = amp_rewrite.pareto("model.onnx", "batches.npz", points=3)
        >>> curve.points[0].seconds <= curve.points[-1].seconds
        True
    """
    if points < 1:
        raise PolicyError(f"{spelled('points', points)}: use 1 or more")
    draft = _in_float32(Draft.of(model, Request.of(**options), folder=folder))
    feed = Feed.of(data, draft.source, allow_nonfinite=allow_nonfinite)
    ranges = calibrated(draft, feed, allow_nonfinite=allow_nonfinite)
    draft, guarded = shifted_and_guarded(draft, ranges, HEADROOM)
    base = draft.paint(guarded.pins)
    may = base.low
    saturate = draft.hazards.saturate
    twin = switchable_model(draft.view, may, draft.request.to, io=draft.io, saturate=saturate)
    reference = Runner.open(draft.source)
    batches = [(batch, reference.run(batch)) for batch in islice(feed, MOST_BATCHES)]
    runner = Runner.open(twin.model) if twin is not None else None
    known = (twin, runner) if twin is not None and runner is not None else None
    foresight = Foresight.of(draft, guarded.pins, base, batches, known, islands=True) if may else None
    if foresight is None or known is None:
        raise ModelError(
            "the errors of this model cannot be predicted: it lowers nothing, its opset is below 12, or no output"
            " is a tensor of floats"
        )
    curve = _Curve(foresight, known, batches)
    found = curve.chosen(points)
    pins: list[tuple[Pin, ...]] = [tuple(p for i in sorted(s.held) for p in foresight.regions[i].pins) for s in found]

    def maker(more: tuple[Pin, ...]) -> Callable[[], Converted]:
        return lambda: finish(draft, draft.paint((*guarded.pins, *more)), guarded.findings, measured=guarded)

    rows = [(curve.point(seen), maker(more)) for seen, more in zip(found, pins, strict=True)]
    listed: list[tuple[CurvePoint, Callable[[], Converted] | None]] = [*rows, (curve.float32, None)]
    listed.sort(key=lambda row: (row[0].seconds, -row[0].error))
    made = tuple(row[1] for row in listed)
    return Pareto(
        model_name(draft),
        draft.request.to.spelling,
        foresight.roof.gpu,
        feed.origin,
        len(batches),
        tuple(row[0] for row in listed),
        curve.considered,
        tuple(_notes(feed, listed, draft)),
        made,
    )


def _in_float32(draft: Draft) -> Draft:
    """Return a draft; of a half model that of its float32 twin, whose low inputs and outputs are asked to be low."""
    view = draft.view
    if not view.low_types:
        return draft
    main, rules = view.scopes[MAIN], []
    for side, values in (("in", main.inputs), ("out", main.outputs)):
        low = ((view.value_name(v), dtype) for v in values if (dtype := view.tensor_dtype(v)) in view.low_types)
        rules += [f"{side}:{glob.escape(name)}={dtype.spelling}" for name, dtype in low if dtype is not None]
    twin = emulate(draft.source, rounding=False, io="float32")
    asked = Request({**vars(draft.request), "io": (*rules, *as_names(draft.request.io))})
    return replace(Draft.of(twin, asked), widened=True)


@dataclass
class _Curve:
    """The choices of all prices, and their points."""

    foresight: Foresight
    twin: tuple[SwitchableModel, Runner]
    batches: Sequence[tuple[Batch, Mapping[str, Any]]]
    considered: int = 0

    def chosen(self, most: int) -> list[PredictedChoice]:
        """Return the plain conversion and at most so many choices that no other one beats, spread evenly."""
        plain, trade = self.foresight.painted(()), self.foresight.trade
        seen = {s.held: s for s in (self.foresight.at(self.foresight.unit * 4.0**e) for e in _EXPONENTS)}
        self.considered = len(seen.keys() | {plain.held})
        seen.pop(plain.held, None)
        order = sorted(seen.values(), key=lambda s: (trade.seconds(s.coloring), self._error(s)))
        front: list[PredictedChoice] = []
        for choice in order:
            if math.isfinite(self._error(choice)) and (not front or self._error(choice) < self._error(front[-1])):
                front.append(choice)
        front = [s for s in front if trade.seconds(s.coloring) < trade.float32 and self._error(s)]
        kept = sorted(set(np.linspace(0, len(front) - 1, min(most, len(front))).round().astype(int).tolist()))
        return [plain, *(front[i] for i in kept)]

    def _error(self, seen: PredictedChoice) -> float:
        return self.foresight.prediction.error(seen.energies)

    def point(self, seen: PredictedChoice) -> CurvePoint:
        """Return a choice as a point, measured in a run of the twin for each batch."""
        prediction, (twin, runner) = self.foresight.prediction, self.twin
        energies, largest = [], 0.0
        for outputs, (batch, _) in zip(prediction.outputs, self.batches, strict=True):
            results = twin.run(runner, twin.mask(seen.coloring), batch)
            energies.append(outputs.energies(results))
            largest = max(largest, *(_largest(y, results[name]) for name, y in outputs.values.items()))
        kind = BETWEEN if seen.held else LOW
        predicted = (self._error(seen), prediction.score(seen.energies, _SCALED))
        measured = (prediction.error(np.concatenate(energies)), largest)
        low = seen.coloring.float32_ops
        seconds = self.foresight.trade.least + self.foresight.trade.seconds(seen.coloring)
        return CurvePoint(kind, seconds, *predicted, *measured, low, self._ops(seen.coloring))

    @property
    def float32(self) -> CurvePoint:
        """Return the model as it is."""
        ops, trade = self._ops(self.foresight.base), self.foresight.trade
        return CurvePoint(FLOAT32, trade.least + trade.float32, 0.0, 0.0, 0.0, 0.0, ops, ops)

    def _ops(self, coloring: Coloring) -> int:
        return len({op for op, _ in coloring.paints})


_SCALED = MetricBound(MEASURES["scaled"], 1.0)


def _largest(expected: Any, result: Any) -> float:
    finite = np.isfinite(expected)
    error = scaled(expected[finite].astype(np.float64), result[finite].astype(np.float64)) if finite.any() else 0.0
    return error if math.isfinite(error) else math.inf


def _notes(feed: Feed, listed: Sequence[tuple[CurvePoint, object]], draft: Draft) -> Iterator[str]:
    if draft.widened:
        yield "the model is half already: the points are conversions of its float32 twin, which has the same weights"
    if feed.random:
        yield "the data are random"
    if listed[0][0].kind == FLOAT32:
        yield (
            "float32 is predicted to be fastest: at these sizes kernels start for longer than they compute; feed larger"
            " batches, or export with larger shapes"
        )
    if len(listed) == 2:
        yield "no choice between float32 and the conversion is faster than float32 and more exact than the conversion"


_HEAD = ("", "µs", "float32 ops", "error", "measured", "largest", "measured", "")


def _cells(number: int, point: CurvePoint) -> tuple[str, ...]:
    errors = (point.error, point.measured_error, point.largest, point.measured_largest)
    word = "" if point.kind == BETWEEN else point.kind
    return str(number), f"{point.micros:.4g}", str(point.float32_ops), *(f"{e:.2g}" for e in errors), word
