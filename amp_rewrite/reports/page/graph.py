"""Graph of a report as a figure: ops in collapsible scopes, Casts on edges, reasons on demand.

Scopes form the tree of modules; each part has a position in its scope.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile

import networkx as nx
from onnx import NodeProto

from amp_rewrite.decide import reasons
from amp_rewrite.decide.sizes import shape
from amp_rewrite.ir.op_classes import CASTS, ELEMENTLESS
from amp_rewrite.ir.view import MAIN, View
from amp_rewrite.reports.page.page import Figure, element
from amp_rewrite.reports.render import cut, plain
from amp_rewrite.reports.rows import DTYPES, FIRST_INPUT, FLOATING, LOW, NO_ROW, CastRow, Change, ReportData, Row
from amp_rewrite.reports.work import flops
from amp_rewrite.settings.selectors import TORCH_SCOPES, torch_scopes

_COLUMNS = ("prefix", "name", "op", "dtype", "rule", "note", "because", "entry", "inputs", "outputs", "variables")
LOW_SIDE, HIGH_SIDE, OTHER_SIDE = 0, 1, 2
_MAX_PORTS = 8
"""Maximum number of inputs or outputs drawn among the ops; if there are more, they are put in a scope."""
LEAD = "Ops from input to output, in scopes. Select an op to see why it has its type, or a scope to expand it."


def graph(
    report: ReportData,
    view: View | None = None,
    changes: Mapping[int, Sequence[Change]] = {},
    added: Collection[int] = (),
) -> Figure:
    """Return the graph of a report as a figure; docs/how-to/look.md describes the columns of its data.

    Args:
        report: the report of the model.
        view: the view of the model, for modules and FLOPs; without it, scopes come from the names of ops.
        changes: the changes of each vertex: rows first, then inputs and outputs.
        added: the positions of the new Casts.
    """
    data = _Graph(report, view, changes, added).data()
    off = element("p", _WITHOUT_SCRIPT, class_="script-off")
    return Figure("graph", "Graph", LEAD, element("div", off, class_="graph", id="graph-board"), data)


def _side_of(row: Row) -> int:
    if row.op in ELEMENTLESS:
        return OTHER_SIDE
    return HIGH_SIDE if row.variables and row.dtype not in LOW else _side_of_type(row.dtype)


def _side_of_type(dtype: str) -> int:
    return LOW_SIDE if dtype in LOW else HIGH_SIDE if dtype in FLOATING else OTHER_SIDE


_WITHOUT_SCRIPT = "The graph needs JavaScript, which is turned off; the rest of the page works without it."


@dataclass
class _Graph:
    """The data of a graph. Its vertices are rows, then inputs and outputs of the model."""

    report: ReportData
    view: View | None
    changes: Mapping[int, Sequence[Change]]
    added: Collection[int]
    texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Deduplicated texts with their numbers."""

    def __post_init__(self) -> None:
        self.ports = (*self.report.inputs, *self.report.outputs)
        self.first_input = len(self.report.rows)  # among the vertices
        self.first_output = self.first_input + len(self.report.inputs)
        self.number = self.first_output + len(self.report.outputs)

    @cached_property
    def reads(self) -> list[list[int]]:
        """Source vertices of the inputs of each vertex; NO_ROW for weights and omitted inputs."""
        reads = [list(map(self._vertex, row.reads)) for row in self.report.rows]
        reads += [[] for _ in self.report.inputs]
        return [*reads, *([self._vertex(port.after)] for port in self.report.outputs)]

    def _vertex(self, source: int) -> int:
        return self.first_input + FIRST_INPUT - source if source <= FIRST_INPUT else source

    def data(self) -> dict[str, object]:
        drawn = [at for at, row in enumerate(self.report.rows) if row.op != "Constant" and not _is_copy(row)]
        order = [*range(self.first_input, self.first_output), *drawn, *range(self.first_output, self.number)]
        paths = paths_of(self.report, [module_of(op.node) for op in self.view.ops] if self.view is not None else ())
        for ports, name in ((self.report.inputs, "inputs"), (self.report.outputs, "outputs")):
            paths += [(name,) if len(ports) > _MAX_PORTS else ()] * len(ports)
        tree = tree_of(paths, order, self.labels)
        edges = ((producer, at) for at, reads in enumerate(self.reads) for producer in reads if producer != NO_ROW)
        places = layers_of(tree, edges, order)
        cells = list(self._cells())
        rules: dict[str, object] = {}
        for rule in dict.fromkeys(row.rule for row in self.report.rows if row.rule):
            reason = reasons.REASONS.get(rule)
            rules[plain(rule)] = {"words": plain(reasons.words(rule)), "page": reason is not None and reason.has_page}
        ends = 2 * self.number
        data: dict[str, object] = {
            "rows": len(self.report.rows),
            "inputs": len(self.report.inputs),
            "outputs": len(self.report.outputs),
            "ops": {name: [vertex[at] for vertex in cells] for at, name in enumerate(_COLUMNS)}
            | {
                "side": [*map(_side_of, self.report.rows), *(_side_of_type(port.dtype) for port in self.ports)],
                "scope": tree.home,
                "place": places[:ends],
                "reads": self.reads,
            },
            "scopes": {"name": [plain(name) for name in tree.names], "parent": tree.parents, "place": places[ends:]},
            "casts": list(self._casts()),
            "rules": rules,
        }
        if self.view is not None:
            data["flops"] = [round(flops(self.view, op)) for op in self.view.ops]
        if self.changes:
            data |= {"inventory": self.report.inventory, "changes": self._change_columns()}
        return data | {"words": list(self.texts)}

    def _text_index(self, text: str) -> int:
        return self.texts.setdefault(plain(text), len(self.texts))

    def _change_columns(self) -> dict[str, list[int]]:
        changes = [(vertex, change) for vertex, group in sorted(self.changes.items()) for change in group]
        columns = {"vertex": [vertex for vertex, _ in changes]}
        for column, name in (("kind", "kind"), ("of", "variable"), ("before", "before"), ("after", "after")):
            columns[column] = [self._text_index(getattr(change, name)) for _, change in changes]
        return columns

    def labels(self, vertex: int) -> str:
        """Return the name of a vertex, without its scopes."""
        if vertex < self.first_input:
            return plain(self.report.rows[vertex].path).rpartition("/")[2] or self.report.rows[vertex].op
        return plain(self.ports[vertex - self.first_input].name)

    def _cells(self) -> Iterator[tuple[int | str, ...]]:
        """Yield the columns of each vertex, with numbers for texts; a name is split into a prefix and the rest."""
        for row in self.report.rows:
            prefix, slash, rest = plain(row.path).rpartition("/")
            entry = f"{row.color}: {row.source}{': ' + row.reason if row.reason else ''}" if row.color else ""
            types = [f"{name} {dtype}" for name, dtype in row.variables.items()]
            mixed = len(set(row.variables.values())) > 1
            yield (
                self._text_index(prefix + slash),
                rest,
                *map(self._text_index, (row.op, row.dtype, row.rule or "", row.note)),
                row.because_row,
                *map(self._text_index, (entry, ", ".join(row.inputs), ", ".join(row.outputs))),
                self._text_index(plain(", ".join(types))) if mixed else 0,
            )
        for kind, ports in (("Input", self.report.inputs), ("Output", self.report.outputs)):
            for port in ports:
                dtype = self._text_index(port.dtype)
                ends = (dtype, 0) if kind == "Output" else (0, dtype)
                yield 0, plain(port.name), self._text_index(kind), dtype, 0, 0, NO_ROW, 0, *ends, 0

    # -- casts -------------------------------------------------------------------------------------

    def _casts(self) -> Iterator[dict[str, object]]:
        """Yield the Casts in the result with their edges: source and reader, alternating.

        Casts read only by other Casts do not have edges.
        """
        readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, reads in enumerate(self.reads):
            for slot, producer in enumerate(reads):
                readers[producer].append((at, slot))
        for at, cast in enumerate(self.report.casts):
            if cast.origin == "folded" or not {cast.from_, cast.to} <= FLOATING:
                continue
            producer = self._vertex(cast.after)
            edges: dict[int, None] = {}
            if producer != NO_ROW and self._written_type(producer, cast.slot) != cast.to:
                edges = dict.fromkeys(at for at, slot in readers[producer] if cast.to in self._read_types(at, slot))
            yield {
                "value": plain(cast.scope + cast.value),
                "from": plain(cast.from_),
                "to": plain(cast.to),
                "origin": plain(cast.origin),
                "why": self._text_index(plain(cast.reason)),
                "readers": cast.readers,
                "edges": [end for reader in edges for end in (producer, reader)],
                **({"sign": "+"} if at in self.added else {}),
                **({"bytes": size} if (size := _bytes_moved(cast)) is not None else {}),
            }

    def _read_types(self, at: int, slot: int) -> tuple[str, ...]:
        if at >= self.first_output:
            return (self.report.outputs[at - self.first_output].dtype,)
        row = self.report.rows[at]
        return row.inputs[slot : slot + 1] or row.outputs

    def _written_type(self, producer: int, slot: int) -> str:
        if producer >= self.first_input:
            return self.report.inputs[producer - self.first_input].dtype
        outputs = self.report.rows[producer].outputs
        return outputs[slot] if slot < len(outputs) else ""


def _bytes_moved(cast: CastRow) -> int | None:
    written, read = DTYPES[cast.to].nbytes(1), DTYPES[cast.from_].nbytes(1)
    return cast.size + cast.size * read // written if cast.size is not None and written else None


def _is_copy(row: Row) -> bool:
    """True for copies and casts between floats; `Row.reads` looks through these."""
    return row.op == "Identity" or (row.op in CASTS and {*row.inputs[:1], *row.outputs[:1]} <= FLOATING)


# -- scopes ----------------------------------------------------------------------------------------------------


ROOT = 0
_MAX_DEPTH = 16
"""Maximum number of levels; deeper levels are merged into the last."""
MAX_PARTS = 96
"""Maximum number of parts in a scope; larger scopes are split into groups."""

_MAX_LABEL = 24
"""Maximum length of a name in the label of a group."""

Path = tuple[str, ...]
Label = Callable[[int], str]
"""Name of a vertex, without its scopes."""


@dataclass(slots=True)
class Tree:
    """Scopes by number, with parents first; `home` is the scope of each vertex of the graph."""

    names: list[str] = field(default_factory=lambda: [""])
    parents: list[int] = field(default_factory=lambda: [-1])
    home: list[int] = field(default_factory=list)

    def add(self, name: str, parent: int) -> int:
        self.names.append(name)
        self.parents.append(parent)
        return len(self.names) - 1

    def parts(self, order: Sequence[int]) -> dict[int, list[int]]:
        """Return the parts of each scope, in the order of their first vertices."""
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

    A row without a scope joins its first computed input or, if it only reads weights, its first reader.
    """
    has_modules = any(modules)
    slashed = any("/" in row.name for row in report.rows if row.named)
    paths: list[Path] = []
    unscoped: list[int] = []
    for at, row in enumerate(report.rows):
        body = tuple(part for part in row.scope.split("/") if part)
        inner = tuple(part for part in modules[at].split("/") if part) if has_modules else _named(row)
        if not inner and (has_modules or not row.named or (slashed and "/" not in row.name)):
            unscoped.append(at)
            source = next((read for read in row.reads if 0 <= read < at and report.rows[read].scope == row.scope), None)
            inner = paths[source][len(body) :] if source is not None else ()
        path = body + inner
        paths.append(path if len(path) <= _MAX_DEPTH else (*path[: _MAX_DEPTH - 1], "/".join(path[_MAX_DEPTH - 1 :])))
    readers: dict[int, int] = {}
    for at, row in enumerate(report.rows):
        for read in row.reads:
            readers.setdefault(read, at)
    for at in reversed(unscoped):
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

    A scope with one part is replaced by the part. A scope with more than `MAX_PARTS` parts is split into groups of
    consecutive parts.
    """
    tree = Tree(home=[ROOT] * len(paths))
    pending: list[tuple[int, int, Sequence[int]]] = [(ROOT, 0, order)]
    while pending:
        scope, depth, contents = pending.pop()
        named: dict[str | int, list[int]] = {}
        for vertex in contents:
            named.setdefault(paths[vertex][depth] if len(paths[vertex]) > depth else vertex, []).append(vertex)
        level = [(scope, list(named.items()))]
        while level:
            at, parts = level.pop()
            if len(parts) > MAX_PARTS:
                for chunk in _chunks(parts):
                    ends = (name if isinstance(name, str) else label(name) for name, _ in (chunk[0], chunk[-1]))
                    level.append((tree.add(" to ".join(cut(end, _MAX_LABEL) for end in ends), at), chunk))
                continue
            for _, members in parts:
                if len(members) == 1:
                    tree.home[members[0]] = at
                else:
                    inner = [paths[vertex] for vertex in members]
                    shared = sum(
                        1 for _ in takewhile(lambda ends: ends[0] == ends[1], zip(min(inner), max(inner), strict=False))
                    )
                    pending.append((tree.add("/".join(inner[0][depth:shared]), at), shared, members))
    return tree


_Parts = list[tuple[str | int, list[int]]]
"""Parts of a scope with their vertices: scopes by name, and vertices by number."""


def _chunks(parts: _Parts) -> list[_Parts]:
    groups = min(MAX_PARTS // 2, -(-len(parts) // (MAX_PARTS // 2)))
    ends = [len(parts) * i // groups for i in range(groups + 1)]
    return [parts[start:end] for start, end in pairwise(ends)]


Part = int
"""The number of a vertex, or the number of a scope plus the number of vertices."""
Edges = Iterable[tuple[int, int]]


def layers_of(tree: Tree, edges: Edges, order: Sequence[int]) -> list[int]:
    """Return the layer and the position of each part as two numbers, vertices before scopes; -1 for undrawn parts."""
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
    meetings: dict[tuple[int, int], tuple[int, int, int]] = {}
    inner: dict[int, dict[Part, dict[Part, None]]] = defaultdict(lambda: defaultdict(dict))
    number = len(tree.home)
    for producer, reader in edges:
        if producer not in drawn or reader not in drawn:
            continue
        ends = tree.home[producer], tree.home[reader]
        if ends not in meetings:
            meetings[ends] = _meeting(tree, depth, *ends)
        scope, first, second = meetings[ends]
        source, target = number + first if first >= 0 else producer, number + second if second >= 0 else reader
        inner[scope][source][target] = None
    return inner


def _meeting(tree: Tree, depth: Sequence[int], first: int, second: int) -> tuple[int, int, int]:
    """Return the innermost scope around two scopes, and its parts around each; -1 for the scope itself."""
    below_first = below_second = -1
    while first != second:
        if depth[first] >= depth[second]:
            below_first, first = first, tree.parents[first]
        else:
            below_second, second = second, tree.parents[second]
    return first, below_first, below_second


def _layered(parts: Sequence[Part], readers: Mapping[Part, Iterable[Part]]) -> list[list[Part]]:
    """Return the parts by layer: each below its sources, and a part without sources directly above its readers."""
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
    """Return the parts in topological order; scopes on a cycle keep their original order."""
    place = {part: i for i, part in enumerate(parts)}
    graph: nx.DiGraph[Part] = nx.DiGraph((part, reader) for part in parts for reader in readers.get(part, ()))
    graph.add_nodes_from(parts)
    groups = nx.condensation(graph)
    members = {group: sorted(contents, key=place.__getitem__) for group, contents in groups.nodes(data="members")}
    ordered = nx.lexicographical_topological_sort(groups, key=lambda group: place[members[group][0]])
    return [part for group in ordered for part in members[group]]


# -- facts ------------------------------------------------------------------------------------------------------


_MAX_METADATA = 4096
"""Maximum length of metadata to read; longer texts do not name the modules of an op."""
_MAX_INPUTS = 4
"""Maximum number of inputs to list."""


def input_shapes(view: View) -> str:
    """Format the input shapes assumed for FLOPs: "with x 128×3×224×224"; free dimensions are 128."""
    inputs = [v for v in view.scopes[MAIN].inputs if view.values[v].tensor is None]
    shapes = [f"{view.value_name(v)} {'×'.join(map(str, shape(view, v))) or 'scalar'}" for v in inputs[:_MAX_INPUTS]]
    more = [f"{len(inputs) - _MAX_INPUTS} more"] if len(inputs) > _MAX_INPUTS else []
    return "with " + ", ".join(shapes + more) if shapes else ""


def module_of(node: NodeProto) -> str:
    """Return the module of a node, as in "encoder/layers.0", from the metadata of PyTorch's exporter, or ""."""
    metadata = {entry.key: entry.value for entry in node.metadata_props if len(entry.value) <= _MAX_METADATA}
    names = torch_scopes(metadata.get(TORCH_SCOPES, ""))
    parts: list[str] = []
    before = ""
    for name in filter(None, names[:-1]):  # the last name is the op's own
        parts.append(name.removeprefix(f"{before}."))
        before = name
    return "/".join(parts)
