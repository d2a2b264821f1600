"""Something that a person should know about a conversion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One fact: its kind ("saturated", "unknown_type" …), what it is about, and one line for people."""

    kind: str
    subject: str
    message: str
