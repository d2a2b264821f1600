"""Figures of a report: the verdict with the next step, counts, and the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from amp_rewrite.decide import reasons
from amp_rewrite.errors import Finding, by_kind
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.page.graph import NAME, graph
from amp_rewrite.reports.page.page import Figure, element, folded, short, table
from amp_rewrite.reports.render import count, share, size
from amp_rewrite.reports.rows import Change, Marked, ReportData
from amp_rewrite.reports.summary import low_types, needs_action, next_command, shift_counts

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View

_SUBJECTS = 20
"""Subjects that a card of findings lists."""
_VERDICTS = {
    "none": "not checked on data",
    "guarded": "guarded by ranges",
    "smoke": "runs on random data",
    "verified": "verified",
    "repaired": "repaired",
    "failed": "failed",
}


@gc_paused()
def report_figures(report: ReportData, view: View | None = None) -> tuple[Figure, ...]:
    """Return summary and graph of a report; with a view of its model, also modules and shapes."""
    if view is None:
        return summary_figure(report), graph(report)
    from amp_rewrite.reports.page.scopes import RowFacts  # late: a report alone is drawn without onnx

    return summary_figure(report, RowFacts(view).shapes), graph(report, view)


def summary_figure(report: ReportData, shapes: str = "") -> Figure:
    """Return verdict, steps, counts and findings of a report. `shapes`: those of the inputs, in words."""
    groups = [_group(kind, group) for kind, group in by_kind(report.findings).items()]
    asked, quiet = ([group for group in groups if bool(group["fact"]) is fact] for fact in (False, True))
    parts = [] if report.inventory else [_verdict(report)]
    if asked:
        parts += [element("h3", "To do"), element("div", *map(_finding, asked), class_="cards findings")]
    parts.append(element("div", *_counts(report, shapes), class_="cards"))
    if report.shifts:
        parts += [element("h3", "Range shifts", class_="part"), _regions(report)]
    if quiet:
        name = count(sum(len(_items(group)) for group in quiet), "finding needs", "findings need") + " no action"
        parts.append(folded(name, element("div", *map(_finding, quiet), class_="cards findings")))
    data: dict[str, object] = {
        "evidence": {"level": report.evidence.level, "words": str(report.evidence)},
        "next": next_command(report),
        "totals": asdict(report.totals),
        "weights": dict(report.weights),
        "findings": [*asked, *quiet],
    }
    data |= {"shifts": [asdict(row) for row in report.shifts]} if report.shifts else {}
    data |= {"shapes": shapes} if shapes else {}
    lead = f"{report.model.name} as it is." if report.inventory else f"{report.model.name} in {report.model.to}."
    return Figure("summary", "Summary", lead, element("div", *parts), data)


def _verdict(report: ReportData) -> Element:
    level, command = report.evidence.level, next_command(report)
    more = [element("p", "next: ", element("code", command))] if command else []
    return _card("evidence", _VERDICTS.get(level, level), str(report.evidence), *more, class_=f"card evidence {level}")


def _card(name: str, value: str, *more: Element | str, **attributes: str) -> Element:
    head = (element("p", name, class_="name"), element("p", value, class_="value"))
    parts = (part if isinstance(part, Element) else element("p", part) for part in more)
    return element("div", *head, *parts, **{"class_": "card", **attributes})


# -- counts ------------------------------------------------------------------------------------------


def _counts(report: ReportData, shapes: str) -> list[Element]:
    totals, low = report.totals, " and ".join(low_types(report)) or report.model.to or "a low type"
    cards = [_share(f"compute ops in {low}", totals.compute_lowered, totals.compute_ops, "compute ops")]
    if totals.flops:
        at = shapes or "free dimensions as 128"
        cards.insert(0, _share(f"FLOPs in {low}", totals.flops_low, totals.flops, f"FLOPs, {at}"))
    if report.inventory:
        cards.append(_card("Casts", str(totals.casts_existing)))
    else:
        inserted = totals.casts_to_low + totals.casts_to_float32
        more = [f"{totals.casts_to_low} to {low}, {totals.casts_to_float32} to float32"] if inserted else []
        rest = ((totals.casts_existing, "of the model kept"), (totals.casts_folded, "removed"))
        cards.append(_card("Casts added", str(inserted), *more, *(f"{n} {words}" for n, words in rest if n)))
    types = ", ".join(f"{dtype} {size(number)}" for dtype, number in sorted(report.weights.items()))
    after = f" → {size(totals.weights_after)}" if totals.baked else ""
    cards.append(_card("weights", f"{size(totals.weights_before)}{after}", types, class_="card weights"))
    if report.shifts:
        regions = [row for row in report.shifts if row.exponent]
        values = count(sum(row.values for row in regions), "value")
        cards.append(_card("regions shifted", str(len(regions)), f"{values}: {shift_counts(report.shifts)}"))
    return cards


def _share(name: str, part: int, whole: int, unit: str) -> Element:
    filled = 100 * part / whole if whole else 0
    bar = element(
        "svg",
        element("rect", x=0, y=0, width=100, height=6, class_="none"),
        element("rect", x=0, y=0, width=filled, height=6, class_="low"),
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        width="100%",
        height=6,
        aria_hidden="true",
    )
    return _card(name, share(part, whole), bar, f"{_amount(part)} of {_amount(whole)} {unit}")


def _amount(number: float) -> str:
    """Return a number with a prefix: "17", "12.3 k", "4.1 G"."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if number < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} E"


def _regions(report: ReportData) -> Element:
    head = ("largest value", "evidence", "remarks", "times", "values", "magnitude", "headroom", "then")
    cells = []
    for row in report.shifts:
        why = row.why or (f"undone at {count(len(row.ends), 'op')}" if row.ends else "")
        times = f"2^-{row.exponent}" if row.exponent else "1"
        sizes = (f"{row.absmax:.4g}", f"{row.headroom:.2g}", f"{row.headroom_after:.2g}")
        cells.append((row.value, row.evidence, why, times, str(row.values), *(sizes if row.absmax else ("", "", ""))))
    return table(head, cells, right=5)


# -- findings ----------------------------------------------------------------------------------------


def _group(kind: str, group: Sequence[Finding]) -> dict[str, object]:
    parts = [reasons.remarked(kind, finding.message).split(" · ") for finding in group]
    return {
        "kind": kind,
        "words": reasons.KINDS.get(kind, ""),
        "fact": not any(map(needs_action, group)),
        "number": len(group),
        "means": "".join(parts[0][1:2]),
        "do": " · ".join(parts[0][2:]),
        "what": [{"subject": f.subject, "what": part[0]} for f, part in zip(group, parts, strict=True)],
    }


def _items(group: Mapping[str, object]) -> Sequence[Mapping[str, str]]:
    what = group["what"]
    return what if isinstance(what, list) else ()


def _finding(group: Mapping[str, object]) -> Element:
    items = _items(group)
    parts = [
        element("p", str(group["kind"]), class_="name"),
        element("p", str(group["words"]), class_="words"),
        element("p", element("b", items[0]["subject"]), f": {items[0]['what']}"),
    ]
    titled = (("It means:", "means"), ("To do:", "do"))
    parts += [element("p", element("i", f"{title} "), str(group[key])) for title, key in titled if group[key]]
    if len(items) > 1:
        rest = len(items) - _SUBJECTS
        shown = [element("li", element("b", item["subject"]), f": {item['what']}") for item in items[1:_SUBJECTS]]
        shown += [element("li", f"and {rest} more in the report")] if rest > 0 else []
        more = count(len(items) - 1, "more of this kind", "more of this kind")
        parts.append(element("details", element("summary", more), element("ul", *shown)))
    return element("article", *parts, class_=f"card finding {'note' if group['fact'] else 'warning'}")


# -- differences ------------------------------------------------------------------------------------------------


_ROWS, _OPEN = 500, 50
"""Changed ops in the table, and up to how many it is unfolded."""
_HEAD = ("change", "op", "type", "dtype", "why")


def changes_figure(
    changes: Sequence[Sequence[str]],
    counts: Mapping[str, int],
    settings: Sequence[tuple[str, str, str]],
    vertices: Sequence[int | None],
) -> Figure:
    """Return the changes as a table, the kinds of difference counted.

    Args:
        changes: kind, op, its type, its element types and the reason of each.
        counts: number of differences of each kind.
        settings: name, value in A and value in B.
        vertices: the vertex of each change in the graph; None for one that it does not show.
    """
    shown = changes[:_ROWS]
    groups = Counter((kind, op, types) for kind, _, op, types, _ in changes)
    sums = [(kind, op, types, str(n)) for (kind, op, types), n in sorted(groups.items(), key=lambda g: (-g[1], g[0]))]
    lead = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "No difference"
    lead += "." if len(shown) == len(changes) else f". The table holds the first {_ROWS}."
    each = table(_HEAD, shown)
    for row, vertex in zip(each.iterfind("table/tbody/tr"), vertices, strict=False):
        if vertex is not None:
            row[1].set("data-vertex", str(vertex))  # the script makes a link of the name
    parts = [
        element("h3", "By type", class_="part"),
        table(("change", "type", "dtype", "number"), sums[:_ROWS], right=1),
        element("details", element("summary", "Each op"), each, **({"open": ""} if len(shown) <= _OPEN else {})),
    ]
    stated = [element("h3", "Settings", class_="part"), table(("setting", "A", "B"), settings)] if settings else []
    data = {
        "counts": dict(counts),
        "settings": {name: [a, b] for name, a, b in settings},
        "changes": [dict(zip(("kind", "title", "op", "types", "why"), row, strict=True)) for row in shown],
        "in_all": len(changes),
    }
    return Figure("changes", "Differences", lead, element("div", *(parts if changes else []), *stated), data)


@gc_paused()
def marked_graph(marked: Marked, changes: Sequence[Change], name: str) -> Figure:
    """Return the newer model, by its name, as a graph with its changes."""
    by_vertex: dict[int, list[Change]] = {}
    for change, vertex in zip(changes, marked.vertices, strict=True):
        if vertex is not None:
            by_vertex.setdefault(vertex, []).append(change)
    lead = (
        f"{short(name)} from input to output, in folded scopes that are open where ops changed; what was removed stands"
        " in the table. Choose an op to see what changed, and why."
    )
    added = frozenset(at for at in marked.casts if at is not None)
    figure = graph(marked.report, marked.view, by_vertex, added)
    return Figure(NAME, "Graph with the changes", lead, figure.drawing, figure.data)
