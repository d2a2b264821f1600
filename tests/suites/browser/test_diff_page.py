"""The page of a difference in a browser: both graphs, linked op by op, with what changed marked in them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from amp_rewrite import convert, diff
from amp_rewrite.reports.delta import Delta
from suites.browser.test_report_page import EVIL, hostile
from support.browser import NARROW, WIDE, Visit, Visiting
from support.corpus import exported

pytestmark = pytest.mark.browser

BERT = "tests/models/bert_ts13.onnx"
PANES = (".pane[data-graph='0']", ".pane[data-graph='1']")


@cache
def lowered() -> Delta:
    """A model against its conversion: ops lowered, added and removed, Casts added."""
    return diff(exported(BERT), convert(exported(BERT), fuse="basic"))


@cache
def kept() -> Delta:
    """Two conversions of a model: few ops raised, with Casts around them."""
    return diff(convert(exported(BERT), fuse="basic"), convert(exported(BERT), fuse="basic", keep=["op=Add"]))


@cache
def page_of(delta: str) -> str:
    return {"lowered": lowered, "kept": kept}[delta]().to_html()


def legends(visit: Visit) -> list[dict[str, int]]:
    """The counts beside the words of both legends, by word."""
    read = """(pane) => [...document.querySelectorAll(`${pane} .legend .key`)].map(
        (key) => [key.textContent.replace(/ \\(.*/, "").trim(), Number(key.dataset.count)])"""
    return [dict(visit.page.evaluate(read, pane)) for pane in PANES]


def details(visit: Visit) -> list[str]:
    return [visit.page.locator(f"{pane} .details").inner_text() for pane in PANES]


def chosen(visit: Visit) -> list[list[str | None]]:
    return [
        [node.get_attribute("data-part") for node in visit.page.locator(f"{pane} .node.chosen").all()] for pane in PANES
    ]


def in_sight(visit: Visit, pane: str) -> bool:
    """True if the chosen op of a pane lies within its frame."""
    node = visit.page.locator(f"{pane} .node.chosen").bounding_box()
    frame = visit.page.locator(f"{pane} .frame-box").bounding_box()
    return bool(node and frame and frame["x"] <= node["x"] + node["width"] / 2 <= frame["x"] + frame["width"]
                and frame["y"] <= node["y"] + node["height"] / 2 <= frame["y"] + frame["height"])  # fmt: skip


SIGNS = {
    "lowered": "▼ lowered",
    "raised": "▲ raised",
    "added": "+ only here: added",
    "removed": "− only here: removed",
    "casts": "Casts only here",
}


@pytest.mark.parametrize("delta", ["lowered", "kept"])
@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (NARROW, True)])
def test_the_page_opens_quietly_and_counts_what_the_json_counts(
    visit: Visiting, delta: str, width: int, dark: bool
) -> None:
    written = json.loads({"lowered": lowered, "kept": kept}[delta]().to_json())
    visited = visit(page_of(delta), width=width, dark=dark)
    assert visited.quiet, visited.errors
    assert visited.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visited.page.locator(".pane").count() == 2
    signs = Counter(cast["sign"] for cast in written["casts"])
    first, second = legends(visited)
    for kind in ("lowered", "raised"):
        number = len({change["name"] for change in written["changes"] if change["kind"] == kind})
        assert first.get(SIGNS[kind], 0) == second.get(SIGNS[kind], 0) == number
    assert second.get(SIGNS["added"], 0) == written["counts"]["added"] and SIGNS["added"] not in first
    assert first.get(SIGNS["removed"], 0) == written["counts"]["removed"] and SIGNS["removed"] not in second
    assert (first.get(SIGNS["casts"], 0), second.get(SIGNS["casts"], 0)) == (signs["-"], signs["+"])
    assert sum(written["counts"].values()) > 10


def test_a_click_on_a_changed_op_shows_what_changed_and_why_in_both_graphs(visit: Visiting) -> None:
    visited = visit(page_of("kept"))
    change = next(change for change in kept().changes if change.kind == "raised")
    visited.page.get_by_role("button", name="Go to the next change").click()
    node = visited.page.locator(f"{PANES[1]} .node.chosen")
    visited.page.locator(".details .close").first.click()
    assert chosen(visited) == [[], []] and node.count() == 0
    visited.page.locator(f"{PANES[0]} .node.op.changed").first.click()
    before, after = details(visited)
    for text in (before, after):
        assert f"raised: {change.before} → {change.after}" in text
    ends = chosen(visited)
    assert all(len(parts) == 1 for parts in ends)
    reports = kept().sides.reports  # type: ignore[union-attr]
    rules = [str(report.rows[int(str(parts[0]))].rule) for report, parts in zip(reports, ends, strict=True)]
    assert rules[0] in before and rules[1] in after and rules[0] != rules[1]
    assert in_sight(visited, PANES[0]) and in_sight(visited, PANES[1])


def test_changes_are_visited_in_turn_by_key_and_read_out(visit: Visiting) -> None:
    visited = visit(page_of("kept"))
    page = visited.page
    page.locator(f"{PANES[1]} [data-part][tabindex='0']").focus()
    number = len({change.name for change in kept().changes})
    seen = []
    for turn in range(1, number + 1):
        page.keyboard.press("n")
        assert f"({turn} of {number})" in page.locator(".said").inner_text()
        assert in_sight(visited, PANES[0]) and in_sight(visited, PANES[1])
        seen.append(tuple(parts[0] for parts in chosen(visited)))
    assert len(set(seen)) == number
    page.keyboard.press("N")
    assert f"({number - 1} of {number})" in page.locator(".said").inner_text()
    assert "raised: float16 → float32" in page.locator(f"{PANES[1]} .node.chosen").get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert chosen(visited) == [[], []]
    assert visited.quiet, visited.errors


def test_scopes_fold_in_both_graphs(visit: Visiting) -> None:
    visited = visit(page_of("kept"))
    page = visited.page
    scope = page.locator(f"{PANES[0]} .node.frame").last
    scope.focus()
    counts = [page.locator(f"{pane} [data-part]").count() for pane in PANES]
    page.keyboard.press("Enter")
    folded = [page.locator(f"{pane} [data-part]").count() for pane in PANES]
    assert folded[0] < counts[0] and folded[1] < counts[1]
    page.keyboard.press("Enter")
    assert [page.locator(f"{pane} [data-part]").count() for pane in PANES] == counts


def test_an_op_of_one_model_alone_is_marked_and_the_other_graph_says_so(visit: Visiting) -> None:
    visited = visit(page_of("lowered"))
    page = visited.page
    page.get_by_role("button", name="Unfold all scopes").click()
    removed = page.locator(f"{PANES[0]} .node.changed.alone").first
    assert removed.locator(".head").text_content().startswith("− ")  # type: ignore[union-attr]
    assert "removed: float32" in removed.get_attribute("aria-label")
    assert removed.locator(".box").evaluate("(box) => getComputedStyle(box).strokeDasharray") != "none"
    removed.focus()
    page.keyboard.press("Enter")
    mine, other = details(visited)
    assert "removed: float32" in mine and "not in this model" in other
    lowered_op = page.locator(f"{PANES[1]} .node.op.changed.low").first
    assert lowered_op.locator(".head").text_content().startswith("▼ ")  # type: ignore[union-attr]


def test_a_cast_of_one_model_alone_is_marked_and_visited_first(visit: Visiting) -> None:
    visited = visit(page_of("kept"))
    page = visited.page
    assert page.locator(f"{PANES[1]} .castmark.changed").first.text_content().startswith("+ ")  # type: ignore[union-attr]
    page.get_by_role("button", name="Go to the next Cast").click()
    assert any("only here" in words for words in details(visited))
    assert f"of {len(kept().casts)})" in page.locator(".said").inner_text()


def test_the_table_of_differences_leads_to_the_graphs(visit: Visiting) -> None:
    visited = visit(page_of("kept"), width=NARROW)
    row = visited.page.locator("#changes details tbody tr").first
    name = row.locator("td").nth(1).inner_text()
    assert row.bounding_box()["height"] < 120  # names are not broken letter by letter
    row.get_by_role("button").click()
    assert name in details(visited)[1]


def test_the_search_goes_once_to_an_op_that_both_have(visit: Visiting) -> None:
    visited = visit(page_of("kept"))
    search = visited.page.get_by_role("searchbox")
    search.fill("Softmax")
    search.press("Enter")
    rows = kept().sides.reports[1].rows  # type: ignore[union-attr]
    number = sum("softmax" in (row.op + row.path).lower() for row in rows)
    assert visited.page.locator(".found").inner_text() == f"1 of {number}"
    assert all("Softmax" in text for text in details(visited))


def test_hostile_names_in_a_difference_run_nothing(visit: Visiting) -> None:
    report = hostile()
    rows = tuple(row._replace(outputs=("float16",), key=str(i)) for i, row in enumerate(report.rows[:-1]))
    other = replace(report, rows=rows, outputs=(), casts=())
    visited = visit(diff(report, other).to_html())
    page = visited.page
    page.get_by_role("button", name="Unfold all scopes").click()
    for pane in PANES:
        for v in range(len(EVIL) - 1):
            page.locator(f"{pane} [data-part='{v}']").focus()
            page.keyboard.press("Enter")
    for table in page.locator("summary").all():
        table.click()
    assert page.locator("img, iframe, script:not(#data):not(:last-of-type), a").count() == 0
    assert not set(page.inner_text("body")) & set("\u202e\u2066\u200f\x00\x1b\ud800")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE
    assert visited.quiet, (visited.errors, visited.dialogs, visited.requests)
