"""The summary of a report as cards: evidence, shares, Casts, weights, and findings with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from amp_rewrite.decide import reasons
from amp_rewrite.errors import by_kind
from amp_rewrite.reports.page.chart import table
from amp_rewrite.reports.page.markup import element
from amp_rewrite.reports.page.page import Figure
from amp_rewrite.reports.render import count, share, size
from amp_rewrite.reports.rows import LOW, ReportData
from amp_rewrite.reports.summary import shift_counts

if TYPE_CHECKING:
    from amp_rewrite.reports.page.facts import ModelWork

_SUBJECTS = 20
"""Subjects that a card of findings lists."""
_WORDS = {
    "none": "not checked on data",
    "guarded": "guarded by ranges",
    "smoke": "smoke test",
    "verified": "verified",
    "repaired": "repaired",
    "failed": "failed",
}


def low_name(report: ReportData) -> str:
    """Name of the low type of a report."""
    names = dict.fromkeys(row.dtype for row in report.rows if row.dtype in LOW)
    return " and ".join(names) or report.model.to or "low"


def summary_cards(report: ReportData, work: ModelWork | None = None) -> Figure:
    """Return the summary of a report as a figure."""
    findings = _findings(report)
    totals = report.totals
    data: dict[str, object] = {
        "evidence": {"level": report.evidence.level, "words": str(report.evidence)},
        "totals": asdict(totals),
        "weights": dict(report.weights),
        "findings": findings,
    }
    if report.shifts:
        data["shifts"] = [asdict(row) for row in report.shifts]
    if work is not None:
        data["work"] = asdict(work)
    low = low_name(report)
    level = report.evidence.level
    evidence = _card("evidence", _WORDS.get(level, level), str(report.evidence), class_=f"card evidence {level}")
    cards = [] if report.inventory else [evidence]
    cards.append(_share(f"compute ops in {low}", totals.compute_lowered, totals.compute_ops, "compute ops"))
    if work is not None and work.flops:
        cards.append(_share(f"FLOPs in {low}", work.flops_low, work.flops, "FLOPs"))
    if work is not None and work.bytes:
        cards.append(_share(f"bytes moved in {low}", work.bytes_low, work.bytes, "bytes"))
    cards += [_casts(report), _weights(report)]
    if report.shifts:
        regions = [row for row in report.shifts if row.exponent]
        values = count(sum(row.values for row in regions), "value")
        cards.append(_card("regions shifted", str(len(regions)), f"{values}: {shift_counts(report.shifts)}"))
    parts = [element("div", *cards, class_="cards")]
    if report.shifts:
        parts += [element("h3", "Range shifts", class_="part"), _regions(report)]
    if findings:
        parts += [element("h3", "Findings"), element("div", *map(_finding, findings), class_="cards findings")]
    lead = f"{report.model.name} as it is." if report.inventory else f"{report.model.name} in {report.model.to}."
    return Figure("summary", "Summary", lead, element("div", *parts), data, notebook=True)


def _card(name: str, value: str, *more: Element | str, **attributes: str) -> Element:
    head = (element("p", name, class_="name"), element("p", value, class_="value"))
    parts = (part if isinstance(part, Element) else element("p", part) for part in more)
    return element("div", *head, *parts, **{"class_": "card", **attributes})


def _share(name: str, part: float, whole: float, unit: str) -> Element:
    """Return a card with a share, and a bar of it."""
    filled = 100 * part / whole if whole else 0
    bar = element(
        "svg",
        element("rect", x=0, y=0, width=100, height=6, class_="none"),
        element("rect", x=0, y=0, width=filled, height=6, class_="low"),
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        width="100%",
        height=6,
        aria_hidden="true",
    )
    return _card(name, share(round(part), round(whole)), bar, f"{_amount(part)} of {_amount(whole)} {unit}")


def _amount(number: float) -> str:
    """Return a number with a prefix: "17", "12.3 k", "4.1 G"."""
    for unit in ("", " k", " M", " G", " T", " P"):
        if number < 999.5:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} E"


def _casts(report: ReportData) -> Element:
    totals = report.totals
    if report.inventory:
        return _card("Casts", str(totals.casts_existing))
    inserted = totals.casts_to_low + totals.casts_to_float32
    more = [f"{totals.casts_to_low} to {low_name(report)}, {totals.casts_to_float32} to float32"] if inserted else []
    rest = ((totals.casts_existing, "of the model itself"), (totals.casts_folded, "folded"))
    more += [f"{number} {words}" for number, words in rest if number]
    return _card("Casts inserted", str(inserted), *more)


def _weights(report: ReportData) -> Element:
    totals = report.totals
    types = ", ".join(f"{dtype} {size(number)}" for dtype, number in sorted(report.weights.items()))
    after = f" → {size(totals.weights_after)}" if totals.baked else ""
    return _card("weights", f"{size(totals.weights_before)}{after}", types, class_="card weights")


def _regions(report: ReportData) -> Element:
    """Return the table of regions: exponent, evidence, sizes and headroom before and after."""
    head = ("largest value", "evidence", "remarks", "times", "values", "magnitude", "headroom", "then")
    cells = []
    for row in report.shifts:
        why = row.why or (f"undone at {count(len(row.ends), 'op')}" if row.ends else "")
        times = f"2^-{row.exponent}" if row.exponent else "1"
        sizes = (f"{row.absmax:.4g}", f"{row.headroom:.2g}", f"{row.headroom_after:.2g}")
        cells.append((row.value, row.evidence, why, times, str(row.values), *(sizes if row.absmax else ("", "", ""))))
    return table(head, cells, right=5)


def _findings(report: ReportData) -> list[dict[str, object]]:
    """Return the findings by kind: the fact, its meaning, the remedy, the subjects, and True for a mere fact."""
    cards: list[dict[str, object]] = []
    for kind, group in by_kind(report.findings).items():
        parts = [reasons.remarked(kind, finding.message).split(" · ") for finding in group]
        what = [{"subject": f.subject, "what": part[0]} for f, part in zip(group, parts, strict=True)]
        cards.append(
            {
                "kind": kind,
                "words": reasons.KINDS.get(kind, ""),
                "fact": all(reasons.is_fact(kind, finding.message) for finding in group),
                "number": len(group),
                "means": "".join(parts[0][1:2]),
                "do": " · ".join(parts[0][2:]),
                "what": what,
            }
        )
    return sorted(cards, key=lambda card: bool(card["fact"]))


def _finding(card: dict[str, object]) -> Element:
    what = card["what"]
    items: Sequence[dict[str, str]] = what if isinstance(what, list) else ()
    mark = "note" if card["fact"] else "warning"
    parts = [
        element("p", element("span", mark, class_=f"mark {mark}"), f" {card['kind']}", class_="name"),
        element("p", str(card["words"]), class_="words"),
        element("p", element("b", items[0]["subject"]), f": {items[0]['what']}"),
    ]
    parts += [element("p", element("i", f"{title} "), str(card[key])) for title, key in _PARTS if card[key]]
    if len(items) > 1:
        rest = len(items) - _SUBJECTS
        shown = [element("li", element("b", item["subject"]), f": {item['what']}") for item in items[1:_SUBJECTS]]
        shown += [element("li", f"and {rest} more in the report")] if rest > 0 else []
        more = count(len(items) - 1, "more of this kind", "more of this kind")
        parts.append(element("details", element("summary", more), element("ul", *shown)))
    return element("article", *parts, class_=f"card finding {mark}")


_PARTS = (("It means:", "means"), ("To do:", "do"))
