"""Reasons in reports, with the safety rules and fusions behind them, as `amp-rewrite explain` prints them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from amp_rewrite.decide.reasons import meaning
from amp_rewrite.errors import PatternError, advice

_HEAD = ("rule", "tier", "says")
_WIDTH = 110
_HEADINGS = {"hit": "Smallest model that needs it", "near": "Nearest model that it leaves alone"}


def records() -> dict[str, Any]:
    """Return the records of safety rules and fusions by name, and by the names of their cases."""
    from amp_rewrite.decide.needs.rule import RULES
    from amp_rewrite.rewrite.fusions import FUSIONS

    both: tuple[Any, ...] = (*RULES, *FUSIONS)
    return {name: record for record in both for name in (record.name, *record.pairs)}


def known_names() -> list[str]:
    """Return all names, strongest tier first, kinds of findings last."""
    from amp_rewrite.decide.reasons import KINDS, REASONS

    tiers = {id: -reason.strength for id, reason in REASONS.items()}
    tiers.update({record.name: tiers.get(record.reason, 0) for record in records().values()})
    return sorted({**tiers, **dict.fromkeys(KINDS, 0)}, key=lambda name: tiers.get(name, 0))


def known_words() -> set[str]:
    """Return all that `described` knows: the names, and those of the cases of rules."""
    return {*records(), *known_names()}


def described(name: str) -> dict[str, Any]:
    """Return all facts about a rule, fusion, reason or kind of finding; PatternError for an unknown name."""
    from amp_rewrite.decide.reasons import FINDINGS, KINDS, REASONS

    known = records()
    if name not in (names := known_words()):
        hint = advice(name, sorted(names), "`amp-rewrite explain rules` lists all")
        raise PatternError(f"no rule or reason {name!r}; {hint}")
    record = known.get(name)
    spoken = record.reason if record is not None else name
    pairs = record.pairs if record is not None else ()
    cases = {case: {end: known[name].model(end, case) for end in _HEADINGS} for case in pairs}
    reason = REASONS.get(spoken)
    return {
        "name": record.name if record is not None and name not in KINDS else name,
        "reason": spoken,
        "tier": reason.strength.words if reason is not None else "finding",
        "words": reason.words if reason is not None else KINDS[spoken],
        "promise": record.promise if record is not None else None,
        "docs": record.docs if record is not None else reason.docs if reason is not None else f"{FINDINGS}#{name}",
        "sections": dict(record.sections) if record is not None else {},
        "models": next(iter(cases.values()), {}),
        "cases": cases,
    }


def models_of(fact: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each model of a rule with a heading."""
    for case, models in fact["cases"].items():
        which = f": {case}" if len(fact["cases"]) > 1 else ""
        for end, head in _HEADINGS.items():
            yield f"{head}{which}", models[end]


def rules_table() -> str:
    """Return a line for each rule, reason and kind of finding."""
    from amp_rewrite.reports.render import table

    facts = {name: described(name) for name in known_names()}
    rows = [(name, fact["tier"], fact["promise"] or fact["words"]) for name, fact in facts.items()]
    return "\n".join(table(rows, head=_HEAD, indent=0))


def rule_page(fact: dict[str, Any]) -> str:
    """Return the text of what `described` returns."""
    lines = [f"{fact['name']}: {fact['promise'] or fact['words']}"]
    if fact["promise"]:
        lines.append(f"  in reports  {fact['reason']}: {fact['words']}")
    lines.append(f"  tier        {fact['tier']}")
    means, remedy = meaning(fact["reason"])
    lines += [f"  meaning     {means}"] if means else []
    lines += [f"  what to do  {remedy}"] if remedy else []
    if fact["docs"]:
        lines.append(f"  docs        {fact['docs']}")
    for head, text in fact["sections"].items():
        lines += ["", head, *textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for head, text in models_of(fact):
        lines += ["", head, textwrap.indent(text.rstrip(), "  ")]
    return "\n".join(lines)
