"""Rows of a report by the name of an op, its type, or a pattern."""

from __future__ import annotations

import re

from amp_rewrite.errors import PatternError, advice
from amp_rewrite.reports.rows import ReportData, Row

_KEYS = ("name", "op", "scope")


def find_rows(report: ReportData, wanted: str) -> tuple[int, ...]:
    """Return the positions of the ops that a text names, () for none: "#12", a path, a name, a type, or a pattern.

    The first of these forms that names an op counts. A pattern is one of `convert`, with the terms of a single op.
    """
    if wanted.startswith("#") and wanted[1:].isdecimal() and len(wanted) < 12 and int(wanted[1:]) < len(report.rows):
        return (int(wanted[1:]),)
    for form in ("path", "name", "op"):
        if rows := tuple(i for i, row in enumerate(report.rows) if getattr(row, form) == wanted):
            return rows
    return _matching(report, wanted) if re.search(r"[=*?\[]|^re:", wanted) else ()


def _matching(report: ReportData, pattern: str) -> tuple[int, ...]:
    from amp_rewrite.settings.selectors import parse_pattern  # late: reports are read without onnx

    terms = parse_pattern(pattern)
    for term in terms:
        if term.key not in _KEYS:
            hint = advice(term.key, _KEYS, f"use {', '.join(_KEYS)}")
            raise PatternError(f"pattern {pattern!r}: the rows of a report do not have the key {term.key!r}; {hint}")
    return tuple(
        i
        for i, row in enumerate(report.rows)
        if all(any(map(term.expression.search, _texts(row, term.key))) for term in terms)
    )


def _texts(row: Row, key: str) -> tuple[str, ...]:
    """Return the texts of a row that a term of a pattern may match."""
    if key == "op":
        return (row.op,)
    return (row.name, row.path) if key == "name" else (row.path.replace(".", "/").lstrip("/"),)
