"""Layout: the layer of each part of each scope and its order there. Each scope is laid out apart, in linear time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from amp_rewrite.reports.page.scopes import Tree

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
    """Return for each scope the edges between its parts: each part with those that read it."""
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
    """Return the innermost scope around two scopes, and its part that contains each; -1 if that is the scope itself."""
    below_first = below_second = -1
    while first != second:
        if depth[first] >= depth[second]:
            below_first, first = first, tree.parents[first]
        else:
            below_second, second = second, tree.parents[second]
    return first, below_first, below_second


def _layered(parts: Sequence[Part], readers: Mapping[Part, Iterable[Part]]) -> list[list[Part]]:
    """Return the parts by layer. A part lies below those that it reads, and one that reads none above its readers."""
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
    """Return the parts, each after those that it reads. Scopes that read each other stand in the given order."""
    waits = dict.fromkeys(parts, 0)
    for part in parts:
        for reader in readers.get(part, ()):
            waits[reader] += 1
    ranked: list[Part] = []
    done: set[Part] = set()
    for start in [part for part in parts if not waits[part]] + list(parts):  # the latter are on circles
        ready = [start] if start not in done else []
        done.update(ready)
        for part in ready:  # grows
            ranked.append(part)
            for reader in readers.get(part, ()):
                waits[reader] -= 1
                if not waits[reader] and reader not in done:
                    done.add(reader)
                    ready.append(reader)
    return ranked
