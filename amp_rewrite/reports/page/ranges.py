"""Figure of ranges: magnitudes of each value along the depth, against the bands of float16 and bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import count
from amp_rewrite.files.fit import Fit
from amp_rewrite.reports.page.axis import MOST_POINTS, Axis, binned, finite, number_text
from amp_rewrite.reports.page.chart import Line, numbers, plot, rows, sample
from amp_rewrite.reports.page.marks import backdrop, band, caption, envelope, limit, pins, spans, stretch
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure

_NAMED = 12
"""Values that the second chart names."""
_PINS = 3
_LEAST, _MOST = 1e-12, 1e12
"""Magnitudes that an axis for float16 holds at most; the least one for bfloat16, too."""


@dataclass(frozen=True, slots=True)
class _DrawnRange:
    """A value that is drawn: its place in depth, its name and its range."""

    place: int
    name: str
    fit: Fit
    to: DType

    @property
    def infinite(self) -> bool:
        return self.fit.nonfinite > 0

    @property
    def beyond(self) -> bool:
        return self.infinite or self.fit.overflow > 0

    @property
    def headroom(self) -> float:
        return self.to.max / self.fit.absmax if self.fit.absmax else math.inf

    @property
    def words(self) -> str:
        if self.infinite:
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


def ranges_figure(values: Mapping[str, Fit], to: DType, data: str) -> Figure:
    """Return the ranges of values as a figure."""
    seen = [
        _DrawnRange(i, name, fit, to) for i, (name, fit) in enumerate(values.items()) if fit.absmax or fit.nonfinite
    ]
    tight = sorted(seen, key=lambda value: (not value.infinite, value.headroom, value.place))[:_NAMED]
    lows = [value.fit.absmin for value in seen]
    y = _axis("magnitude, smallest to largest that is not zero", seen, to)
    x = Axis.depth("value", len(seen))
    bands = ((to.tiny, to.max, "low"), (to.smallest_subnormal, to.tiny, "cast"), (to.max, math.inf, "high"))
    marks = [mark for low, high, kind in bands for mark in band(y, low, high, kind)]
    whole = len(seen) <= MOST_POINTS
    bins = [] if whole else binned(lows, [value.fit.absmax for value in seen])
    if whole:
        for kind in ("low", "high"):
            chosen = (
                (i, v.fit.absmin, v.fit.absmax, f"{v.name}: {_ends(v.fit)}, {v.words}")
                for i, v in enumerate(seen)
                if v.beyond is (kind == "high")
            )
            marks += spans(x, y, chosen, kind)
    marks += envelope(x, y, bins, "low")
    at = {value.place: i for i, value in enumerate(seen)}
    other = next(dtype for dtype in LOW_TYPES if dtype is not to)
    marks += limit(y, other.max, f"largest {other.spelling}", "reference")
    marks += limit(y, other.tiny, f"smallest normal {other.spelling}", "reference")
    for (low, high, _), words in zip(bands, (f"{to.spelling} normal", "subnormal", "overflow"), strict=True):
        marks += caption(y, low, high, words)
    marks += pins(x, y, [(at[v.place] + 0.5, v.fit.absmax, str(i)) for i, v in enumerate(tight[:_PINS], 1)])
    lead = _lead(seen, tight, to, data, left_out=len(values) - len(seen), bins=len(bins))
    legend = [
        sample("low", f"normal in {to.spelling}", "band"),
        sample("cast", "subnormal: fewer digits", "band"),
        sample("high", "overflow", "band"),
        *([sample("high", "value that overflows, or is infinite or NaN")] if any(v.beyond for v in seen) else []),
    ]
    shown = [value.row for value in (seen if whole else tight)]
    drawing = element(
        "div",
        plot(x, y, marks, name=lead, legend=legend),
        element("h3", "Tightest values", class_="part"),
        _named(tight, to, bands),
        _table(seen if whole else tight, whole=whole),
    )
    drawn: dict[str, object] = {
        "to": to.spelling,
        "bands": {
            dtype.spelling: {"subnormal": dtype.smallest_subnormal, "normal": dtype.tiny, "largest": dtype.max}
            for dtype in LOW_TYPES
        },
        "values": shown,
        "tightest": [value.name for value in tight],
        "seen": len(seen),
        "left_out": len(values) - len(seen),
        "bins": [part.data for part in bins],
    }
    return Figure("ranges", "Ranges", lead, drawing, drawn, notebook=True)


def _lead(
    seen: Sequence[_DrawnRange], tight: Sequence[_DrawnRange], to: DType, data: str, *, left_out: int, bins: int
) -> str:
    if not seen:
        return f"No value other than zero was seen ({short(data)})."
    beyond = sum(value.beyond for value in seen)
    words = [
        f"Magnitudes of {count(len(seen), 'value')} on {short(data)}, by depth, against the range of {to.spelling}."
    ]
    if beyond:
        verb = "does" if beyond == 1 else "do"
        words.append(f"{count(beyond, 'value')} {verb} not fit it.")
    first = tight[0]
    words.append(f"The tightest is {short(first.name)}: {_ends(first.fit)}, {first.words}.")
    if any((v.fit.absmax > _MOST and to is DType.FLOAT16) or 0 < v.fit.absmin < _LEAST for v in seen):
        words.append("Magnitudes beyond the axis stand at its ends.")
    if bins:
        words.append(f"Too many to draw one by one: {bins} bins of neighbours show their smallest and largest.")
    if left_out:
        words.append(
            f"{count(left_out, 'value')} that {'is' if left_out == 1 else 'are'} zero or not seen are left out."
        )
    return " ".join(words)


def _ends(fit: Fit) -> str:
    return f"{number_text(fit.absmin)} to {number_text(fit.absmax)}" if fit.absmax else "no finite number"


def _named(tight: Sequence[_DrawnRange], to: DType, bands: Sequence[tuple[float, float, str]]) -> Element:
    axis = _axis("magnitude", tight, to)
    lines = []
    for i, value in enumerate(tight, 1):
        marks = [mark for low, high, kind in bands for mark in backdrop(axis, low, high, kind)]
        kind = "high" if value.beyond else "low"
        marks += stretch(axis, value.fit.absmin, value.fit.absmax, kind, _ends(value.fit))
        lines.append(Line(f"{i} · {value.name}", marks, value.words))
    return rows(axis, lines, name=f"Values with the least headroom in {to.spelling}")


def _table(values: Iterable[_DrawnRange], *, whole: bool) -> Element:
    head = ("value", "smallest", "largest", "headroom", "overflow", "subnormal", "flushed to zero", "infinite or NaN")
    cells = []
    for v in values:
        parts = (v.fit.overflow, v.fit.subnormal, v.fit.flushed, v.fit.nonfinite)
        sizes = map(number_text, (v.fit.absmin, v.fit.absmax, v.headroom))
        cells.append((v.name, *sizes, *(_percent(part, v.fit.count) for part in parts)))
    return numbers(head, cells, right=7, note="" if whole else "The tightest values; the file of ranges holds all.")


def _axis(label: str, values: Iterable[_DrawnRange], to: DType) -> Axis:
    """Return the axis of the magnitudes; those far beyond float16 stand at its ends, not to squeeze the others."""
    sizes = [number for value in values for number in (value.fit.absmin, value.fit.absmax) if number]
    least, most = _LEAST, (_MOST if to is DType.FLOAT16 else math.inf)
    float16 = DType.FLOAT16.smallest_subnormal, 10 * DType.FLOAT16.max
    return Axis.logarithmic(label, [*(min(max(size, least), most) for size in sizes), *float16])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if part and whole else "–"
