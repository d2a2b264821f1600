"""A report as text for people: one screen of summary, and on demand every row."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from amp_rewrite.decide import reasons
from amp_rewrite.errors import by_kind
from amp_rewrite.ir.op_classes import CASTS, ELEMENTLESS
from amp_rewrite.reports.evidence import UNCHECKED
from amp_rewrite.reports.next_step import LOW, affected, next_step
from amp_rewrite.reports.render import count, plain, share, shortened, size, table
from amp_rewrite.reports.rows import ReportData, Row, ShiftRow

_SHOWN_CASTS = 6
_UNASKED = {"Constant", *CASTS, *ELEMENTLESS}
"""Op types whose float32 needs no reason."""
_Key = TypeVar("_Key", bound=Hashable)


def summary(report: ReportData, *, verbose: bool = False, more: str = "", command: str | None = None) -> str:
    """Return the text of a report; `verbose` adds all casts, findings and rows. Ends with a newline.

    `more`: lines to insert before the last part, which says how far to trust a conversion; `command` is the next step
    to trust it more, None for that of the report, "" for none.
    """
    body = [_stock(report)] if report.inventory else [_why(report), _raised(report), _refused(report)]
    parts = [_head(report), *body, _casts(report, verbose), _findings(report, verbose)]
    if verbose:
        parts.append(_rows(report))
    parts += [more.rstrip("\n").split("\n") if more else [], _evidence(report, command)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(report: ReportData) -> list[str]:
    model = report.model
    opsets = ", ".join(f"{domain} {version}" for domain, version in model.opsets.items())
    lines = [f"{plain(model.name)}{' → ' + model.to if model.to else ''}"]
    facts = [("model", f"IR {model.ir_version}, {plain(opsets)}")]
    if model.to:
        chosen = {"target": model.target, **model.settings}
        facts.append(("settings", ", ".join(f"{name} {plain(value)}" for name, value in chosen.items() if value)))
    if model.config:
        facts.append(("config file", plain(model.config)))
    if model.lists:
        facts.append(("lists", f"{plain(model.lists)} ({(model.fingerprint or '')[:12]})"))
    return [*lines, *table([*facts, *_totals(report)])]


def _evidence(report: ReportData, command: str | None) -> list[str]:
    """Return the evidence and the next step; nothing for an inventory, and where nothing was low or changed."""
    if report.inventory or (report.evidence == UNCHECKED and not affected(report)):
        return []
    step = str(next_step(report) or "") if command is None else command
    return [plain(str(report.evidence)), *([f"next: {plain(step)}"] if step else [])]


def _totals(report: ReportData) -> list[tuple[str, str]]:
    totals = report.totals
    rows = [row for row in report.rows if row.op != "Constant"]
    floats = [row for row in rows if row.op not in ELEMENTLESS]  # those read a shape, whatever the type of its value
    dtypes = Counter(row.dtype for row in floats if row.variables or row.dtype in ("float32", "unknown", *LOW))
    parts = [f"{number} {dtype}" for dtype, number in sorted(dtypes.items())]
    rest = len(rows) - dtypes.total()
    parts += [f"{rest} without floats"] if rest else []
    parts += [count(totals.ops - len(rows), "constant")] if totals.ops > len(rows) else []
    lowered = share(totals.compute_lowered, totals.compute_ops)
    low = " and ".join(dtype for dtype in LOW if dtypes[dtype]) or report.model.to or "a low type"
    facts = [
        ("compute ops", f"{totals.compute_lowered} of {totals.compute_ops} in {low} ({lowered})"),
        ("ops", f"{totals.ops}: {', '.join(parts)}" if parts else "0"),
        ("casts", _cast_counts(report)),
        ("weights", _weights(report)),
    ]
    if totals.integer_ops:
        facts.insert(1, ("integer ops", f"{totals.integer_ops}, computed on integers: their types stay"))
    if totals.raised:
        compute = f" ({count(totals.compute_raised, 'compute op')})" if totals.compute_raised else ""
        facts.append(("raised", f"{count(totals.raised, 'op')} to float32{compute}"))
    if totals.refused:
        facts.append(("kernel gate", f"{count(totals.refused, 'op')} refused"))
    if report.shifts:
        facts.append(("shifts", shift_counts(report.shifts)))
    return facts


def shift_counts(shifts: Sequence[ShiftRow]) -> str:
    """Return the number of regions by exponent, and of values that are left alone."""
    exponents = Counter(row.exponent for row in shifts)
    parts = [f"{count(n, 'region')} times 2^-{exponent}" for exponent, n in sorted(exponents.items()) if exponent]
    parts += [f"{count(exponents[0], 'value')} beyond the type not shifted"] if exponents[0] else []
    return ", ".join(parts)


def _cast_counts(report: ReportData) -> str:
    totals = report.totals
    inserted = totals.casts_to_low + totals.casts_to_float32
    parts = []
    if not report.inventory:
        parts.append(f"{inserted} inserted")
        if inserted:
            to = Counter(cast.to for cast in report.casts if cast.origin == "inserted")
            types = [*dict.fromkeys((report.model.to or "", "float32", *sorted(to)))]
            parts[0] += f" ({', '.join(f'{to[dtype]} to {dtype}' for dtype in types)})"
    if totals.casts_existing or report.inventory:
        parts.append(f"{totals.casts_existing} of the model itself")
    if totals.casts_folded:
        parts.append(f"{totals.casts_folded} folded")
    return ", ".join(parts)


def _weights(report: ReportData) -> str:
    totals = report.totals
    if not totals.baked:
        return size(totals.weights_before)
    types = Counter(row.to for row in report.baked)
    parts = [f"{number} stored as {dtype}" for dtype, number in sorted(types.items())]
    parts += [f"{n} {word}" for n, word in ((totals.saturated, "saturated"), (totals.flushed, "flushed")) if n]
    return f"{size(totals.weights_before)} → {size(totals.weights_after)} ({', '.join(parts)})"


# -- a conversion ------------------------------------------------------------------------------------


def _grouped(rows: Iterable[Row], key: Callable[[Row], _Key]) -> dict[_Key, list[Row]]:
    groups: dict[_Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _raised(report: ReportData) -> list[str]:
    """Return the ops that became float32, by the pattern or rule behind it, in order."""

    def cause(row: Row) -> str:  # without the parts of a note that differ from op to op
        return row.note if row.note.startswith("kept by") else row.note.partition(": ")[0].partition(", because ")[0]

    rows = [(str(len(g)), note, _examples(g)) for note, g in _grouped(report.raised, cause).items()]
    return [f"raised to float32: {count(report.totals.raised, 'op')}", *table(rows, right=">")] if rows else []


def _why(report: ReportData) -> list[str]:
    """Return the ops that stayed float32, by rule, the most frequent first; without the model's own Casts."""
    high = [row for row in report.rows if row.rule not in (None, reasons.RAISED) and row.dtype not in LOW]
    high = [row for row in high if row.op not in _UNASKED]
    groups = _grouped(high, lambda row: row.rule or "")
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [(str(len(g)), rule, reasons.words(rule), _examples(g)) for rule, g in ordered]
    return [f"why {count(len(high), 'op')} stayed float32", *table(rows, right=">")] if rows else []


def _examples(rows: Sequence[Row]) -> str:
    """Return the op types in a group, the most frequent first, each with a count."""
    kinds = Counter(row.op for row in rows)
    return shortened([f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))], 4)


def _refused(report: ReportData) -> list[str]:
    """Return one line per op type and reason; there can be hundreds of equal ones."""
    groups = _grouped(report.refused, lambda row: (row.op, row.note))
    rows = [(str(len(g)), op, note, shortened([row.path for row in g])) for (op, note), g in sorted(groups.items())]
    return ["refused by the kernel gate", *table(rows, right=">")] if rows else []


def _casts(report: ReportData, verbose: bool) -> list[str]:
    inserted = [cast for cast in report.casts if verbose or cast.origin == "inserted"]
    if not inserted:
        return []
    shown = inserted if verbose else inserted[:_SHOWN_CASTS]
    rows = [
        (cast.scope + cast.value, f"{cast.from_} → {cast.to}", f"×{cast.readers}", f"{cast.origin}: {cast.reason}")
        for cast in shown
    ]
    rest = len(inserted) - len(shown)
    return ["casts", *table(rows), *([f"  … and {rest} more (--verbose)"] if rest else [])]


def _findings(report: ReportData, verbose: bool) -> list[str]:
    """Return one line per kind, with the first of it; all of them when verbose."""
    rows = []
    for kind, group in by_kind(report.findings).items():
        if verbose:
            rows += [(kind, finding.subject, finding.message) for finding in group]
        else:
            rest = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
            fact = _PREDICTED.sub("", reasons.remarked(kind, group[0].message, rest))
            rows.append((f"{len(group)} {kind}", group[0].subject, fact))
    return ["findings", *table(rows)] if rows else []


_PREDICTED = re.compile(r", [\d.e+-]+ µs less\b")
"""A predicted time in a finding: one screen has no room for guesses."""


# -- an inventory ------------------------------------------------------------------------------------


def _stock(report: ReportData) -> list[str]:
    """Return the op types, the most frequent first, each with its element types."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for row in report.rows:
        kinds[row.op][row.dtype] += 1
    ordered = sorted(kinds.items(), key=lambda item: (-item[1].total(), item[0]))
    rows = [(str(n.total()), kind, ", ".join(f"{n[d]} {d}" for d in sorted(n))) for kind, n in ordered]
    return ["ops by type", *table(rows, right=">")]


def _rows(report: ReportData) -> list[str]:
    head: tuple[str, ...] = ("op", "type", "dtype")
    cells = [(row.path, row.op, row.dtype) for row in report.rows]
    if report.inventory:
        return ["ops", *table(cells, head=head)]
    # A rule that only follows the list has the reason of the list as its note.
    notes = (row.note or (row.reason if row.rule and not row.because else "") for row in report.rows)
    whole = [(*c, row.color or "", row.why, note) for c, row, note in zip(cells, report.rows, notes, strict=True)]
    return ["ops", *table(whole, head=(*head, "color", "rule", "note"))]
