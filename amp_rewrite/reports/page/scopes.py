"""Scopes: the tree of modules behind the folds of a graph, and the place of each part in its scope."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import networkx as nx
from onnx import NodeProto

from amp_rewrite.decide import sizes
from amp_rewrite.ir.view import MAIN, View
from amp_rewrite.reports.render import cut
from amp_rewrite.reports.rows import ReportData, Row
from amp_rewrite.settings.selectors import TORCH_SCOPES, torch_scopes

ROOT = 0
_DEEPEST = 16
"""Levels of names; deeper ones are one level."""
MOST = 96
"""Parts of a scope; those of a larger one are put in groups."""

_LABEL = 24
"""Characters of a name in the label of a group."""

Path = tuple[str, ...]
Label = Callable[[int], str]
"""Name of a vertex, without its scopes."""


@dataclass(slots=True)
class Tree:
    """Scopes by number, parents before their parts; `home` is the scope of each vertex of the graph."""

    names: list[str] = field(default_factory=lambda: [""])
    parents: list[int] = field(default_factory=lambda: [-1])
    home: list[int] = field(default_factory=list)

    def add(self, name: str, parent: int) -> int:
        """Add a scope and return its number."""
        self.names.append(name)
        self.parents.append(parent)
        return len(self.names) - 1

    def parts(self, order: Sequence[int]) -> dict[int, list[int]]:
        """Return the parts of each scope, in the order of their first vertex: vertices, then scopes by number."""
        parts: dict[int, list[int]] = defaultdict(list)
        seen = {ROOT}
        for vertex in order:
            at = self.home[vertex]
            while at not in seen:
                seen.add(at)
                parts[self.parents[at]].append(len(self.home) + at)
                at = self.parents[at]
            parts[self.home[vertex]].append(vertex)
        return parts


def paths_of(report: ReportData, modules: Sequence[str] = ()) -> list[Path]:
    """Return the path of scopes of each row.

    A row without a scope lies where its first input is computed; one that reads only weights, where it is read.
    """
    stated = any(modules)
    slashed = any("/" in row.name for row in report.rows if row.named)
    paths: list[Path] = []
    silent: list[int] = []
    for at, row in enumerate(report.rows):
        body = tuple(part for part in row.scope.split("/") if part)
        own = tuple(part for part in modules[at].split("/") if part) if stated else _named(row)
        if not own and (stated or not row.named or (slashed and "/" not in row.name)):
            silent.append(at)
            known = next((read for read in row.reads if 0 <= read < at and report.rows[read].scope == row.scope), None)
            own = paths[known][len(body) :] if known is not None else ()
        path = body + own
        paths.append(path if len(path) <= _DEEPEST else (*path[: _DEEPEST - 1], "/".join(path[_DEEPEST - 1 :])))
    readers: dict[int, int] = {}
    for at, row in enumerate(report.rows):
        for read in row.reads:
            readers.setdefault(read, at)
    for at in reversed(silent):
        row, reader = report.rows[at], readers.get(at)
        if all(read < 0 for read in row.reads) and reader is not None and report.rows[reader].scope == row.scope:
            paths[at] = paths[reader]
    return paths


def _named(row: Row) -> Path:
    if not row.named or "/" not in row.name:
        return ()
    name = row.name.removeprefix(row.scope)
    return tuple(part for part in name.split("/")[:-1] if part)


def tree_of(paths: Sequence[Path], order: Sequence[int], label: Label = str) -> Tree:
    """Return the tree of scopes.

    A scope of one part gives way to its part. One of more than `MOST` parts has groups instead, of parts that follow
    each other.
    """
    tree = Tree(home=[ROOT] * len(paths))
    waiting: list[tuple[int, int, Sequence[int]]] = [(ROOT, 0, order)]
    while waiting:
        scope, depth, inside = waiting.pop()
        named: dict[str | int, list[int]] = {}
        for vertex in inside:
            named.setdefault(paths[vertex][depth] if len(paths[vertex]) > depth else vertex, []).append(vertex)
        level = [(scope, list(named.items()))]
        while level:
            at, parts = level.pop()
            if len(parts) > MOST:
                for chunk in _chunks(parts):
                    ends = (name if isinstance(name, str) else label(name) for name, _ in (chunk[0], chunk[-1]))
                    level.append((tree.add(" to ".join(cut(end, _LABEL) for end in ends), at), chunk))
                continue
            for _, members in parts:
                if len(members) == 1:
                    tree.home[members[0]] = at
                else:
                    own = [paths[vertex] for vertex in members]
                    shared = sum(
                        1 for _ in takewhile(lambda ends: ends[0] == ends[1], zip(min(own), max(own), strict=False))
                    )
                    waiting.append((tree.add("/".join(own[0][depth:shared]), at), shared, members))
    return tree


_Parts = list[tuple[str | int, list[int]]]
"""Parts of a scope, each with its vertices: scopes by name, and vertices by number."""


def _chunks(parts: _Parts) -> list[_Parts]:
    groups = min(MOST // 2, -(-len(parts) // (MOST // 2)))
    ends = [len(parts) * i // groups for i in range(groups + 1)]
    return [parts[start:end] for start, end in pairwise(ends)]


Part = int
"""A vertex by its number, or a scope by its number after the number of vertices."""
Edges = Iterable[tuple[int, int]]


def layers_of(tree: Tree, edges: Edges, order: Sequence[int]) -> list[int]:
    """Return layer and order of each part: vertices first, then scopes; two numbers each, -1 for parts not drawn."""
    number = len(tree.home)
    placed = [-1] * (2 * (number + len(tree.names)))
    inner = _inner_edges(tree, edges, frozenset(order))
    for scope, parts in tree.parts(order).items():
        for layer, members in enumerate(_layered(parts, inner.get(scope, {}))):
            for at, part in enumerate(members):
                placed[2 * part : 2 * part + 2] = layer, at
    return placed


def _inner_edges(tree: Tree, edges: Edges, drawn: Collection[int]) -> dict[int, dict[Part, dict[Part, None]]]:
    depth = [0] * len(tree.names)
    for scope in range(1, len(tree.names)):
        depth[scope] = depth[tree.parents[scope]] + 1
    met: dict[tuple[int, int], tuple[int, int, int]] = {}
    inner: dict[int, dict[Part, dict[Part, None]]] = defaultdict(lambda: defaultdict(dict))
    number = len(tree.home)
    for producer, reader in edges:
        if producer not in drawn or reader not in drawn:
            continue
        ends = tree.home[producer], tree.home[reader]
        if ends not in met:
            met[ends] = _meeting(tree, depth, *ends)
        scope, first, second = met[ends]
        source, target = number + first if first >= 0 else producer, number + second if second >= 0 else reader
        inner[scope][source][target] = None
    return inner


def _meeting(tree: Tree, depth: Sequence[int], first: int, second: int) -> tuple[int, int, int]:
    """Return the innermost scope around two scopes, and its part around each; -1 for the scope itself."""
    below_first = below_second = -1
    while first != second:
        if depth[first] >= depth[second]:
            below_first, first = first, tree.parents[first]
        else:
            below_second, second = second, tree.parents[second]
    return first, below_first, below_second


def _layered(parts: Sequence[Part], readers: Mapping[Part, Iterable[Part]]) -> list[list[Part]]:
    """Return the parts by layer: each below its sources, and a source without inputs above its readers."""
    ranked = _ranked(parts, readers)
    rank = {part: i for i, part in enumerate(ranked)}
    layer = dict.fromkeys(ranked, 0)
    reads: dict[Part, list[Part]] = defaultdict(list)
    for part in ranked:
        for reader in readers.get(part, ()):
            if rank[reader] > rank[part]:
                layer[reader] = max(layer[reader], layer[part] + 1)
                reads[reader].append(part)
    for part in reversed(ranked):
        below = [layer[reader] for reader in readers.get(part, ()) if rank[reader] > rank[part]]
        if not reads[part] and below:
            layer[part] = min(below) - 1
    rows: list[list[Part]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for part in ranked:
        rows[layer[part]].append(part)
    place: dict[Part, float] = {}
    for row in rows:
        centers = {part: sum(place[read] for read in reads[part]) / max(len(reads[part]), 1) for part in row}
        row.sort(key=lambda part: centers[part])
        place |= {part: i - (len(row) - 1) / 2 for i, part in enumerate(row)}
    return [row for row in rows if row]


def _ranked(parts: Sequence[Part], readers: Mapping[Part, Iterable[Part]]) -> list[Part]:
    """Return the parts, each after its sources. Scopes on a circle stand in the given order."""
    place = {part: i for i, part in enumerate(parts)}
    graph: nx.DiGraph[Part] = nx.DiGraph((part, reader) for part in parts for reader in readers.get(part, ()))
    graph.add_nodes_from(parts)
    circles = nx.condensation(graph)
    members = {circle: sorted(inside, key=place.__getitem__) for circle, inside in circles.nodes(data="members")}
    ordered = nx.lexicographical_topological_sort(circles, key=lambda circle: place[members[circle][0]])
    return [part for circle in ordered for part in members[circle]]


# -- facts ------------------------------------------------------------------------------------------------------


_LONGEST = 4096
"""Characters of metadata that are read; more are not the modules of an op."""
_INPUTS = 4
"""Inputs whose shapes are stated."""


def input_shapes(view: View) -> str:
    """Return the shapes of the inputs behind FLOPs: "with x 128×3×224×224"; free dimensions are 128."""
    inputs = [v for v in view.scopes[MAIN].inputs if view.values[v].tensor is None]
    stated = [f"{view.value_name(v)} {'×'.join(map(str, sizes.shape(view, v))) or 'scalar'}" for v in inputs[:_INPUTS]]
    more = [f"{len(inputs) - _INPUTS} more"] if len(inputs) > _INPUTS else []
    return "with " + ", ".join(stated + more) if stated else ""


def module_of(node: NodeProto) -> str:
    """Return the module of a node, as PyTorch's exporter notes it: "encoder/layers.0"; "" without a note."""
    stated = {entry.key: entry.value for entry in node.metadata_props if len(entry.value) <= _LONGEST}
    names = torch_scopes(stated.get(TORCH_SCOPES, ""))
    parts: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):  # the last one is the op's own name
        parts.append(name.removeprefix(f"{before}."))
        before = name
    return "/".join(parts)
