"""The graph of a report as a figure: ops in folded scopes, Casts on edges, reasons on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from amp_rewrite.decide import reasons
from amp_rewrite.ir.op_classes import CASTS, ELEMENTLESS
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.page.scopes import Path, layers_of, paths_of, tree_of
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.rows import DTYPES, FIRST_INPUT, FLOATING, LOW, NO_ROW, CastRow, PortRow, ReportData, Row

if TYPE_CHECKING:
    from amp_rewrite.reports.op_changes import Change
    from amp_rewrite.reports.page.facts import RowFacts

_COLUMNS = ("prefix", "name", "op", "dtype", "rule", "note", "because", "entry", "inputs", "outputs", "variables")
LOW_SIDE, HIGH_SIDE, OTHER_SIDE = 0, 1, 2
_FEW_PORTS = 8
"""Inputs or outputs of a model that stand among its ops; more of them are put in a scope."""
LEAD = "Ops from input to output, in folded scopes. Choose an op to see why it has its type, and a scope to unfold it."


def graph(report: ReportData, facts: RowFacts | None = None) -> Figure:
    """Return the graph of a report as a figure. Without facts of the model, names of ops alone tell scopes."""
    words = Words()
    drawn = graph_data(report, facts, words)
    rules = rules_of([report])
    return Figure("graph", "Graph", LEAD, board("graph"), {**drawn, "rules": rules, "words": list(words.known)})


def graph_data(
    report: ReportData,
    facts: RowFacts | None,
    words: Words,
    comparison: GraphDifference | None = None,
) -> dict[str, object]:
    """Return the data of a graph, in columns: docs/how-to/look.md names them.

    Its texts are added to `words`.
    """
    return _Graph(report, facts, words, comparison).data()


def _side_of(row: Row) -> int:
    if row.op in ELEMENTLESS:
        return OTHER_SIDE
    return HIGH_SIDE if row.variables and row.dtype not in LOW else _side_of_type(row.dtype)


def _side_of_type(dtype: str) -> int:
    return LOW_SIDE if dtype in LOW else HIGH_SIDE if dtype in FLOATING else OTHER_SIDE


def board(name: str) -> Element:
    """Return the place for the graphs of a figure, filled by the script."""
    off = element("p", _WITHOUT_SCRIPT, class_="script-off")
    return element("div", off, class_="graph", id=f"{name}-board", data_graphs=name)


def rules_of(reports: Iterable[ReportData]) -> dict[str, object]:
    """Return the words of the rules in reports, and whether they have a page."""
    rules: dict[str, object] = {}
    for rule in dict.fromkeys(row.rule for report in reports for row in report.rows if row.rule):
        known = reasons.reason_of(rule)
        rules[plain(rule)] = {"words": plain(reasons.words(rule)), "page": known is not None and known.has_page}
    return rules


_WITHOUT_SCRIPT = "The graph needs JavaScript, which is off here; the other parts of the page do not."


@dataclass(frozen=True, slots=True)
class GraphDifference:
    """Differences that a graph shows, by vertex: rows, then inputs and outputs of the model.

    `links`: the number of each vertex, equal for the same op in other graphs, -1 for one that is not compared; `casts`:
    the sign of each Cast that no other graph has, by its position in the report.
    """

    title: str
    links: Sequence[int]
    changes: Mapping[int, Sequence[Change]]
    casts: Mapping[int, str]


class Words:
    """Texts, each held once and named by its number. The first is empty."""

    def __init__(self) -> None:
        self.known = {"": 0}

    def number(self, text: str) -> int:
        """Return the number of a text, as it is shown."""
        at = self.known.get(text)  # most texts are known, and plain
        return self.known.setdefault(plain(text), len(self.known)) if at is None else at


@dataclass(frozen=True)
class _Graph:
    """The vertices of a graph: rows, then inputs and outputs of the model."""

    report: ReportData
    facts: RowFacts | None
    words: Words
    comparison: GraphDifference | None = None

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
        reads = [list(row.reads) for row in self.report.rows]
        for at, port in enumerate(self.report.inputs, self.first_input):
            for row, slot in zip(port.reads[::2], port.reads[1::2], strict=True):
                missing = min(slot + 1, len(self.report.rows[row].inputs)) - len(reads[row])
                reads[row] += [NO_ROW] * missing
                if slot < len(reads[row]):
                    reads[row][slot] = at
                else:  # beyond the inputs: what a body hands out
                    reads[row].append(at)
        reads += [[] for _ in self.report.inputs]
        for port in self.report.outputs:
            reads.append([self.first_input + FIRST_INPUT - port.after if port.after <= FIRST_INPUT else port.after])
        return reads

    @cached_property
    def order(self) -> list[int]:
        """Drawn vertices, each after its inputs: inputs, rows, outputs.

        Constants have none, and Casts of the model between floats stand on edges, but for those that are read.
        """
        read = {producer for reads in self.reads for producer in reads}
        rows = enumerate(self.report.rows)
        drawn = [at for at, row in rows if row.op != "Constant" and (at in read or not _passes(row))]
        return [*range(self.first_input, self.first_output), *drawn, *range(self.first_output, self.number)]

    @cached_property
    def paths(self) -> list[Path]:
        """Scopes of each vertex."""
        paths = paths_of(self.report, self.facts.modules if self.facts is not None else ())
        for ports, name in ((self.report.inputs, "inputs"), (self.report.outputs, "outputs")):
            paths += [(name,) if len(ports) > _FEW_PORTS else ()] * len(ports)
        return paths

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield the edges: a vertex and a reader."""
        return ((producer, at) for at, reads in enumerate(self.reads) for producer in reads if producer != NO_ROW)

    def data(self) -> dict[str, object]:
        """Return the data of the graph, as `graph_data` does."""
        tree = tree_of(self.paths, self.order, self.labels)
        places = layers_of(tree, self.edges(), self.order)
        ends = 2 * self.number
        data: dict[str, object] = {
            "rows": len(self.report.rows),
            "inputs": len(self.report.inputs),
            "outputs": len(self.report.outputs),
            "ops": self._columns(self.words.number)
            | {
                "side": [*map(_side_of, self.report.rows), *(_side_of_type(port.dtype) for port in self._all_ports)],
                "scope": tree.home,
                "place": places[:ends],
                "reads": self.reads,
            },
            "scopes": {"name": [plain(name) for name in tree.names], "parent": tree.parents, "place": places[ends:]},
            "casts": self._casts(),
        }
        if self.facts is not None:
            data["flops"] = [round(count) for count in self.facts.flops]
        return data | self._compared()

    def _compared(self) -> dict[str, object]:
        """Return title, links and changes of a graph beside others; an empty mapping for a single graph."""
        if self.comparison is None:
            return {}
        changes = [(at, change) for at, group in sorted(self.comparison.changes.items()) for change in group]
        columns: dict[str, list[int]] = {"vertex": [at for at, _ in changes]}
        for column, name in (("kind", "kind"), ("of", "variable"), ("before", "before"), ("after", "after")):
            columns[column] = [self.words.number(getattr(change, name)) for _, change in changes]
        title = {"title": plain(self.comparison.title), "inventory": self.report.inventory}
        return title | {"link": list(self.comparison.links), "changes": columns}

    def labels(self, vertex: int) -> str:
        """Return the name of a vertex, without its scopes."""
        if vertex < self.first_input:
            return plain(self.report.rows[vertex].path).rpartition("/")[2] or self.report.rows[vertex].op
        return plain(self._all_ports[vertex - self.first_input].name)

    def _columns(self, number: Callable[[str], int]) -> dict[str, list[int | str]]:
        """Return the columns of the vertices, texts by their number; a name is a prefix and the rest."""
        cells = [*self._row_cells(number), *self._port_cells(number)]
        return {name: [vertex[at] for vertex in cells] for at, name in enumerate(_COLUMNS)}

    def _row_cells(self, number: Callable[[str], int]) -> Iterator[tuple[int | str, ...]]:
        for row in self.report.rows:
            prefix, slash, rest = plain(row.path).rpartition("/")
            entry = f"{row.color}: {row.source}{': ' + row.reason if row.reason else ''}" if row.color else ""
            stated = [f"{name} {dtype}" for name, dtype in row.variables.items()]
            mixed = len(set(row.variables.values())) > 1
            yield (
                number(prefix + slash),
                rest,
                *map(number, (row.op, row.dtype, row.rule or "", row.note)),
                row.because_row,
                *map(number, (entry, ", ".join(row.inputs), ", ".join(row.outputs))),
                number(plain(", ".join(stated))) if mixed else 0,
            )

    def _port_cells(self, number: Callable[[str], int]) -> Iterator[tuple[int | str, ...]]:
        for kind, ports in (("Input", self.report.inputs), ("Output", self.report.outputs)):
            for port in ports:
                dtype = number(port.dtype)
                ends = (dtype, 0) if kind == "Output" else (0, dtype)
                yield 0, plain(port.name), number(kind), dtype, 0, 0, NO_ROW, 0, *ends, 0

    @property
    def _all_ports(self) -> tuple[PortRow, ...]:
        return (*self.report.inputs, *self.report.outputs)

    # -- casts -------------------------------------------------------------------------------------

    def _casts(self) -> list[dict[str, object]]:
        """Return the Casts in the result, each with the edges that it stands on: vertex and reader, in turn."""
        result: list[dict[str, object]] = []
        signs = self.comparison.casts if self.comparison is not None else {}
        for at, cast in enumerate(self.report.casts):
            if cast.origin == "folded" or not {cast.from_, cast.to} <= FLOATING:
                continue
            moved = _stated_bytes(cast)
            if moved is None and self.facts is not None:
                moved = self.facts.cast_bytes(cast)
            producer = cast.after if cast.after != NO_ROW else self._ports.get(cast.value, NO_ROW)
            edges = [end for reader in self._readers_behind(producer, cast) for end in (producer, reader)]
            shown: dict[str, object] = {
                "value": plain(cast.scope + cast.value),
                "from": plain(cast.from_),
                "to": plain(cast.to),
                "origin": plain(cast.origin),
                "why": self.words.number(plain(cast.reason)),
                "readers": cast.readers,
                "edges": edges,
            }
            shown |= {"sign": signs[at]} if at in signs else {}
            result.append(shown | ({"bytes": moved} if moved is not None else {}))
        return result

    @cached_property
    def _ports(self) -> Mapping[str, int]:
        """Vertices of the inputs by name."""
        return {port.name: at for at, port in enumerate(self.report.inputs, self.first_input)}

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """Readers of each vertex: vertex, and position in its reads."""
        readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, reads in enumerate(self.reads):
            for slot, producer in enumerate(reads):
                if producer != NO_ROW:
                    readers[producer].append((at, slot))
        return readers

    def _readers_behind(self, producer: int, cast: CastRow) -> list[int]:
        if producer == NO_ROW:
            return []
        written = self._written(producer, cast.slot)
        readers = self._readers.get(producer, ())
        return list(dict.fromkeys(at for at, slot in readers if self._passes_through(cast, written, at, slot)))

    def _passes_through(self, cast: CastRow, written: str, at: int, slot: int) -> bool:
        """True if a vertex reads a value that is written in a type through a Cast, as the last one or one before."""
        read, via = self._read(at, slot)
        passed = via.split(", ")
        if cast.to in passed:
            return True
        if at < self.first_input and slot >= len(self.report.rows[at].inputs):  # what a body hands out
            return cast.to != written and cast.to in self.report.rows[at].outputs
        return read == cast.to and (read != written or cast.from_ in passed)

    def _read(self, at: int, slot: int) -> tuple[str, str]:
        if at >= self.first_output:
            port = self.report.outputs[at - self.first_output]
            return port.dtype, port.via
        row = self.report.rows[at]
        return row.inputs[slot] if slot < len(row.inputs) else "", row.via.get(str(slot), "")

    def _written(self, producer: int, slot: int) -> str:
        if producer >= self.first_input:
            return self.report.inputs[producer - self.first_input].dtype
        outputs = self.report.rows[producer].outputs
        return outputs[slot] if slot < len(outputs) else ""


def _stated_bytes(cast: CastRow) -> int | None:
    """Return the bytes that a Cast reads and writes, by the size in its report; None where that is unknown."""
    if cast.size is None or not {cast.from_, cast.to} <= DTYPES.keys():
        return None
    written, read = DTYPES[cast.to].nbytes(1), DTYPES[cast.from_].nbytes(1)
    return cast.size + cast.size * read // written if written else None


def _passes(row: Row) -> bool:
    """True for a Cast between floats: a value passes through it to its readers."""
    return row.op in CASTS and {*row.inputs[:1], *row.outputs[:1]} <= FLOATING
