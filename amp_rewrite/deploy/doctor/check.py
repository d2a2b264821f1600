"""One check of a checkup."""

from __future__ import annotations

from dataclasses import dataclass

OK, FINDING, ADVICE, UNKNOWN = "ok", "finding", "advice", "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its state ("ok", "finding", "advice", "unknown"), the fact, and the remedy."""

    topic: str
    state: str
    fact: str
    remedy: str = ""
