"""The page of a difference in a browser: the table of changes, and the newer model with what changed marked in it."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from amp_rewrite import convert, diff
from amp_rewrite.reports.delta import Delta
from suites.browser.test_report_page import EVIL, details, hostile, legend, walk
from support.browser import NARROW, WIDE, Visiting
from support.corpus import exported

pytestmark = [pytest.mark.browser, pytest.mark.slow]

BERT = "tests/models/bert_ts13.onnx"


@cache
def lowered() -> Delta:
    """A model against its conversion: ops lowered, added and removed, Casts added."""
    return diff(exported(BERT), convert(exported(BERT), fuse="basic"))


@cache
def kept() -> Delta:
    """Two conversions of a model: few ops raised, with Casts around them."""
    return diff(convert(exported(BERT), fuse="basic"), convert(exported(BERT), fuse="basic", keep=["op=Add"]))


@pytest.mark.parametrize(("made", "width", "dark"), [(lowered, WIDE, False), (kept, NARROW, True)])
def test_the_page_opens_quietly_and_counts_what_the_difference_counts(
    visit: Visiting, made: object, width: int, dark: bool
) -> None:
    delta = made()  # type: ignore[operator]
    visited = visit(delta.to_html(), width=width, dark=dark)
    assert visited.quiet, visited.errors
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
    counts = legend(visited)
    ops = Counter(kind for kind, _ in {(change.kind, change.name) for change in delta.changes})
    found = [counts.get(name, 0) for name in ("low", "high", "only")]
    assert found == [ops["lowered"], ops["raised"], delta.counts["added"]]
    assert counts.get("cast alone", 0) == sum(cast.sign == "+" for cast in delta.casts)
    assert sum(delta.counts.values()) > 10


def test_changes_are_visited_in_turn_by_key_read_out_and_explained(visit: Visiting) -> None:
    visited = visit(kept().to_html())
    page = visited.page
    page.locator("[data-part][tabindex='0']").focus()
    number = len({change.name for change in kept().changes})
    seen = set()
    for turn in range(1, number + 1):
        page.keyboard.press("n")
        assert f"({turn} of {number})" in page.locator(".said").inner_text()
        seen.add(page.locator(".node.chosen").get_attribute("data-part"))
    assert len(seen) == number
    page.keyboard.press("N")
    assert f"({number - 1} of {number})" in page.locator(".said").inner_text()
    chosen = page.locator(".node.chosen")
    assert "raised: float16 → float32" in chosen.get_attribute("aria-label")
    rule = kept().report.rows[int(str(chosen.get_attribute("data-part")))].rule  # type: ignore[union-attr]
    assert "raised: float16 → float32" in details(visited) and str(rule) in details(visited)
    page.keyboard.press("Escape")
    assert page.locator(".node.chosen").count() == 0
    assert visited.quiet, visited.errors


def test_what_is_new_is_marked_and_new_casts_are_visited_first(visit: Visiting) -> None:
    visited = visit(lowered().to_html())
    page = visited.page
    page.get_by_role("button", name="Unfold all scopes").click()
    added = page.locator(".node.changed.alone").first
    assert added.locator(".head").text_content().startswith("+ ")  # type: ignore[union-attr]
    assert added.locator(".box").evaluate("(box) => getComputedStyle(box).strokeDasharray") != "none"
    assert page.locator(".node.op.changed.low").first.locator(".head").text_content().startswith("▼ ")  # type: ignore
    assert page.locator(".castmark.changed").first.text_content().startswith("+ ")  # type: ignore[union-attr]
    page.get_by_role("button", name="Go to the next Cast").click()
    assert "new: " in details(visited)
    assert f"of {sum(cast.sign == '+' for cast in lowered().casts)})" in page.locator(".said").inner_text()


def test_the_table_of_differences_leads_to_the_graph(visit: Visiting) -> None:
    visited = visit(kept().to_html(), width=NARROW)
    row = visited.page.locator("#changes details tbody tr").first
    name = row.locator("td").nth(1).inner_text()
    assert row.bounding_box()["height"] < 120  # names are not broken letter by letter
    row.get_by_role("button").click()
    assert name in details(visited)


def test_hostile_names_in_a_difference_run_nothing(visit: Visiting) -> None:
    report = hostile()
    rows = tuple(row._replace(outputs=("float16",)) for row in report.rows[:-1])
    visited = visit(diff(report, replace(report, rows=rows, outputs=(), casts=())).to_html())
    walk(visited, len(EVIL) - 1)
    assert visited.quiet, (visited.errors, visited.dialogs, visited.requests)
