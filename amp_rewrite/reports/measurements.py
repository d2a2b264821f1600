"""Measurements: errors of ops, of outputs, and of the trials of a search."""

from __future__ import annotations

from dataclasses import dataclass

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
