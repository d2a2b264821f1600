"""Evidence: the outcome of a check on data, and measurements of ops, outputs and trials."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.reports.render import count

NONE, GUARDED, SMOKE, VERIFIED, REPAIRED, FAILED = "none", "guarded", "smoke", "verified", "repaired", "failed"
"""Levels: no data; only ranges; random inputs; outputs within tolerance, without or with pins; outputs beyond it."""
ARGUMENTS = "the arguments of export"
"""Source of a batch made from the arguments of `export`."""
UNOPENED = "onnxruntime cannot open the model"
"""Prefix of the objection if the model cannot be run on any data."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Outcome of checking a conversion on data; `str()` gives the sentence at the end of a report.

    `level`: one of the levels above. `data`: the source of the batches. `random`: the batches are random, not real
    data. `criterion`: the bound on the outputs' errors. `error`: the largest error relative to the largest value of its
    output, as text; empty if no outputs were compared. `emulated`: the low type was emulated. `pinned`: the number of
    regions kept in float32 by a repair. `objection`: the reason for a failure. `largest_error`: `error` as a number;
    None if it is not finite. `score`: the worst score in the criterion's unit, unless that is relative to the largest
    value. `keep`: patterns for the ops kept in float32 by the check; a conversion with them does not need a check.
    """

    level: str = NONE
    data: str = ""
    batches: int = 0
    random: bool = False
    criterion: str = ""
    error: str = ""
    emulated: bool = False
    pinned: int = 0
    objection: str = ""
    largest_error: float | None = None
    score: str = ""
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.level == NONE:
            stop = f"; the check stopped: {self.objection}" if self.objection else ""
            return f"not checked on data: a graph does not show what overflows on your inputs{stop}"
        pinned = count(self.pinned, "op" if self.keep else "region")
        facts = [_FACTS[self.level].format(pinned=pinned, why=self.objection)]
        scale_is_clear = self.random or "largest value" in self.criterion
        scale = "" if scale_is_clear else " of an output's largest value"
        largest = f"largest error {self.error}{scale}" if self.error else ""
        facts += filter(None, [f"worst {self.score}" if self.score else largest])
        facts += [f"passes if {self.criterion}"] if self.criterion else []
        facts += ["half precision emulated"] if self.emulated and not self.random else []
        batches = count(self.batches, *(f"{'random ' if self.random else ''}{noun}" for noun in ("batch", "batches")))
        sentence = f"checked on {batches} ({self.data.removeprefix('random, ')}): {', '.join(facts)}"
        return f"{sentence}; this says nothing about your data" if self.random else sentence

    @property
    def conclusive(self) -> bool:
        """True if outputs were compared on real data."""
        return self.level in (VERIFIED, REPAIRED, FAILED) and not self.random

    @property
    def uncheckable(self) -> bool:
        """True if onnxruntime cannot run the model on any data here."""
        return self.objection.startswith(UNOPENED)


UNCHECKED = Evidence()


_FACTS = {
    GUARDED: "only ranges; add a tolerance to compare outputs",
    SMOKE: "no gross error",
    VERIFIED: "verified",
    REPAIRED: "repaired by keeping {pinned} in float32",
    FAILED: "failed: {why}",
}


# -- measurements --------------------------------------------------------------------------------------------

Index = tuple[int | str, ...]
"""Indices of an element; a map is indexed by its key."""


@dataclass(frozen=True, slots=True)
class OpErrors:
    """Errors of one op of the candidate, by its name in the reference.

    An error is sqrt(sum (value - reference)^2 / sum reference^2) over all batches, maximized over all outputs.
    `own`: the local error, with the reference's values as inputs; 0 for an op that only moves or selects values; None
    for an op without a low type, or one that cannot be measured in isolation. `accumulated`: the error of the op's
    outputs in a run of the candidate. `max_abs`: the largest accumulated error of finite values; infinite if these are
    right but others became infinite or NaN. `absmax`: the largest magnitude in the reference. `overflows`: with the
    reference's values as inputs, the op returns infinity or NaN where the reference is finite.
    """

    op: str
    kind: str
    dtype: str
    own: float | None
    accumulated: float
    max_abs: float
    absmax: float
    overflows: bool = False


ALLCLOSE = "allclose"


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound on the difference between two arrays: the name of a measure, and its limit.

    "allclose" is |a - b| <= atol + rtol |a| in every element, as in numpy, where `a` is the reference. Its score is the
    largest |a - b| / (atol + rtol |a|).
    """

    name: str
    limit: float = 1.0
    rtol: float = 0.0
    atol: float = 0.0

    def __str__(self) -> str:
        if self.name == ALLCLOSE:
            return f"|a - b| <= {self.atol:g} + {self.rtol:g} |a| in every element"
        if self.name == "scaled":
            return f"error ≤ {self.limit:g} of the output's largest value"
        return f"{self.name} at least {self.limit:g}"

    @property
    def measured(self) -> str:
        """Name of the score."""
        names = {ALLCLOSE: "error in units of the allowed error", "scaled": "error relative to the largest value"}
        return names.get(self.name, self.name)

    @property
    def higher(self) -> bool:
        """True if a higher score is better."""
        return self.name not in (ALLCLOSE, "scaled")

    def passes(self, number: float) -> bool:
        return number >= self.limit if self.higher else number <= self.limit


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between a candidate's array and the reference's, with the verdict of a criterion.

    `max_abs` and `scaled` (max |a-b| / max |a|) cover the values that are finite on both sides; None if there are none.
    `compared` counts these values; in a non-floating array, all of them. `nonfinite` counts infinities and NaN in the
    reference and in the candidate. `where` is the index of the largest difference; `reference` and `candidate` are the
    values there, as text. `score` is the number compared with the limit; None if the verdict has another reason.
    `because` gives the reason in one line.
    """

    elements: int
    ok: bool
    because: str
    compared: int = 0
    max_abs: float | None = None
    scaled: float | None = None
    score: float | None = None
    where: Index | None = None
    reference: str = ""
    candidate: str = ""
    nonfinite: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One output in one batch or, with `step`, in one of several runs on the batch.

    For a tensor in a sequence, `part` is its index: "[0]", "[1]" …
    """

    output: str
    batch: int
    difference: Difference
    part: str = ""
    step: int | None = None

    @property
    def label(self) -> str:
        """Name of the compared tensor: "y", "y[0]"."""
        return self.output + self.part

    @property
    def place(self) -> str:
        """Batch and step: "3", "3, step 57"."""
        return str(self.batch) if self.step is None else f"{self.batch}, step {self.step}"


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial: its number of pinned regions, verdict, reason, ops in float32, and worst score (None without one)."""

    pinned: int
    ok: bool
    because: str
    float32_ops: int = 0
    score: float | None = None
