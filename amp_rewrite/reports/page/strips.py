"""Figures of a difference: both models as strips of ops in the same order, and the ops that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from xml.etree.ElementTree import Element

from amp_rewrite.errors import count
from amp_rewrite.reports.op_changes import OpRun
from amp_rewrite.reports.page.axis import MOST_POINTS, Axis, percent
from amp_rewrite.reports.page.chart import Line, rows, sample, table
from amp_rewrite.reports.page.markup import element, hint, short
from amp_rewrite.reports.page.page import Figure

_ROWS, _OPEN = 500, 50
"""Changed ops in the table, and up to how many it is unfolded."""
_HEIGHTS = {"low": ("50%", "50%"), "muted": ("80%", "20%"), "high": ("0%", "100%"), "absent": ("0%", "100%")}
"""Top and height of an op in a strip: low types take half of it, so that the strip reads without colors."""
_KINDS = {"float16": "low", "bfloat16": "low", "float32": "high", "float64": "high", "": "absent"}


def strips_figure(a: str, b: str, runs: Sequence[OpRun], summary: str) -> Figure:
    """Return two models as strips of ops, aligned by the ops that they share."""
    total = sum(run.ops for run in runs)
    axis = Axis.depth("op", total)
    bins = _binned(runs, total) if len(runs) > MOST_POINTS else []
    lines = [
        Line(f"A: {a}", _shares(bins, total, "a") if bins else _strip(runs, total, "a")),
        Line(f"B: {b}", _shares(bins, total, "b") if bins else _strip(runs, total, "b")),
        Line("changed", _changed(runs, total), count(sum(run.ops for run in runs if run.changed), "op")),
    ]
    lead = f"Types of {count(total, 'op')} in both models, aligned by the ops that they share: {short(summary)}."
    if bins:
        lead += f" Too many to draw one by one: each of {len(bins)} bins shows the share of each type."
    legend = [
        sample("low", "float16 or bfloat16" + ("" if bins else ": half as high")),
        sample("high", "float32 or float64"),
        sample("muted", "other types" + ("" if bins else ": low")),
        sample("absent", "op that this model lacks"),
        sample("tolerance", "op that differs", "line"),
    ]
    drawing = element("div", rows(axis, lines, name=lead, legend=legend))
    data = {
        "a": a,
        "b": b,
        "ops": total,
        "runs": [] if bins else [asdict(run) for run in runs],
        "bins": [{"first": b.first, "ops": b.ops, **b.types} for b in bins],
        "changed": sum(run.ops for run in runs if run.changed),
    }
    return Figure("strips", "Both models", lead, drawing, data, notebook=True)


@dataclass(frozen=True, slots=True)
class Places:
    """Number of the graph and vertex of each change in a figure; None for one that no graph shows."""

    figure: str
    at: Sequence[tuple[int, int] | None] = ()


def changes_figure(
    changes: Sequence[Mapping[str, str]],
    counts: Mapping[str, int],
    settings: Sequence[tuple[str, str, str]] = (),
    places: Places | None = None,
) -> Figure:
    """Return the ops that changed as a table, the kinds of difference counted."""
    shown = changes[:_ROWS]
    head = ("change", "op", "type", "dtype", "why")
    cells = ([change[name] for name in ("kind", "title", "op", "types", "why")] for change in shown)
    groups = Counter((change["kind"], change["op"], change["types"]) for change in changes)
    sums = [(kind, op, types, str(n)) for (kind, op, types), n in sorted(groups.items(), key=lambda g: (-g[1], g[0]))]
    lead = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "No difference"
    lead += "." if len(shown) == len(changes) else f". The table holds the first {_ROWS}."
    opened = len(shown) <= _OPEN
    each = table(head, cells)
    if places is not None:
        each.set("data-board", f"{places.figure}-board")
        for row, at in zip(each.iterfind("table/tbody/tr"), places.at, strict=False):
            if at is not None:
                row.set("data-at", f"{at[0]} {at[1]}")
                row[1].set("data-op", "")  # the script makes a link of the name
    parts = [
        element("h3", "By type", class_="part"),
        table(("change", "type", "dtype", "number"), sums[:_ROWS], right=1),
        element("details", element("summary", "Each op"), each, **({"open": ""} if opened else {})),
    ]
    stated = [element("h3", "Settings", class_="part"), table(("setting", "A", "B"), settings)] if settings else []
    drawing = element("div", *(parts if changes else []), *stated)
    data = {
        "counts": dict(counts),
        "settings": {name: [a, b] for name, a, b in settings},
        "changes": [dict(change) for change in shown],
        "in_all": len(changes),
    }
    return Figure("changes", "Differences", lead, drawing, data)


@dataclass(frozen=True, slots=True)
class _Shares:
    """A bin of ops: the number of ops of each type, by side."""

    first: int
    ops: int
    types: Mapping[str, Counter[str]]


def _binned(runs: Sequence[OpRun], total: int) -> list[_Shares]:
    """Return bins of equally many ops, so that no short run is lost."""
    width = -(-total // MOST_POINTS)
    bins = [
        _Shares(first, min(width, total - first), {"a": Counter(), "b": Counter()}) for first in range(0, total, width)
    ]
    at = 0
    for run in runs:
        left = run.ops
        while left:
            part = min(left, width - at % width)
            for side, dtype in (("a", run.a), ("b", run.b)):
                bins[at // width].types[side][_kind(dtype)] += part
            at, left = at + part, left - part
    return bins


def _strip(runs: Sequence[OpRun], total: int, side: str) -> list[Element]:
    boxes, start = [], 0
    for dtype, group in groupby(runs, key=lambda run: str(getattr(run, side))):
        ops = sum(run.ops for run in group)
        y, height = _HEIGHTS[_kind(dtype)]
        place = {"x": percent(start / total), "width": percent(ops / total), "y": y, "height": height}
        words = f"{count(ops, 'op')}: {dtype or 'absent'}"
        boxes.append(element("rect", hint(words), class_=f"span {_kind(dtype)}", **place))
        start += ops
    return boxes


def _shares(bins: Sequence[_Shares], total: int, side: str) -> list[Element]:
    boxes = []
    for part in bins:
        top = 0.0
        for kind in ("low", "muted", "absent", "high"):
            share = part.types[side][kind] / part.ops
            place = {"x": percent(part.first / total), "width": percent(part.ops / total)}
            if share:
                boxes.append(element("rect", y=percent(top), height=percent(share), class_=f"span {kind}", **place))
            top += share
    return boxes


def _changed(runs: Sequence[OpRun], total: int) -> list[Element]:
    """Return a mark for each group of changed ops; groups too near to tell apart share one."""
    marks, end = [], -1.0
    for run, start in zip(runs, accumulate((run.ops for run in runs), initial=0), strict=False):
        if run.changed and (start + run.ops) / total > end:
            left = max(start / total, end)
            end = max((start + run.ops) / total, left + 1 / MOST_POINTS)
            place = {"x": percent(left), "width": percent(end - left)}
            marks.append(element("rect", hint(count(run.ops, "op")), y="10%", height="80%", class_="changed", **place))
    return marks


def _kind(dtype: str) -> str:
    return _KINDS.get(dtype, "muted")
