"""Reports of conversions, with their reasons, and inventories of models: one row per op, casts and totals.

A report is plain data. It is unchanged by a round trip through JSON, can be read without the model and without ONNX,
and contains neither times nor absolute paths: the same conversion gives the same bytes. The schema of its JSON is
`docs/reference/report.schema.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import PatternError, ReportError, advice
from amp_rewrite.reports.json_records import Malformed, defaults_of, line_by_line, load, reader_of, record
from amp_rewrite.reports.render import count
from amp_rewrite.reports.result import Result
from amp_rewrite.reports.rows import FIRST_INPUT, NO_ROW, SCHEMA, Header, ReportData, Row, Totals
from amp_rewrite.settings.option import ALWAYS
from amp_rewrite.settings.request import KEYWORDS, RECORDED

if TYPE_CHECKING:
    from amp_rewrite.reports.page.page import Figure

MAX_CHARACTERS = 256 * 2**20


@dataclass(frozen=True, slots=True, repr=False)
class Report(Result, ReportData):
    """Report of a conversion or of a model, to print, store and read again.

    Attributes:
        model: facts about the model and settings of the conversion.
        totals: counts.
        rows: one per op, in topological order.
        casts: casts between floats.
        baked: weights stored in another type.
        findings: notable facts and problems.
        inputs: the model's inputs.
        outputs: the model's outputs.
        weights: bytes of dense initializers and Constants after the conversion, by type.
        evidence: the outcome of checking the conversion on data.
        shifts: regions of values scaled by a power of two, and unscaled values beyond the type's range.
        schema: version of the format.

    Example:
        >>> import amp_rewrite
        >>> report = amp_rewrite.convert("model.onnx").report
        >>> amp_rewrite.Report.from_json(report.to_json(), "report.json") == report
        True
    """

    @property
    def brief(self) -> str:
        """Model, type and number of lowered ops."""
        if self.inventory:
            return f"{self.model.name}: inventory of {count(self.totals.ops, 'op')}"
        totals = self.totals
        casts = count(totals.casts_to_low + totals.casts_to_float32, "Cast")
        lowered = f"{totals.compute_lowered} of {count(totals.compute_ops, 'compute op')} in {self.model.to}"
        return f"{self.model.name} → {self.model.to}: {lowered}, {casts} inserted"

    def find(self, op: str) -> tuple[Row, ...]:
        """Return the row of the op with this name or path, or the rows of all ops of a type or pattern.

        Raises:
            PatternError: nothing matches; the message suggests names.
        """
        if rows := tuple(self.rows[i] for i in self.positions(op)):
            return rows
        names = dict.fromkeys(name for row in self.rows for name in (row.name, row.op))
        hint = advice(op, names, "name an op, an op type, or a pattern such as op=MatMul", limit=3)
        raise PatternError(f"{self.model.name}: no op has the name or type {op!r}; {hint}")

    def text(self, *, verbose: bool = False, more: str = "", command: str | None = None) -> str:
        """Return a one-screen summary, ending with the evidence and a newline.

        Args:
            verbose: add every row.
            more: text to insert before the evidence.
            command: the next step; None derives it from the evidence, "" omits it.
        """
        from amp_rewrite.reports.summary import summary  # late: most conversions in Python print none

        return summary(self, verbose=verbose, more=more, command=command)

    def figures(self) -> Sequence[Figure]:
        """Return the summary and the graph."""
        from amp_rewrite.reports.page.report_figures import report_figures  # late: most reports are not drawn

        return report_figures(self)

    def to_json(self) -> str:
        """Return JSON with one row per line; equal reports give equal text. Ends with a newline."""
        fields: dict[str, object] = {
            "schema": self.schema,
            "model": _encode(self.model),
            "totals": _encode(self.totals),
        }
        fields["weights"] = dict(sorted(self.weights.items()))
        if evidence := _encode(self.evidence):
            fields["evidence"] = evidence
        shifts = ("shifts",) if self.shifts else ()
        lists = (*shifts, "findings", "inputs", "outputs", "casts", "baked", "rows")
        return line_by_line(
            {name: _dump(value) for name, value in fields.items()},
            {name: (_dump(_encode(item)) for item in getattr(self, name)) for name in lists},
        )

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Report:
        """Return a report from the JSON of `to_json`.

        Raises:
            ReportError: the text is invalid; the message names `source` and the field.
        """
        if len(text) > MAX_CHARACTERS:
            raise ReportError(f"{source} is larger than {MAX_CHARACTERS >> 20} MiB, so it is not a report")
        report: Report = load(text, source, "a report of amp-rewrite", "write the report again", ReportError, _read)
        return report


def _dump(item: object) -> str:
    return json.dumps(item, allow_nan=False, check_circular=False)


def _encode(item: Any) -> dict[str, object]:
    """Return the non-default fields, in order, with maps sorted by key.

    A header's settings become fields: first those recorded for every conversion, and the others at the end.
    """
    encoded: dict[str, object] = {}
    others: dict[str, object] = {}
    for name, default in defaults_of(item.__class__).items():
        value = getattr(item, name)
        if name == "settings":
            encoded |= {name: text for name, text in value.items() if KEYWORDS[name].recorded == ALWAYS}
            others = {name: text for name, text in value.items() if name not in encoded}
        elif value != default or (isinstance(item, Totals) and name not in _RARE):
            encoded[name.rstrip("_")] = dict(sorted(value.items())) if isinstance(value, Mapping) else value
    return encoded | others


# -- reading ------------------------------------------------------------------------------------------------


def _read(loaded: object) -> Report:
    schema = loaded.get("schema") if isinstance(loaded, dict) else SCHEMA
    if schema != SCHEMA:
        newer = " (upgrade amp-rewrite)" if isinstance(schema, int) and schema > SCHEMA else ""
        raise Malformed(f"is {schema!r}, but this version reads {SCHEMA}{newer}", ".schema")
    report: Report = _REPORT(loaded)
    # A row may only read earlier rows; other positions may refer to any row.
    number, first = len(report.rows), FIRST_INPUT - len(report.inputs) + 1
    bounds: list[tuple[str, Sequence[int], int, int]] = []
    for i, row in enumerate(report.rows):
        bounds += [(f".rows[{i}].reads", row.reads, first, i)]
        bounds += [(f".rows[{i}].because_row", (row.because_row,), NO_ROW, number)]
    bounds += [(f".casts[{i}].after", (cast.after,), first, number) for i, cast in enumerate(report.casts)]
    bounds += [(f".outputs[{i}].after", (port.after,), first, number) for i, port in enumerate(report.outputs)]
    for where, positions, start, end in bounds:
        if any(not start <= position < end for position in positions):
            raise Malformed("does not name an input or a valid row", where)
    return report


def _header(**fields: Any) -> Header:
    texts = {name: fields.pop(name, None) for name in RECORDED}
    return Header(**fields, settings={name: text for name, text in texts.items() if text is not None})


_RARE = ("integer_ops", "flops", "flops_low")
"""Totals omitted from the JSON if zero."""
_REPORT = record(
    Report,
    {"model": record(Header, dict.fromkeys(RECORDED, reader_of(str | None)), make=_header)},
    required=("model", "totals", "weights", "rows", "casts", "baked", "findings", "inputs", "outputs", "schema"),
)
