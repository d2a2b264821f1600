"""Chains of reasons for the types of ops, each back to its root op."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_rewrite.decide import reasons
from amp_rewrite.errors import PatternError, advice
from amp_rewrite.reports.render import plain, shortened
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import FIRST_INPUT, LOW, NO_ROW, PortRow, ReportData, Row

_SHIFTED = re.compile(r"_shifted_(-?\d+)(_\d+)*$")
"""Suffix of the names of values scaled by a power of two."""

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View


@dataclass(frozen=True, slots=True)
class Chain:
    """An op and the chain of causes of its type, with the root last. `asked`: the name in the query.

    `alike`: the paths of the other ops selected by that name, with the same reasons. `input`: the model input of that
    name, if its readers are explained; `rows` is empty if it has none. `shift`: the exponent k if the op scales its
    results by 2⁻ᵏ.
    """

    asked: str
    rows: tuple[Row, ...]
    alike: tuple[str, ...] = ()
    input: PortRow | None = None
    shift: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Result):
    """Chains of reasons, in the order of the names.

    Attributes:
        model: name of the model.
        chains: one per op, or per group of ops with the same reasons.
        inventory: True if no type is decided yet.
    """

    model: str
    chains: tuple[Chain, ...]
    inventory: bool = False

    @property
    def brief(self) -> str:
        """Each op with its type and its rule."""
        firsts = [chain.rows[0] for chain in self.chains if chain.rows]
        heads = [f"{row.path} {row.dtype}{f' ({row.rule})' if row.rule else ''}" for row in firsts]
        return plain(f"{self.model}: {shortened(heads) or 'no op'}")

    def text(self) -> str:
        """Return the reasons, step by step. Ends with a newline."""
        parts, inputs = [], set()
        for chain in self.chains:
            lines = []
            if chain.input is not None and chain.input not in inputs:
                inputs.add(chain.input)
                readers = "read by" if chain.rows else "which no op reads"
                lines.append(f"{chain.input.name} is an input of the model, {chain.input.dtype}, {readers}")
            for i, row in enumerate(chain.rows):
                if self.inventory:
                    state = f"is {_types(row)} in the model; its new type is not decided yet"
                    lines.append(f"{row.path} ({row.op}) {state}")
                else:
                    lines += _step(row, first=not i)
                if chain.shift is not None and not i:
                    lines.append(f"    shifted: its results are scaled by 2^{-chain.shift}")
                if chain.alike and not i:
                    lines.append(f"    and {len(chain.alike)} more like it: {shortened(chain.alike)}")
            parts.append("\n".join(map(plain, lines)) + "\n")
        return "\n".join(parts)

    def to_json(self) -> str:
        """Return the chains as JSON, the steps of each in order. Ends with a newline."""
        chains = [
            {"asked": chain.asked, "alike": chain.alike, "steps": [_encoded(row) for row in chain.rows]}
            | ({} if chain.input is None else {"input": {"name": chain.input.name, "dtype": chain.input.dtype}})
            | ({} if chain.shift is None else {"shift": chain.shift})
            for chain in self.chains
        ]
        return json.dumps({"schema": 1, "model": self.model, "chains": chains}, indent=1) + "\n"


def explained(report: ReportData, names: Sequence[str], view: View | None = None) -> Explanation:
    """Return the reasons for the types of ops, step by step.

    Each name is the name or path (scope and name) of an op, "#12" for the thirteenth row, an op type, a pattern, or an
    input of the model, to explain its readers. With the `view` of the report's model, it can also be another value.
    Raise PatternError, with suggestions, if a name is unknown or ambiguous, or if no name is given.
    """
    if not names:
        raise PatternError(f"{report.model.name}: nothing to explain; name an op, an op type or a value")
    producers: dict[str, int] = {}
    shifts: dict[int, int] = {}
    if view is not None:
        for value in reversed(view.values):  # reversed: if several bodies use a name, the first of them counts
            producers[value.name] = NO_ROW if value.producer is None else int(value.producer)
        for op in view.ops if report.shifts else ():
            shifted = (_SHIFTED.search(view.value_name(value)) for value in op.results)
            if (match := next(filter(None, shifted), None)) is not None:
                shifts[int(op.id)] = int(match[1])
    chains = tuple(chain for name in names for chain in _chains(report, name, producers, shifts))
    return Explanation(report.model.name, chains, report.inventory)


def _chains(report: ReportData, name: str, producers: Mapping[str, int], shifts: Mapping[int, int]) -> Iterator[Chain]:
    ops, port = _rows_of(report, name, producers)
    if port is not None and not ops:
        yield Chain(name, (), input=port)
    groups: dict[object, list[int]] = {}
    for op in ops:
        row = report.rows[op]
        groups.setdefault((row.dtype, row.rule, row.color, row.source, row.reason, shifts.get(op)), []).append(op)
    for first, *others in groups.values():
        steps: dict[int, Row] = {}
        at = first
        while at != NO_ROW and at not in steps:
            steps[at] = report.rows[at]
            at = report.rows[at].because_row
        alike = tuple(report.rows[op].path for op in others)
        yield Chain(name, tuple(steps.values()), alike, port, shifts.get(first))


def _step(row: Row, *, first: bool) -> list[str]:
    head = f"{'' if first else 'because '}{plain(row.path)} ({row.op}) is {_types(row)}"
    if row.rule is None:
        return [f"{head} in the model already" if row.dtype in LOW else f"{head}: it does not compute in float32"]
    listed = reasons.UNLISTED if row.color == reasons.UNLISTED else f"on the {row.color} list"
    words = reasons.words(row.rule)
    redundant = (row.rule == reasons.UNPAINTED and row.note) or words == listed  # the note or the last line says it
    facts = ["" if redundant else words, plain(row.note).removeprefix(f"{row.color}: ")]
    lines = [f"{head}: {row.rule}", *(f"    {fact}" for fact in [": ".join(filter(None, facts))] if fact)]
    reason = reasons.REASONS.get(row.rule)
    if reason is not None and reason.has_page:
        lines.append(f"    more: amp-rewrite explain {row.rule}, or {reason.docs}")
    if row.color:
        source = f" ({plain(row.source)})" if row.source else ""
        lines.append(f"    {listed}{source}{': ' + plain(row.reason) if row.reason else ''}")
    return lines


def _encoded(row: Row) -> dict[str, object]:
    fields = ("op", "dtype", "rule", "note", "color", "source", "reason")
    return {"name": row.path, **{name: getattr(row, name) for name in fields}}


def _types(row: Row) -> str:
    if len(set(row.variables.values())) < 2:
        return row.dtype
    return f"{row.dtype} ({', '.join(f'{name} {dtype}' for name, dtype in row.variables.items())})"


def _rows_of(report: ReportData, name: str, producers: Mapping[str, int]) -> tuple[Sequence[int], PortRow | None]:
    """Return the rows selected by a name, or the model input of that name and its readers; ops take precedence."""
    rows = report.positions(name)
    namesakes = [i for i in rows if name in (report.rows[i].name, report.rows[i].path)]
    if len(namesakes) > 1:
        choices = " or ".join(f"#{i} ({report.rows[i].path})" for i in namesakes)
        raise PatternError(f"{report.model.name}: {len(namesakes)} ops are named {name!r}; explain {choices}")
    if rows:
        return rows, None
    inputs = {FIRST_INPUT - i: port for i, port in enumerate(report.inputs)}
    sources = dict(producers) | {port.name: port.after for port in report.outputs}
    sources |= {port.name: source for source, port in inputs.items()}
    source = sources.get(name)
    if source is None:
        candidates = dict.fromkeys((*(row.name for row in report.rows), *sources, *(row.op for row in report.rows)))
        hint = advice(name, candidates, f"`amp-rewrite report {report.model.name} -v` lists the names", limit=3)
        raise PatternError(f"{report.model.name}: no op{' or value' if producers else ''} is named {name!r}; {hint}")
    if source == NO_ROW:
        raise PatternError(f"{report.model.name}: {name!r} is a weight; explain an op that reads it")
    if source in inputs:
        return [i for i, row in enumerate(report.rows) if source in row.reads], inputs[source]
    return (source,), None
