"""Figures of a difference: the changed ops as a table, and the newer model as a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.page.chart import table
from amp_rewrite.reports.page.graph import NAME, graph
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.rows import Change, Marked

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
    """Return the newer model as a graph with its changes. `name`: that of the model."""
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
