"""Figures of a report (verdict with the next step, counts, graph) and of differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from amp_rewrite.decide import reasons
from amp_rewrite.errors import Finding, by_kind
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.page.graph import graph, input_shapes
from amp_rewrite.reports.page.page import Figure, collapsed, element, short, table
from amp_rewrite.reports.render import count, share, size
from amp_rewrite.reports.rows import Change, ReportData
from amp_rewrite.reports.summary import low_types, needs_action, next_command

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View

_MAX_SHOWN = 20
"""Maximum number of subjects on a card of findings."""
_VERDICTS = {
    "none": "not checked on data",
    "guarded": "guarded by ranges",
    "smoke": "runs on random data",
    "verified": "verified",
    "repaired": "repaired",
    "failed": "failed",
}


@gc_paused()
def report_figures(report: ReportData, view: View | None = None, command: str | None = None) -> tuple[Figure, ...]:
    """Return the summary and the graph of a report; a view of its model adds modules and shapes.

    `command`: the next step; None derives it from the report, "" omits it.
    """
    shapes = input_shapes(view) if view is not None else "free dimensions as 128"
    step = next_command(report) if command is None else command
    return summary_figure(report, shapes, step), graph(report, view)


def summary_figure(report: ReportData, shapes: str, command: str) -> Figure:
    """Return the verdict, next step, counts and findings of a report.

    `shapes`: a description of the input shapes assumed for its FLOPs.
    """
    groups = by_kind(report.findings)
    urgent = [kind for kind, group in groups.items() if any(map(needs_action, group))]
    without_action = [kind for kind in groups if kind not in urgent]
    parts = []
    if not report.inventory:
        level = report.evidence.level
        step = [element("p", "next: ", element("code", command))] if command else []
        state = _VERDICTS.get(level, level)
        parts.append(_card("evidence", state, str(report.evidence), *step, class_=f"card evidence {level}"))
    if urgent:
        cards = (_finding(kind, groups[kind], "warning") for kind in urgent)
        parts += [element("h3", "To do"), element("div", *cards, class_="cards findings")]
    parts.append(element("div", *_counts(report, shapes), class_="cards"))
    if report.shifts:
        cells = []
        for row in report.shifts:
            why = row.why or f"undone at {count(len(row.ends), 'op')}"
            scale = f"2^-{row.exponent}" if row.exponent else "1"
            cells.append((row.value, why, scale, str(row.values), f"{row.absmax:.4g}" if row.absmax else ""))
        regions = table(("largest value", "remarks", "scale", "values", "magnitude"), cells, right=3)
        parts += [element("h3", "Range shifts", class_="part"), regions]
    if without_action:
        name = count(sum(len(groups[kind]) for kind in without_action), "finding needs", "findings need") + " no action"
        cards = (_finding(kind, groups[kind], "note") for kind in without_action)
        parts.append(collapsed(name, element("div", *cards, class_="cards findings")))
    lead = f"Inventory of {report.model.name}." if report.inventory else f"{report.model.name} in {report.model.to}."
    return Figure("summary", "Summary", lead, element("div", *parts))


def _card(name: str, value: str, *more: Element | str, **attributes: str) -> Element:
    head = (element("p", name, class_="name"), element("p", value, class_="value"))
    parts = (part if isinstance(part, Element) else element("p", part) for part in more)
    return element("div", *head, *parts, **{"class_": "card", **attributes})


# -- counts ------------------------------------------------------------------------------------------


def _counts(report: ReportData, shapes: str) -> list[Element]:
    totals, low = report.totals, " and ".join(low_types(report)) or report.model.to or "a low type"
    lowered, compute = totals.compute_lowered, totals.compute_ops
    cards = [_card(f"FLOPs in {low}", share(totals.flops_low, totals.flops), shapes)] if totals.flops else []
    cards.append(_card(f"compute ops in {low}", share(lowered, compute), f"{lowered} of {compute}"))
    if report.inventory:
        cards.append(_card("Casts", str(totals.casts_existing)))
    else:
        rest = (
            (totals.casts_to_low, f"to {low}"),
            (totals.casts_to_float32, "to float32"),
            (totals.casts_existing, "kept from the model"),
            (totals.casts_folded, "removed"),
        )
        inserted = str(totals.casts_to_low + totals.casts_to_float32)
        cards.append(_card("Casts added", inserted, ", ".join(f"{n} {words}" for n, words in rest if n)))
    types = ", ".join(f"{dtype} {size(number)}" for dtype, number in sorted(report.weights.items()))
    after = f" → {size(totals.weights_after)}" if totals.baked else ""
    return [*cards, _card("weights", f"{size(totals.weights_before)}{after}", types, class_="card weights")]


# -- findings ----------------------------------------------------------------------------------------


def _finding(kind: str, group: Sequence[Finding], class_: str) -> Element:
    messages = [reasons.remarked(kind, finding.message).split(" · ") for finding in group]
    facts = [(element("b", f.subject), f": {parts[0]}") for f, parts in zip(group, messages, strict=True)]
    why, todo = "".join(messages[0][1:2]), " · ".join(messages[0][2:])
    parts = [
        element("p", kind, class_="name"),
        element("p", reasons.KINDS.get(kind, ""), class_="words"),
        element("p", *facts[0]),
        *(element("p", element("i", f"{name}: "), text) for name, text in (("It means", why), ("To do", todo)) if text),
    ]
    if len(facts) > 1:
        shown = [element("li", *fact) for fact in facts[1:_MAX_SHOWN]]
        shown += [element("li", f"and {len(facts) - _MAX_SHOWN} more in the report")] if len(facts) > _MAX_SHOWN else []
        more = element("summary", f"{len(facts) - 1} more of this kind")
        parts.append(element("details", more, element("ul", *shown)))
    return element("article", *parts, class_=f"card finding {class_}")


# -- differences ------------------------------------------------------------------------------------------------


_MAX_ROWS, _MAX_OPEN_ROWS = 500, 50
"""Maximum number of changes in the table, and in an initially expanded table."""


def changes_figure(
    summary: str,
    changes: Iterable[Sequence[str]],
    settings: Sequence[Sequence[str]],
    vertices: Sequence[int | None],
) -> Figure:
    """Return the changes as a table.

    Args:
        summary: the changes in one line.
        changes: kind, op, its type, its element types and the reason of each.
        settings: name, value in A and value in B.
        vertices: the vertex of each change in the graph; None for an undrawn change.
    """
    rows = list(changes)
    each = table(("change", "op", "type", "dtype", "why"), rows[:_MAX_ROWS])
    for row, vertex in zip(each.iterfind("table/tbody/tr"), vertices, strict=False):
        if vertex is not None:
            row[1].set("data-vertex", str(vertex))  # the script turns the name into a link
    opened = {"open": ""} if len(rows) <= _MAX_OPEN_ROWS else {}
    parts = [element("details", element("summary", "Each op"), each, **opened)] if rows else []
    parts += [element("h3", "Settings", class_="part"), table(("setting", "A", "B"), settings)] if settings else []
    lead = f"{summary}." if len(rows) <= _MAX_ROWS else f"{summary}. The table lists the first {_MAX_ROWS}."
    return Figure("changes", "Differences", lead, element("div", *parts))


@gc_paused()
def marked_graph(
    report: ReportData, view: View | None, changes: Mapping[int, Sequence[Change]], added: Iterable[int]
) -> Figure:
    """Return the graph of the newer model with its changes; see `graph`."""
    lead = (
        f"{short(report.model.name)} from input to output; scopes are expanded where ops changed. Removed ops"
        " appear only in the table. Select an op to see what changed and why."
    )
    figure = graph(report, view, changes, frozenset(added))
    return Figure(figure.name, "Graph with the changes", lead, figure.drawing, figure.data)
