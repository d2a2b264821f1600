"""Graph of a report as a figure: ops in folded scopes, Casts on edges, reasons on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from amp_rewrite.decide import reasons, sizes
from amp_rewrite.ir.op_classes import CASTS, ELEMENTLESS
from amp_rewrite.reports.page.page import Figure, element
from amp_rewrite.reports.page.scopes import Path, layers_of, module_of, paths_of, tree_of
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.rows import (
    DTYPES,
    FIRST_INPUT,
    FLOATING,
    LOW,
    NO_ROW,
    CastRow,
    Change,
    PortRow,
    ReportData,
    Row,
)

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View

_COLUMNS = ("prefix", "name", "op", "dtype", "rule", "note", "because", "entry", "inputs", "outputs", "variables")
LOW_SIDE, HIGH_SIDE, OTHER_SIDE = 0, 1, 2
_FEW_PORTS = 8
"""Inputs or outputs of a model that stand among its ops; more of them are put in a scope."""
LEAD = "Ops from input to output, in folded scopes. Choose an op to see why it has its type, and a scope to unfold it."


def graph(
    report: ReportData,
    view: View | None = None,
    changes: Mapping[int, Sequence[Change]] = {},
    added: Collection[int] = (),
) -> Figure:
    """Return the graph of a report as a figure, in columns: docs/how-to/look.md names them.

    Args:
        report: of the model.
        view: of the model, for modules and operations; without it, names of ops alone tell scopes.
        changes: what changed about a vertex; rows first, then inputs and outputs.
        added: positions of the Casts that are new.
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


_WITHOUT_SCRIPT = "The graph needs JavaScript, which is off here; the other parts of the page do not."


@dataclass(frozen=True)
class _Graph:
    """The vertices of a graph: rows, then inputs and outputs of the model."""

    report: ReportData
    view: View | None
    changes: Mapping[int, Sequence[Change]]
    added: Collection[int]
    words: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Texts, each held once and named by its number."""

    @cached_property
    def first_input(self) -> int:
        """Number of the first input among the vertices."""
        return len(self.report.rows)

    @cached_property
    def first_output(self) -> int:
        """Number of the first output among the vertices."""
        return self.first_input + len(self.report.inputs)

    @cached_property
    def number(self) -> int:
        """Number of vertices."""
        return self.first_output + len(self.report.outputs)

    @cached_property
    def reads(self) -> list[list[int]]:
        """Vertices behind each input of each vertex; NO_ROW for weights and missing inputs."""
        reads = [list(map(self._vertex, row.reads)) for row in self.report.rows]
        reads += [[] for _ in self.report.inputs]
        return [*reads, *([self._vertex(port.after)] for port in self.report.outputs)]

    def _vertex(self, source: int) -> int:
        return self.first_input + FIRST_INPUT - source if source <= FIRST_INPUT else source

    @cached_property
    def order(self) -> list[int]:
        """Drawn vertices, each after its inputs: inputs, rows, outputs."""
        drawn = [at for at, row in enumerate(self.report.rows) if row.op != "Constant" and not _passes(row)]
        return [*range(self.first_input, self.first_output), *drawn, *range(self.first_output, self.number)]

    @cached_property
    def paths(self) -> list[Path]:
        """Scopes of each vertex."""
        paths = paths_of(self.report, [module_of(op.node) for op in self.view.ops] if self.view is not None else ())
        for ports, name in ((self.report.inputs, "inputs"), (self.report.outputs, "outputs")):
            paths += [(name,) if len(ports) > _FEW_PORTS else ()] * len(ports)
        return paths

    def data(self) -> dict[str, object]:
        """Return the data of the graph."""
        tree = tree_of(self.paths, self.order, self.labels)
        edges = ((producer, at) for at, reads in enumerate(self.reads) for producer in reads if producer != NO_ROW)
        places = layers_of(tree, edges, self.order)
        cells = [*self._row_cells(), *self._port_cells()]  # texts by their number; a name is a prefix and the rest
        rules: dict[str, object] = {}
        for rule in dict.fromkeys(row.rule for row in self.report.rows if row.rule):
            known = reasons.reason_of(rule)
            rules[plain(rule)] = {"words": plain(reasons.words(rule)), "page": known is not None and known.has_page}
        ends = 2 * self.number
        data: dict[str, object] = {
            "rows": len(self.report.rows),
            "inputs": len(self.report.inputs),
            "outputs": len(self.report.outputs),
            "ops": {name: [vertex[at] for vertex in cells] for at, name in enumerate(_COLUMNS)}
            | {
                "side": [*map(_side_of, self.report.rows), *(_side_of_type(port.dtype) for port in self._all_ports)],
                "scope": tree.home,
                "place": places[:ends],
                "reads": self.reads,
            },
            "scopes": {"name": [plain(name) for name in tree.names], "parent": tree.parents, "place": places[ends:]},
            "casts": list(self._casts()),
            "rules": rules,
        }
        if self.view is not None:
            data["flops"] = [round(sizes.flops(self.view, op)) for op in self.view.ops]
        if self.changes:
            data |= {"inventory": self.report.inventory, "changes": self._changed()}
        return data | {"words": list(self.words)}

    def _number(self, text: str) -> int:
        return self.words.setdefault(plain(text), len(self.words))

    def _changed(self) -> dict[str, list[int]]:
        changes = [(vertex, change) for vertex, group in sorted(self.changes.items()) for change in group]
        columns = {"vertex": [vertex for vertex, _ in changes]}
        for column, name in (("kind", "kind"), ("of", "variable"), ("before", "before"), ("after", "after")):
            columns[column] = [self._number(getattr(change, name)) for _, change in changes]
        return columns

    def labels(self, vertex: int) -> str:
        """Return the name of a vertex, without its scopes."""
        if vertex < self.first_input:
            return plain(self.report.rows[vertex].path).rpartition("/")[2] or self.report.rows[vertex].op
        return plain(self._all_ports[vertex - self.first_input].name)

    def _row_cells(self) -> Iterator[tuple[int | str, ...]]:
        for row in self.report.rows:
            prefix, slash, rest = plain(row.path).rpartition("/")
            entry = f"{row.color}: {row.source}{': ' + row.reason if row.reason else ''}" if row.color else ""
            stated = [f"{name} {dtype}" for name, dtype in row.variables.items()]
            mixed = len(set(row.variables.values())) > 1
            yield (
                self._number(prefix + slash),
                rest,
                *map(self._number, (row.op, row.dtype, row.rule or "", row.note)),
                row.because_row,
                *map(self._number, (entry, ", ".join(row.inputs), ", ".join(row.outputs))),
                self._number(plain(", ".join(stated))) if mixed else 0,
            )

    def _port_cells(self) -> Iterator[tuple[int | str, ...]]:
        for kind, ports in (("Input", self.report.inputs), ("Output", self.report.outputs)):
            for port in ports:
                dtype = self._number(port.dtype)
                ends = (dtype, 0) if kind == "Output" else (0, dtype)
                yield 0, plain(port.name), self._number(kind), dtype, 0, 0, NO_ROW, 0, *ends, 0

    @property
    def _all_ports(self) -> tuple[PortRow, ...]:
        return (*self.report.inputs, *self.report.outputs)

    # -- casts -------------------------------------------------------------------------------------

    def _casts(self) -> Iterator[dict[str, object]]:
        """Yield the Casts in the result, each with its edges: vertex and reader, in turn.

        A Cast that another one reads stands on none.
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
            if producer != NO_ROW and self._written(producer, cast.slot) != cast.to:
                edges = dict.fromkeys(at for at, slot in readers[producer] if cast.to in self._read(at, slot))
            yield {
                "value": plain(cast.scope + cast.value),
                "from": plain(cast.from_),
                "to": plain(cast.to),
                "origin": plain(cast.origin),
                "why": self._number(plain(cast.reason)),
                "readers": cast.readers,
                "edges": [end for reader in edges for end in (producer, reader)],
                **({"sign": "+"} if at in self.added else {}),
                **({"bytes": moved} if (moved := _moved(cast)) is not None else {}),
            }

    def _read(self, at: int, slot: int) -> tuple[str, ...]:
        if at >= self.first_output:
            return (self.report.outputs[at - self.first_output].dtype,)
        row = self.report.rows[at]
        return row.inputs[slot : slot + 1] or row.outputs

    def _written(self, producer: int, slot: int) -> str:
        if producer >= self.first_input:
            return self.report.inputs[producer - self.first_input].dtype
        outputs = self.report.rows[producer].outputs
        return outputs[slot] if slot < len(outputs) else ""


def _moved(cast: CastRow) -> int | None:
    written, read = DTYPES[cast.to].nbytes(1), DTYPES[cast.from_].nbytes(1)
    return cast.size + cast.size * read // written if cast.size is not None and written else None


def _passes(row: Row) -> bool:
    """True for copies and casts, which `Row.reads` looks through."""
    return row.op == "Identity" or (row.op in CASTS and {*row.inputs[:1], *row.outputs[:1]} <= FLOATING)
