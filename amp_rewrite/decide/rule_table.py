"""All safety rules that a report can name: those that read the model alone, and those on the border of the types."""

from __future__ import annotations

from typing import Any

from amp_rewrite.decide.coloring import no_gain
from amp_rewrite.decide.hazards import find
from amp_rewrite.decide.hazards.rule import Rule

RULES: tuple[Rule[..., Any], ...] = (*find.RULES, *no_gain.RULES)
"""The rules, by reason or by finding."""
