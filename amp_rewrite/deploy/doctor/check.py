"""One check, and a checkup of several: data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from amp_rewrite.reports.render import blocks, count
from amp_rewrite.reports.result import Result

if TYPE_CHECKING:
    pass

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its state ("ok", "finding", "advice", "unknown"), the fact, and the remedy."""

    topic: str
    state: str
    fact: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Checkup(Result):
    """All checks, in order. Advice and unknown facts are not findings.

    Attributes:
        checks: one per topic.
    """

    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """True without a finding."""
        return all(check.state != FINDING for check in self.checks)

    @property
    def brief(self) -> str:
        """Number of findings; without any, that of pieces of advice."""
        findings, advice = (sum(check.state == state for check in self.checks) for state in (FINDING, ADVICE))
        if findings:
            return count(findings, "finding")
        if any(check.topic == "values" for check in self.checks):
            lacks = any(check.topic == "GPU" and check.state == ADVICE for check in self.checks)
            return "no obstacle in the model; its values were not seen" + "; this machine has no GPU" * lacks
        return f"no obstacle; {count(advice, 'piece of advice', 'pieces of advice')}" if advice else "all well"

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the checks as dictionaries."""
        return map(asdict, self.checks)

    def text(self) -> str:
        """Return a line per check, followed by its remedy if any."""
        rows = blocks([(_MARKS[c.state], c.topic, c.fact) for c in self.checks], indent=0)
        remedies = ([f"{'':{_INDENT}}{check.remedy}"] if check.remedy else [] for check in self.checks)
        lines = [line for row, remedy in zip(rows, remedies, strict=True) for line in (*row, *remedy)]
        return "\n".join([*lines, "", self.brief])

    def to_json(self) -> str:
        """Return `{"well": …, "checks": [{"topic", "state", "fact", "remedy"}, …]}`."""
        return json.dumps({"well": self.well, "checks": [asdict(check) for check in self.checks]}, indent=2)


_MARKS = {OK: "ok", FINDING: "FINDING", ADVICE: "advice", UNKNOWN: "unknown"}
_INDENT = 9
