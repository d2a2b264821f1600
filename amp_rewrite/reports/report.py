"""Reports: a conversion and its reasons, or the inventory of a model. One row per op, the casts, the totals.

A report is plain data. It goes to JSON and comes back equal, needs no model and no ONNX to be read, and holds
neither times nor absolute paths: the same model converted in the same way gives the same bytes.
`docs/reference/report.schema.json` is the form of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from amp_rewrite.errors import Finding, ReportError
from amp_rewrite.reports import reading
from amp_rewrite.reports.reading import Malformed, Reader, fail, list_of, map_of, optional
from amp_rewrite.reports.rows import NO_ROW, SCHEMA, BakeRow, CastRow, Header, ReportData, Row, Totals
from amp_rewrite.reports.summary import summary
from amp_rewrite.settings.options import KEYWORDS, STATED, Stated

MAX_CHARACTERS = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Report(ReportData):
    """A report that can be printed, stored and read again."""

    def text(self, *, verbose: bool = False) -> str:
        """Return one screen of summary; `verbose` adds every row. Ends with a newline."""
        return summary(self, verbose=verbose)

    def to_json(self) -> str:
        """Return JSON with one row per line; equal reports give equal text. Ends with a newline."""
        parts = [f'  "schema": {self.schema}']
        parts += [f'  "{name}": {_dump(_encode(getattr(self, name)))}' for name in ("model", "totals")]
        for name in ("findings", "casts", "baked", "rows"):
            lines = ",\n".join(f"    {_dump(_encode(item))}" for item in getattr(self, name))
            parts.append(f'  "{name}": [\n{lines}\n  ]' if lines else f'  "{name}": []')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Report:
        """Return the report of a `to_json` text. ReportError, naming `source` and the field, for other text."""
        return _report(_load(text, source), source)


def _dump(item: object) -> str:
    return json.dumps(item, allow_nan=False, check_circular=False)


def _encode(item: Any) -> dict[str, object]:
    """Return the fields that differ from their defaults, in their order; maps in the order of their keys.

    The settings of a header stand among its fields: those that every conversion states first, the others at the end.
    """
    encoded: dict[str, object] = {}
    last: dict[str, object] = {}
    for name, default in _FIELDS[type(item)]:
        value = getattr(item, name)
        if name == "settings":
            encoded |= {name: text for name, text in value.items() if KEYWORDS[name].stated is Stated.ALWAYS}
            last = {name: text for name, text in value.items() if name not in encoded}
        elif value != default:
            encoded[name.rstrip("_")] = dict(sorted(value.items())) if isinstance(value, Mapping) else value
    return encoded | last


# -- reading ------------------------------------------------------------------------------------------------


def _load(text: str | bytes, source: str) -> object:
    if len(text) > MAX_CHARACTERS:
        raise ReportError(f"{source}: larger than {MAX_CHARACTERS >> 20} MiB, so not a report of this tool")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise ReportError(f"{source}: not UTF-8 text, so not a report; write it with --report or --json") from error
    return reading.load(text, source, "a report of this tool", "write the report again", ReportError)


def _report(loaded: object, source: str) -> Report:
    schema = loaded.get("schema") if isinstance(loaded, dict) else None
    if isinstance(loaded, dict) and schema != SCHEMA:
        advice = "upgrade amp-rewrite" if isinstance(schema, int) and schema > SCHEMA else "write the report again"
        raise ReportError(f"{source}: schema is {schema!r}, this version reads {SCHEMA}; {advice}")
    try:
        report: Report = _object(Report)(loaded)
        _check_positions(report)
    except Malformed as error:
        where = error.path.lstrip(".") or "the whole"
        raise ReportError(f"{source}: {where} {error}; write the report again") from error
    return report


def _check_positions(report: Report) -> None:
    """Raise Malformed unless each row reads only rows before it."""
    for i, row in enumerate(report.rows):
        if any(not NO_ROW <= read < i for read in row.reads):
            fail(f".rows[{i}].reads", "names a row that does not stand before this one")
        if not NO_ROW <= row.because_row < len(report.rows):
            fail(f".rows[{i}].because_row", "does not name a row")
    for i, cast in enumerate(report.casts):
        if not NO_ROW <= cast.after < len(report.rows):
            fail(f".casts[{i}].after", "does not name a row")


def _object(cls: type) -> Reader:
    def reader(value: object) -> Any:
        if not isinstance(value, dict):
            raise Malformed(f"must be an object, but is {reading.kind(value)}")
        readers = _READERS[cls]
        fields_read = {}
        name = ""
        try:
            for name, item in value.items():
                attribute, read = readers[name]
                fields_read[attribute] = read(item)
            if cls is Header:
                texts = ((name, fields_read.pop(name, None)) for name in STATED)
                fields_read["settings"] = {name: text for name, text in texts if text is not None}
        except KeyError:
            raise Malformed(f"has an unknown field {name!r}") from None
        except Malformed as error:
            error.path = f".{name}{error.path}"
            raise
        for name in _NEEDED[cls]:
            if name not in fields_read:
                raise Malformed(f"lacks the field {name!r}")
        return cls(**fields_read)

    return reader


_TYPES: dict[str, Reader] = {
    "str": reading.text,
    "str | None": optional(reading.text),
    "int": reading.natural,
    "int | None": optional(reading.natural),
    "bool": reading.flag,
    "Mapping[str, int]": map_of(reading.integer),
    "Mapping[str, str]": map_of(reading.text),
    "tuple[str, ...]": list_of(reading.text),
    "tuple[int, ...]": list_of(reading.integer),
    "Header": _object(Header),
    "Totals": _object(Totals),
    "tuple[Row, ...]": list_of(_object(Row)),
    "tuple[CastRow, ...]": list_of(_object(CastRow)),
    "tuple[BakeRow, ...]": list_of(_object(BakeRow)),
    "tuple[Finding, ...]": list_of(_object(Finding)),
}
_SIGNED = {(Row, "because_row"), (CastRow, "after")}
_CLASSES = (Report, Header, Totals, Row, CastRow, BakeRow, Finding)


def _parts(cls: Any) -> list[tuple[str, str, object]]:
    """Return the fields of a class: name, annotation, default. Postponed annotations are their own source text."""
    if issubclass(cls, tuple):
        defaults = cls._field_defaults
        return [(name, cls.__annotations__[name].__forward_arg__, defaults.get(name, MISSING)) for name in cls._fields]
    return [(f.name, str(f.type), f.default) for f in fields(cls)]


_PARTS = {cls: _parts(cls) for cls in _CLASSES}
_READERS: dict[type, dict[str, tuple[str, Reader]]] = {
    cls: {
        name.rstrip("_"): (name, reading.integer if (cls, name) in _SIGNED else _TYPES[stated])
        for name, stated, _ in parts
    }
    for cls, parts in _PARTS.items()
}
del _READERS[Header]["settings"]
_READERS[Header] |= {name: (name, optional(reading.text)) for name in STATED}  # they stand beside the other fields
_NEEDED: dict[type, tuple[str, ...]] = {
    cls: tuple(name for name, _, default in parts if cls is Report or default is MISSING)
    for cls, parts in _PARTS.items()
}
_RARE = ("integer_ops",)
"""Totals that a report states only where they are not zero."""
_FIELDS: dict[type, tuple[tuple[str, object], ...]] = {
    cls: tuple((name, MISSING if cls is Totals and name not in _RARE else default) for name, _, default in parts)
    for cls, parts in _PARTS.items()
}
