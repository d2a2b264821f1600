"""Measured ranges of a model's values, with their file format and table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import EvidenceError, spelled
from amp_rewrite.files.casting import Fit
from amp_rewrite.files.disk import check_output_path, read_regular, write_whole
from amp_rewrite.reports.json_records import Malformed, load, map_of, reader_of, record
from amp_rewrite.reports.render import count, plain, table
from amp_rewrite.reports.result import Result
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import ValueId, View
    from amp_rewrite.reports.page.page import Figure

SCHEMA = 1
MAX_BYTES = 256 * 2**20
_REMEDY = "calibrate again"


@dataclass(frozen=True, slots=True)
class Range(Fit):
    """Statistics of all elements of a value over all batches; `count` is 0 if no element was computed."""

    def times(self, batches: int) -> Range:
        """Return the range of the same elements repeated in each of `batches` batches."""
        return Range(
            **{f.name: getattr(self, f.name) * (1 if f.name.startswith("abs") else batches) for f in fields(self)}
        )

    def headroom(self, to: DType) -> float:
        """Return the largest factor for the values without overflow; infinity if all values are zero."""
        return to.max / self.absmax if self.absmax else math.inf


@dataclass(frozen=True, slots=True, repr=False)
class Ranges(Result):
    """Ranges of one model's values, with their overflow and underflow when rounded to the low type `to`.

    The elements of a constant count once per batch.

    Attributes:
        to: "float16" or "bfloat16".
        values: range of each floating-point tensor, by name; in a body, after the body's path and a colon.
        batches: number of batches.
        origin: source of the data.
        random: True for random data.
        model: file name of the model.
        graph: the graph's `Fingerprint`.
        weights: the weights' `Fingerprint`.
        untapped: the reason for each floating-point value that was not measured.
        tool: version of this package.

    Example:
        >>> import amp_rewrite
        >>> amp_rewrite.calibrate("model.onnx", "batches.npz").batches
        1
    """

    to: str
    values: Mapping[str, Range]
    batches: int
    origin: str
    random: bool
    model: str
    graph: str
    weights: str
    untapped: Mapping[str, str] = field(default_factory=dict)
    tool: str = VERSION

    @property
    def brief(self) -> str:
        """One line with the model, the low type, and the numbers of values and batches."""
        seen = f"{count(len(self.values), 'value')} in {count(self.batches, 'batch', 'batches')}"
        return f"{self.model} for {self.to}: {seen}"

    def figures(self) -> Sequence[Figure]:
        """Return a figure of the magnitudes by depth, with the ranges of the low types."""
        from amp_rewrite.reports.page.measured_figures import ranges_figure  # imported late: few runs draw figures

        random = " (random, not real data)" if self.random else ""
        data = f"{count(self.batches, 'batch', 'batches')} of {self.origin}{random}"
        return (ranges_figure(self.values, DType.parse(self.to), data),)

    def of(self, view: View, value: ValueId) -> Range | None:
        """Return the range of a value, or None if it was not measured."""
        return self.values.get(key(view, value))

    def check(self, model: Model) -> None:
        """Check that the ranges belong to a model.

        Raises:
            EvidenceError: the graph or the weights differ.
        """
        from amp_rewrite.files.fingerprint import fingerprint

        actual = fingerprint(model)
        for what, expected, found in (("graph", self.graph, actual.graph), ("weights", self.weights, actual.weights)):
            if expected != found:
                fault = f"{what} {expected[:12]} and {found[:12]} differ"
                name = f", {self.model}" if self.model else ""
                raise EvidenceError(f"the ranges belong to another model{name}: {fault}; {_REMEDY} on this one")

    def to_json(self) -> str:
        """Return JSON with one value per line; equal ranges have equal JSON."""
        head = {"schema": SCHEMA, **{name: getattr(self, name) for name in _HEAD}}
        lines = {name: json.dumps(value) for name, value in head.items()}
        lines["values"] = _lines({name: asdict(range_) for name, range_ in self.values.items()})
        lines["untapped"] = _lines(self.untapped)
        return "{\n" + ",\n".join(f' "{name}": {value}' for name, value in lines.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Ranges:
        """Return the ranges in the text of `to_json`. `source`: name of the text in errors.

        Raises:
            EvidenceError: the text is invalid; the message names the field.
        """
        ranges: Ranges = load(text, source, "a ranges file", _REMEDY, EvidenceError, _ranges)
        return ranges

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the ranges to a file atomically.

        Raises:
            EvidenceError: the file cannot be written, or already exists.
        """
        file = Path(path)
        check_writable(file, overwrite)
        try:
            write_whole(file, self.to_json().encode())
        except OSError as cause:
            raise EvidenceError(f"cannot write {file}: {cause.strerror or cause}; nothing was changed") from cause

    @classmethod
    def load(cls, path: str | Path) -> Ranges:
        """Return the ranges in a file.

        Raises:
            EvidenceError: the file cannot be read or is invalid; the message says why in one line.
        """
        try:
            content = read_regular(path, MAX_BYTES)
        except OSError as cause:
            raise EvidenceError(f"cannot read {path}: {cause.strerror}; name a file written by calibrate") from cause
        if len(content) > MAX_BYTES:
            raise EvidenceError(f"{path} is larger than {MAX_BYTES >> 20} MiB, so it is not a ranges file")
        return cls.from_json(content, str(path))

    def text(self, *, top: int | None = None) -> str:
        """Return a summary and a table of the `top` values (by default all): infinity and NaN first, then by absmax."""
        to = DType.parse(self.to)
        seen = sorted(((k, r) for k, r in self.values.items() if r.count), key=_size_of_row, reverse=True)
        random = "; random data is not real data" if self.random else ""
        facts = [
            ("data", f"{self.origin}, {count(self.batches, 'batch', 'batches')}{random}"),
            ("values", f"{len(seen)} seen, {len(self.values) - len(seen)} not seen, {len(self.untapped)} not measured"),
            ("overflow", f"{count(sum(1 for _, r in seen if r.overflow), 'value')} beyond {to.max:g}"),
            ("nonfinite", f"{count(sum(1 for _, r in seen if r.nonfinite), 'value')} with infinity or NaN"),
        ]
        rows = [_cells(name, range_, to) for name, range_ in seen[:top]]
        lines = [f"{plain(self.model)}: ranges for {self.to}", *table(facts), ""]
        lines += table(rows, head=_COLUMNS, right=" >>>>>>>>")
        if len(rows) < len(seen):
            lines.append(f"  … {len(seen) - len(rows)} more")
        return "\n".join(lines)


def key(view: View, value: ValueId) -> str:
    """Return the name of a value in a ranges file; equal names in bodies with equal paths share one range."""
    path = view.scopes[view.values[value].scope].path
    return f"{path.removesuffix('/')}:{view.value_name(value)}" if path else view.value_name(value)


def check_writable(file: Path, overwrite: bool) -> None:
    if file.suffix.lower() == ".onnx":
        raise EvidenceError(f"cannot write {file}: ranges are JSON, not a model; use the suffix .json")
    check_output_path(file, EvidenceError)
    if file.exists() and not overwrite:
        raise EvidenceError(f"{file} already exists; name another output, or use {spelled('overwrite', True)}")


_HEAD = ("model", "graph", "weights", "tool", "to", "batches", "origin", "random")


def _lines(entries: Mapping[str, object]) -> str:
    rows = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(rows) + "\n }" if rows else "{}"


_COLUMNS = ("value", "absmax", "headroom", "smallest", "overflow", "subnormal", "flushed", "nonfinite", "elements")


def _size_of_row(row: tuple[str, Range]) -> float:
    return math.inf if row[1].nonfinite else row[1].absmax


def _cells(name: str, range_: Range, to: DType) -> tuple[str, ...]:
    headroom = range_.headroom(to)
    counts = (range_.overflow, range_.subnormal, range_.flushed, range_.nonfinite)
    return (
        name,
        f"{range_.absmax:.4g}" if range_.nonfinite < range_.count else "-",
        f"{headroom:.3g}" if math.isfinite(headroom) else "-",
        f"{range_.absmin:.4g}" if range_.absmin else "-",
        *(f"{100 * part / range_.count:.3g}%" if part else "-" for part in counts),
        str(range_.count),
    )


# -- reading -----------------------------------------------------------------------------------------


def _ranges(loaded: object) -> Ranges:
    if isinstance(loaded, Mapping):
        if {"totals", "rows"} <= loaded.keys():
            raise Malformed("is a conversion report, not a ranges file")
        if (schema := loaded.get("schema")) != SCHEMA:
            raise Malformed(f"is {schema!r:.20}, but this version reads {SCHEMA}", ".schema")
    ranges: Ranges = _RANGES(loaded)
    return ranges


def _range(value: object) -> Range:
    numbers: Range = _NUMBERS(value)
    if max(numbers.nonfinite, numbers.overflow, numbers.flushed, numbers.subnormal) > numbers.count:
        raise Malformed(f"counts more than its {numbers.count} elements")
    if numbers.absmin > numbers.absmax:
        raise Malformed("is larger than its absmax", ".absmin")
    return numbers


def _size(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value <= DType.DOUBLE.max:  # type: ignore[operator]
        raise Malformed("must be a finite number, 0 or more")
    return float(value)  # type: ignore[arg-type]


def _low_type(value: object) -> str:
    if value not in [dtype.spelling for dtype in DType if dtype.low]:
        raise Malformed(f"is {value!r:.20}, which is not a low type")
    return str(value)


_NUMBERS = record(Range, dict.fromkeys(("absmax", "absmin"), _size), required=tuple(f.name for f in fields(Range)))
_RANGES = record(
    Ranges,
    {"schema": reader_of(int), "to": _low_type, "values": map_of(_range)},
    required=("schema", *(f.name for f in fields(Ranges))),
    make=lambda schema, **known: Ranges(**known),
)
