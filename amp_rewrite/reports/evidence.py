"""Evidence: how far a conversion was checked on data, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.reports.render import count

NONE, GUARDED, SMOKE, VERIFIED, REPAIRED, FAILED = "none", "guarded", "smoke", "verified", "repaired", "failed"
"""Levels: no data; ranges alone; random inputs; outputs near enough, without or with pins; outputs not near enough."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Checks of a conversion on data; `str()` of it is the sentence at the end of a report.

    `level`: one of the levels above. `data`: the source of the batches; `random`: drawn, not real. `criterion`: the one
    for the outputs. `error`: the largest one, relative to the largest value of its output, as text; empty where no
    outputs were compared. `emulated`: the low type was emulated. `pinned`: number of regions that a repair keeps in
    float32. `objection`: the reason of a failure. `largest_error`: the number behind `error`, None if it is not finite.
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
            why = f": {self.objection}" if self.objection else ""
            return f"not checked on data{why}: what overflows on your inputs cannot be seen in a graph"
        kept = count(self.pinned, "op" if self.keep else "region")
        facts = [_FACTS[self.level].format(pinned=kept, why=self.objection)]
        scale = "" if self.random else " of an output's largest value"
        largest = f"largest error {self.error}{scale}" if self.error else ""
        facts += filter(None, [f"worst {self.score}" if self.score else largest])
        facts += [f"passes if {self.criterion}"] if self.criterion else []
        facts += ["half precision emulated"] if self.emulated and not self.random else []
        batches = count(self.batches, *(f"{'random ' if self.random else ''}{noun}" for noun in ("batch", "batches")))
        words = f"checked on {batches} ({self.data.removeprefix('random, ')}): {', '.join(facts)}"
        return f"{words}; not proof for your data" if self.random else words

    @property
    def enough(self) -> bool:
        """True if the conversion was checked on real data as far as it can be."""
        return self.level in (VERIFIED, REPAIRED, FAILED) and not self.random


UNCHECKED = Evidence()

_FACTS = {
    GUARDED: "guarded by the ranges seen, outputs not compared",
    SMOKE: "no gross fault",
    VERIFIED: "verified",
    REPAIRED: "repaired with {pinned} in float32",
    FAILED: "failed: {why}",
}
