"""Evidence: the check of a conversion on data, and measurements of ops, outputs and trials."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.reports.render import count

NONE, GUARDED, SMOKE, VERIFIED, REPAIRED, FAILED = "none", "guarded", "smoke", "verified", "repaired", "failed"
"""Levels: no data; ranges alone; random inputs; outputs near enough, without or with pins; outputs too far off."""
ARGUMENTS = "the arguments of export"
"""Origin of a batch of arguments of `export`."""
UNOPENED = "onnxruntime cannot open the model"
"""Start of the objection if no data can help."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Checks of a conversion on data; `str()` of it is the sentence at the end of a report.

    `level`: one of the levels above. `data`: the source of the batches; `random`: drawn, not real. `criterion`: the one
    for the outputs. `error`: the largest one, relative to the largest value of its output, as text; empty where no
    outputs were compared. `emulated`: the low type was emulated. `pinned`: number of regions in float32 by a repair.
    `objection`: the reason of a failure. `largest_error`: the number behind `error`, None if it is not finite.
    `score`: the worst score in the unit of the criterion, where that is not relative to the largest value. `keep`: the
    patterns by which a check keeps ops float32: with them, the same conversion needs no check.
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
        kept = count(self.pinned, "op" if self.keep else "region")
        facts = [_FACTS[self.level].format(pinned=kept, why=self.objection)]
        known = self.random or "largest value" in self.criterion
        scale = "" if known else " of an output's largest value"
        largest = f"largest error {self.error}{scale}" if self.error else ""
        facts += filter(None, [f"worst {self.score}" if self.score else largest])
        facts += [f"passes if {self.criterion}"] if self.criterion else []
        facts += ["half precision emulated"] if self.emulated and not self.random else []
        batches = count(self.batches, *(f"{'random ' if self.random else ''}{noun}" for noun in ("batch", "batches")))
        words = f"checked on {batches} ({self.data.removeprefix('random, ')}): {', '.join(facts)}"
        return f"{words}; this says nothing about your data" if self.random else words

    @property
    def enough(self) -> bool:
        """True if the conversion was checked on real data as far as it can be."""
        return self.level in (VERIFIED, REPAIRED, FAILED) and not self.random

    @property
    def impossible(self) -> bool:
        """True if no data can check the conversion here."""
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
"""Indices of an element; a map has its key for one."""


@dataclass(frozen=True, slots=True)
class OpErrors:
    """One op of the candidate, by its name in the reference.

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


ALLCLOSE = "allclose"


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound on the difference of two arrays: a measure by name, with its limit.

    "allclose" is |a - b| <= atol + rtol |a| in each element, as of numpy; `a` is the reference. Its number is the
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
        """Name of the judged number."""
        names = {ALLCLOSE: "error in units of the allowed one", "scaled": "error relative to the largest value"}
        return names.get(self.name, self.name)

    @property
    def higher(self) -> bool:
        """True if a higher number is better."""
        return self.name not in (ALLCLOSE, "scaled")

    def passes(self, number: float) -> bool:
        return number >= self.limit if self.higher else number <= self.limit


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a candidate's array from the reference's, and the decision of a criterion.

    `max_abs` and `scaled` (max |a-b| / max |a|) are over the values that are finite on both sides; None without such
    values. `compared` counts these; in arrays that are not floating it counts all. `nonfinite` counts infinities and
    NaN of the reference and of the candidate. `where` is the element with the largest difference, `reference` and
    `candidate` are its values as text. `score` is the number judged by the criterion; None if something else decided.
    `because` is the reason in one line.
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
    """One trial: its number of pinned regions, verdict, reason, ops in float32, and worst score (None without one)."""

    pinned: int
    ok: bool
    because: str
    float32_ops: int = 0
    score: float | None = None
