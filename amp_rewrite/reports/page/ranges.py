"""Figure of ranges: the values with the least headroom, against the numbers of the low type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import count
from amp_rewrite.files.casting import Fit
from amp_rewrite.reports.page.chart import (
    Axis,
    Line,
    backdrop,
    finite,
    number_text,
    numbers,
    rows,
    sample,
    stretch,
)
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

_DRAWN, _LISTED = 12, 500
"""Values that the chart draws, and that the table holds."""
_LEAST, _MOST = 1e-12, 1e12
"""Magnitudes that an axis for float16 holds at most; the least one for bfloat16, too."""
_HEAD = ("value", "smallest", "largest", "headroom", "overflow", "subnormal", "flushed to zero", "infinite or NaN")


@dataclass(frozen=True, slots=True)
class _DrawnRange:
    """A value in the chart: its place in depth, its name and its range."""

    place: int
    name: str
    fit: Fit
    to: DType

    @property
    def mask(self) -> bool:
        """True for the largest float32: no layer computes it, a mask is filled with it."""
        return not self.fit.nonfinite and self.fit.absmax >= DType.FLOAT.max

    @property
    def beyond(self) -> bool:
        return (self.fit.nonfinite > 0 or self.fit.overflow > 0) and not self.mask

    @property
    def headroom(self) -> float:
        return self.to.max / self.fit.absmax if self.fit.absmax else math.inf

    @property
    def ends(self) -> str:
        fit = self.fit
        return f"{number_text(fit.absmin)} to {number_text(fit.absmax)}" if fit.absmax else "no finite number"

    @property
    def words(self) -> str:
        if self.mask:
            return "a mask"
        if self.fit.nonfinite:
            return f"{_percent(self.fit.nonfinite, self.fit.count)} infinite or NaN"
        if self.fit.overflow:
            return f"{_percent(self.fit.overflow, self.fit.count)} overflow"
        return f"{number_text(self.headroom)}× to spare"

    @property
    def row(self) -> dict[str, object]:
        fit = self.fit
        return {
            "value": self.name,
            "place": self.place,
            "absmin": finite(fit.absmin),
            "absmax": finite(fit.absmax),
            "headroom": finite(self.headroom),
            **{name: getattr(fit, name) for name in ("count", "overflow", "subnormal", "flushed", "nonfinite")},
        }

    @property
    def cells(self) -> tuple[str, ...]:
        fit = self.fit
        parts = (fit.overflow, fit.subnormal, fit.flushed, fit.nonfinite)
        sizes = map(number_text, (fit.absmin, fit.absmax, self.headroom))
        return (self.name, *sizes, *(_percent(part, fit.count) for part in parts))


def ranges_figure(values: Mapping[str, Fit], to: DType, data: str) -> Figure:
    """Return the ranges of values as a figure; one value alone is not drawn."""
    seen = [
        _DrawnRange(i, name, fit, to) for i, (name, fit) in enumerate(values.items()) if fit.absmax or fit.nonfinite
    ]
    tight = sorted(seen, key=lambda value: (value.mask, not value.fit.nonfinite, value.headroom, value.place))
    drawn, listed = tight[:_DRAWN], tight[:_LISTED]
    bands = ((to.tiny, to.max, "low"), (to.smallest_subnormal, to.tiny, "cast"), (to.max, math.inf, "high"))
    axis = _axis(drawn, to)
    lines = []
    for value in drawn:
        marks = [mark for low, high, kind in bands for mark in backdrop(axis, low, high, kind)]
        kind = "muted" if value.mask else "high" if value.beyond else "low"
        marks += stretch(axis, value.fit.absmin, value.fit.absmax, kind, value.ends)
        lines.append(Line(value.name, marks, value.words))
    legend = [
        sample("low", f"normal in {to.spelling}", "band"),
        sample("cast", "subnormal: fewer digits", "band"),
        sample("high", "overflow", "band"),
    ]
    chart = rows(axis, lines, name=f"Values with the least headroom in {to.spelling}", legend=legend)
    note = "" if len(listed) == len(seen) else "The tightest values; the file of ranges holds all."
    held: dict[str, object] = {
        "to": to.spelling,
        "bands": {
            dtype.spelling: {"subnormal": dtype.smallest_subnormal, "normal": dtype.tiny, "largest": dtype.max}
            for dtype in LOW_TYPES
        },
        "values": [value.row for value in listed],
        "tightest": [value.name for value in drawn],
        "seen": len(seen),
        "left_out": len(values) - len(seen),
    }
    table = numbers(_HEAD, (value.cells for value in listed), right=7, note=note)
    drawing = element("div", *([chart] if len(seen) > 1 else []), table)
    return Figure("ranges", "Ranges", _lead(tight, to, data, len(values) - len(seen)), drawing, held)


def _lead(tight: Sequence[_DrawnRange], to: DType, data: str, left_out: int) -> str:
    if not tight:
        return f"No value other than zero was seen ({short(data)})."
    beyond = sum(value.beyond for value in tight)
    first = tight[0]
    words = [f"Magnitudes of {count(len(tight), 'value')} on {short(data)}, against the range of {to.spelling}."]
    words += [f"{count(beyond, 'value does', 'values do')} not fit it."] if beyond else []
    words.append(f"The tightest is {short(first.name)}: {first.ends}, {first.words}.")
    words += [f"{count(left_out, 'value')} zero or not seen, and left out."] if left_out else []
    return " ".join(words)


def _axis(values: Sequence[_DrawnRange], to: DType) -> Axis:
    """Return the axis of the magnitudes; those far beyond float16 stand at its ends, not to squeeze the others."""
    sizes = [number for value in values for number in (value.fit.absmin, value.fit.absmax) if number]
    most = _MOST if to is DType.FLOAT16 else math.inf
    float16 = DType.FLOAT16.smallest_subnormal, 10 * DType.FLOAT16.max
    return Axis.logarithmic("magnitude", [*(min(max(size, _LEAST), most) for size in sizes), *float16])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if part and whole else "–"
