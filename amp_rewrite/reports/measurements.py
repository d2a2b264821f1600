"""Measurements: errors of ops, of outputs, and of the trials of a search, and those that `locate --json` prints."""

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

Index = tuple[int | str, ...]
"""Indices of an element; a map has its key for one."""


@dataclass(frozen=True, slots=True)
class OpErrors:
    """One op of the candidate, by the name that it has in the reference.

    Errors are sqrt(sum (value - reference)^2 / sum reference^2) over all batches, the largest over all outputs.
    `own`: the local error, of the op fed with the reference's values; 0 if it only moves or selects values; None if it
    has no low type or cannot be measured alone. `accumulated`: the error of its output in the candidate as it runs.
    `max_abs` is the largest accumulated error of finite values, infinite if others are lost and these are right;
    `absmax` the largest value in the reference. `overflows`: fed with the reference's values, it gives infinity or NaN
    for values that are finite there.
    """

    op: str
    kind: str
    dtype: str
    own: float | None
    accumulated: float
    max_abs: float
    absmax: float
    overflows: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a candidate's array from the reference's, and the decision of a criterion.

    `max_abs`, `max_rel` (per element, |a-b| / |a|) and `scaled` (max |a-b| / max |a|) are over the values that are
    finite on both sides; None without such values. `compared` counts these; in arrays that are not floating it counts
    all. `nonfinite` counts infinities and NaN of the reference and of the candidate. `where` is the element that
    differs most, `reference` and `candidate` are its values as text. `score` is the number that the criterion judges;
    None if something else decided. `because` is the reason in one line.
    """

    elements: int
    ok: bool
    because: str
    compared: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    scaled: float | None = None
    score: float | None = None
    where: Index | None = None
    reference: str = ""
    candidate: str = ""
    nonfinite: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output in one batch, or with `step` in one of several runs on it.

    For one tensor of a sequence, `part` is "[0]", "[1]" …
    """

    output: str
    batch: int
    difference: Difference
    part: str = ""
    step: int | None = None

    @property
    def label(self) -> str:
        """Return the name of the compared tensor: "y", "y[0]"."""
        return self.output + self.part

    @property
    def place(self) -> str:
        """Return the batch and the step: "3", "3, step 57"."""
        return str(self.batch) if self.step is None else f"{self.batch}, step {self.step}"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial: the number of pinned regions, its verdict and the reason, the number of ops in float32, and the worst
    score of an output, None without one."""

    pinned: int
    ok: bool
    because: str
    float32_ops: int = 0
    score: float | None = None


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
        """Read the output of `locate --json`; ReportError for another file."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from error
        return cls(str(path), reading.load(text, str(path), "errors that locate found", _AGAIN, ReportError, _decoded))

    def of(self, op: NamedOp | Row) -> LocalError | None:
        """Return the error of an op; None if it was not measured."""
        return self.errors.get((op.name, op.op))

    def shares(self, rows: Sequence[NamedOp | Row], model: str) -> dict[int, float]:
        """Return the share of each op in the sum of finite errors; 1 for a lost op.

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
