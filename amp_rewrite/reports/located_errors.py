"""Local errors of ops, read from the JSON that `amp-rewrite locate` prints."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from amp_rewrite.errors import ReportError, count
from amp_rewrite.reports import reading
from amp_rewrite.reports.reading import Malformed
from amp_rewrite.reports.rows import Row

_AGAIN = "write it again with `amp-rewrite locate --json`"


class NamedOp(NamedTuple):
    """An op by its name and type."""

    name: str
    op: str


class LocalError(NamedTuple):
    """The local error of an op; `lost`: it overflows, or the error is not finite."""

    own: float
    lost: bool


@dataclass(frozen=True)
class LocatedErrors:
    """Local errors by name and type of the op. `source`: the file."""

    source: str
    errors: Mapping[tuple[str, str], LocalError] = field(repr=False)

    @classmethod
    def load(cls, path: str | Path) -> LocatedErrors:
        """Return the errors in a file; ReportError if it is not one that `locate --json` printed."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from error
        return cls(str(path), reading.load(text, str(path), "errors that locate found", _AGAIN, ReportError, _decoded))

    def of(self, op: NamedOp | Row) -> LocalError | None:
        """Return the error of an op; None if it was not measured."""
        return self.errors.get((op.name, op.op))

    def shares(self, rows: Sequence[NamedOp | Row], model: str) -> dict[int, float]:
        """Return the share of each op in the sum of the errors that are finite; 1 for an op that is lost.

        `model`: its name. ReportError if it lacks most of the ops that were measured: they are of another model.
        """
        known = {(row.name, row.op) for row in rows}
        here = sum(op in known for op in self.errors)
        if 2 * here <= len(self.errors):
            raise ReportError(
                f"{self.source}: measures {count(len(self.errors), 'op')}, of which {model} has {here}; give the"
                " errors of this model"
            )
        measured = {at: error for at, row in enumerate(rows) if (error := self.of(row)) is not None}
        total = sum(error.own for error in measured.values() if not error.lost)
        return {at: 1.0 if error.lost else error.own / total if total else 0.0 for at, error in measured.items()}


def _beyond(number: object) -> bool:
    """True for an integer that no float holds."""
    return isinstance(number, int) and number > sys.float_info.max


def _decoded(text: bytes) -> Mapping[tuple[str, str], LocalError]:
    loaded = reading.decode(text)
    if not isinstance(loaded, dict) or not isinstance(rows := loaded.get("rows"), list):
        raise Malformed("holds no list 'rows'")
    errors = {}
    for at, row in enumerate(rows):
        try:
            name, kind, own = row["op"], row["kind"], row["own"]
            if own is not None:
                own = math.inf if own in ("inf", "-inf", "nan") or _beyond(own) else reading.size(own)
                errors[str(name), str(kind)] = LocalError(own, row.get("overflows") is True or math.isinf(own))
        except KeyError as missing:
            raise Malformed(f"lacks the field {missing}", f".rows[{at}]") from None
        except (TypeError, Malformed):
            raise Malformed("must be null or a number that is not negative", f".rows[{at}].own") from None
    return errors
