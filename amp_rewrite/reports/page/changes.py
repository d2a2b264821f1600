"""Figure of a difference: the ops that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amp_rewrite.reports.page.chart import table
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure

_ROWS, _OPEN = 500, 50
"""Changed ops in the table, and up to how many it is unfolded."""


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
