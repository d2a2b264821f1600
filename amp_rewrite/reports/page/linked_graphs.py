"""The graphs of a difference beside each other: the same op has the same number in both, and changes are marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.reports.op_changes import BothModels
from amp_rewrite.reports.page.graph import GraphDifference, Words, board, graph_data, rules_of
from amp_rewrite.reports.page.markup import short
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.rows import ReportData

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View
    from amp_rewrite.reports.page.facts import RowFacts

NAME = "graphs"
LEAD = (
    "Both models from input to output, in folded scopes that are open where ops changed. Choose an op: the same op is"
    " shown in the other model, with what changed about it."
)


@gc_paused()
def linked_graphs(titles: Sequence[str], sides: BothModels) -> Figure:
    """Return both models of a difference as graphs whose ops are linked."""
    words = Words()
    pairs = list(sides.pairs())
    graphs: list[dict[str, object]] = []
    for side, (title, report, view) in enumerate(zip(titles, sides.reports, sides.views, strict=True)):
        vertices = len(report.rows) + len(report.inputs) + len(report.outputs)
        links = [-1] * vertices
        for number, pair in enumerate(pairs):
            links[pair[side]] = number
        comparison = GraphDifference(short(title), links, sides.changed(side), sides.signs(side))
        graphs.append(graph_data(report, _facts(view, report), words, comparison=comparison))
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
    """Return the scopes around a scope, from outside, and itself."""
    path = []
    while scope >= 0:
        path.append(scope)
        scope = parents[scope]
    return path[::-1]
