"""The next step after a conversion: the check that would tell more of it, and has not been made."""

from __future__ import annotations

from dataclasses import dataclass

from amp_rewrite.reports.evidence import NONE
from amp_rewrite.reports.rows import ReportData
from amp_rewrite.settings.request import USUAL_TOLERANCES

LOW = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class NextStep:
    """The check that is missing, in words, and the tolerance to start with, "" if the outputs have a criterion."""

    check: str
    tolerance: str

    def __str__(self) -> str:
        if not self.tolerance:
            return f"{self.check}, and keep the criterion"
        python, shell = f"tolerance={self.tolerance}", f"--tolerance {self.tolerance}"
        return f"{self.check}, as amp_rewrite.repair(model, data, {python}) or --data batches.npz {shell}"


def next_step(report: ReportData) -> NextStep | None:
    """Return the next step; None for an inventory, if nothing is low or changed, and after a check on real data."""
    evidence = report.evidence
    if report.inventory or evidence.enough or not affected(report):
        return None
    real = "give real data in place of random" if evidence.random else "compare the outputs"
    check = "give data" if evidence.level == NONE else real
    return NextStep(check, "" if evidence.criterion else USUAL_TOLERANCES[report.model.to or LOW[0]])


def affected(report: ReportData) -> bool:
    """True if something is low or changed, so that its numbers may be others."""
    totals = report.totals
    changed = totals.casts_to_low + totals.casts_to_float32 + totals.casts_folded + totals.baked + totals.raised
    return bool(changed) or any(row.dtype in LOW for row in report.rows)
