"""Measured ranges of a model's values: as numbers, as a file, as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import EvidenceError
from amp_rewrite.files.rounding import Fit
from amp_rewrite.files.scratch import write_whole
from amp_rewrite.reports.render import count, plain, table
from amp_rewrite.version import VERSION

if TYPE_CHECKING:
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import ValueId, View

SCHEMA = 1
MAX_BYTES = 256 * 2**20
_AGAIN = "calibrate again"


@dataclass(frozen=True, slots=True)
class Range(Fit):
    """The `Fit` of all elements of a value over all batches; count 0 if no element was computed."""

    def merge(self, other: Fit) -> Range:
        """Return the range of both together."""
        return Range(*astuple(Fit.merge(self, other)))

    def times(self, batches: int) -> Range:
        """Return the range of the same values seen that many times."""
        return Range(
            **{f.name: getattr(self, f.name) * (1 if f.name.startswith("abs") else batches) for f in fields(self)}
        )

    def headroom(self, to: DType) -> float:
        """Return the factor by which the value can grow before it overflows the type; infinity for zeros."""
        return to.max / self.absmax if self.absmax else math.inf


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of one model's values for the type `to` ("float16" or "bfloat16"), rounded to nearest even.

    `values` has the range of each floating tensor by its `key`, in topological order: its name, or, for a value in a
    body, the body's path, a colon and the name. A copy (Reshape, Transpose …) has the range of its source. Constants
    count once per batch. `untapped` has the reason for each floating value without a range. `origin` and `random`
    describe the data, `model`, `graph` and `weights` the model: its file name and its `Fingerprint`.
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

    def of(self, view: View, value: ValueId) -> Range | None:
        """Return the range of a value of the model, or None if it was not tapped."""
        return self.values.get(key(view, value))

    def check(self, model: Model) -> None:
        """Raise EvidenceError, naming the difference, if these are not the ranges of this model."""
        from amp_rewrite.files.fingerprint import fingerprint

        found = fingerprint(model)
        fault = _other("graph", self.graph, found.graph) or _other("weights", self.weights, found.weights)
        if fault:
            name = f", {self.model}" if self.model else ""
            raise EvidenceError(f"the ranges are of another model{name}: {fault} differ; {_AGAIN} on this one")

    def merge(self, other: Ranges) -> Ranges:
        """Return the ranges over the batches of both. Raise EvidenceError for those of another model or type."""
        fault = (
            _other("type", self.to, other.to)
            or _other("graph", self.graph, other.graph)
            or _other("weights", self.weights, other.weights)
        )
        if fault:
            raise EvidenceError(f"cannot merge ranges of different models or types: {fault}; {_AGAIN} in one way")
        values = dict(self.values)
        for name, found in other.values.items():
            values[name] = values[name].merge(found) if name in values else found
        return replace(
            self,
            values=values,
            untapped={k: why for k, why in {**self.untapped, **other.untapped}.items() if k not in values},
            batches=self.batches + other.batches,
            origin=_joined(self.origin, other.origin),
            random=self.random or other.random,
            tool=_joined(self.tool, other.tool),
        )

    # -- files ---------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return JSON with one value per line; the same ranges give the same text."""
        head = {name: getattr(self, name) for name in _HEAD}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in {"schema": SCHEMA, **head}.items()]
        rows = {name: dict(zip(_NUMBERS, astuple(found), strict=True)) for name, found in self.values.items()}
        values, untapped = _lines(rows), _lines(self.untapped)
        return "\n".join(["{", *lines, f' "values": {values},', f' "untapped": {untapped}', "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Ranges:
        """Read what `to_json` wrote. Raise EvidenceError, naming the source and the invalid field."""
        try:
            loaded = json.loads(text, parse_constant=_no_constant)
        except RecursionError as error:
            raise EvidenceError(f"{source}: nested too deeply, so not a file of ranges") from error
        except ValueError as error:
            raise EvidenceError(f"{source}: not JSON ({error}); name a file that calibrate wrote") from error
        try:
            return _ranges(loaded)
        except EvidenceError as error:
            raise EvidenceError(f"{source}: {error}; {_AGAIN}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the file completely or not at all. Raise EvidenceError if it cannot be written, or exists without
        `overwrite`."""
        file = Path(path)
        check_writable(file, overwrite)
        try:
            write_whole(file, self.to_json().encode())
        except OSError as cause:
            raise EvidenceError(f"cannot write {file}: {cause.strerror or cause}; nothing was changed") from cause

    @classmethod
    def load(cls, path: str | Path) -> Ranges:
        """Read ranges from a file. Raise EvidenceError, naming the fault in one line, if it is invalid."""
        file = Path(path)
        try:
            if not (file.is_file() or file.is_fifo()):
                fact = "it is not a regular file" if file.exists() else "there is no such file"
                raise EvidenceError(f"cannot read {file}: {fact}; name a file that calibrate wrote")
            with file.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
        except OSError as cause:
            raise EvidenceError(f"cannot read {file}: {cause.strerror}; name a file that calibrate wrote") from cause
        if len(content) > MAX_BYTES:
            raise EvidenceError(f"{file}: larger than {MAX_BYTES >> 20} MiB, so not a file of ranges")
        return cls.from_json(content, str(file))

    # -- text ----------------------------------------------------------------------------------------

    def text(self, *, top: int | None = None) -> str:
        """Return a summary and a table of `top` rows: values with infinity or NaN first, then by absmax."""
        to = DType.parse(self.to)
        seen = sorted(((k, r) for k, r in self.values.items() if r.count), key=_size_of_row, reverse=True)
        unseen = [(name,) for name, found in self.values.items() if not found.count]
        shown = seen[:top]
        random = "; random data is not real data" if self.random else ""
        facts = [
            ("data", f"{self.origin}, {count(self.batches, 'batch', 'batches')}{random}"),
            ("values", f"{len(seen)} seen, {len(unseen)} not seen, {len(self.untapped)} not tapped"),
            ("overflow", f"{count(sum(1 for _, r in seen if r.overflow), 'value')} beyond {to.max:g}"),
            ("nonfinite", f"{count(sum(1 for _, r in seen if r.nonfinite), 'value')} with infinity or NaN"),
        ]
        lines = [f"{plain(self.model)}: ranges for {self.to}", *table(facts), "", *_table(shown, to)]
        if len(shown) < len(seen):
            lines.append(f"  … {len(seen) - len(shown)} more")
        if unseen:
            lines += ["", "not seen: a branch not taken, a loop of no trips, or an empty tensor", *table(unseen)]
        if self.untapped:
            lines += ["", "not tapped", *table(self.untapped.items())]
        return "\n".join(lines)


def key(view: View, value: ValueId) -> str:
    """Return the name of a value in a file of ranges; equal names in bodies of equal path share one range."""
    found = view.values[value]
    path = view.scopes[found.scope].path
    return f"{path.removesuffix('/')}:{found.name}" if path else found.name


def check_writable(file: Path, overwrite: bool) -> None:
    """Raise EvidenceError if ranges cannot be written to `path`, and say why."""
    if not file.parent.is_dir():
        raise EvidenceError(f"cannot write {file}: the folder {file.parent} does not exist; make it first")
    if file.is_dir():
        raise EvidenceError(f"cannot write {file}: it is a folder; name a file")
    if file.exists() and not overwrite:
        raise EvidenceError(f"{file} exists; name another output, or replace it with --overwrite")


_NUMBERS = tuple(f.name for f in fields(Range))
_HEAD = ("model", "graph", "weights", "tool", "to", "batches", "origin", "random")


def _other(what: str, mine: str, theirs: str) -> str:
    """Return the difference of two headers, or an empty text."""
    return f"{what} {mine[:12]} and {theirs[:12]}" if mine != theirs else ""


def _joined(a: str, b: str) -> str:
    """Return both texts, each once."""
    return "; ".join(dict.fromkeys([*a.split("; "), *b.split("; ")]))


def _lines(entries: Mapping[str, object]) -> str:
    rows = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(rows) + "\n }" if rows else "{}"


# -- a table -----------------------------------------------------------------------------------------

_COLUMNS = ("absmax", "headroom", "smallest", "overflow", "subnormal", "flushed", "nonfinite", "elements", "value")


def _table(rows: list[tuple[str, Range]], to: DType) -> list[str]:
    return table((_cells(name, found, to) for name, found in rows), head=_COLUMNS, right=">>>>>>>>")


def _size_of_row(row: tuple[str, Range]) -> float:
    return math.inf if row[1].nonfinite else row[1].absmax


def _cells(name: str, found: Range, to: DType) -> tuple[str, ...]:
    headroom = found.headroom(to)
    counts = (found.overflow, found.subnormal, found.flushed, found.nonfinite)
    return (
        f"{found.absmax:.4g}" if found.nonfinite < found.count else "-",
        f"{headroom:.3g}" if math.isfinite(headroom) else "-",
        f"{found.absmin:.4g}" if found.absmin else "-",
        *(f"{100 * part / found.count:.3g} %" if part else "-" for part in counts),
        str(found.count),
        name,
    )


# -- reading -----------------------------------------------------------------------------------------


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _ranges(loaded: object) -> Ranges:
    content = _object("the whole", loaded)
    if content.get("schema") != SCHEMA:
        raise EvidenceError(f"schema is {content.get('schema')!r:.20}, this version reads {SCHEMA}")
    wanted = ("schema", *_HEAD, "values", "untapped")
    _check_fields("the whole", content, wanted)
    head = {name: _FIELDS[name](name, content[name]) for name in _HEAD}
    if head["to"] not in [dtype.spelling for dtype in DType if dtype.low]:
        raise EvidenceError(f"to is {head['to']!r:.20}, which is not a low type")
    values = {
        _text("a key of values", k): _range(f"values.{k}", v) for k, v in _object("values", content["values"]).items()
    }
    untapped = {k: _text(f"untapped.{k}", v) for k, v in _object("untapped", content["untapped"]).items()}
    return Ranges(values=values, untapped=untapped, **head)


def _range(where: str, entry: object) -> Range:
    numbers = _object(where, entry)
    _check_fields(where, numbers, _NUMBERS)
    read: dict[str, Any] = {
        n: (_size if n.startswith("abs") else _natural)(f"{where}.{n}", numbers[n]) for n in _NUMBERS
    }
    if any(read[part] > read["count"] for part in ("nonfinite", "overflow", "flushed", "subnormal")):
        raise EvidenceError(f"{where} counts more than its {read['count']} elements")
    if read["absmin"] > read["absmax"]:
        raise EvidenceError(f"{where}.absmin is larger than its absmax")
    return Range(**read)


def _check_fields(where: str, found: Mapping[str, object], wanted: tuple[str, ...]) -> None:
    for name in wanted:
        if name not in found:
            raise EvidenceError(f"{where} lacks the field {name!r}")
    for name in found:
        if name not in wanted:
            raise EvidenceError(f"{where} has an unknown field {name!r:.60}")


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EvidenceError(f"{where} must be an object")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        raise EvidenceError(f"{where} must be text")
    return value


def _natural(where: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise EvidenceError(f"{where} must be a whole number from 0 to 2^63")
    return value


def _size(where: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value <= DType.DOUBLE.max:  # type: ignore[operator]
        raise EvidenceError(f"{where} must be a finite number that is not negative")
    return float(value)  # type: ignore[arg-type]


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise EvidenceError(f"{where} must be true or false")
    return value


_FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("model", "graph", "weights", "tool", "to", "origin"), _text),
    "batches": _natural,
    "random": _flag,
}
