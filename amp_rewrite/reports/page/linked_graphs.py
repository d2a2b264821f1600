"""Figures of a difference: the ops that changed, and both graphs beside each other with changes marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.op_changes import BothModels
from amp_rewrite.reports.page.chart import table
from amp_rewrite.reports.page.graph import GraphDifference, Words, board, graph_data, rules_of
from amp_rewrite.reports.page.markup import element, short
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.rows import ReportData

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.page.facts import RowFacts

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
    """Return the changed ops as a table, the kinds of difference counted."""
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


NAME = "graphs"
LEAD = (
    "Both models from input to output, in folded scopes that are open where ops changed. Choose an op: the same op is"
    " shown in the other model, with what changed about it."
)


@gc_paused()
def linked_graphs(titles: Sequence[str], sides: BothModels) -> Figure:
    """Return both models of a difference as linked graphs."""
    words = Words()
    pairs = list(sides.pairs())
    graphs: list[dict[str, object]] = []
    for side, (title, report, view) in enumerate(zip(titles, sides.reports, sides.views, strict=True)):
        vertices = len(report.rows) + len(report.inputs) + len(report.outputs)
        links = [-1] * vertices
        for number, pair in enumerate(pairs):
            links[pair[side]] = number
        comparison = GraphDifference(short(title), links, sides.changed(side), sides.signs(side))
        graphs.append(graph_data(report, _facts(view, report), words, comparison))
    for graph, links in zip(graphs, _scope_links([_tree(graph) for graph in graphs], pairs), strict=True):
        scopes = graph["scopes"]
        assert isinstance(scopes, dict)
        scopes["link"] = links
    rules = rules_of(sides.reports)
    data = {"graphs": graphs, "rules": rules, "words": list(words.known)}
    return Figure(NAME, "Both graphs", LEAD, board(NAME), data)


def _facts(view: View | None, report: ReportData) -> RowFacts | None:
    if view is None:
        return None
    from amp_rewrite.reports.page.facts import RowFacts  # late: reports alone are drawn without onnx

    return RowFacts(view, report)


Scopes = tuple[Sequence[int], Sequence[int]]
"""The scope of each vertex, and the scope around each scope."""


def _tree(graph: Mapping[str, object]) -> Scopes:
    ops, scopes = graph["ops"], graph["scopes"]
    assert isinstance(ops, dict) and isinstance(scopes, dict)
    return ops["scope"], scopes["parent"]


def _scope_links(trees: Sequence[Scopes], pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return a number for each scope of both trees, equal for scopes that hold the same ops for the most part.

    Scopes of one depth belong together if each shares most ops with the other. Others have -1.
    """
    homes = Counter((trees[0][0][i], trees[1][0][j]) for i, j in pairs)
    shared: Counter[tuple[int, int]] = Counter()
    for (first, second), number in homes.items():
        for scopes in zip(_path(first, trees[0][1]), _path(second, trees[1][1]), strict=False):
            shared[scopes] += number
    best: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for (first, second), _ in shared.most_common():
        best[0].setdefault(first, second)
        best[1].setdefault(second, first)
    links = [[-1] * len(parents) for _, parents in trees]
    mutual = ((first, second) for first, second in best[0].items() if best[1][second] == first)
    for number, (first, second) in enumerate(mutual):
        links[0][first] = links[1][second] = number
    return links


def _path(scope: int, parents: Sequence[int]) -> list[int]:
    path = []
    while scope >= 0:
        path.append(scope)
        scope = parents[scope]
    return path[::-1]
