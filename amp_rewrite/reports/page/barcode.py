"""The barcode of a report: one strip along the depth of a model with its element types and Casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from xml.etree.ElementTree import Element

from amp_rewrite.ir.op_classes import ELEMENTLESS
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.render import WIDTH, count, wrap
from amp_rewrite.reports.rows import FLOATING, LOW, NO_ROW, ReportData, Row

LOW_SIDE, HIGH_SIDE, OTHER_SIDE = 0, 1, 2
_BARS = 240
"""Bars of the drawing."""
_COLUMNS = 72
"""Columns where no terminal says how many it has."""
_STRIP, _TICK = 40, 10


class BarcodeBar(NamedTuple):
    """Consecutive ops: how many are low, high (any other float) and without floats, and the Casts of their results."""

    low: int = 0
    high: int = 0
    other: int = 0
    to_low: int = 0
    to_high: int = 0


def side_of(row: Row) -> int:
    """Return the side of a row: low, high, or other for one that computes no floats, whatever it reads."""
    if row.op in ELEMENTLESS:
        return OTHER_SIDE
    return HIGH_SIDE if row.variables and row.dtype not in LOW else side_of_type(row.dtype)


def side_of_type(dtype: str) -> int:
    """Return the side of an element type."""
    return LOW_SIDE if dtype in LOW else HIGH_SIDE if dtype in FLOATING else OTHER_SIDE


def bars_of(report: ReportData, most: int) -> list[BarcodeBar]:
    """Return at most so many bars, of nearly as many ops each, in the order of the ops. Constants do not count."""
    rows = [at for at, row in enumerate(report.rows) if row.op != "Constant"]
    number = min(most, len(rows))
    if not number:
        return []
    counts = [[0] * 5 for _ in range(number)]
    place = {at: i * number // len(rows) for i, at in enumerate(rows)}
    for at in rows:
        counts[place[at]][side_of(report.rows[at])] += 1
    for cast in report.casts:
        if cast.origin != "folded" and {cast.from_, cast.to} <= FLOATING:
            counts[place.get(cast.after, 0) if cast.after != NO_ROW else 0][3 if cast.to in LOW else 4] += 1
    return [BarcodeBar(*columns) for columns in counts]


def low_name(report: ReportData) -> str:
    """Return the name of the low type of a report."""
    names = dict.fromkeys(row.dtype for row in report.rows if row.dtype in LOW)
    return " and ".join(names) or report.model.to or "low"


def barcode(report: ReportData) -> Figure:
    """Return the barcode of a report as a figure."""
    bars = bars_of(report, _BARS)
    low = low_name(report)
    total = _total(bars)
    data = {**total._asdict(), "type": low, "bars": [list(bar) for bar in bars]}
    words = f"{total.low} ops in {low}, {total.high} in float32 or wider, {total.other} without floats; " + (
        f"{count(total.to_low, 'Cast')} to {low}, {total.to_high} to float32"
    )
    drawing = element(
        "svg",
        element("title", words),
        *_shapes(bars),
        viewBox=f"0 0 {max(len(bars), 1) * 4} {_STRIP + 2 * _TICK}",
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
        role="img",
        class_="barcode",
        width="100%",
        height=_STRIP + 2 * _TICK,
    )
    keys = (
        ("low", f"{low}: from below", total.low),
        ("high", "float32: from above", total.high),
        ("none", "without floats: gap", total.other),
        ("cast", f"Cast to {low}: tick below", total.to_low),
        ("cast", "Cast to float32: tick above", total.to_high),
    )
    swatches = ((element("i", class_=f"swatch {name}"), f"{text} ({number}) ") for name, text, number in keys)
    legend = element("p", *(element("span", *key, class_="key") for key in swatches), class_="legend")
    lead = "Ops from input to output along the depth of the model: their element types, and where Casts stand."
    return Figure("barcode", "Barcode", lead, element("div", drawing, legend), data, notebook=True)


def _shapes(bars: Sequence[BarcodeBar]) -> Iterator[Element]:
    """Yield the shapes of bars: low from below, high from above, one for a run of equal bars; and ticks of Casts."""
    at = 0
    for (low, high), run in groupby(bars, _heights):
        width = len(list(run))
        if high:
            yield element("rect", x=4 * at, y=_TICK, width=4 * width, height=high, class_="high")
        if low:
            yield element("rect", x=4 * at, y=_TICK + _STRIP - low, width=4 * width, height=low, class_="low")
        at += width
    for at, bar in enumerate(bars):
        for number, y in ((bar.to_high, 0), (bar.to_low, _TICK + _STRIP + 2)):
            if number:
                yield element("rect", x=4 * at + 1, y=y, width=2, height=_TICK - 2, class_="cast")


def _heights(bar: BarcodeBar) -> tuple[float, float]:
    whole = bar.low + bar.high + bar.other
    return round(_STRIP * bar.low / whole, 1), round(_STRIP * bar.high / whole, 1)


def _total(bars: Sequence[BarcodeBar]) -> BarcodeBar:
    return BarcodeBar(*map(sum, zip(*bars, strict=True)))


def barcode_lines(report: ReportData) -> list[str]:
    """Return the barcode as lines for a terminal, and its key; none for a report without ops.

    The letters stand for the type of most ops of a column, so that the strip needs no color.
    """
    width = min(WIDTH.get() or _COLUMNS, 160)
    bars = bars_of(report, max(width - 2, 8))
    if not bars:
        return []
    low = low_name(report)
    strip = "".join("#" if bar.low > bar.high else "-" if bar.high else "." for bar in bars)
    casts = "".join(" ^vx"[2 * bool(bar.to_low) + bool(bar.to_high)] for bar in bars).rstrip()
    per = -(-sum(_total(bars)[:3]) // len(bars))
    key = f"# {low}, - float32, . without floats"
    key += f", v Cast to {low}, ^ Cast to float32, x both" if casts else ""
    key += f"; a column stands for up to {count(per, 'op')}" if per > 1 else ""
    lines = [f"  {strip}", *([f"  {casts}"] if casts else [])]
    return ["depth", *lines, *wrap(f"  {key}", width)]
