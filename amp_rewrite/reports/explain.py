"""Why an op has the type that it has: the chain of reasons, back to the op that decides."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from amp_rewrite.decide import reasons
from amp_rewrite.errors import PatternError
from amp_rewrite.reports.render import plain
from amp_rewrite.reports.rows import NO_ROW, ReportData, Row

if TYPE_CHECKING:
    from amp_rewrite.ir.view import View


def makers(view: View) -> Mapping[str, int]:
    """Of each value the row of the op that makes it; NO_ROW for inputs and weights."""
    return {
        value.name: NO_ROW if value.producer is None else int(value.producer)
        for value in reversed(view.values)  # of equal names in several bodies the first counts
    }


def explain(report: ReportData, name: str, makers: Mapping[str, int] = MappingProxyType({})) -> str:
    """The reasons behind one op, step by step, the last one being the root. Ends with a newline.

    `name` is an op's name, its path (scope and name), "#12" for the thirteenth row, or the name of a value, whose
    row is in `makers`. PatternError for a name that no op and no value has, or that several ops have; it lists what
    to ask for instead.
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
    """One op: what it is, the rule in words, and what the lists say of it."""
    head = f"{'' if first else 'because '}{plain(row.path)} ({row.op}) is {_types(row)}"
    if row.rule is None:
        return [f"{head}: it computes no float32"]
    lines = [f"{head}: {row.rule}", f"    {reasons.words(row.rule)}{_noted(row)}"]
    if row.rule in reasons.REASONS and reasons.REASONS[row.rule].has_page:
        lines.append(f"    more: amp-rewrite rule {row.rule}, or {reasons.REASONS[row.rule].docs}")
    if row.color:
        lines.append(f"    {row.color}: {plain(row.source)}{': ' + plain(row.reason) if row.reason else ''}")
    return lines


def _noted(row: Row) -> str:
    return f": {plain(row.note)}" if row.note else ""


def _types(row: Row) -> str:
    """The type, and the variables where they differ: "float16 (T float16, U float32)"."""
    if len(set(row.variables.values())) < 2:
        return row.dtype
    return f"{row.dtype} ({', '.join(f'{name} {dtype}' for name, dtype in row.variables.items())})"


def _find(report: ReportData, name: str, makers: Mapping[str, int]) -> int:
    """The position of the row that a name or a path stands for; that of an op before that of a value."""
    if name.startswith("#") and name[1:].isdecimal() and len(name) < 12 and int(name[1:]) < len(report.rows):
        return int(name[1:])
    found = [i for i, row in enumerate(report.rows) if row.path == name]
    found = found or [i for i, row in enumerate(report.rows) if row.name == name]
    if not found and name in makers:
        if makers[name] == NO_ROW:
            raise PatternError(
                f"{report.model.name}: no op makes {name!r}, an input or a weight; ask for a reader of it"
            )
        return makers[name]
    if not found:
        names = dict.fromkeys((*(row.name for row in report.rows), *makers))
        near = difflib.get_close_matches(name, names, 3)
        advice = f"did you mean {', '.join(map(repr, near))}?" if near else "report --verbose lists them all"
        raise PatternError(f"{report.model.name}: no op{' or value' if makers else ''} is named {name!r}; {advice}")
    if len(found) > 1:
        paths = [report.rows[i].path for i in found]
        unique = len(set(paths)) == len(paths)
        ways = [repr(path) if unique else f"#{i} ({report.rows[i].op})" for i, path in zip(found, paths, strict=True)]
        raise PatternError(f"{report.model.name}: {len(found)} ops are named {name!r}; ask for {' or '.join(ways)}")
    return found[0]
