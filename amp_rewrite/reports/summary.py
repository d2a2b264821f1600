"""Text of a report: a one-screen summary and, on demand, every row."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from pathlib import PurePath

from amp_rewrite.decide import reasons
from amp_rewrite.errors import Finding, by_kind
from amp_rewrite.ir.op_classes import CASTS, ELEMENTLESS
from amp_rewrite.reports.evidence import ARGUMENTS, UNCHECKED
from amp_rewrite.reports.render import WIDTH, count, cut, display_width, plain, share, shortened, size, table, wrap
from amp_rewrite.reports.rows import NO_ROW, CastRow, ReportData, Row
from amp_rewrite.settings.request import USUAL_TOLERANCES

LOW = ("float16", "bfloat16")
_LINES, _COLUMNS = 19, 80
"""Screen size of a summary; a line about the written file follows it."""
_NEXT, _OPEN = "next: ", "on CUDA: "
"""Prefixes of unwrapped lines to copy: a command, and Python code to load the result."""
_HINTS = {"channels_last": _OPEN, "caches": "between steps: "}
"""Kinds of findings shown before the next step, with their prefixes."""
_BATCHES = "batches.npz"
"""The data file in suggested commands."""
_MAX_OBJECTION = 240
"""Maximum length of an error in the evidence; onnxruntime's errors take several lines."""
_UNREPORTED = {"Constant", "Identity", *CASTS, *ELEMENTLESS}
"""Op types left in float32 without a reported reason."""
_Part = list[str]


def summary(report: ReportData, *, verbose: bool = False, more: str = "", command: str | None = None) -> str:
    """Return the text of a report; `verbose` adds all Casts, findings and rows. Ends with a newline.

    `more`: lines to insert before the evidence. `command`: the next step; None derives it from the report, "" omits it.
    """
    extra = more.rstrip("\n").split("\n") if more else []
    ending = _evidence(report, next_command(report) if command is None else command, verbose=verbose)
    if verbose:
        found = [(f.kind, f.subject, f.message) for group in by_kind(report.findings).values() for f in group]
        findings = ["findings", *table(found)] if found else []
        each = [
            (c.scope + c.value, f"{c.from_} → {c.to}", f"×{c.readers}", f"{c.origin}: {c.reason}") for c in report.casts
        ]
        casts = ["Casts", *table(each)] if each else []
        parts = [_head(report), _settings(report), *_tables(report), casts, findings]
        return _joined([*parts, _rows(report), extra, ending])
    token = WIDTH.set(min(WIDTH.get() or _COLUMNS, _COLUMNS))
    try:
        findings = _findings(report)
        lines = (1 if line.startswith((_NEXT, _OPEN)) else len(_wrapped(line)) for line in (*ending, *extra))
        last = sum(lines) + bool(extra)  # as wrapped by a terminal
        room = _LINES - last - (len(findings) + 1 if findings else 0)
        fitted = _fitted([_head(report), *_tables(report), _casts(report)], room)
        return _joined([*fitted, findings, extra, ending])
    finally:
        WIDTH.reset(token)


def _joined(parts: Iterable[_Part]) -> str:
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _fitted(parts: Sequence[_Part], room: int) -> list[_Part]:
    """Shorten the longest parts until all fit into `room` lines, with a blank line after each."""
    first, *rest = [list(part) for part in parts if part]
    while rest and sum(len(part) + 1 for part in (first, *rest)) > room:
        longest = max(rest, key=len)
        if len(longest) <= 2:  # keep the heading and one line
            break
        longest[-2:] = ["  … (-v shows all)"]
    return [first, *rest]


# -- the head ----------------------------------------------------------------------------------------


def _head(report: ReportData) -> _Part:
    model, totals = report.model, report.totals
    facts = [("work", _work(report))]
    if totals.integer_ops:
        facts.append(("integers", f"{count(totals.integer_ops, 'op')} between quantizers keep their types"))
    if totals.weights_before:
        after = f" → {size(totals.weights_after)}" if totals.baked else ""
        facts.append(("weights", f"{size(totals.weights_before)}{after}"))
    if report.inventory:
        facts.append(("Casts", str(totals.casts_existing)))
    if report.shifts:
        exponents = Counter(row.exponent for row in report.shifts)
        parts = [f"{count(n, 'region')} times 2^-{k}" for k, n in sorted(exponents.items()) if k]
        parts += [f"{count(exponents[0], 'unshifted value')} out of range"] if exponents[0] else []
        facts.append(("shifts", ", ".join(parts)))
    needs = [f"{plain(f.subject)} or later" for f in report.findings if f.kind == "needs_release"]
    facts += [("target", ", ".join((plain(model.target), *needs)))] if model.target else []
    if report.findings:
        todo, total = sum(map(needs_action, report.findings)), len(report.findings)
        need = f"{todo} need{'s' if todo == 1 else ''} action" if todo else f"{count(total, 'note')}, nothing to do"
        facts.append(("findings", f"{f'{total}, {need}' if 0 < todo < total else need} (-v shows all)"))
    settings = {name: value for name, value in model.settings.items() if name != "target"}
    non_default = [f"{name} {plain(value)}" for name, value in settings.items() if value != "default"]
    facts += [("settings", ", ".join(non_default))] if non_default else []
    facts += [("config", plain(model.config))] if model.config else []
    return [f"{plain(model.name)}{f' → {model.to}' if _affected(report) and model.to else ''}", *table(facts)]


def _work(report: ReportData) -> str:
    totals = report.totals
    if not totals.compute_ops:
        return f"no matrix products or convolutions, so {report.model.to or 'float16'} gains little"
    low = " and ".join(low_types(report)) or report.model.to or "float16 or bfloat16"
    ops = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')}"
    if not totals.flops:
        return f"{ops} in {low}"
    return f"{share(totals.flops_low, totals.flops)} of FLOPs in {low}: {ops}"


def low_types(report: ReportData) -> list[str]:
    dtypes = {row.dtype for row in report.rows}
    return [dtype for dtype in LOW if dtype in dtypes]


def _settings(report: ReportData) -> _Part:
    model = report.model
    opsets = ", ".join(f"{domain} {version}" for domain, version in model.opsets.items())
    facts = [("model", f"IR {model.ir_version}, {plain(opsets)}")]
    if model.to:
        facts.append(("settings", ", ".join(f"{name} {plain(value)}" for name, value in model.settings.items())))
    if stored := Counter(row.to for row in report.baked):
        parts = [f"{count(number, 'weight')} as {dtype}" for dtype, number in sorted(stored.items())]
        totals = report.totals
        parts += [f"{n} {word}" for n, word in ((totals.saturated, "saturated"), (totals.flushed, "flushed")) if n]
        facts.append(("stored", ", ".join(parts)))
    if model.lists:
        facts.append(("lists", f"{plain(model.lists)} ({(model.fingerprint or '')[:12]})"))
    return table(facts)


# -- ops ---------------------------------------------------------------------------------------------


def _tables(report: ReportData) -> list[_Part]:
    if not report.inventory:
        return [_float32_ops(report), _raised_ops(report)]
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for row in report.rows:
        kinds[row.op][row.dtype] += 1
    ordered = sorted(kinds.items(), key=lambda item: (-item[1].total(), item[0]))
    rows = [(str(n.total()), kind, ", ".join(f"{n[d]} {d}" for d in sorted(n))) for kind, n in ordered]
    return [[f"{count(report.totals.ops, 'op')} by type", *table(rows, right=">")]]


def _float32_ops(report: ReportData) -> _Part:
    high = [row for row in report.rows if row.rule not in (None, reasons.RAISED) and row.dtype not in LOW]
    high = [row for row in high if row.op not in _UNREPORTED]
    if not high:
        return []
    compute = report.totals.compute_ops - report.totals.compute_lowered - report.totals.compute_raised
    among = f"{count(compute, 'compute op') if compute else 'no compute op'} among them"
    groups = sorted(_grouped(high, lambda row: row.rule or "").items(), key=lambda item: (-len(item[1]), item[0]))
    if compute:  # compute ops first
        groups.sort(key=lambda item: all(row.color != "allow" for row in item[1]))
    lines = _count_lines((len(rows), reasons.words(rule), rows) for rule, rows in groups)
    heading = f"{len(high)} ops stay float32, {among}" if len(high) > 1 else "1 op stays float32"
    return [heading, *lines]


def _raised_ops(report: ReportData) -> _Part:

    def cause(row: Row) -> str:  # the part of a note shared by similar ops
        return row.note if row.note.startswith("kept by") else row.note.partition(": ")[0].partition(", because ")[0]

    groups = _grouped(report.raised, cause)
    lines = _count_lines((len(rows), note, rows) for note, rows in groups.items())
    return [f"{count(report.totals.raised, 'op')} of a low type raised to float32", *lines] if lines else []


def _count_lines(groups: Iterable[tuple[int, str, Sequence[Row]]]) -> list[str]:
    rows = []
    for number, words, ops in groups:
        kinds = sorted(Counter(_op_type(row.op) for row in ops).items(), key=lambda item: (-item[1], item[0]))
        rows.append((str(number), words, shortened([f"{n} {kind}" for kind, n in kinds], 4)))
    if WIDTH.get() is None:
        return table(rows, right=">")
    digits = max((len(number) for number, _, _ in rows), default=0)
    return [_with_examples(f"  {number:>{digits}}  {words}", kinds) for number, words, kinds in rows]


def _with_examples(words: str, examples: str) -> str:
    """Return the words, followed by as many examples as fit on the line."""
    width = WIDTH.get() or _COLUMNS
    names = examples.removesuffix(", …").split(", ") if examples else []
    line = plain(f"{words} ({examples})" if names else words)
    while display_width(line) > width and names:
        names.pop()
        line = plain(f"{words} ({', '.join((*names, '…'))})" if names else words)
    return cut(line, width)


def _op_type(op: str) -> str:
    return op.rpartition("::")[2]


def _rows(report: ReportData) -> _Part:
    head: tuple[str, ...] = ("op", "type", "dtype")
    cells = [(row.path, row.op, row.dtype) for row in report.rows]
    if report.inventory:
        return ["ops", *table(cells, head=head)]
    # A decision made only by the list has the list's reason as its note.
    notes = (row.note or (row.reason if row.rule and not row.because else "") for row in report.rows)
    rows = [(*c, row.color or "", row.why, note) for c, row, note in zip(cells, report.rows, notes, strict=True)]
    return ["ops", *table(rows, head=(*head, "color", "rule", "note"))]


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


# -- Casts -------------------------------------------------------------------------------------------


def _casts(report: ReportData) -> _Part:
    totals = report.totals
    parts = [f"{count(totals.casts_to_low + totals.casts_to_float32, 'Cast')} added"]
    parts += [f"{totals.casts_folded} removed"] if totals.casts_folded else []
    parts += [f"{totals.casts_existing} kept from the model"] if totals.casts_existing else []
    inserted = [cast for cast in report.casts if cast.origin == "inserted"]
    if report.inventory or not (inserted or totals.casts_folded):
        return []
    readers: dict[tuple[int, str], Row] = {}
    for row in report.rows:
        for read, dtype in zip(row.reads, row.inputs, strict=False):
            readers.setdefault((read, dtype), row)
    groups: dict[tuple[str, str], list[str]] = {}
    for cast in inserted:
        cause, op = _cause(report, cast, readers)
        groups.setdefault((cast.to, cause), []).append(op)
    lines = []
    for (to, cause), ops in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        kinds = Counter(filter(None, ops)).most_common()
        words = f"  {len(ops)}  to {to}: {cause}"
        lines.append(_with_examples(words, ", ".join(f"{n} {op}" for op, n in kinds)))
    return [", ".join(parts), *lines]


def _cause(report: ReportData, cast: CastRow, readers: Mapping[tuple[int, str], Row]) -> tuple[str, str]:
    if not cast.reason.startswith("read in "):
        return ("the model's outputs" if cast.reason.startswith("the model") else "outputs of bodies"), ""
    if cast.after < 0:
        return ("weights read in both types" if cast.after == NO_ROW else "the model's inputs"), ""
    if cast.to in LOW:
        return f"after ops in {cast.from_}", _op_type(report.rows[cast.after].op)
    reader = readers.get((cast.after, cast.to))
    return f"before ops in {cast.to}", _op_type(reader.op) if reader else ""


# -- findings ----------------------------------------------------------------------------------------


def needs_action(finding: Finding) -> bool:
    """True if a finding requires action: it is not a fact, not harmless, and not already in the table of ops."""
    return finding.kind not in _IN_TABLE and not reasons.is_fact(finding.kind, finding.message)


_IN_TABLE = (reasons.KERNEL_GATE, reasons.SCHEMA_GATE)
"""Kinds whose ops are already listed as float32; if they matter, mostly_float32 gives advice."""


def _findings(report: ReportData) -> _Part:
    lines: list[str] = []
    for kind, group in by_kind(report.findings).items():
        if urgent := [finding for finding in group if needs_action(finding)]:
            rest = f" (and {len(urgent) - 1} more)" if len(urgent) > 1 else ""
            subject = "" if urgent[0].subject == "model" else f"{urgent[0].subject}: "
            words = reasons.remarked(kind, urgent[0].message, rest)
            if kind == _MOSTLY_FLOAT32:
                words = words.partition(" · ")[2]  # the head and the table of ops say the rest
            lines += _wrapped(f"  {kind}: {subject}{words}")
    return ["to do", *lines] if lines else []


_MOSTLY_FLOAT32 = "mostly_float32"


def _wrapped(line: str) -> list[str]:
    return wrap(plain(line), WIDTH.get() or _COLUMNS, hanging=2)


# -- evidence ----------------------------------------------------------------------------------------


def _evidence(report: ReportData, command: str, *, verbose: bool) -> _Part:
    if report.inventory or (report.evidence == UNCHECKED and not _affected(report)):
        return []
    evidence = report.evidence
    if not verbose:
        evidence = replace(evidence, objection=cut(evidence.objection, _MAX_OBJECTION))
    hints = [f"{_HINTS[f.kind]}{plain(f.message)}" for f in report.findings if f.kind in _HINTS]
    steps = [f"{_NEXT}{plain(command)}"] if command else []
    if _BATCHES in command and (evidence.random or not evidence.data):  # the user has yet to write the file
        steps.insert(0, cut(plain(f'your inputs: np.savez("{_BATCHES}", {_arrays(report)})'), _COLUMNS))
    return [plain(str(evidence)), *hints, *steps]


def _arrays(report: ReportData) -> str:
    """Return arguments of numpy.savez for the inputs: keywords, or a mapping if a name is not an identifier."""
    names = [port.name for port in report.inputs] or ["name"]
    if all(name.isidentifier() and not iskeyword(name) for name in names):
        return ", ".join(f"{name}=…" for name in names)
    return f"**{{{', '.join(f'{json.dumps(name)}: …' for name in names)}}}"


def unchecked(report: ReportData) -> bool:
    """True if the conversion can be checked on real data, and has not been."""
    return not (report.inventory or report.evidence.conclusive or report.evidence.uncheckable) and _affected(report)


def next_command(report: ReportData) -> str:
    """Return the command to check a conversion on data, or a Python call for a model without a file; "" for none."""
    if not unchecked(report):
        return ""
    model, tolerance = report.model, USUAL_TOLERANCES[report.model.to or LOW[0]]
    if report.evidence.data == ARGUMENTS:
        return f"the same call with tolerance={tolerance}, overwrite=True"
    if not PurePath(model.name).suffix:
        return f"amp_rewrite.repair(model, data, tolerance={tolerance})"
    to = ["--to", model.to] if model.to not in (None, LOW[0]) else []
    return shlex.join(["amp-rewrite", model.name, *to, "--data", _BATCHES, "--tolerance", tolerance])


def _affected(report: ReportData) -> bool:
    totals = report.totals
    changed = totals.casts_to_low + totals.casts_to_float32 + totals.casts_folded + totals.baked + totals.raised
    return bool(changed) or any(row.dtype in LOW for row in report.rows)
