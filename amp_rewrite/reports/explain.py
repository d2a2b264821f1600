"""The chain of reasons behind the type of an op, back to the op that decides."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from amp_rewrite.decide import reasons
from amp_rewrite.errors import PatternError, advice
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.rows import NO_ROW, ReportData, Row

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View


def makers(view: View) -> Mapping[str, int]:
    """Return the row of the op that makes each value; NO_ROW for inputs and weights."""
    return {
        value.name: NO_ROW if value.producer is None else int(value.producer)
        for value in reversed(view.values)  # of equal names in several bodies the first counts
    }


def explain(report: ReportData, name: str, makers: Mapping[str, int] = MappingProxyType({})) -> str:
    """Return the reasons behind one op, step by step, the root last. Ends with a newline.

    `name`: an op's name, its path (scope and name), "#12" for the thirteenth row, or the name of a value, whose row is
    in `makers`. PatternError, with names to use instead, for an unknown name or one that several ops have.
    """
    at = _find(report, name, makers)
    if report.inventory:
        row = report.rows[at]
        return plain(f"{row.path} ({row.op}) is {_types(row)} in the model; nothing has decided about it yet") + "\n"
    seen: set[int] = set()
    lines: list[str] = []
    while at != NO_ROW and at not in seen:
        lines += _step(report.rows[at], first=not seen)
        seen.add(at)
        at = report.rows[at].because_row
    return "\n".join(map(plain, lines)) + "\n"


def _step(row: Row, *, first: bool) -> list[str]:
    """Return the lines about one op: its types, its rule in words, and its list entry."""
    head = f"{'' if first else 'because '}{plain(row.path)} ({row.op}) is {_types(row)}"
    if row.rule is None:
        return [f"{head}: it computes no float32"]
    lines = [f"{head}: {row.rule}", f"    {reasons.words(row.rule)}{': ' + plain(row.note) if row.note else ''}"]
    if row.rule in reasons.REASONS and reasons.REASONS[row.rule].has_page:
        lines.append(f"    more: amp-rewrite rule {row.rule}, or {reasons.REASONS[row.rule].docs}")
    if row.color:
        lines.append(f"    {row.color}: {plain(row.source)}{': ' + plain(row.reason) if row.reason else ''}")
    return lines


def _types(row: Row) -> str:
    """Return the type, with the variables if they differ: "float16 (T float16, U float32)"."""
    if len(set(row.variables.values())) < 2:
        return row.dtype
    return f"{row.dtype} ({', '.join(f'{name} {dtype}' for name, dtype in row.variables.items())})"


def _find(report: ReportData, name: str, makers: Mapping[str, int]) -> int:
    """Return the position of the row of a name or path; ops take precedence over values."""
    if name.startswith("#") and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < len(report.rows):
        return int(name[1:])
    rows = [i for i, row in enumerate(report.rows) if row.path == name]
    rows = rows or [i for i, row in enumerate(report.rows) if row.name == name]
    if not rows and name in makers:
        if makers[name] == NO_ROW:
            fact = f"no op makes {name!r}, an input or a weight"
            raise PatternError(f"{report.model.name}: {fact}; ask for a reader of it")
        return makers[name]
    if not rows:
        names = dict.fromkeys((*(row.name for row in report.rows), *makers))
        hint = advice(name, names, "report --verbose lists them all", most=3)
        raise PatternError(f"{report.model.name}: no op{' or value' if makers else ''} is named {name!r}; {hint}")
    if len(rows) > 1:
        paths = [report.rows[i].path for i in rows]
        unique = len(set(paths)) == len(paths)
        ways = [repr(path) if unique else f"#{i} ({report.rows[i].op})" for i, path in zip(rows, paths, strict=True)]
        raise PatternError(f"{report.model.name}: {len(rows)} ops are named {name!r}; ask for {' or '.join(ways)}")
    return rows[0]
