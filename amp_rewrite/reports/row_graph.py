"""A report as a graph: what each row reads, past constants, copies and casts between floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.rows import FIRST_INPUT, FLOATING, NO_ROW, PortRow, Row


def _passed_over(row: Row) -> bool:
    """True for a constant, a copy, a cast between floats and one to the type that it reads."""
    if row.op in ("Constant", "Identity"):
        return True
    if row.op not in CASTS or not row.inputs or not row.outputs:
        return False
    return row.inputs[0] == row.outputs[0] or {row.inputs[0], row.outputs[0]} <= FLOATING


@dataclass(frozen=True)
class RowGraph:
    """A report as a graph of the ops that count. Sources are rows, `NO_ROW`, or inputs as in `PortRow.after`."""

    report: Report

    @cached_property
    def _sources(self) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
        """By row the sources of its reads, and that of its result: of a row that is passed over, what it reads."""
        rows = self.report.rows
        fed: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, port in enumerate(self.report.inputs):
            for at, place in zip(port.reads[::2], port.reads[1::2], strict=True):
                fed[at].append((place, FIRST_INPUT - number))
        source: list[int] = []
        reads: list[Sequence[int]] = []
        for i, row in enumerate(rows):
            own = [source[read] if read != NO_ROW else NO_ROW for read in row.reads]
            for place, number in fed.get(i, ()):
                if place < _most_reads(row):
                    own += [NO_ROW] * (place + 1 - len(own))
                    own[place] = number
            reads.append(own)
            source.append((own[0] if own else NO_ROW) if _passed_over(row) else i)
        return reads, source

    @property
    def reads(self) -> Sequence[Sequence[int]]:
        """By row the sources of its reads."""
        return self._sources[0]

    def source(self, after: int) -> int:
        """Return the source behind a position in `CastRow.after` or `PortRow.after`."""
        return self._sources[1][after] if after >= 0 else after

    @cached_property
    def outputs(self) -> Sequence[PortRow]:
        return self.report.outputs

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Rows of ops. A report of version 1 does not tell the sources of its outputs."""
        rows, reads = self.report.rows, self.reads
        counting = [not _passed_over(row) for row in rows]
        if not self.outputs:
            return tuple(i for i, counts in enumerate(counting) if counts)
        alive = [False] * len(rows)
        for port in self.outputs:
            if (source := self.source(port.after)) >= 0:
                alive[source] = True
        for i in range(len(rows) - 1, -1, -1):
            if alive[i]:
                for read in reads[i]:
                    if read >= 0:
                        alive[read] = True
        return tuple(i for i, counts in enumerate(counting) if counts and alive[i])

    @cached_property
    def readers(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Readers of each row among live rows: position in the reads, and row."""
        readers: list[list[tuple[int, int]]] = [[] for _ in self.report.rows]
        for i in self.live:
            for place, read in enumerate(self.reads[i]):
                if read >= 0:
                    readers[read].append((place, i))
        return readers


def _most_reads(row: Row) -> int:
    return len(row.inputs) + 2 * len(row.outputs) + 2
