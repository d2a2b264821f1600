"""Scopes: the tree of modules that folds a graph, from metadata, names and bodies of ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from amp_rewrite.reports.render import cut
from amp_rewrite.reports.rows import ReportData, Row

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
    readers = _first_readers(report)
    for at in reversed(silent):
        row, reader = report.rows[at], readers.get(at)
        if all(read < 0 for read in row.reads) and reader is not None and report.rows[reader].scope == row.scope:
            paths[at] = paths[reader]
    return paths


def _first_readers(report: ReportData) -> Mapping[int, int]:
    """Return the first row that reads each row."""
    readers: dict[int, int] = {}
    for at, row in enumerate(report.rows):
        for read in row.reads:
            readers.setdefault(read, at)
    return readers


def _named(row: Row) -> Path:
    """Return the scopes in a name: "/encoder/layer.0/MatMul" lies in "encoder" and "layer.0"."""
    if not row.named or "/" not in row.name:
        return ()
    name = row.name.removeprefix(row.scope)
    return tuple(part for part in name.split("/")[:-1] if part)


def tree_of(paths: Sequence[Path], order: Sequence[int], label: Label = str) -> Tree:
    """Return the tree of scopes. A scope of one part gives way to that part, and a large one is split into groups."""
    whole = Tree()
    known: dict[Path, int] = {(): ROOT}
    for path in paths:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in known:
                known[path[:depth]] = whole.add(path[depth - 1], known[path[: depth - 1]])
        whole.home.append(known[path])
    return _grouped(_lean(whole, order), order, label)


def _lean(tree: Tree, order: Sequence[int]) -> Tree:
    """Return the tree without scopes that hold a single part, or none that is drawn."""
    parts = tree.parts(order)
    lean = Tree()
    place = {ROOT: ROOT}
    names = dict(enumerate(tree.names))
    number = len(tree.home)
    for scope in range(1, len(tree.names)):
        above = tree.parents[scope]
        inside = parts.get(scope, ())
        if len(inside) > 1:
            place[scope] = lean.add(names[scope], place[above])
            continue
        place[scope] = place[above]
        if len(inside) == 1 and inside[0] >= number:
            child = inside[0] - number
            names[child] = f"{names[scope]}/{names[child]}"
    lean.home = [place[home] for home in tree.home]
    return lean


def _grouped(tree: Tree, order: Sequence[int], label: Label) -> Tree:
    """Return the tree with at most `MOST` parts in each scope; groups stand for parts that follow each other."""
    parts = tree.parts(order)
    if all(len(inside) <= MOST for inside in parts.values()):
        return tree
    number = len(tree.home)
    split = Tree(home=[ROOT] * number)
    place = {ROOT: ROOT}
    waiting = [ROOT]
    while waiting:
        scope = waiting.pop()
        level: list[tuple[int, Sequence[int]]] = [(place[scope], parts.get(scope, []))]
        while level:
            at, inside = level.pop()
            if len(inside) > MOST:
                level += [(split.add(_between(tree, chunk, label), at), chunk) for chunk in _chunks(inside)]
                continue
            for part in inside:
                if part >= number:
                    place[part - number] = split.add(tree.names[part - number], at)
                    waiting.append(part - number)
                else:
                    split.home[part] = at
    drawn = set(order)
    for vertex, home in enumerate(tree.home):
        if vertex not in drawn:
            split.home[vertex] = place[home]
    return split


def _chunks(inside: Sequence[int]) -> list[Sequence[int]]:
    """Return consecutive groups of nearly equal size, at most half of `MOST` of them."""
    groups = min(MOST // 2, -(-len(inside) // (MOST // 2)))
    ends = [len(inside) * i // groups for i in range(groups + 1)]
    return [inside[start:end] for start, end in pairwise(ends)]


def _between(tree: Tree, chunk: Sequence[int], label: Label) -> str:
    """Return the name of a group: those of its first and last part, "Conv_12 to Relu_60"."""
    number = len(tree.home)
    ends = (label(part) if part < number else tree.names[part - number] for part in (chunk[0], chunk[-1]))
    return " to ".join(cut(end, _LABEL) for end in ends)
